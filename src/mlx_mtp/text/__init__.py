"""What a text means: reasoning, tool calls, schemas and grammars."""
