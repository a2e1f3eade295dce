"""Continuous batching: sequences that share passes, each with its own drafts, and ``batch_generate``."""
