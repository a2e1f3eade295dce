"""Prompt caches over turns: exactly what was said, nothing twice, whatever the options and wherever a turn was stopped."""

import copy
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models import cache as stock
from mlx_lm.sample_utils import make_logits_processors

import mlx_mtp
from mlx_mtp import make_prompt_cache
from mlx_mtp.core.caches.prompt_cache import open_prompt_cache
from tests.support.decoding import mtp, plain
from tests.support.models import FLASH, PACK, model_of, tiny_model
from tests.support.profiles import examples

TURNS = ([3, 1, 4, 1, 5, 9], [2, 6], [5, 3, 5, 8, 9])


class Counting:
    def __init__(self, model):
        self._model, self.n = model, 0

    def __getattr__(self, name):
        return getattr(self._model, name)

    def __call__(self, inputs, **kwargs):
        self.n += inputs.shape[1]
        return self._model(inputs, **kwargs)


@examples(6)
@given(data=st.data())
def test_greedy_turns_match_mlx_lm(data):
    """Two turns in one cache, also through a file, which mlx-lm does in a cache of its own, with the same options in each."""
    draw = data.draw
    model = model_of(draw(st.sampled_from(["qwen3_5", "qwen3_next", PACK, FLASH])), draw(st.integers(0, 2)))
    processors = make_logits_processors(
        logit_bias=draw(st.sampled_from([None, {3: 1.0}])),
        repetition_penalty=draw(st.sampled_from([None, 1.3])),
        frequency_penalty=draw(st.sampled_from([None, 0.3])),
    )
    options = dict(
        prefill_step_size=draw(st.integers(1, 8)),
        logits_processors=processors,
        kv_bits=draw(st.sampled_from([None, 4, 8])),
        kv_group_size=32,
        quantized_kv_start=draw(st.sampled_from([0, 7, 20])),
        sampler=mlx_mtp.make_sampler(temp=1.0, top_p=0.9, seed=3) if draw(st.booleans()) else None,
    )
    ours, theirs = make_prompt_cache(model), stock.make_prompt_cache(model)
    for question in TURNS[:2]:
        options["max_tokens"], depth = draw(st.integers(1, 12)), draw(st.integers(0, 6))
        # mlx-lm quantizes at once what the first turn left, and where its own chunks end.
        want = plain(question, model, prompt_cache=theirs, **options | {"prefill_step_size": 2048})
        assert mtp(question, model, prompt_cache=ours, num_draft_tokens=depth, **options) == want
        assert [type(c).__name__ for c in ours[: len(theirs)]] == [type(c).__name__ for c in theirs]
        if draw(st.booleans()):
            with TemporaryDirectory() as folder:
                stock.save_prompt_cache(f"{folder}/cache.safetensors", ours)
                ours = stock.load_prompt_cache(f"{folder}/cache.safetensors")


def test_mlx_lm_resumes_our_cache_and_we_resume_its():
    """Nothing that is in a cache is read again."""
    model, history = Counting(model_of("qwen3_5", 1)), []
    prompt_cache = make_prompt_cache(model)
    for i, question in enumerate([*TURNS, [7, 7]]):
        history += question
        run, options, model.n = plain, {}, 0
        if i % 2 == 0:
            run, options = mtp, dict(num_draft_tokens=1)
        tokens = run(question, model, max_tokens=7, prompt_cache=prompt_cache, **options)
        assert model.n <= len(question) + 2 * 7 < len(history) + 7 or i == 0
        assert tokens == plain(history, model, max_tokens=7)
        history += tokens


def test_copies_are_caches_of_their_own():
    """Those of mlx-lm's LRUPromptCache, which finds the longest prefix, and one of the end of a turn."""
    model, lru = model_of("qwen3_5", 1), stock.LRUPromptCache()
    prompt_cache = make_prompt_cache(model)
    history = TURNS[0] + mtp(TURNS[0], model, max_tokens=9, prompt_cache=prompt_cache)
    lru.insert_cache("model", history, prompt_cache)
    earlier, asked = copy.deepcopy(prompt_cache), history + TURNS[1]
    for _ in range(2):  # a cache that was handed out and used is a copy
        found, rest = lru.fetch_nearest_cache("model", asked)
        assert rest == TURNS[1]
        more = mtp(rest, model, max_tokens=9, prompt_cache=found, num_draft_tokens=3)
        assert more == plain(asked, model, max_tokens=9)
    # Shorter: these layers cannot be trimmed, and none may claim it.
    assert lru.fetch_nearest_cache("model", history[:-3] + [31])[0] is None
    assert not stock.can_trim_prompt_cache(prompt_cache)
    mtp(TURNS[1], model, max_tokens=9, prompt_cache=prompt_cache)
    assert mtp(TURNS[2], model, max_tokens=9, prompt_cache=earlier) == plain(history + TURNS[2], model, max_tokens=9)


def test_each_rank_resumes_its_own_part_alone(tmp_path):
    """Another rank's part has the same shapes: nothing else would tell."""

    def as_rank(*part):
        model = tiny_model("qwen3_5")
        model.ranks = SimpleNamespace(rank=part[0], size=part[1]) if part else None
        return model

    parts, file = [(), (0, 2), (1, 2), (1, 4)], str(tmp_path / "cache.safetensors")
    for part in parts:
        saved = make_prompt_cache(as_rank())
        mtp(TURNS[0], as_rank(), max_tokens=2, prompt_cache=saved)
        saved[-1][3] = make_prompt_cache(as_rank(*part))[-1][3]
        stock.save_prompt_cache(file, saved)
        for other in parts:
            loaded = stock.load_prompt_cache(file)
            if other == part:
                open_prompt_cache(as_rank(*other), loaded)
            else:
                with pytest.raises(ValueError, match=r"cache belongs to (rank|one process).* and this is"):
                    open_prompt_cache(as_rank(*other), loaded)
