"""The source archive holds what its own tests need."""

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILD = "from setuptools.build_meta import build_sdist; print(build_sdist('built'))"
TREE = (".ci", "benchmarks", "convert", "docs", "examples", "scripts", "src", "tests")
FILES = ("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml")
MADE = shutil.ignore_patterns("__pycache__", "*.egg-info")


def test_the_archive_has_every_file_of_the_repository(tmp_path):
    for name in TREE:
        shutil.copytree(
            ROOT / name, tmp_path / "tree" / name, ignore=MADE, copy_function=lambda _, new: Path(new).touch()
        )
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path / "tree")
    shutil.copy(ROOT / "src" / "mlx_mtp" / "_version.py", tmp_path / "tree" / "src" / "mlx_mtp")
    wanted = {str(path.relative_to(tmp_path / "tree")) for path in tmp_path.rglob("*") if path.is_file()}
    built = subprocess.run([sys.executable, "-c", BUILD], cwd=tmp_path / "tree", capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    with tarfile.open(tmp_path / "tree" / "built" / built.stdout.splitlines()[-1]) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {"tests/support/models.py", "tests/support/ranks/generation.py", "tests/data/dense/config.json"} <= wanted
    assert wanted - held == set()
