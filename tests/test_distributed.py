"""Several processes run one model: the tokens are those of one process. See ``support/ranks/`` for what each of them does."""

import json
import re
import sys
from collections import defaultdict
from types import SimpleNamespace

import mlx.core as mx
import pytest

from mlx_mtp import generate
from mlx_mtp.checkpoint.hub import fetch
from mlx_mtp.checkpoint.part import divide, files_of, names_of
from mlx_mtp.checkpoint.reader import CheckpointReader
from mlx_mtp.core.distributed import synchronize
from mlx_mtp.core.models.family import HeadNames
from mlx_mtp.core.models.head_weights import quantize_head
from mlx_mtp.core.models.shard import check_pipeline, check_shard
from tests.support import distribution
from tests.support.checkpoints import stored, tables, tensors, write
from tests.support.launch import LAUNCH, launch, run
from tests.support.models import FLASH, GLM, LATENT, PACK, QWEN, tiny_config, tiny_model

# Two of everything that two ranks divide, and of what four do by a slow test.
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 4, "linear_num_value_heads": 8}
HALVES = {"num_hidden_layers": 2, "full_attention_interval": 2, "vocab_size": 512}
# The first two layers are recurrent: a stage of a pipeline without attention.
STAGES = HALVES | {"num_hidden_layers": 4, "full_attention_interval": 4}


def checkpoint(folder, family, **changes):
    """A random checkpoint in the layout of mlx-lm's conversions."""
    sizes = SIZES | {"mtp_num_hidden_layers": 1, **changes}
    # A stage receives hidden states of the dtype of its embeddings, which is float16 in a pack.
    dtype = mx.float16 if family == PACK else mx.float32
    model = tiny_model(family, dtype=dtype, **sizes)
    folder.mkdir(exist_ok=True)
    return write(folder / family, tiny_config(family, **sizes), stored(model) | tables(model))


def slow(*cases):
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


@pytest.mark.parametrize(
    ("n", "how_much", "tensor", "pipeline"),
    [
        (2, "some", ("qwen3_next",), (FLASH,)),  # tests/test_server_ranks.py splits a qwen3_5
        *slow((2, "some", (), ("qwen3_next", PACK)), (2, "some", (GLM, LATENT), (GLM, LATENT))),
        *slow(*((n, "some", tuple(QWEN), ("qwen3_5", "qwen3_next")) for n in (2, 4))),
        *slow(*((2, "all", (family,), (family,)) for family in QWEN)),
    ],
)
def test_ranks_generate_the_tokens_of_one_process(tmp_path, n, how_much, tensor, pipeline):
    models = [f"tensor:{checkpoint(tmp_path / 'halves', family, **HALVES)}" for family in tensor]
    models += [f"pipeline:{checkpoint(tmp_path / 'stages', family, **STAGES)}" for family in pipeline]
    facts, *others = launch(n, "generation", how_much, *models, timeout=600 * n)
    assert all(other == facts for other in others)
    assert len(facts) > 15
    collectives = [value for name, value in facts.items() if name.endswith("collectives")]
    assert {tuple(value[:3]) for value in collectives} == {(True, True, True)}, collectives
    assert [name for name, value in facts.items() if value is False] == []


@pytest.mark.slow
@pytest.mark.parametrize(("how", "sizes"), [("tensor", HALVES), ("pipeline", STAGES)])
def test_ranks_sample_the_exact_distribution(tmp_path, how, sizes):
    folder = checkpoint(tmp_path, "qwen3_5", **sizes | {"vocab_size": distribution.VOCAB})
    p_values, other = launch(2, "sampling", how, str(folder), "200", timeout=500)
    assert p_values == other
    assert len(p_values) == 5
    assert min(p_values.values()) > distribution.LEVEL, p_values


def test_what_cannot_be_divided_is_refused():
    for n, what, changes in (
        (3, "4 attention heads", {}),
        (2, "3 key-value heads", {"num_attention_heads": 6, "num_key_value_heads": 3}),
        (2, "1 key heads", {"linear_num_key_heads": 1}),
        (2, "513 token ids", {"vocab_size": 513}),
        (2, "65 columns or groups of mlp.gate_proj.weight", {"intermediate_size": 65}),
    ):
        model = tiny_model("qwen3_5", **SIZES | HALVES | changes)
        with pytest.raises(ValueError, match=rf"cannot be split among {n} processes.* its {what}.*--pipeline"):
            check_shard(model, n)
    model = tiny_model("qwen3_5", **SIZES | HALVES)
    check_shard(model, 2)
    quantize_head(model.mtp, 4)  # quantized layers are divided between groups
    with pytest.raises(ValueError, match=r"1 columns or groups of mlp\.down_proj\.scales"):
        check_shard(model, 2)
    with pytest.raises(ValueError, match=r"qwen4_exp cannot be split .* residual streams .* a pipeline \(--pipeline\)"):
        check_shard(tiny_model(FLASH, **SIZES | HALVES), 2)
    model = tiny_model("qwen3_next", **SIZES | HALVES)
    check_pipeline(model, 2)
    with pytest.raises(ValueError, match="has 2 layers, too few for a pipeline of 3 processes"):
        check_pipeline(model, 3)


def test_a_stage_downloads_the_files_of_its_layers(hub, tmp_path):
    folder = split(checkpoint(tmp_path, "qwen3_5", **STAGES))
    hub.publish("org/split", folder)
    group = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    reader = CheckpointReader("org/split", folder=fetch("org/split", None, weights=()))
    stage = divide(reader, SimpleNamespace(size=2, group=group), True)
    path = fetch("org/split", None, weights=files_of(reader, stage))
    assert stage == range(2, 4)
    assert files_of(reader, stage) == [f"model-{part}.safetensors" for part in ("2", "3", "mtp", "rest")]
    assert sorted(file.name for file in path.glob("model*.safetensors")) == files_of(reader, stage)
    # Neither the layer of the head nor the vision tower are of a stage
    every = ["model.norm.weight", "lm_head.weight", "mtp.layers.0.mlp.x"]
    tower = ["vision_tower.blocks.0.norm1.weight", "model.visual.pos_embed.weight"]
    layers = ["model.layers.0.mlp.x", "model.layers.1.mlp.x"]
    assert names_of(every + tower + layers, range(1, 2), HeadNames()) == [*every, layers[1]]


def split(folder):
    """A file for each layer, one for the head, and one for the rest."""
    weights, files = tensors(folder), defaultdict(dict)
    mx.eval(weights)
    (folder / "model.safetensors").unlink()
    for name, w in weights.items():
        layer = re.search(r"(mtp|layers\.(\d+))\.", name)
        part = "rest" if layer is None else layer[2] or "mtp"
        files[f"model-{part}.safetensors"][name] = w
    for file, own in files.items():
        mx.save_safetensors(str(folder / file), own)
    index = {name: file for file, own in files.items() for name in own}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def test_collectives_of_a_gpu_stream_are_waited_for(monkeypatch):
    """MLX runs them on the default stream of the CPU."""
    waited, stream = [], mx.new_stream(mx.cpu)
    monkeypatch.setattr(mx, "synchronize", waited.append)
    synchronize(stream)
    assert waited == [stream, mx.default_stream(mx.cpu)]


ENDS = """
import os, signal, sys
from tests.support.ranks import bare
import mlx.core as mx
from mlx_mtp.cli.display import one_line_errors
from mlx_mtp.errors import MTPError
with one_line_errors("mlx_mtp test"):
    group = mx.distributed.init(strict=True, backend="ring")
    for i in range(1_000_000):
        mx.eval(mx.distributed.all_sum(mx.ones(8), group=group))
        if i == 50 and group.rank() == int(sys.argv[1]):
            if sys.argv[2] == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise MTPError("of this rank")
"""


KILLED, FAILED = ("is killed", "exited with code -9"), ("fails", "mlx_mtp test: error: of this rank")


@pytest.mark.parametrize(("rank", "deed", "reason"), [(1, *FAILED), *slow((0, *FAILED), (0, *KILLED), (1, *KILLED))])
def test_a_rank_that_ends_ends_the_others(rank, deed, reason):
    """``mlx.launch`` ends them, or MLX's ring raises an error; a test that they do not end runs into its timeout."""
    result = run(2, sys.executable, "-c", ENDS, str(rank), deed, timeout=300)
    assert reason in result.stderr
    assert "Traceback" not in result.stderr


GENERATE = (str(LAUNCH.parent / "mlx_mtp.generate"), "--mtp", "--max-tokens", "20", "--verbose", "False")


@pytest.mark.slow
def test_rank_0_prints_what_one_process_does(demo):
    """In a pipeline every pass is computed as in one process, so this holds in bfloat16 too."""
    one = generate(*demo, "class Stack:", max_tokens=20)
    two = run(2, *GENERATE, "--prompt", "class Stack:", "--pipeline", "--draft-vocab", "1000")
    assert (two.stdout.strip(), len(one) > 20) == (one.strip(), True), two.stderr
    errors = run(2, *GENERATE, "--prompt", "-").stderr
    (line,) = (line for line in errors.splitlines() if "WARN" not in line)
    assert "error: --prompt - " in line
    assert "rank 0 exited with code 2" in errors
    chat = (sys.executable, "-m", "mlx_mtp.chat", "--mtp", "--num-draft-tokens", "2", "--max-tokens", "8")
    done = run(2, *chat, stdin="import os\nimport sys\n/exit\n")
    assert done.stdout.count("tokens-per-step") == 2, done.stdout + done.stderr
    assert done.stdout.count("Starting chat session") == 1
    assert "exited with code" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--pipeline",)])
def test_the_benchmark_and_the_check_run_on_ranks(tmp_path, flags):
    figures = tmp_path / "figures.json"
    benchmark = [sys.executable, "-m", *f"mlx_mtp.benchmark --max-tokens 8 --repeat 1 --json {figures}".split()]
    done = run(2, *benchmark, *flags, timeout=300)
    assert done.stdout.count("auto: ") == 1, done.stderr
    assert {result["run"] for result in json.loads(figures.read_text())["results"]} >= {"no drafts", "auto"}
    done = run(2, *GENERATE, "--check", "--prompt", "def add(a, b):", *flags)
    assert len(re.findall("Identical|within rounding", done.stdout)) == 1, done.stderr
