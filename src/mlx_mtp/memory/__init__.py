"""Memory: the process's use and limit, and estimates for models and texts."""
