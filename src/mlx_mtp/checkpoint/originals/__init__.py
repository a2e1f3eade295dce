"""Parts that a conversion lacks of its original: find the original, fetch only the part, and try a head."""
