"""Samplers, noise that belongs to a position of a text, and which drafts are accepted."""
