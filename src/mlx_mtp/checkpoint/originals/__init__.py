"""Parts that a conversion lacks of its base model: find the base model, fetch only the part, and try a head."""
