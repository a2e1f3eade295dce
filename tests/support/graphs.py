"""The operations of a graph that MLX would evaluate."""

import re
import tempfile
from pathlib import Path
from unittest.mock import patch

import mlx.core as mx

# These change shapes and strides, and move no data.
VIEWS = set(
    ["Broadcast", "Depends", "ExpandDims", "Flatten", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unflatten"]
)


def operations(*outputs: mx.array) -> list[str]:
    with tempfile.NamedTemporaryFile() as file:
        mx.export_to_dot(file.name, *outputs)
        names = re.findall(r'label ?="([^"]+)", shape=rectangle', Path(file.name).read_text())
    return [name for name in names if name not in VIEWS]


def traced(function, *inputs: mx.array) -> list[tuple[str, tuple[int, ...], mx.Dtype]]:
    """The name, shape and dtype of each operation of a function of arrays, of which none is evaluated."""
    found = []
    with patch.object(mx, "contiguous", lambda x, *_: x):  # MLX cannot export it
        mx.export_function(found.append, function, *inputs)
    primitives = [own for own in found if own["type"] == "primitive"]
    return [(own["name"], shape, dtype) for own in primitives for _, shape, dtype in own["outputs"]]
