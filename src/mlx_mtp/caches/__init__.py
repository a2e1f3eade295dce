"""Caches of the keys, values and states of texts: of one sequence, of several in rows, and of prompts."""
