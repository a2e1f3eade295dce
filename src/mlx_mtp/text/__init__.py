"""Reasoning, tool calls, schemas and grammars."""
