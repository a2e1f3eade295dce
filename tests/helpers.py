"""Small models and plain decoding for the tests."""

import json
import resource
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.generate import generate_step
from mlx_lm.models import switch_layers
from mlx_lm.utils import load_model

from mlx_mtp import mtp_generate_step
from mlx_mtp.decoding import loop
from mlx_mtp.decoding.copies import CopyDrafter
from mlx_mtp.decoding.depth import MAX_COPY_TOKENS
from mlx_mtp.decoding.drafter import Drafts
from mlx_mtp.decoding.sampling import for_one_text
from mlx_mtp.models.cache import ArraysCache

DATA = Path(__file__).parent / "data"
# Where a generation is stopped: at every length up to 40 with `-m slow`, at those that differ most by default.
STOPS = [
    pytest.param((1, 2, 3, 4, 5, 7, 9, 14, 25, 40), id="some stops"),
    pytest.param(range(1, 41), marks=pytest.mark.slow, id="all stops"),
]
PROMPT = mx.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5])

DENSE = {
    "model_type": "qwen3_5_text",
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "full_attention_interval": 2,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "mtp_num_hidden_layers": 1,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "norm_topk_prob": True,
}
ROPE = {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}


def tiny_config(family: str, **changes) -> dict:
    """The config.json of a tiny model of a family; ``changes`` are to the text config."""
    if family == "qwen3_next":
        config = {**DENSE, **EXPERTS, **ROPE, "max_position_embeddings": 4096, "mlp_only_layers": []}
        return {**config, "model_type": family, **changes}
    experts = EXPERTS if family == "qwen3_5_moe" else {}
    text = {**DENSE, **experts, "rope_parameters": {"type": "default", **ROPE}, **changes}
    return {"model_type": family, "text_config": text}


def tiny_model(family: str, seed: int = 0, dtype: mx.Dtype = mx.float32, **changes):
    """A random model with a head, its weights spread so that greedy output varies.

    float32 for mixtures of experts: MLX's CPU backend multiplies gathered matrices in nothing else.
    """
    module = import_module(f"mlx_mtp.models.{family}")
    model = module.Model(module.ModelArgs.from_dict(tiny_config(family, **changes)))
    model.eval()
    keys = iter(mx.random.split(mx.random.key(seed), len(tree_flatten(model.parameters()))))

    def weight(path, p):
        noise = mx.random.normal(p.shape, key=next(keys))
        if "norm" in path:
            return (1 + 0.2 * noise).astype(dtype)
        if p.ndim == 1:
            return noise.astype(p.dtype if path.endswith("A_log") else dtype)
        return (noise * (1.0 if "embed" in path else 2 * p.shape[-1] ** -0.5)).astype(dtype)

    model.update(tree_map_with_path(weight, model.parameters()))
    mx.eval(model.parameters())
    return model


def deep_model(family: str, seed: int = 0, **changes):
    """A ``tiny_model`` with two layers of each kind."""
    return tiny_model(family, seed, num_hidden_layers=4, **changes)


def load_reference(folder: Path):
    """A checkpoint of tests/data in float32, cast before the norms are shifted, as its reference values were computed."""
    module = import_module(f"mlx_mtp.models.{json.loads((folder / 'config.json').read_text())['model_type']}")

    class Model(module.Model):
        def sanitize(self, weights):
            return super().sanitize({name: w.astype(mx.float32) for name, w in weights.items()})

    classes = (Model, module.ModelArgs)
    model, _ = load_model(folder, model_config={"mtp_num_hidden_layers": 1}, get_model_classes=lambda config: classes)
    return model


def tensors(folder: Path) -> dict[str, mx.array]:
    """All of a checkpoint's tensors."""
    weights: dict[str, mx.array] = {}
    for file in folder.glob("*.safetensors"):
        weights.update(mx.load(str(file)))
    return weights


@contextmanager
def full_disk(n_bytes):
    """Files cannot grow beyond ``n_bytes``, and writing them fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def text_of(tokenizer, tokens) -> str:
    """The text up to the end of text."""
    detokenizer = tokenizer.detokenizer
    for token in tokens:
        if token in tokenizer.eos_token_ids:
            break
        detokenizer.add_token(token)
    detokenizer.finalize()
    return detokenizer.text


def plain(prompt, model, **kwargs) -> list[int]:
    """The tokens of mlx-lm's own generation; a sampler with a seed draws from its first position on."""
    sampler = for_one_text(kwargs.pop("sampler", None))
    return [token for token, _ in generate_step(mx.array(prompt), model, sampler=sampler, **kwargs)]


def arrays_equal(a, b) -> bool:
    """Whether two trees of arrays and Nones are the same, bit for bit."""

    def same(x, y):
        return x is y if x is None or y is None else x.dtype == y.dtype and mx.array_equal(x, y).item()

    a, b = tree_flatten(a), tree_flatten(b)
    return [name for name, _ in a] == [name for name, _ in b] and all(same(x, y) for (_, x), (_, y) in zip(a, b))


def round_otherwise(monkeypatch, amount: float) -> None:
    """A device whose products, attention and convolutions of several rows differ from those of one by up to ``amount``."""

    def patch(owner, name, rows):
        original = getattr(owner, name)

        def rounded(*args, **kwargs):
            out, n = original(*args, **kwargs), rows(*args)
            return out if n == 1 else out * (1 + amount * mx.sin(1e4 * out))

        monkeypatch.setattr(owner, name, rounded)

    for owner in (nn.Linear, switch_layers.SwitchLinear):
        patch(owner, "__call__", lambda module, x, *_: x.shape[1])
    patch(mx, "quantized_matmul", lambda x, *_: x.shape[-2])
    patch(nn.Embedding, "as_linear", lambda module, x: x.shape[1])
    patch(nn.Conv1d, "__call__", lambda module, x: x.shape[1] - module.weight.shape[1] + 1)
    patch(mx.fast, "scaled_dot_product_attention", lambda q, *_: q.shape[2])


class Scripted:
    """A model whose draft of token i is ``truth[i]`` where ``right(i)``, and another token elsewhere.

    The head itself runs, so that its cache is filled as ever; only what its lm_head says is the script's.
    """

    def __init__(self, model, truth: list[int], right):
        self._model, self._truth, self._right = model, truth, right
        self._rows = 0

    def __getattr__(self, name):
        return getattr(self._model, name)

    def __call__(self, *args, **kwargs):
        return self._model(*args, **kwargs)

    def mtp(self, embeddings, hidden, cache, last_only=False):
        out = self._model.mtp(embeddings, hidden, cache, last_only)
        self._rows = cache.offset
        return out

    def draft_logits(self, hidden):
        logits = self._model.draft_logits(hidden)
        # The last of n rows pairs hidden state n - 1 with token n, and guesses token n + 1.
        i = self._rows + 1
        draft = self._truth[i] if self._right(i) else (self._truth[i] + 1) % logits.shape[-1]
        return 0 * logits + 10 * (mx.arange(logits.shape[-1]) == draft)


def script_copies(monkeypatch, truth: list[int], offer) -> None:
    """Copies are offered where ``offer(i)`` is not None, for the first of them at token i, and right where it is True."""

    class ScriptedCopies(CopyDrafter):
        def odds(self, n_unread):
            return [0.9] * MAX_COPY_TOKENS if offer(len(self.text) + n_unread) is not None else []

        def propose(self, k, n_unread):
            first = len(self.text) + n_unread
            tokens = [truth[i] if offer(i) else (truth[i] + 1) % 32 for i in range(first, first + k)]
            return Drafts(mx.array(tokens, mx.uint32), [None] * k)

    monkeypatch.setattr(loop, "CopyDrafter", ScriptedCopies)


def mtp(prompt, model, **kwargs):
    return [token for token, _, _ in mtp_generate_step(mx.array(prompt), model, **kwargs)]


def assert_cache_of(model, prompt_cache, n_tokens):
    """A cache of ``n_tokens`` tokens: no window open, a row of the head for each but the last, whose hidden state waits."""
    backbone, (head, last_hidden) = prompt_cache[: len(model.layers)], prompt_cache[len(model.layers) :]
    assert {c.offset for c in backbone if not isinstance(c, ArraysCache)} == {n_tokens}
    assert all(c.window is None for c in backbone if isinstance(c, ArraysCache))
    assert head.offset == n_tokens - 1
    assert last_hidden[0].shape[1] == 1
