"""The speed of models with the shapes of published ones and random weights, without their checkpoints.

    python -m benchmarks.synthetic --shapes 0.8b-bf16 --acceptance 0.8
    python -m benchmarks.synthetic --shapes 4b-4bit 27b-4bit 35b-a3b-4bit --depths 1 2 3
    python -m benchmarks.synthetic --shapes flash-next-12-layers-4bit --depths 1 3 auto

All computations are done: every layer, the head, and both output layers. Then the logits are replaced, so that the model says a
fixed text, and the head drafts it with a given acceptance rate, which is set, not measured. Plain mlx-lm, runs with
fixed numbers of drafts and ``auto``, which begins with the times of the test of the device, take turns.
"""

import random
import statistics
from collections.abc import Mapping
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path
from mlx_lm.generate import generate_step

import mlx_mtp
from benchmarks.timing import ratios, seconds, spread, take_turns
from mlx_mtp.checkpoint.checks import self_test
from mlx_mtp.core.models import model_module
from mlx_mtp.core.pacing.depth import Depth
from scripts.shared import script_parser
from tests.support.scripted import Scripted

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
    # A quarter of its layers, half of its experts, and a small table of n-grams in memory: 12 GB.
    "flash-next-12-layers-4bit": {
        **COMMON, **FOUR_BITS, "model_type": "qwen4_exp", "hidden_size": 2560, "intermediate_size": 0,
        "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 2, "linear_num_value_heads": 32,
        "num_experts": 256, "num_experts_per_tok": 10, "moe_intermediate_size": 640, "shared_expert_intermediate_size": 640,
        "norm_topk_prob": True, "tie_word_embeddings": False, "output_gate_type": "sigmoid", "ple_layer_ids": [2, 6],
        "ngram_vocab_size_base": 20_000, "split_ngram_parts": 4, "eos_token_id": 0,
    },
}  # fmt: skip
N_ROWS = 10_000  # of a random table of n-grams
PLAIN, AGAIN, AUTO = "plain", "plain again", "auto"


def model_of(shape: Mapping[str, Any]) -> Any:
    """A model of a shape, whose weights are made when they are used."""
    module = model_module(shape["model_type"])
    return module.Model(module.ModelArgs.from_dict({"model_type": shape["model_type"], "text_config": dict(shape)}))


def synthetic_model(shape: Mapping[str, Any]) -> Any:
    """A model with random weights.

    If the shape has a quantization, the backbone is quantized as in mlx-lm, without a copy in floating point. The head has 16
    bits.
    """
    model = model_of(shape).eval()
    # MLX's CPU backend multiplies gathered matrices only in float32.
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    dtype = mx.float32 if shape.get("num_experts") and on_cpu else mx.bfloat16

    def cast(path: str, p: mx.array) -> mx.array:
        return p.astype(dtype) if model.cast_predicate(path) and mx.issubdtype(p.dtype, mx.floating) else p

    model.update(tree_map_with_path(cast, model.parameters()))
    if "quantization" in shape:
        _quantize(model, dtype, **shape["quantization"])
    mx.eval(model.parameters())
    for i in model.ngrams.hashes if shape["model_type"] == "qwen4_exp" else ():
        model.ngrams.tables[i] = RandomTable(model.ngrams.width, dtype)
    return model


class RandomTable:
    """A table of n-grams in memory, in place of an ``NgramTable``, whose rows stand for several n-grams each."""

    def __init__(self, width: int, dtype: mx.Dtype):
        self.arrays = {"weight": mx.random.normal((N_ROWS, width)).astype(dtype)}

    def __call__(self, ids: mx.array) -> mx.array:
        return self.arrays["weight"][ids % N_ROWS]


def scripted(model: Any, acceptance: float, n_ids: int, n: int = 4096) -> Scripted:
    """A model that says a text of n tokens, and drafts it with this acceptance rate, given the drafts before."""
    text = [(i * 7919 + 13) % n_ids for i in range(n)]
    return Scripted(model, text, lambda i: random.Random(i).random() < acceptance, says=True)


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


def generate(model: Any, prompt: mx.array, max_tokens: int, depth: int | str | Depth) -> float:
    """Seconds from the first token to the last."""
    how = {} if depth in (PLAIN, AGAIN) else {"num_draft_tokens": depth, "copy_drafts": "off"}
    steps = (mlx_mtp.mtp_generate_step if how else generate_step)(prompt, model, max_tokens=max_tokens, **how)
    next(steps)
    return seconds(lambda: list(steps))


def main() -> None:
    flags = dict(
        acceptance=(0.8, "Of a draft, given those before it."), depths=(["1", "2", "3"], "Drafts in a step, or auto.")
    )
    flags |= dict(max_tokens=64, prompt=(128, "Tokens of the prompt."), repeat=(3, "Rounds."))
    parser = script_parser(__doc__, **flags)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.8b-bf16"], help="Default: 0.8b-bf16.")
    args = parser.parse_args()
    print(f"{mx.default_device()}; random weights, acceptance set to {args.acceptance}; speed relative to plain mlx-lm")
    for name in args.shapes:
        real = synthetic_model(SHAPES[name])
        depths: dict[str, Any] = {d: d if d == AUTO else int(d) for d in ("0", *args.depths)}
        if AUTO in depths:
            depths[AUTO] = mlx_mtp.Depth(mlx_mtp.MAX_DRAFT_TOKENS, times=self_test.run(real).step_times())
        model = scripted(real, args.acceptance, SHAPES[name]["vocab_size"])
        prompt = mx.array(model.texts[0][: args.prompt])
        ways = {PLAIN: PLAIN, AGAIN: AGAIN, **depths}
        runs = {way: partial(generate, model, prompt, args.max_tokens, how) for way, how in ways.items()}
        found = {way: times[1:] for way, times in take_turns(runs, args.repeat + 1).items()}  # the first round warms up
        ms = 1e3 * statistics.median(found[PLAIN]) / (args.max_tokens - 1)
        print(f"{name}  plain {ms:.2f} ms a token")
        for way in [*ways][1:]:
            print(
                f"{name}  {way + (' drafts' if way.isdigit() else ''):11}  {spread(ratios(found[PLAIN], found[way]))}",
                flush=True,
            )
        mx.clear_cache()


if __name__ == "__main__":
    main()
