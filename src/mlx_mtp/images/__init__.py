"""Images of a prompt: opening them, their patches, and their embeddings."""
