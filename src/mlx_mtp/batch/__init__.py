"""Continuous batching: sequences that generate in one pass, each with its own drafts, and ``batch_generate``."""
