"""How many tokens to draft, and how much of a prompt to process at a time, by measured times."""
