"""The number of tokens to draft in a step, chosen by measured times."""
