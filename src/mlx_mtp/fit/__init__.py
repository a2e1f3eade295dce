"""``mlx_mtp.fit``: train the MTP head alone, to guess what its own backbone says."""

from .fitting import fit

__all__ = ["fit"]
