"""Models of real shapes with random weights, to time what no checkpoint is at hand for.

All that costs time is computed: every layer, the head, both output layers. Only what they say is then replaced by a script:
the model chooses token i of a fixed text, and the head drafts it where a throw of a seeded die says so and another elsewhere.
So the rate of acceptance is set, not measured, and the text is the same on every device.
"""

import random
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path

from ..models import model_module
from ..models.cache import n_tokens
from ..models.draft_lm_head import DraftLMHead, quantize_head

COMMON = {
    "vocab_size": 248320,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "mtp_num_hidden_layers": 1,
}
FOUR_BITS = {"quantization": {"group_size": 64, "bits": 4}}
# The text_config of published Qwen3.5 checkpoints, as far as it has to do with time.
SHAPES: dict[str, dict[str, Any]] = {
    "0.8b-bf16": {
        **COMMON,
        "model_type": "qwen3_5",
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 16,
        "tie_word_embeddings": True,
    },
    "4b-4bit": {
        **COMMON,
        **FOUR_BITS,
        "model_type": "qwen3_5",
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 32,
        "tie_word_embeddings": True,
    },
    "27b-4bit": {
        **COMMON,
        **FOUR_BITS,
        "model_type": "qwen3_5",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 48,
        "tie_word_embeddings": False,
    },
    "35b-a3b-4bit": {
        **COMMON,
        **FOUR_BITS,
        "model_type": "qwen3_5_moe",
        "hidden_size": 2048,
        "intermediate_size": 0,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 32,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
}


class Script:
    """What the model and its head say.

    Args:
        acceptance (float): The probability of a draft to stand, given that those before it stood.
        n_ids (int): The text is of the first so many token ids.
    """

    def __init__(self, acceptance: float, n_ids: int):
        self.acceptance, self.n_ids = acceptance, n_ids
        self.rows = 0  # of the head's cache

    def token(self, i: int) -> int:
        return (i * 7919 + 13) % self.n_ids

    def say(self, logits: mx.array, tokens: list[int]) -> mx.array:
        """Logits [B, T, V], computed all the same, that say these tokens [T]."""
        ids = mx.arange(logits.shape[-1], dtype=mx.uint32)
        return 0 * logits + 10 * (ids == mx.array(tokens, mx.uint32)[:, None])

    def choose(self, logits: mx.array, offset: int) -> mx.array:
        return self.say(logits, [self.token(offset + t + 1) for t in range(logits.shape[1])])

    def draft(self, logits: mx.array) -> mx.array:
        # The last of n rows pairs hidden state n - 1 with token n, and guesses token n + 1.
        i = self.rows + 1
        right = random.Random(i).random() < self.acceptance
        return self.say(logits, [(self.token(i) + (not right)) % self.n_ids])


def synthetic_model(
    shape: Mapping[str, Any],
    acceptance: float,
    *,
    draft_vocab: int | None = None,
    mtp_bits: int | None = None,
    draft_head_bits: int | None = None,
) -> tuple[nn.Module, Script]:
    """
    A model with random weights, the backbone quantized as mlx-lm would, where the shape says so, the head in 16 bits.

    Quantized weights are made so: at no time is there a copy of them in floating point.

    Args:
        shape (Mapping[str, Any]): A text config, its model type and its quantization, such as one of ``SHAPES``.
        acceptance (float): The probability of a draft to stand, given that those before it stood.
        draft_vocab (int, optional): Drafts come from the first so many token ids.
        mtp_bits (int, optional): As in ``mlx_mtp.load``.
        draft_head_bits (int, optional): As in ``mlx_mtp.load``.

    Returns:
        Tuple[nn.Module, Script]: The model, and what it says.
    """
    module = model_module(shape["model_type"])
    script = Script(acceptance, draft_vocab or shape["vocab_size"])

    class Model(module.Model):  # type: ignore[name-defined]
        def __call__(self, inputs, cache=None, input_embeddings=None, *, return_hidden=False, **kwargs):
            offset = 0 if cache is None else n_tokens(cache[: len(self.layers)])
            logits, hidden = super().__call__(inputs, cache, input_embeddings, return_hidden=True, **kwargs)
            logits = script.choose(logits, offset)
            return (logits, hidden) if return_hidden else logits

        @property
        def mtp(self):
            head = self.language_model.mtp

            def run(embeddings, hidden, cache, last_only=False):
                out = head(embeddings, hidden, cache, last_only)
                script.rows = cache.offset
                return out

            return run

        def draft_logits(self, hidden):
            return script.draft(super().draft_logits(hidden))

    class ScriptedLMHead(DraftLMHead):
        def __call__(self, hidden):
            return script.draft(super().__call__(hidden))

    config = {"model_type": shape["model_type"], "text_config": dict(shape)}
    model = Model(module.ModelArgs.from_dict(config))
    model.eval()
    # MLX's CPU backend multiplies gathered matrices in nothing but float32.
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    dtype = mx.float32 if shape.get("num_experts") and on_cpu else mx.bfloat16
    _cast(model, dtype)
    if "quantization" in shape:
        _quantize(model, dtype, **shape["quantization"])
    head = model.language_model.mtp
    if mtp_bits is not None:
        quantize_head(head, mtp_bits)
    mx.eval(model.parameters())
    if not (draft_vocab is draft_head_bits is None):
        ids = None if draft_vocab is None else list(range(draft_vocab))
        model.drafting.lm_head = ScriptedLMHead(model.output_layer, ids, draft_head_bits)
    return model, script


def _cast(model: Any, dtype: mx.Dtype) -> None:
    def cast(path, p):
        return p.astype(dtype) if model.cast_predicate(path) and mx.issubdtype(p.dtype, mx.floating) else p

    model.update(tree_map_with_path(cast, model.parameters()))


def _quantize(model: Any, dtype: mx.Dtype, group_size: int, bits: int) -> None:
    """Quantize all but the head. Nothing is evaluated yet, so what the layers held is never made."""
    chosen = model.quant_predicate or (lambda path, module: True)

    def predicate(path, module):
        if "mtp." in path or not hasattr(module, "to_quantized") or module.weight.shape[-1] % group_size:
            return False
        return chosen(path, module)

    nn.quantize(model, group_size, bits, class_predicate=predicate)
    m: Any
    for _, m in model.named_modules():
        if "scales" not in m:
            continue
        # Values in even steps around 0, of variance 1 / inputs.
        levels, n_in = 2**m.bits, m.scales.shape[-1] * m.group_size
        step = (12 / ((levels**2 - 1) * n_in)) ** 0.5
        m.weight = mx.random.randint(0, 2**32 - 1, m.weight.shape, mx.uint32)
        m.scales = mx.full(m.scales.shape, step, dtype)
        m.biases = mx.full(m.scales.shape, -step * (levels - 1) / 2, dtype)
