"""What generates: the algorithm, the models and their layers, caches, samplers, and several processes."""
