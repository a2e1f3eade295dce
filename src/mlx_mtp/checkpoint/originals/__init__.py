"""A part that a conversion has lost of its original: finding the original, fetching the part alone, and trying a head."""
