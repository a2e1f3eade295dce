"""Prompt caches of small models for the tests of the prompt store: how a text is read, and what a cache holds."""

import copy
import functools

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models import cache as stock

from mlx_mtp import KVOptions, make_prompt_cache
from mlx_mtp.core.caches.indexed import names_of

from .decoding import prefill
from .models import arrays_equal, deep_model

model_of = functools.cache(deep_model)
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]
KV_OPTIONS = dict(kv_bits=8, kv_group_size=32, quantized_kv_start=6)
KV = KVOptions(**KV_OPTIONS)


def read(model, tokens, cuts=(), store=None, kv=None):
    """A prompt cache of a text, read on from the store's where it is given, and inserted at each cut and at the end."""
    prompt_cache, n, handle = (make_prompt_cache(model), 0, None) if store is None else store.fetch(tokens, kv)
    options = KV_OPTIONS if kv else {}
    for cut in sorted({*cuts, len(tokens)}):
        if cut > n:
            prefill(mx.array(tokens[n:cut]), model, prompt_cache=prompt_cache, **options)
            n = cut
            if store is not None:
                handle = store.insert(tokens[:n], prompt_cache, kv, handle)
    return prompt_cache


def held(prompt_cache) -> list:
    """All that a prompt cache holds, without the space for more tokens."""

    def rows_of(c):
        arrays = [] if c.keys is None else [getattr(c, name) for name in names_of(c)]
        return tree_map(lambda x: x[..., : c.offset, :], arrays)

    return [c.cache if isinstance(c, stock.ArraysCache) else rows_of(c) for c in prompt_cache]


def names(prompt_cache) -> list[str]:
    return [type(c).__name__ for c in prompt_cache]


def assert_same_next(model, a, b, kv=None, tokens=(7, 3)):
    """The logits of these tokens are bit for bit the same, one by one and as a window."""
    a, b = copy.deepcopy(a), copy.deepcopy(b)
    assert arrays_equal(held(a)[:-1], held(b)[:-1])
    for part in (tokens[:1], tokens):
        logits = [model(mx.array([part]), cache=c[: len(model.layers)]) for c in (a, b)]
        assert arrays_equal(*([x] for x in logits))


def n_snapshots(store) -> int:
    return sum(node.snapshot.in_memory for node in store._forest.nodes())
