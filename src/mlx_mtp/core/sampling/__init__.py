"""Samplers, noise by position, logits processors, and the acceptance of drafts."""
