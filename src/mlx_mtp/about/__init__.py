"""Commands that tell about the published models, this machine, and files that were fetched."""
