"""Imports of ``mlx_mtp`` without what its ``__init__`` and mlx-lm's import, which takes seconds: import this first."""

import sys
import types
from importlib.util import find_spec

for name in ("mlx_mtp", "mlx_lm"):
    package = types.ModuleType(name)
    package.__path__ = find_spec(name).submodule_search_locations
    sys.modules[name] = package
