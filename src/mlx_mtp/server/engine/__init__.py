"""Generates the answers: requests wait until the memory has room for them, and then share the passes of one model."""
