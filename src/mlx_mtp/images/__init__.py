"""Images of a prompt: opening them, their patches, and the rows that stand for them."""
