"""The layers of the models, as pure functions that are compiled for passes over a few tokens, and the head."""
