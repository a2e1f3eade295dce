"""Imports of ``mlx_mtp`` without what its ``__init__`` imports, which takes seconds: import this first."""

import sys
import types
from pathlib import Path

package = types.ModuleType("mlx_mtp")
package.__path__ = [str(Path(__file__).parents[3] / "src/mlx_mtp")]
sys.modules["mlx_mtp"] = package
