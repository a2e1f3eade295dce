"""``mlx_mtp.convert``: mlx-lm's conversion, with the MTP head kept as it is."""

from .conversion import convert

__all__ = ["convert"]
