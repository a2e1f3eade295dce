"""Several machines: the ranks that ``mlx.launch`` starts, which run one model."""
