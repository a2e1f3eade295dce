"""Checkpoints: loading them, the formats of their head, the hub, and what --tune measured."""
