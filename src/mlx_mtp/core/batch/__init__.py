"""Continuous batching: sequences that share passes, each with its own drafts, and ``batch_generate``."""

MAX_TOKEN_GAP = 0.5  # seconds
MIN_DECODE_SHARE = 0.33
