"""``mlx_mtp convert``: mlx-lm's conversion that keeps the MTP head."""

from .conversion import convert

__all__ = ["convert"]
