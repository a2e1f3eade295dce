"""``mlx_mtp fit``: train only the MTP head, to predict its backbone's tokens."""

from .fitting import fit

__all__ = ["fit"]
