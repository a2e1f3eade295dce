"""The numbers of tokens to draft in a step and to prefill between two steps, chosen by measured times."""
