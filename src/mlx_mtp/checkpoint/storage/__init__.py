"""Reading and writing of checkpoints: the hub, folders, and safetensors files."""
