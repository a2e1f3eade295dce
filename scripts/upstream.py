"""mlx-lm's own tests of generation and prompt caches, from its source distribution, on our model classes.

    pip download --no-deps --no-binary mlx-lm mlx-lm==0.32.2
    python -m scripts.upstream mlx_lm-0.32.2.tar.gz

They name a checkpoint to download; in its place they get the bundled demo, once as mlx-lm loads it and once as we do. What
passes with mlx-lm's class must pass with ours: exit status 1 if a test does not. Some fail with both, since they are of a
chat model, or of caches that can be trimmed.
"""

import contextlib
import io
import sys
import tarfile
import tempfile
import unittest
from importlib import import_module
from pathlib import Path

import mlx.core as mx
from mlx_lm import utils
from tqdm import tqdm

import mlx_mtp
from mlx_mtp.checkpoint import DEMO
from scripts.shared import script_parser

MODULES = ("test_generate", "test_prompt_cache")
# The demo has no chat template; any will do.
TEMPLATE = {"chat_template": "{% for m in messages %}# {{ m.content }}\n{% endfor %}"}


def outcomes(folder: str, load) -> dict[str, str]:
    """The outcome of each test of a folder with this ``load`` in the place of mlx-lm's."""
    for name in MODULES:
        sys.modules.pop(name, None)
    generate = import_module("mlx_lm.generate")
    original, stream = utils.load, generate.generation_stream  # some tests replace the stream
    utils.load = lambda *args, **kwargs: load(str(DEMO), tokenizer_config=TEMPLATE)
    try:
        found = [unittest.TestLoader().discover(folder, f"{name}.py") for name in MODULES]
        tests = [t for suite in found for module in suite for case in module for t in case]
        # Each in a suite of its own, hence with a fresh model, since some change theirs.
        return {test.id(): outcome(unittest.TestSuite([test])) for test in tqdm(tests, disable=None)}
    finally:
        utils.load, generate.generation_stream = original, stream


def outcome(suite: unittest.TestSuite) -> str:
    with contextlib.redirect_stdout(io.StringIO()):
        result = unittest.TextTestRunner(stream=io.StringIO()).run(suite)
    return "passes" if result.wasSuccessful() else (result.failures + result.errors)[0][1].strip().splitlines()[-1]


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("sdist", type=Path, help="mlx-lm's source distribution, a .tar.gz.")
    args = parser.parse_args()
    mx.random.seed(0)
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(args.sdist) as sdist:
            sdist.extractall(folder, filter="data")
        tests = str(next(Path(folder).glob("*/tests")))
        theirs = outcomes(tests, utils.load)
        ours = outcomes(tests, mlx_mtp.load)
    worse = [name for name in theirs if theirs[name] == "passes" != ours[name]]
    both = [name for name in theirs if theirs[name] != "passes" and name not in worse]
    for title, names in (("fail with ours alone", worse), ("fail with mlx-lm's class, too", both)):
        print(f"{len(names)} of {len(theirs)} {title}")
        for name in names:
            print(f"  {name}: {ours[name]}")
    sys.exit(1 if worse or not theirs else 0)


if __name__ == "__main__":
    main()
