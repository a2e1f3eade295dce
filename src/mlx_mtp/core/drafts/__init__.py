"""Free sources of drafts, and the draft options."""
