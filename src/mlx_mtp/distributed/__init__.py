"""Several machines: the processes that ``mlx.launch`` starts, which run one model together."""
