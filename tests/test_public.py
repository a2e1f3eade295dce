"""The public names, and how they are spelled."""

import subprocess
import sys
from pathlib import Path

import mlx_mtp


def test_public_names():
    assert mlx_mtp.__all__ == [
        "GenerationResponse",
        "MTPModule",
        "convert",
        "generate",
        "load",
        "make_prompt_cache",
        "make_sampler",
        "mtp_generate_step",
        "stream_generate",
    ]
    assert all(callable(getattr(mlx_mtp, name)) for name in mlx_mtp.__all__)


def test_type_hints_are_shipped():
    assert (Path(mlx_mtp.__file__).parent / "py.typed").exists()


def test_both_spellings_of_generate_in_any_order_without_a_warning():
    program = """
import mlx_mtp
from mlx_mtp import generate
from mlx_mtp.generate import generate as function, mtp_generate_step
import mlx_mtp.generate
from mlx_mtp import convert, generate as again
assert callable(mlx_mtp.generate) and callable(generate) and again is generate and callable(convert)
assert mlx_mtp.generate.generate is function
try:
    mlx_mtp.generate(None, None, "prompt", max_tokens=0)
except ValueError as e:
    print(e)
"""
    for first in ("", "import mlx_mtp.generate\n", "from mlx_mtp.generate import stream_generate\n"):
        done = subprocess.run([sys.executable, "-W", "error", "-c", first + program], capture_output=True, text=True)
        assert done.stderr == ""
        assert "must be non-zero" in done.stdout


def test_the_command_runs_without_a_warning():
    command = [sys.executable, "-W", "error", "-m", "mlx_mtp.generate", "--mtp", "-m", "5", "--prompt", "-"]
    done = subprocess.run(command, capture_output=True, text=True, input="def f(x):\n    return")
    assert done.returncode == 0
    assert done.stderr == ""
    assert "tokens-per-step" in done.stdout
