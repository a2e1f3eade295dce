"""The multi-token-prediction head: one extra decoder layer, which predicts the token after next.

    pair i:  E[t_{i+1}] ── pre_fc_norm_embedding ──┐
                                                   ├── fc ── decoder layer ── norm ──> lm_head: a guess of t_{i+2}
             h_i ───────── pre_fc_norm_hidden ─────┘

h_i is the backbone's output after its final norm. Names and layouts are those of the published Qwen3.5, 3.6 and Qwen3-Next
checkpoints; the method is DeepSeek-V3's (arXiv:2412.19437, section 2.2), as in vLLM's qwen3_next_mtp.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention

from ..caches.positions import Positions, rope_at
from .compiled import Compiler
from .layer import after_attention, keys_and_values_of, queries_of
from .passes import current_pass, in_pass, pass_of_head

T = TypeVar("T")

EXPERT_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class MTPModule(nn.Module):
    """The head, without the embedding and the lm_head that it shares with the backbone.

    Args:
        args: The backbone's text arguments.
        layer (nn.Module): A full-attention decoder layer of the backbone's kind.
    """

    def __init__(self, args: Any, layer: nn.Module):
        super().__init__()
        self.pre_fc_norm_embedding = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.fc = nn.Linear(2 * args.hidden_size, args.hidden_size, bias=False)
        self.layers = [layer]
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)

    def __call__(self, embeddings: mx.array, hidden: mx.array, cache: Any = None, last_only: bool = False) -> mx.array:
        """
        Args:
            embeddings (mx.array): The embedding of the token after each position, [B, T, H].
            hidden (mx.array): The backbone's hidden state at each position, or the head's own for a further draft, [B, T, H].
            cache (KVCache, optional): The head's keys and values.
            last_only (bool): Return only the output of the last position, for a draft. The positions before it only add keys
            and
              values to the cache. Requires a cache. Default: ``False``.

        Returns:
            mx.array: [B, T, H], after the head's norm; with ``last_only`` [B, 1, H].
        """
        if cache is None:
            return self.decode(self.combine(embeddings, hidden))
        T, this, (layer,) = hidden.shape[1], current_pass(), self.layers
        n, offset, mask, start = (
            1 if last_only else T,
            cache.offset,
            create_attention_mask(hidden, cache),
            this.start(cache),
        )
        if n < T:
            mask = None if mask is None or isinstance(mask, str) else mask[..., -1:, :]
        # The queries' start is computed outside, since the CPU backend compiles a kernel for each number in a trace.
        starts = [*start, *(s + (T - n) if n < T else s for s in start)]
        x, queries, keys, values, gate = this.call(_before_attention, self, embeddings, hidden, *starts, n=n)
        rope, scale = layer.self_attn.rope, layer.self_attn.scale
        if not start:
            queries, keys = rope(queries, offset=offset + T - n), rope(keys, offset=offset)
        keys, values = cache.update_and_fetch(keys, values)
        out = scaled_dot_product_attention(queries, keys, values, cache, scale=scale, mask=mask)
        return this.call(_after_attention, self, x, out, gate)

    def combine(self, embeddings: mx.array, hidden: mx.array) -> mx.array:
        """The input of the decoder layer, [B, T, H], from embeddings and hidden states [B, T, H]."""
        return self.fc(
            mx.concatenate([self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)], axis=-1)
        )

    def decode(self, x: mx.array, cache: Any = None) -> mx.array:
        """Run the decoder layer and the norm on the output of ``combine`` -> [B, T, H]."""
        (layer,) = self.layers
        return self.norm(layer(x, mask=create_attention_mask(x, cache), cache=cache))


def _before_attention(
    mtp: Any,
    embeddings: mx.array,
    hidden: mx.array,
    start: mx.array | None = None,
    queries_start: mx.array | None = None,
    *,
    n: int,
) -> tuple[mx.array, ...]:
    """The head's part before attention. Only the last n positions have queries. Without starts, rope is left out.

    Returns:
        Tuple[mx.array, ...]: The input of the last n positions [B, n, H]; then, as ``layer.before_attention``, their queries,
          the keys and values of all positions, and the gate of the last n.
    """
    (layer,) = mtp.layers
    x = mtp.combine(embeddings, hidden)  # [B, T, H]
    normed = layer.input_layernorm(x)
    queries, gate = queries_of(layer.self_attn, normed[:, -n:])
    keys, values = keys_and_values_of(layer.self_attn, normed)
    if start is not None:
        rope = layer.self_attn.rope
        queries, keys = rope(queries, offset=queries_start), rope(keys, offset=start)
    return x[:, -n:], queries, keys, values, gate


def _after_attention(mtp: Any, x: mx.array, out: mx.array, gate: mx.array) -> mx.array:
    (layer,) = mtp.layers
    return mtp.norm(after_attention(layer, x, out, gate))


def append_keys_and_values(layer: Any, x: mx.array, cache: Any) -> None:
    """Append the keys and values of x [B, T, H] to the cache."""
    keys, values = keys_and_values_of(layer.self_attn, layer.input_layernorm(x))
    cache.update_and_fetch(layer.self_attn.rope(keys, offset=cache.offset), values)


def run_head(
    model: Any,
    hidden: mx.array,
    tokens: mx.array,
    cache: Any,
    embeddings: mx.array | None = None,
    positions: Positions | None = None,
    compiler: Compiler | None = None,
) -> mx.array:
    """One pass of a model's head, for its last position.

    Args:
        hidden (mx.array): The hidden states of T positions, [B, T, H].
        tokens (mx.array): The token after each, [B, T].
        cache (KVCache): The head's keys and values, to which T positions are appended.
        embeddings (mx.array, optional): Embeddings to use instead of the tokens', [B, T, H].
        positions (Positions, optional): The positions of the hidden states in a text with images. Default: ``None``, plain
          positions.
        compiler (Compiler, optional): Compiles the pass. Default: ``None``, not compiled.

    Returns:
        mx.array: The head's output for the last position, [B, 1, H].
    """
    this = pass_of_head(hidden.shape[1], model.drafting, compiler)
    if embeddings is None:
        # Not compiled: the CPU backend would compile a kernel for each place of a weight in a word of quantized weights.
        embeddings = model.model.embed_tokens(tokens)
    with in_pass(this), rope_at(positions):
        return model.mtp(embeddings, hidden, cache, last_only=True)


def split_head(weights: Mapping[str, T]) -> tuple[dict[str, T], dict[str, T]]:
    """Split a checkpoint's tensors into (backbone, head). The head's names lose the prefix ``mtp.``."""
    backbone, head = {}, {}
    for name, w in weights.items():
        prefix, dot, rest = name.partition("mtp.")
        if dot and prefix in ("", "model.", "language_model.", "language_model.model.", "model.language_model."):
            head[rest] = w
        else:
            backbone[name] = w
    return backbone, head


def is_raw(weights: Mapping[str, mx.array]) -> bool:
    """Whether tensors are in the Hugging Face layout, with convolutions [C, 1, K] instead of MLX's [C, K, 1]."""
    return any("conv1d.weight" in name and w.shape[-1] != 1 for name, w in weights.items())


def sanitize_head(mtp: MTPModule, head: Mapping[str, mx.array], raw: bool) -> dict[str, mx.array]:
    """Map a head's tensors to the names and values of ``MTPModule``'s parameters.

    Experts may be stacked, separate, fused, or named as in a dense layer. In a raw checkpoint, 1 is added to every norm.

    Raises:
        ValueError: Tensors are missing, unknown or of the wrong shape; the message names them.
    """
    parameters: Any = tree_flatten(mtp.parameters())
    expected = {name: p.shape for name, p in parameters}
    weights = dict(head)

    # The experts' tensors if they are not stacked: {name: shape}
    experts, mlp = {}, "layers.0.mlp"
    stacked = {p: f"{mlp}.switch_mlp.{p}.weight" for p in EXPERT_PROJECTIONS}
    gate_up, down = f"{mlp}.experts.gate_up_proj", f"{mlp}.experts.down_proj"
    if stacked["up_proj"] in expected:
        n_experts, size, hidden = expected[stacked["up_proj"]]
        for part in ("weight", "scales", "biases"):
            for p in EXPERT_PROJECTIONS:  # the layout of heads published in separate files
                if (name := f"{mlp}.{p}.{part}") in weights:
                    weights[f"{mlp}.switch_mlp.{p}.{part}"] = weights.pop(name)
        if gate_up in weights:
            experts = {gate_up: (n_experts, 2 * size, hidden), down: (n_experts, hidden, size)}
        elif any(name.startswith(f"{mlp}.experts.") for name in weights):
            experts = {
                f"{mlp}.experts.{e}.{p}.weight": expected[name][1:]
                for p, name in stacked.items()
                for e in range(n_experts)
            }
    if experts:
        _check({name: shape for name, shape in expected.items() if name not in stacked.values()} | experts, weights)
    else:
        _check(expected, weights)

    if gate_up in experts:
        gate, up = mx.split(weights.pop(gate_up), 2, axis=-2)  # [E, I, H] each
        weights[stacked["gate_proj"]], weights[stacked["up_proj"]] = gate, up
        weights[stacked["down_proj"]] = weights.pop(down)
    elif experts:
        for p, name in stacked.items():
            weights[name] = mx.stack([weights.pop(n) for n in experts if n.endswith(f".{p}.weight")])  # [E, I, H]
    if raw:
        for name, shape in expected.items():
            if len(shape) == 1:
                weights[name] = weights[name] + 1.0
    return weights


def _check(expected: Mapping[str, tuple[int, ...]], weights: Mapping[str, mx.array]) -> None:
    if missing := [name for name in expected if name not in weights]:
        raise ValueError(f"The MTP head lacks {_listed(missing)}.")
    # mlx-lm checks the shapes of quantized tensors.
    quantized = {name.removesuffix("scales") + "weight" for name in weights if name.endswith(".scales")}
    wrong = [
        f"mtp.{name} is {list(weights[name].shape)}, not {list(shape)}"
        for name, shape in expected.items()
        if name not in quantized and weights[name].shape != shape
    ]
    if wrong:
        raise ValueError(f"The MTP head does not fit this model: {'; '.join(wrong[:4])}.")


def _listed(names: list[str], most: int = 4) -> str:
    shown = ", ".join("mtp." + name for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more tensors"
