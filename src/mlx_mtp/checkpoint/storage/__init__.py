"""Where checkpoints are read from and written to: the hub, folders, safetensors files."""
