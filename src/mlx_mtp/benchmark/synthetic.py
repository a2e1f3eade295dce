"""Models with real shapes and random weights, to time a model without its checkpoint.

All computations are done: every layer, the head, and both output layers. Then the logits are replaced: the model chooses token
i of a fixed text, and the head drafts this token or, by a seeded draw, another one. So the acceptance rate is set, not
measured, and the text is the same on every device.
"""

import random
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path

from ..caches.prompt_cache import n_tokens
from ..layers.draft_lm_head import DraftLMHead, quantize_head
from ..models import model_module

# The shapes of published checkpoints: the fields of text_config that affect the time.
COMMON = {
    "model_type": "qwen3_5", "vocab_size": 248320, "head_dim": 256, "full_attention_interval": 4, "linear_num_key_heads": 16,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6,
    "rope_parameters": {"type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}, "mtp_num_hidden_layers": 1,
}  # fmt: skip
FOUR_BITS = {"quantization": {"group_size": 64, "bits": 4}}
SHAPES: dict[str, dict[str, Any]] = {
    "0.8b-bf16": {
        **COMMON, "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8,
        "num_key_value_heads": 2, "linear_num_value_heads": 16, "tie_word_embeddings": True,
    },
    "4b-4bit": {
        **COMMON, **FOUR_BITS, "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32,
        "num_attention_heads": 16, "num_key_value_heads": 4, "linear_num_value_heads": 32, "tie_word_embeddings": True,
    },
    "27b-4bit": {
        **COMMON, **FOUR_BITS, "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64,
        "num_attention_heads": 24, "num_key_value_heads": 4, "linear_num_value_heads": 48, "tie_word_embeddings": False,
    },
    "35b-a3b-4bit": {
        **COMMON, **FOUR_BITS, "model_type": "qwen3_5_moe", "hidden_size": 2048, "intermediate_size": 0,
        "num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2, "linear_num_value_heads": 32,
        "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True, "tie_word_embeddings": False,
    },
}  # fmt: skip


class Script:
    """The text and the drafts of a synthetic model.

    Args:
        acceptance (float): The acceptance rate of a draft, given that the drafts before it are accepted.
        n_ids (int): The text uses the first ``n_ids`` token ids.
    """

    def __init__(self, acceptance: float, n_ids: int):
        self.acceptance, self.n_ids = acceptance, n_ids
        self.n_pairs = 0  # in the head's cache

    def token(self, i: int) -> int:
        return (i * 7919 + 13) % self.n_ids

    def say(self, logits: mx.array, tokens: list[int]) -> mx.array:
        """Replace logits [B, T, V] by those of tokens [T], but still compute them."""
        ids = mx.arange(logits.shape[-1], dtype=mx.uint32)
        return 0 * logits + 10 * (ids == mx.array(tokens, mx.uint32)[:, None])

    def choose(self, logits: mx.array, offset: int) -> mx.array:
        return self.say(logits, [self.token(offset + t + 1) for t in range(logits.shape[1])])

    def draft(self, logits: mx.array) -> mx.array:
        # The last of n pairs has hidden state n - 1 and token n, and predicts token n + 1.
        i = self.n_pairs + 1
        right = random.Random(i).random() < self.acceptance
        return self.say(logits, [(self.token(i) + (not right)) % self.n_ids])


class ScriptedLMHead(DraftLMHead):
    """A ``DraftLMHead`` with scripted logits."""

    script: Script

    def __call__(self, hidden: mx.array) -> mx.array:
        return self.script.draft(super().__call__(hidden))


def synthetic_model(
    shape: Mapping[str, Any],
    acceptance: float,
    *,
    draft_vocab: int | None = None,
    mtp_bits: int | None = None,
    draft_head_bits: int | None = None,
) -> tuple[nn.Module, Script]:
    """Make a model with random weights. Return the model and its text.

    If the shape has a quantization, the backbone is quantized as in mlx-lm, without a copy in floating point. The head has 16
    bits.

    Args:
        shape (Mapping[str, Any]): A text config, its model type and its quantization, such as one of ``SHAPES``.
        acceptance (float): The acceptance rate of a draft, given that the drafts before it are accepted.
        draft_vocab (int, optional): Draft from the first ``draft_vocab`` token ids.
    """
    script = Script(acceptance, draft_vocab or shape["vocab_size"])
    model = _scripted_model(shape, script)
    model.eval()
    # MLX's CPU backend multiplies gathered matrices only in float32.
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    dtype = mx.float32 if shape.get("num_experts") and on_cpu else mx.bfloat16
    _cast(model, dtype)
    if "quantization" in shape:
        _quantize(model, dtype, **shape["quantization"])
    if mtp_bits is not None:
        quantize_head(model.language_model.mtp, mtp_bits)
    mx.eval(model.parameters())
    if draft_vocab is not None or draft_head_bits is not None:
        ids = None if draft_vocab is None else list(range(draft_vocab))
        lm_head = ScriptedLMHead(model.output_layer, ids, draft_head_bits)
        lm_head.script = script
        model.drafting.lm_head = lm_head
    return model, script


class ScriptedHead:
    """A head that tells the script its number of pairs."""

    def __init__(self, head: Any, script: Script):
        self.head, self.script = head, script

    def __call__(self, embeddings: mx.array, hidden: mx.array, cache: Any, last_only: bool = False) -> mx.array:
        out: mx.array = self.head(embeddings, hidden, cache, last_only)
        self.script.n_pairs = cache.offset
        return out

    def __getattr__(self, name: str) -> Any:
        return getattr(self.head, name)


def _scripted_model(shape: Mapping[str, Any], script: Script) -> Any:
    """Make a lazy model of a shape, with scripted logits and drafts."""
    module = model_module(shape["model_type"])

    class Model(module.Model):  # type: ignore[name-defined]
        def __call__(
            self,
            inputs: mx.array,
            cache: list[Any] | None = None,
            input_embeddings: mx.array | None = None,
            *,
            return_hidden: bool = False,
            **kwargs: Any,
        ) -> mx.array | tuple[mx.array, mx.array]:
            offset = 0 if cache is None else n_tokens(cache[: len(self.layers)])
            logits, hidden = super().__call__(inputs, cache, input_embeddings, return_hidden=True, **kwargs)
            logits = script.choose(logits, offset)
            return (logits, hidden) if return_hidden else logits

        @property
        def mtp(self) -> ScriptedHead:
            return ScriptedHead(self.language_model.mtp, script)

        def draft_logits(self, hidden: mx.array) -> mx.array:
            return script.draft(super().draft_logits(hidden))

    config = {"model_type": shape["model_type"], "text_config": dict(shape)}
    return Model(module.ModelArgs.from_dict(config))


def _cast(model: Any, dtype: mx.Dtype) -> None:
    def cast(path: str, p: mx.array) -> mx.array:
        return p.astype(dtype) if model.cast_predicate(path) and mx.issubdtype(p.dtype, mx.floating) else p

    model.update(tree_map_with_path(cast, model.parameters()))


def _quantize(model: Any, dtype: mx.Dtype, group_size: int, bits: int) -> None:
    """Quantize all but the head. Nothing is evaluated yet, so the weights in floating point are never made."""
    chosen = model.quant_predicate or (lambda path, module: True)

    def predicate(path: str, module: Any) -> Any:
        if "mtp." in path or not hasattr(module, "to_quantized") or module.weight.shape[-1] % group_size:
            return False
        return chosen(path, module)

    nn.quantize(model, group_size, bits, class_predicate=predicate)
    for _, m in model.named_modules():
        if "scales" not in m:
            continue
        # Evenly spaced values around 0 with variance 1 / inputs.
        levels, n_in = 2**m.bits, m.scales.shape[-1] * m.group_size
        step = (12 / ((levels**2 - 1) * n_in)) ** 0.5
        m.weight = mx.random.randint(0, 2**32 - 1, m.weight.shape, mx.uint32)
        m.scales = mx.full(m.scales.shape, step, dtype)
        m.biases = mx.full(m.scales.shape, -step * (levels - 1) / 2, dtype)
