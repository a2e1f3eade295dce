"""Sources of drafts other than the head, and the draft options."""
