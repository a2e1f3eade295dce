import functools
import gc
import inspect
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from types import SimpleNamespace

import mlx.core as mx
import pytest
from hypothesis import settings

from tests.support import profiles
from tests.support.hub_stand_in import Hub

HUB, HF_HOME, CACHE = Hub(), TemporaryDirectory(prefix="huggingface-"), TemporaryDirectory(prefix="cache-")

# No test asserts a time, and what passes once passes again: only the long run looks for new examples.
settings.register_profile("short", deadline=None, derandomize=True)
settings.register_profile("long", deadline=None)
settings.load_profile("short")


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="all cases, and 50 times as many examples of properties")


def pytest_configure(config):
    """Nothing of the user's is read, and nothing outside is reached: huggingface_hub looks here when it is imported."""
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        os.environ.pop(name, None)
    if config.getoption("--long"):
        profiles.LONG, config.option.markexpr = True, ""
        settings.load_profile("long")
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):  # then all processes of the tests would compile all modules
        os.environ["PYTHONPYCACHEPREFIX"] = str(Path(gettempdir(), "mlx_mtp-bytecode"))
    os.environ.update(
        HF_ENDPOINT=HUB.url, HF_HOME=HF_HOME.name, XDG_CACHE_HOME=CACHE.name, HF_HUB_DISABLE_PROGRESS_BARS="1"
    )
    compile_header()


def compile_header():
    """MLX's CPU backend compiles a kernel for each kind of fused function: a second each, four fifths of it for one header.

    Compile it beside the kernels, once for each version of MLX: there, g++ looks for it first, if it has MLX's own flags.
    """
    header, include = Path("mlx", "backend", "cpu", "compiled_preamble.h"), Path(mx.__file__).parent / "include"
    target = Path(gettempdir(), "mlx", mx.__version__, "cpu", f"{header}.gch")
    if sys.platform != "linux" or shutil.which("g++") is None or target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder, target.name)
        flags = ["-std=c++17", "-O3", "-fPIC", "-w", f"-I{include}", "-x", "c++-header"]
        subprocess.run(["g++", *flags, include / header, "-o", made], check=True)
        os.replace(made, target)


def pytest_collection_finish():
    """Exclude the objects of imports from garbage collection, which took a tenth of the time."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _quick_loading():
    """No self-test, a second for each new checkpoint. mlx-lm asks for the signature of its arguments once, and transformers
    writes no config for a log that is off."""
    from mlx_lm.models import base
    from transformers import PretrainedConfig

    from mlx_mtp.checkpoint import load

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "ensure_tested", lambda *_: None)
        patch.setattr(PretrainedConfig, "__repr__", object.__repr__)
        patch.setattr(base, "inspect", SimpleNamespace(signature=functools.cache(inspect.signature)))
        yield


@pytest.fixture(autouse=True)
def _seeded():
    """Samplers without a seed draw from a state that each test begins with."""
    import mlx.core as mx

    mx.random.seed(0)


@pytest.fixture
def hub():
    """The stand-in for the hub, with nothing on it; no heads were fetched from it."""
    HUB.clear()
    shutil.rmtree(os.path.join(HF_HOME.name, "mlx_mtp"), ignore_errors=True)
    return HUB


@pytest.fixture(scope="session")
def demo():
    """The bundled checkpoint: (model, tokenizer)."""
    import mlx_mtp

    return mlx_mtp.load(str(mlx_mtp.DEMO))


@pytest.fixture(scope="session")
def trained():
    """A trained checkpoint whose passes take a third of the demo's time: (model, tokenizer)."""
    import mlx_mtp
    from tests.support.models import TRAINED

    return mlx_mtp.load(TRAINED)


@pytest.fixture
def equal_steps(monkeypatch):
    """Every step takes as long as any other, however loaded the machine is: drafts cost no time."""
    from mlx_mtp.core.decoding import planner

    monkeypatch.setattr(planner, "perf_counter", itertools.count(0.0).__next__)


@pytest.fixture(name="uncompiled", scope="module")
def _uncompiled():
    """No function is compiled, in a whole module."""
    from tests.support.models import uncompiled

    with uncompiled():
        yield


@pytest.fixture(scope="module")
def client(server):
    """OpenAI's own, of the module's server."""
    from openai import OpenAI

    with OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(server):
    """Anthropic's own."""
    from anthropic import Anthropic

    with Anthropic(base_url=server.url.removesuffix("/v1"), api_key="none", max_retries=0) as client:
        yield client
