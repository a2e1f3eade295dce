"""The models' layers as pure functions, which are compiled for passes over a few tokens, and the MTP head."""
