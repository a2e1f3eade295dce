"""Modules that bear the name of their main function, as mlx-lm's do."""

import sys
from types import ModuleType


class CallableModule(ModuleType):
    """A module that, called, is its function of the same name.

    ``import mlx_mtp.generate`` puts the module where the package's function ``generate`` would be. With
    ``sys.modules[__name__].__class__ = CallableModule`` both spellings work, in any order of imports.
    """

    def __call__(self, *args, **kwargs):
        return vars(self)[self.__name__.rpartition(".")[2]](*args, **kwargs)


def make_callable(name: str) -> None:
    """Make the module of this name callable; one that runs as ``__main__`` has no need of it."""
    if name != "__main__":
        sys.modules[name].__class__ = CallableModule
