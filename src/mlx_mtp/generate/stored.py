"""Generation with a prompt store: prefill begins after the stored prefix of the prompt, and the rest is stored."""

from collections.abc import Generator
from contextlib import closing
from dataclasses import fields
from typing import Any

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..caches.prompt_cache import PromptCache
from ..caches.single import KVOptions
from ..decoding.loop import mtp_generate_step, prefill
from ..images.prompt import ImagePrompt
from ..prompt_store import PromptStore
from ..prompt_store.cuts import cuts_of

KV_NAMES = [field.name for field in fields(KVOptions)]


def stored_steps(
    store: PromptStore,
    tokenizer: TokenizerWrapper,
    pictured: ImagePrompt | None,
    prompt: mx.array,
    model: Any,
    stream: Any,
    **options: Any,
) -> Generator[tuple[int, mx.array, bool], None, None]:
    """``mtp_generate_step`` with a prompt store in place of a prompt cache.

    Args:
        pictured (ImagePrompt, optional): The prompt with images, if it has any.

    Raises:
        ValueError: An option cannot be combined with a store, or the store is for another model.
    """
    for name in ("prompt_cache", "input_embeddings"):
        if options.pop(name, None) is not None:
            raise ValueError(f"prompt_store and {name} cannot be combined.")
    if store.model is not model:
        raise ValueError("The prompt store belongs to another model: make one with PromptStore(model).")
    if model.ranks is not None:
        raise ValueError("A prompt store serves one process: omit prompt_store on several machines.")
    tokens: list[int] = prompt.tolist()  # type: ignore[assignment]  # [T]
    key = tokens[:] if pictured is None else pictured.key[:]
    kv = KVOptions(**{name: options[name] for name in KV_NAMES if name in options})
    cache, n_stored, handle = store.fetch(key[:-1], kv)
    cuts = cuts_of(tokenizer, tokens, store.n_common(key))
    embeddings = None if pictured is None else pictured.embed(model, n_stored)

    def part(begin: int, end: int) -> tuple[mx.array, dict[str, Any]]:
        """A part of the prompt, as arguments of the functions that prefill it."""
        if pictured is None or embeddings is None:
            return prompt[begin:end], {}
        own = embeddings[begin - n_stored : end - n_stored]
        return prompt[begin:end], {"input_embeddings": own, "images": pictured.images}

    n = n_stored
    progress = options.pop("prompt_progress_callback", None) or (lambda *_: None)
    # Of a part, as of the whole.
    options["prompt_progress_callback"] = lambda n_read, _: progress(n + n_read, len(tokens))
    for cut in (cut for cut in cuts if cut > n_stored):
        _prefill_part(*part(n, cut), model, stream, cache, options)
        n = cut
        handle = store.insert(key[:n], cache, kv, handle)
    rest, given = part(n, len(tokens))
    try:
        steps = mtp_generate_step(rest, model, stream, prompt_cache=cache, all_tokens=tokens[:n], **options, **given)
        with closing(steps):
            for step in steps:
                key.append(step[0])
                yield step
    finally:
        n_read = PromptCache(cache, len(model.layers)).n_tokens  # fewer after Ctrl-C before the first token
        store.insert(key[:n_read], cache, kv, handle)


def _prefill_part(
    tokens: mx.array, given: dict[str, Any], model: Any, stream: Any, cache: list[Any], options: dict[str, Any]
) -> None:
    """Prefill a part of a prompt without drafts. Its text is kept for copies."""
    names = ("prefill_step_size", "prompt_progress_callback", *KV_NAMES)
    shared = {name: options[name] for name in names if name in options}
    prefill(tokens, model, stream=stream, prompt_cache=cache, num_draft_tokens=0, copy_drafts="auto", **shared, **given)
