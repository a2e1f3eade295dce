"""Where drafts come from beside the head, and the options of drafting."""
