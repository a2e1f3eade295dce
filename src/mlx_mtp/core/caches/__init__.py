"""Caches of keys, values and recurrent states: of one sequence, of several sequences in rows, and of prompts."""
