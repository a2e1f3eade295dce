"""Whether a model accepts the drafts of its head, and the reading of the head's norms with which it does.

It is measured once for each checkpoint on a machine: a pass of the model over built-in text gives its choices, and one of the
head its drafts. Some checkpoints do not tell which norms of the head lack the 1 that MLX's layout adds, or whether a further
draft is fed the head's output after its norm or before.
"""

import hashlib
import json
import logging
from collections.abc import Mapping
from itertools import combinations
from time import perf_counter
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_unflatten
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ...core.distributed import from_rank_0
from ...core.layers.mtp import DraftKVCache
from ...core.models.mixin import MTPModel
from ...files import keep, kept
from ...memory import TEST_CHUNK
from ...prompts import built_in_tokens
from ..hub import first_line
from ..reader import CheckpointReader
from .formats import Head

# On the built-in text, mostly code, a model accepts 0.5 to 0.9 of its own head's drafts. A constant draft is right as often as
# the most frequent token occurs, 0.05 to 0.15; random heads and heads of other models reach 0 to 0.03.
FLOOR = 0.3
BETTER = 0.1  # how many more drafts must be accepted with another reading than the one that a checkpoint tells
NEAR = 0.03  # a difference that is chance
N_TOKENS = 256  # of the built-in text
MAX_SECONDS = 3.0  # after which no more of the text is read
FILE = "acceptance.json"  # of what was measured on this machine
PARTS = ("layers.", "norm.", "pre_fc_norm_")  # the beginnings of the names of norms that conversions treat alike

Reading = tuple[str, ...]  # the PARTS whose norms are stored without the 1

log = logging.getLogger(__name__)


class Measured(NamedTuple):
    rate: float  # of first drafts at each token of the built-in text, with greedy decoding
    reading: Reading | None = None  # None: the one that the checkpoint tells
    feeds_normed: bool = True  # whether a further draft is fed the head's output after its norm, or before


def settle(model: MTPModel, tokenizer: TokenizerWrapper, name: str, head: Head, key: str, may_measure: bool) -> None:
    """Set ``model.head_acceptance_rate``, kept under ``key_of``, and read the head's norms so that drafts are accepted."""
    measured = from_rank_0(model.ranks, lambda: known(key))
    if measured is not None and measured.reading is not None:
        read_norms(model, head.norms, measured.reading)
    elif measured is None and may_measure:
        try:
            measured = _measure(model, tokenizer, name, head)
        except RuntimeError as e:  # MLX's, such as of a kernel that this device does not have
            log.warning(f"[WARNING] The MTP head of {head.source.name} could not be tested: {first_line(e)}")
            return
        keep(FILE, key, measured)
    if measured is not None:
        model.head_acceptance_rate = measured.rate
        model.mtp.is_fed_normed = measured.feeds_normed


def _measure(model: MTPModel, tokenizer: TokenizerWrapper, name: str, head: Head) -> Measured:
    told = told_by(head.raw)
    source = head.source.name
    rates = measure_readings(model, tokenizer, head.norms, told)
    rates = from_rank_0(model.ranks, lambda: rates)
    best = best_of(rates, told)
    read_norms(model, head.norms, best)
    if model.family.tries_outputs:
        by_feeding = measure_feeding(model, tokenizer)
        by_feeding = from_rank_0(model.ranks, lambda: by_feeding)
        return Measured(rates[best], None, by_feeding[True] >= by_feeding[False] - NEAR)
    if best == told:
        return Measured(rates[best])
    log.warning(
        f"[WARNING] 1 is added to {shifted(best)} of the norms of the MTP head of {source}, other than its files suggest: "
        f"{name} accepts {rates[best]:.0%} of the drafts on built-in text then, and {rates[told]:.0%} otherwise. To write such "
        f"a head: `mlx_mtp convert --graft-mtp-from {source} --model {name} --mlx-path NEW`."
    )
    return Measured(rates[best], best)


def shifted(reading: Reading) -> str:
    """The norms to which a reading adds 1, in words."""
    return "all" if reading == PARTS else ", ".join(f"{part}*" for part in reading) or "none"


def told_by(raw: bool) -> Reading:
    return PARTS if raw else ()


def best_of(rates: Mapping[Reading, float], told: Reading) -> Reading:
    """The reading to use: the one that is told, unless another is better. Of those as good, one of all norms alike."""
    best = max(rates.values())
    if best < max(rates[told] + BETTER, FLOOR):
        return told
    near = [reading for reading, rate in rates.items() if rate >= best - NEAR]
    return min(near, key=lambda reading: (reading not in ((), PARTS), len(reading)))


def measure_readings(
    model: MTPModel, tokenizer: TokenizerWrapper, norms: Mapping[str, mx.array], told: Reading
) -> dict[Reading, float]:
    """The acceptance rate with each reading of stored norms. Before and after, the model has ``told``, that of its files."""
    text = _read(model, tokenizer)
    if not model.family.shifts_norms:
        return {told: _rate(model, *text)}
    rates = {}
    for reading in (reading for n in range(len(PARTS) + 1) for reading in combinations(PARTS, n)):
        read_norms(model, norms, reading)
        rates[reading] = _rate(model, *text)
    read_norms(model, norms, told)
    return rates


def measure_feeding(model: MTPModel, tokenizer: TokenizerWrapper) -> dict[bool, float]:
    """Measure the acceptance of second drafts, whether these are fed the head's output after its norm, or before.

    Of first drafts that are the text's own tokens: the model's choice behind others is unknown.
    """
    tokens, hidden, choices = _read(model, tokenizer)
    rates = {}
    embed = model.model.embed_tokens
    own = model.mtp.is_fed_normed
    for is_normed in (True, False):
        model.mtp.is_fed_normed = is_normed
        cache = DraftKVCache()
        out = model.mtp(embed(tokens[:, 1:]), hidden[:, :-1], cache)  # [1, T - 1, H]
        first = mx.argmax(model.project(model.mtp.output(out)), axis=-1)
        out = model.mtp(embed(first), out, cache)
        second = mx.argmax(model.project(model.mtp.output(out)), axis=-1)
        is_right = first[:, :-1] == tokens[:, 2:]
        n_accepted = (is_right & (second[:, :-1] == choices[:, 2:])).sum()
        rates[is_normed] = float(n_accepted / mx.maximum(is_right.sum(), 1))
    model.mtp.is_fed_normed = own
    return rates


def _read(model: MTPModel, tokenizer: TokenizerWrapper) -> tuple[mx.array, mx.array, mx.array]:
    """Built-in text, as far as it is read in time: tokens [1, T], hidden states [1, T, H], the model's choices [1, T]."""
    tokens = built_in_tokens(tokenizer, model.vocab_size, N_TOKENS)  # [1, T]
    cache = model.make_cache()
    end = perf_counter() + MAX_SECONDS
    read = list[tuple[mx.array, mx.array]]()
    for i in range(0, tokens.size, TEST_CHUNK):
        logits, hidden = model(tokens[:, i : i + TEST_CHUNK], cache=cache, return_hidden=True)
        read.append((hidden, mx.argmax(logits, axis=-1)))
        mx.eval(read, [c.state for c in cache])
        if model.ranks is None and perf_counter() > end:
            break
    hidden, choices = (mx.concatenate([*x], axis=1) for x in zip(*read))
    return tokens[:, : hidden.shape[1]], hidden, choices


def _rate(model: MTPModel, tokens: mx.array, hidden: mx.array, choices: mx.array) -> float:
    """The share of the head's drafts that are the model's choices, given tokens [1, T] and hidden states [1, T, H]."""
    out = model.mtp(model.model.embed_tokens(tokens[:, 1:]), hidden[:, :-1])
    drafts = mx.argmax(model.project(model.mtp.output(out)), axis=-1)  # not a cheaper output layer's
    return float(mx.mean(drafts == choices[:, 1:]))


def read_norms(model: Any, norms: Mapping[str, mx.array], reading: Reading) -> None:
    """Set the norms of a model's head to those stored, read in this way, if its family has several."""
    if not model.family.shifts_norms:
        return
    dtype = model.mtp.norm.weight.dtype
    read = with_ones(norms, reading).items()
    model.update(tree_unflatten([(model.head_prefix + name, w.astype(dtype)) for name, w in read]))


def with_ones(norms: Mapping[str, mx.array], reading: Reading) -> dict[str, mx.array]:
    """Norms as in MLX's layout, given those stored."""
    return {name: w + 1.0 if name.startswith(reading) else w for name, w in norms.items()}


def known(key: str) -> Measured | None:
    try:
        rate, reading, *feeds_normed = kept(FILE, key)
        told = None if reading is None else tuple(map(str, reading))
        return Measured(float(rate), told, *map(bool, feeds_normed))
    except (TypeError, ValueError):
        return None


def key_of(
    checkpoint: CheckpointReader, head: CheckpointReader, adapter: str | None = None, bits: int | None = None
) -> str:
    """Identifies a checkpoint and that of its head, an adapter, and the bits to which the head is quantized in memory."""
    state = [_state_of(checkpoint), _state_of(head), adapter, bits]
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()[:32]


def _state_of(checkpoint: CheckpointReader) -> Any:
    if checkpoint.revision is not None:
        return [checkpoint.name, checkpoint.revision]
    names = [name for name in checkpoint.files if name.endswith((".safetensors", "config.json"))]
    stats = [(name, (checkpoint.path / name).stat()) for name in sorted(names)]
    return [str(checkpoint.path.resolve()), *((name, s.st_size, s.st_mtime_ns) for name, s in stats)]
