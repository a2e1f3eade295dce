"""Commands about the published models, this machine, and fetched files."""
