"""Sources of drafts beside the head, and the options of drafting."""
