"""The MTP heads of checkpoints: their layouts, where a missing one is found, and whether the model accepts its drafts."""
