"""What a checkpoint is: reading it, the layouts of its head, the hub, and what was tuned for it."""
