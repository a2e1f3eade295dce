"""Several sequences in one pass, each with its own drafts: the rows, their decoder and its depth, and the generator."""
