"""How many tokens to draft in a step, and how many to prefill between two steps, by measured times."""
