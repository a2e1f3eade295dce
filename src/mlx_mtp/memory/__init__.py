"""One account of memory: what is held, what may be held, and what a model or a text will need."""
