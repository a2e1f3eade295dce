"""MLX's CPU backend compiles a kernel for each kind of fused function: a second each, four fifths of it for one header."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import mlx.core as mx

HEADER = Path("mlx", "backend", "cpu", "compiled_preamble.h")
FLAGS = ("-std=c++17", "-O3", "-fPIC")  # MLX's: with others, g++ does not use the file


def compile_header() -> None:
    """Compile the header beside the kernels, once for each version of MLX: there, g++ looks for it first."""
    include = Path(mx.__file__).parent / "include"
    target = Path(tempfile.gettempdir(), "mlx", mx.__version__, "cpu", f"{HEADER}.gch")
    if sys.platform != "linux" or shutil.which("g++") is None or target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder, target.name)
        subprocess.run(
            ["g++", *FLAGS, "-w", f"-I{include}", "-x", "c++-header", include / HEADER, "-o", made], check=True
        )
        os.replace(made, target)
