"""The one type of a model's floating-point weights, ``--dtype``: see "One type" in docs/develop/loading.md.

Weights that a checkpoint has in float32 beside others, such as the decay of a recurrence, stay as they are.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ...checkpoint import AUTO, DTYPES
from ...core.distributed import any_rank, from_rank_0
from ...core.layers.mtp import has_head
from ...core.models import family_of
from ...core.models.head_weights import is_head
from ...core.models.mixin import MTPModel
from ...errors import MTPError
from ...files import keep, kept
from ...prompts import built_in_tokens

P = ParamSpec("P")
T = TypeVar("T")
FILE = "float16.json"  # of models that float16 cannot hold
N_TOKENS = 8  # of the built-in text for which logits must be finite
WITHOUT_BFLOAT16 = (13, 14)  # the generations of the GPUs of M1 and M2

log = logging.getLogger(__name__)


class Float16Error(MTPError):
    def __init__(self, name: str, reason: str):
        self.reason = reason
        super().__init__(f"{name} does not run in float16 ({reason}): use --dtype bfloat16.")


def dtype_of(model: Any) -> mx.Dtype:
    if isinstance(model, MTPModel):
        return model.layers[0].dtype
    sizes: Counter[mx.Dtype] = Counter()
    parameters: Any = tree_flatten(model.parameters())
    for _, p in parameters:
        sizes[p.dtype] += p.size * mx.issubdtype(p.dtype, mx.floating)
    return sizes.most_common(1)[0][0]


def set_dtype(model: Any, dtype: str, prefers_float16: bool) -> bool:
    """Cast a model's weights when they are read, see ``load``. Return whether a backbone of another type is in float16 now."""
    own = dtype_of(model)
    target = DTYPES.get(dtype, mx.float16 if prefers_float16 and own == mx.bfloat16 else own)
    family = family_of(getattr(model, "model_type", None))
    if target != own and family is not None and family.pack_of is not None:
        raise MTPError(f"A model of type {model.model_type} computes in float16 only: leave --dtype out.")
    may_cast = getattr(model, "cast_predicate", lambda _: True)  # mlx-lm's, for checkpoints in float32

    def cast(path: str, p: mx.array) -> mx.array:
        of_backbone = target.size == 2 and (p.dtype.size == 2 or (p.dtype == own and may_cast(path)))
        of_head = is_head(path) and may_cast(path)
        return p.astype(target) if mx.issubdtype(p.dtype, mx.floating) and (of_backbone or of_head) else p

    model.update(tree_map_with_path(cast, model.parameters()))
    return target == mx.float16 != own


def check_float16(model: Any, tokenizer: TokenizerWrapper, name: str) -> None:
    """Raise a Float16Error if a weight of a model that was cast to float16, or a logit, is not finite, on any rank."""
    ranks = getattr(model, "ranks", None)
    parameters = dict(tree_flatten(model.parameters()))
    # The bits of infinity and NaN are the largest of each sign; integers are fast on any device.
    are_finite = {
        path: (p.view(mx.int16).max() < 0x7C00) & (p.view(mx.uint16).max() < 0xFC00)
        for path, p in parameters.items()
        if p.dtype == mx.float16
    }
    mx.eval(are_finite)
    large = next((path for path, x in are_finite.items() if not x), None)
    if any_rank(ranks, large is not None):  # before a pass, which runs on all ranks
        raise Float16Error(name, f"{large or 'a weight of another rank'} has values beyond 65,504")
    is_finite = True
    try:
        is_finite = bool(mx.stack([mx.isfinite(x).all() for x in _logits(model, tokenizer)]).all())
    except RuntimeError:  # MLX's, of which the test of the device warns
        log.debug("No logits in float16", exc_info=True)
    if any_rank(ranks, not is_finite):
        raise Float16Error(name, "its logits are not finite")


def _logits(model: Any, tokenizer: TokenizerWrapper) -> list[mx.array]:
    embedding = next(m for m in model.modules() if isinstance(m, nn.Embedding | nn.QuantizedEmbedding))
    tokens = built_in_tokens(tokenizer, len(embedding.weight), N_TOKENS)  # [1, T]
    if not has_head(model):
        return [model(tokens)]
    logits, hidden = model(tokens, return_hidden=True)
    return [logits, model.draft_logits(model.mtp(model.model.embed_tokens(tokens[:, 1:]), hidden[:, :-1]))]


@contextmanager
def once_in_float16(key: str | None) -> Iterator[None]:
    """A context that keeps the reason of a Float16Error for ``check_untried``."""
    try:
        yield
    except Float16Error as e:
        if key is not None:
            keep(FILE, key, e.reason)
        raise


def check_untried(name: str, key: str | None, ranks: Any) -> None:
    """Raise the Float16Error that was raised under a key before, on this machine or on rank 0's."""
    if key is not None and (reason := from_rank_0(ranks, lambda: kept(FILE, key))) is not None:
        raise Float16Error(name, reason)


def bfloat16_if_needed(load: Callable[P, T]) -> Callable[P, T]:
    """A decorator of ``load``: what "auto" cannot run in float16 is loaded in bfloat16, with one line."""

    @wraps(load)
    def load_again(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return load(*args, **kwargs)
        except Float16Error as e:
            if kwargs.get("dtype", AUTO) != AUTO:
                raise
            log.warning(f"[WARNING] {e} It is loaded in bfloat16 now.")
        mx.clear_cache()  # the first model is freed with the error
        kwargs["dtype"] = "bfloat16"
        return load(*args, **kwargs)

    return load_again
