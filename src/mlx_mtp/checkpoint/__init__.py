"""Checkpoints: loading, the formats of heads, the hub, and tuned settings."""
