"""Generation, ours and mlx-lm's, and what it must leave."""

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors

from mlx_mtp import make_prompt_cache, make_sampler, mtp_generate_step
from mlx_mtp.core.caches.prompt_cache import open_prompt_cache
from mlx_mtp.core.caches.recurrent import RecurrentCache
from mlx_mtp.core.caches.rows import KVOptions, Rows
from mlx_mtp.core.sampling.sampler import for_one_text

PROMPT = mx.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5])
WINDOW = mx.array([8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3])


def difference(ours: mx.array, theirs: np.ndarray) -> float:
    return float(np.abs(np.array(ours) - theirs).max())


def plain(prompt, model, **kwargs) -> list[int]:
    """The tokens of mlx-lm's own generation; a sampler with a seed samples from its first position on."""
    sampler = for_one_text(kwargs.pop("sampler", None))
    return [token for token, _ in generate_step(mx.array(prompt), model, sampler=sampler, **kwargs)]


def mtp(prompt, model, **kwargs):
    return [token for token, _, _ in mtp_generate_step(mx.array(prompt), model, **kwargs)]


def prefill(prompt, model, **kwargs):
    """Read a prompt into a prompt cache."""
    mtp(prompt, model, max_tokens=0, **kwargs)


def text_of(tokenizer, tokens, prompt=()) -> str:
    """The text up to the end of text; behind the tokens of a prompt that it goes on from, with a space that it begins with."""
    detokenizer = tokenizer.detokenizer
    for token in prompt[-1:]:
        detokenizer.add_token(token)
    n = len(detokenizer.text)
    for token in tokens:
        if token in tokenizer.eos_token_ids:
            break
        detokenizer.add_token(token)
    detokenizer.finalize()
    return detokenizer.text[n:]


def text_alone(model, tokenizer, prompt, max_tokens=12, temperature=0.0, top_p=0.0, seed=None, **penalties) -> str:
    """The text of mlx-lm's own single run, by the fields of a request."""
    tokens, sampler = tokenizer.encode(prompt), make_sampler(temperature, top_p, seed=seed)
    options = dict(max_tokens=max_tokens, sampler=sampler, logits_processors=make_logits_processors(**penalties))
    return text_of(tokenizer, plain(tokens, model, **options), tokens)  # a space at its beginning is kept


def interrupt_at(n: int):
    """A progress callback that presses Ctrl-C once n tokens have been read."""

    def interrupt(n_read, _):
        if n_read >= n:
            raise KeyboardInterrupt

    return interrupt


def filled(model, bits=None, prompt=PROMPT) -> list:
    """The backbone's caches of a prompt, quantized to so many bits."""
    caches = model.make_cache()
    if len(prompt):
        model(prompt[None], cache=caches)
        mx.eval([c.state for c in caches])
    return [c.to_quantized(32, bits) if bits and hasattr(c, "to_quantized") else c for c in caches]


def rows_of(model, bits=None, prompts=(PROMPT,)) -> Rows:
    """The caches of prompts as rows, quantized to so many bits."""
    rows = Rows(model, kv := KVOptions())
    for prompt in prompts:
        cache = open_prompt_cache(model, None)
        cache.entries[: len(model.layers)] = filled(model, bits, prompt)
        rows.join([cache], [kv])
    return rows


def one_by_one(model, caches, tokens) -> mx.array:
    """The logits of these tokens, each read in a pass of its own."""
    return mx.concatenate([model(token[None, None], cache=caches) for token in tokens], axis=1)


def assert_cache_of(model, prompt_cache, n_tokens):
    """A cache of ``n_tokens`` tokens: no window open, a row of the head for each but the last, whose hidden state waits."""
    backbone, (head, last_hidden) = prompt_cache[: len(model.layers)], prompt_cache[len(model.layers) :]
    assert {c.offset for c in backbone if not isinstance(c, RecurrentCache)} == {n_tokens}
    assert all(c.split is None for c in backbone if isinstance(c, RecurrentCache))
    assert head.offset == n_tokens - 1
    assert last_hidden[0].shape[1] == 1


def head_rows(prompt_cache):
    """The head's keys and values, and the hidden state that it waits with."""
    head, (last_hidden, *_) = prompt_cache[-2], prompt_cache[-1].cache
    return [] if head.keys is None else [*(x[:, :, : head.offset] for x in (head.keys, head.values)), last_hidden]


def assert_head_rows(prompt_cache, want):
    rows = head_rows(prompt_cache)
    assert [x.shape for x in rows] == [x.shape for x in want]
    assert all(mx.allclose(x, y, rtol=1e-3, atol=1e-3) for x, y in zip(rows, want))


def assert_goes_on(model, prompt_cache, tokens):
    """A complete prompt cache of these tokens, from which the text and the drafts go on as from a cold start."""
    assert_cache_of(model, prompt_cache, len(tokens))
    cold = make_prompt_cache(model)
    prefill(mx.array(tokens), model, prompt_cache=cold)
    assert_head_rows(prompt_cache, head_rows(cold))
    assert prompt_cache[-1][2].tolist() == tokens  # for copies
    assert mtp([7], model, max_tokens=4, prompt_cache=prompt_cache) == plain([*tokens, 7], model, max_tokens=4)
