"""Samplers, noise by the position in a text, logits processors, and the acceptance of drafts."""
