"""Qwen3.8-Flash-Next: residual streams, n-gram embeddings, sparse attention and experts, with the MTP head.

mlx-lm (0.32.2) has no such model: it is made of the parts of mlx-lm's Qwen3.5 and of this package, as in
``modular_qwen4_exp.py`` of transformers (5.24). A hidden state is n streams before the last mixer, [B, T, n H], which the head
takes.

    for each part of a layer, attention or recurrence and then experts:
        normed = norm of each stream;  input = mean of the streams, mixed by weights that depend on them
        streams += injection of each stream * output
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import qwen3_5 as stock
from mlx_lm.models.qwen3_next import Qwen3NextRMSNormGated

from ...errors import MTPError
from ..caches.recurrent import State
from ..layers.attention import Arrays, GatedAttentionLayer
from ..layers.layer import Layer
from ..layers.mtp import MTPModule
from ..layers.passes import Pass, current_pass
from ..layers.recurrence import RecurrentLayer
from ..layers.sparse import Indexer, Norm
from . import qwen3_5, qwen3_5_moe
from .family import Family
from .mixin import add_layers, without_layers
from .ngrams import NgramEmbedding, NgramHash, NgramTable, add_ngrams

TABLE = ".ple.ple_embedding.ngram_embedding."  # in the names of a table's tensors


@dataclass
class TextModelArgs(qwen3_5.TextModelArgs):
    layer_types: list[str] | None = None
    output_gate_type: str | None = None
    hc_count: int = 4
    hc_lowrank: int = 320
    indexer_n_heads: int = 4
    indexer_head_dim: int = 128
    indexer_budget: int = 2048
    indexer_compress_ratio: int = 4
    ple_layer_ids: list[int] = field(default_factory=list)
    ple_embed_dim: int | None = None
    ple_conv_kernel_size: int = 4
    ngram_size: int = 3
    heads_per_ngram: int = 8
    ngram_vocab_size_base: int = 20_000_000
    split_ngram_parts: int = 128
    seed: int = 1234
    eos_token_id: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ple_layer_ids = sorted({*(self.ple_layer_ids or ())})
        self.ple_embed_dim = self.ple_embed_dim or self.hidden_size
        n, ids, budget = self.num_hidden_layers, self.ple_layer_ids, self.indexer_budget
        wrong = {
            "num_experts must be 1 or more": self.num_experts < 1,
            "layer_types must have a type for each layer": len(self.layer_types or ()) not in (0, n),
            "indexer_budget must be a multiple of indexer_compress_ratio": budget % self.indexer_compress_ratio,
            "ple_layer_ids must be those of recurrent layers, from 1 on": not all(
                1 <= i <= n and self.is_linear(i - 1) for i in ids
            ),
            "ngram_size must be 2 or more": ids and self.ngram_size < 2,
            "split_ngram_parts must be 1 or more": self.split_ngram_parts < 1,
            "ple_conv_kernel_size must be 2 or more": ids and self.ple_conv_kernel_size < 2,
            "eos_token_id is needed for n-gram embeddings": ids and self.eos_token_id in (None, []),
        }
        if sentences := [sentence for sentence, is_wrong in wrong.items() if is_wrong]:
            raise MTPError(f"in its config, {sentences[0]}")

    def is_linear(self, i: int) -> bool:
        if self.layer_types is None:
            return (i + 1) % self.full_attention_interval != 0
        return self.layer_types[i] == "linear_attention"


ModelArgs = qwen3_5.ModelArgs


class Streams(nn.Module):
    """The mixer of residual streams before a part of a layer, whose output is injected, or before an output layer."""

    def __init__(self, args: TextModelArgs, injects: bool = True):
        super().__init__()
        n, size = args.hc_count, args.hc_count * args.hidden_size
        self.n_streams = n
        self.hc_norm = Norm(size, args.rms_norm_eps, n)
        self.input_mix_weight_down = nn.Linear(size, args.hc_lowrank, bias=False)
        self.input_mix_weight_up = nn.Linear(args.hc_lowrank, size, bias=False)
        if injects:
            self.block_inject_weight = nn.Linear(size, n, bias=False)

    def __call__(self, x: mx.array) -> tuple[mx.array, ...]:
        """Streams [B, T, n H] -> the input [B, T, H], and the injection of each stream, [B, T, n]"""
        normed = self.hc_norm(x)
        mix = mx.sigmoid(self.input_mix_weight_up(nn.silu(self.input_mix_weight_down(normed) / self.n_streams)))
        mixed = (mix * normed).reshape(*x.shape[:2], self.n_streams, -1).mean(axis=2)
        if "block_inject_weight" not in self:
            return (mixed,)
        return mixed, 2 * mx.sigmoid(self.block_inject_weight(normed) / self.n_streams)


class SigmoidGatedNorm(Qwen3NextRMSNormGated):
    """mlx-lm's norm, with a sigmoid in place of silu."""

    def __call__(self, x: mx.array, gate: mx.array) -> mx.array:
        normed = mx.fast.rms_norm(x, self.weight, self.eps).astype(mx.float32)
        return (normed * mx.sigmoid(gate.astype(mx.float32))).astype(x.dtype)


class StreamsLayer(Layer, nn.Module):
    """What both kinds of layers have in common: their parts read streams and add to them."""

    def __init__(self, args: TextModelArgs, layer_idx: int):
        super().__init__()
        self.mlp = stock.SparseMoeBlock(args)
        self.attn_hyper_connection = Streams(args)
        self.mlp_hyper_connection = Streams(args)

    @property
    def dtype(self) -> mx.Dtype:
        return self.attn_hyper_connection.hc_norm.weight.dtype

    def enter(self, x: mx.array) -> tuple[mx.array, ...]:
        return self.attn_hyper_connection(x)

    def join(self, x: mx.array, out: mx.array, *for_join: mx.array) -> mx.array:
        (injection,) = for_join
        return x + (injection[..., None] * out[:, :, None]).reshape(x.shape)

    def feed_forward(self, x: mx.array) -> mx.array:
        mixed, injection = self.mlp_hyper_connection(x)
        return self.join(x, self.mlp(mixed), injection)

    def __call__(self, x: mx.array, mask: mx.array | str | None = None, cache: Any | None = None) -> mx.array:
        if mask is not None and self.is_linear:
            raise MTPError("This model does not run over padded prompts: use batch_generate of mlx_mtp, not of mlx-lm.")
        return self.run(x, mask, self.make_cache() if cache is None else cache, current_pass())


class Attention(StreamsLayer, GatedAttentionLayer):
    def __init__(self, args: TextModelArgs, layer_idx: int):
        super().__init__(args, layer_idx)
        self.self_attn = stock.Attention(args)
        self.self_attn.q_norm = Norm(args.head_dim, args.rms_norm_eps)
        self.self_attn.k_norm = Norm(args.head_dim, args.rms_norm_eps)
        self.self_attn.indexer = Indexer(args)

    @property
    def row_sizes(self) -> dict[str, tuple[int, int]]:
        return {**super().row_sizes, "index_keys": (1, self.self_attn.indexer.head_dim)}

    def score_bytes(self, n: int) -> int:
        """Also the indexer's scores of blocks."""
        indexer = self.self_attn.indexer
        return super().score_bytes(n) + 2 + (indexer.n_heads + 2) * mx.float32.size // indexer.block_size

    def project(self, normed: mx.array, last: bool = False) -> tuple[Arrays, Arrays, Arrays]:
        """Also the indexer's queries [B, Hi, T, Di] and keys [B, 1, T, Di]."""
        queries, keys, gates = super().project(normed, last)
        index, index_keys = self.self_attn.indexer(normed)
        return [*queries, index[:, :, -1:] if last else index], [*keys, index_keys], gates

    def attend(
        self, queries: Arrays, cached: Sequence[Any], mask: Any, cache: Any, first: int | mx.array, pass_: Pass
    ) -> mx.array:
        query, index = queries
        keys, values, index_keys = cached
        query = mx.depends(query, [index_keys])  # otherwise they would not be computed where none are needed
        indexer = self.self_attn.indexer
        if index_keys.shape[2] // indexer.block_size > indexer.n_blocks:
            mask = indexer.select(self.self_attn.rope, index, index_keys, first)
        return super().attend([query], [keys, values], mask, cache, first, pass_)


class Recurrence(StreamsLayer, RecurrentLayer):
    def __init__(self, args: TextModelArgs, layer_idx: int):
        super().__init__(args, layer_idx)
        self.n_previous = args.ngram_size - 1
        if layer_idx + 1 in args.ple_layer_ids:
            self.ple = NgramEmbedding(args)
        self.linear_attn = stock.GatedDeltaNet(args)
        if args.output_gate_type == "sigmoid":
            self.linear_attn.norm = SigmoidGatedNorm(self.linear_attn.head_v_dim, args.rms_norm_eps)

    @property
    def has_ngrams(self) -> bool:
        return "ple" in self

    @property
    def states(self) -> list[State]:
        if not self.has_ngrams:
            return super().states
        size = self.ple.conv1d.weight.shape[0]
        # Token ids less the end of text: zeros, the states before the first token, stand for it.
        ids = State((self.n_previous, 1), mx.int32)
        return [*super().states, State((self.ple.n_last, size)), ids]

    def embed(self, x: mx.array, arrays: list[mx.array], pass_: Pass) -> tuple[mx.array, list[mx.array]]:
        if not self.has_ngrams:
            return x, []
        tokens, embeddings = pass_.arrays[id(self)]
        x, inputs = pass_.call(add_ngrams, self.ple, x, embeddings, arrays[2])
        return x, [inputs, tokens]


class Backbone(stock.Qwen3_5TextModel):
    """The layers between the embedding and the last mixer, as in mlx-lm's Qwen3.5, over streams."""

    def __init__(self, args: TextModelArgs):
        super().__init__(without_layers(args))
        self.n_streams = args.hc_count
        kinds = [args.is_linear(i) for i in range(args.num_hidden_layers)]
        self.norm = nn.Identity()  # a hidden state is before the mixer
        self.hyper_connection_mixer = Streams(args, injects=False)
        self.ssm_idx, self.fa_idx = (kinds.index(kind) if kind in kinds else None for kind in (True, False))
        self.ngrams = Ngrams(args)

    @property
    def ngram_layers(self) -> list[int]:
        """The layers with n-gram embeddings, of those that this rank has."""
        return [i for i, layer in enumerate(self.layers) if isinstance(layer, Recurrence) and layer.has_ngrams]

    def __call__(self, inputs: mx.array, cache: list[Any] | None = None) -> mx.array:
        for i in self.ngram_layers:
            last = None if cache is None else cache[i - self.start_idx][3]
            current_pass().arrays[id(self.layers[i])] = self.ngrams.read(i, inputs, last)
        streams = mx.tile(self.embed_tokens(inputs), (1, 1, self.n_streams))
        return super().__call__(inputs, cache, input_embeddings=streams)


class Ngrams:
    """The hashes and tables of the layers with n-gram embeddings, which are no parameters."""

    def __init__(self, args: TextModelArgs):
        self.hashes = {i - 1: NgramHash(args, place) for place, i in enumerate(args.ple_layer_ids)}
        self.width = (args.ple_embed_dim or 0) // (args.heads_per_ngram * (args.ngram_size - 1))  # of a row
        self.tables: dict[int, NgramTable] = {}  # by layer, set by ``mlx_mtp.load``

    def read(self, i: int, inputs: mx.array, last: mx.array | None) -> tuple[mx.array, mx.array]:
        """New tokens [B, T] of layer i -> the last tokens before with the new ones, and the embeddings of these, [B, T, P]"""
        ngram_hash, table = self.hashes[i], self.tables[i]
        eos = ngram_hash.eos
        if last is None:
            last = mx.zeros((len(inputs), ngram_hash.n_previous, 1), mx.int32)
        tokens = mx.concatenate([last, inputs[..., None].astype(mx.int32) - eos], axis=1)
        ids = tokens[..., 0].astype(mx.int64) + eos
        rows = table(ngram_hash(ids if table.arrays is not None else np.array(ids)))  # from files: waits for the tokens
        return tokens, rows.reshape(*inputs.shape, -1)


class Head(MTPModule):
    def __init__(self, args: TextModelArgs, layer: nn.Module):
        nn.Module.__init__(self)
        H = args.hidden_size
        self.n_streams = args.hc_count
        self.pre_fc_norm_embedding = Norm(H, args.rms_norm_eps)
        self.pre_fc_norm_hidden = Norm(args.hc_count * H, args.rms_norm_eps)
        self.fc_embedding, self.fc_hidden = (nn.Linear(H, H, bias=False) for _ in range(2))
        self.layers = [layer]
        self.norm = nn.Identity()  # further drafts are fed the streams before the mixer
        self.hyper_connection_mixer = Streams(args, injects=False)

    def combine(self, embeddings: mx.array, hidden: mx.array) -> mx.array:
        streams = self.pre_fc_norm_hidden(hidden).reshape(*hidden.shape[:2], self.n_streams, -1)
        of_token = self.fc_embedding(self.pre_fc_norm_embedding(embeddings))
        return (self.fc_hidden(streams) + of_token[:, :, None]).reshape(hidden.shape)

    def output(self, out: mx.array) -> mx.array:
        (mixed,) = self.hyper_connection_mixer(out)
        return mixed


FAMILY = Family(
    text_args=TextModelArgs,
    attention=Attention,
    recurrence=Recurrence,
    is_recurrent=TextModelArgs.is_linear,
    head=Head,
    convolution="conv1d.weight",
    drafter="qwen4_exp_mtp",
    needs_head=True,
    repeats_heads=True,
    no_shard="its residual streams are mixed in each layer",
    no_images="A model of type qwen4_exp takes text only here: leave the images out.",
)


class TextModel(stock.TextModel):
    def __init__(self, args: TextModelArgs):
        super().__init__(without_layers(args))
        self.args = args
        self.model = Backbone(args)
        add_layers(self, args, FAMILY)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Convolutions in MLX's layout, and no tables. Norms are as stored in both layouts."""
        weights = {name: w for name, w in weights.items() if TABLE not in name}
        if self.args.tie_word_embeddings:
            weights.pop("lm_head.weight", None)
        return {name: w.moveaxis(2, 1) if FAMILY.is_raw({name: w.shape}) else w for name, w in weights.items()}


class Model(qwen3_5_moe.Model):
    family = FAMILY
    text_model = TextModel

    def __call__(self, inputs: mx.array, cache: list[Any] | None = None, **options: Any) -> Any:  # type: ignore[override]
        """As of the base, but without input embeddings, since n-grams are those of token ids."""
        return super().__call__(inputs, cache, **options)

    def logits(self, hidden: mx.array) -> mx.array:
        (mixed,) = self.model.hyper_connection_mixer(hidden)
        return self.project(mixed)

    def other_weights(self) -> list[tuple[str, mx.array]]:
        tables = self.ngrams.tables.items()
        return [(f"ngrams.{i}", table(np.linspace(0, len(table.rows) - 1, 16).astype(int))) for i, table in tables]

    @property
    def ngrams(self) -> Ngrams:
        return self.model.ngrams

    @property
    def hidden_size(self) -> int:
        return self.text_args.hc_count * self.text_args.hidden_size
