"""What the tests share: models, checkpoints, servers and plain decoding. Scripts and benchmarks use it, too."""
