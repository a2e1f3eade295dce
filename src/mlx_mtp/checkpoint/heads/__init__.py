"""The head of a conversion that has none: finding its original, fetching the head alone, and trying it."""
