"""Texts with a prompt store are those without one; where prompts are cut, and what is kept of those that are stopped."""

from contextlib import closing

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import make_logits_processors

import mlx_mtp
from mlx_mtp import PromptStore, make_sampler, stream_generate
from mlx_mtp.memory import FAILED_PASS
from mlx_mtp.prompt_store import arrays
from mlx_mtp.prompt_store import store as store_module
from mlx_mtp.prompt_store.store import OPENING, choose_cuts
from tests.support.decoding import plain, text_of
from tests.support.models import TRAINED
from tests.support.prompt_store import model_of, n_snapshots


def answer(model, tokenizer, prompt, store, **options):
    return [r.token for r in stream_generate(model, tokenizer, prompt, prompt_store=store, **options)]


def test_a_session_is_that_of_mlx_lm(trained, monkeypatch):
    """Turns that go on, without comparing rows, as handles say where a text was read; one that is edited; the first again."""
    model, tokenizer = trained
    store, text, prompts, compared = PromptStore(model, 1 << 30), "def read_lines(path):\n", [], []
    monkeypatch.setattr(arrays, "are_equal", lambda *_: compared.append(_))
    for turn in ("def write_lines(path):\n", "import os\n", "import re\n"):
        prompts.append(text)
        text += text_of(tokenizer, answer(model, tokenizer, text, store, max_tokens=5)) + turn
    assert store.fetch(tokenizer.encode(prompts[2]))[1] >= len(tokenizer.encode(prompts[1]))
    assert compared == []
    monkeypatch.undo()
    for prompt in [*prompts, prompts[1] + "# another end\n", prompts[0]]:
        tokens, calls = tokenizer.encode(prompt), []
        progress = dict(prompt_progress_callback=lambda *progress, calls=calls: calls.append(progress))
        got = answer(model, tokenizer, prompt, store, max_tokens=5, **progress)
        assert got == plain(tokens, model, max_tokens=5)[: len(got)]
        assert {total for _, total in calls} == {len(tokens)}
        assert sorted(calls) == calls
        assert calls[-1] == (len(tokens), len(tokens))
    assert calls[0] == (len(tokens) - 1, len(tokens))  # the first prompt again: its last token begins the generation


def test_prompts_are_cut_where_messages_end(trained):
    model, tokenizer = trained[0], mlx_mtp.load(TRAINED)[1]
    tokenizer.chat_template, tokenizer.has_chat_template = "x", True
    messages = [f"{OPENING}user\nimport {name}\n" for name in ("os", "sys", "re")]
    prompt = "".join(messages) + f"{OPENING}assistant\n"
    tokens = tokenizer.encode(prompt)
    ends = [len(tokenizer.encode("".join(messages[: i + 1]))) for i in range(3)]
    store = PromptStore(model, 1 << 30)
    answer(model, tokenizer, prompt, store, max_tokens=3)
    for end in ends[1:]:  # the first is short
        assert store.fetch([*tokens[:end], 1])[1] == end
    assert choose_cuts(ends, len(tokens)) == ends[1:]
    assert n_snapshots(store) == len(ends)


def test_what_is_stopped_is_kept(trained, monkeypatch):
    """An answer, and a prompt as far as it is read: up to a cut and the chunk after it."""
    model, tokenizer = trained
    store, line = PromptStore(model, 1 << 30), tokenizer.encode("def read_lines(path):\n")
    prompt, other = line * 3, [*tokenizer.encode("import os\n"), *line]
    with closing(stream_generate(model, tokenizer, other, prompt_store=store, max_tokens=40)) as responses:
        tokens = [next(responses).token for _ in range(5)]
    assert store.fetch([*other, *tokens])[1] == len(other) + 5
    monkeypatch.setattr(store_module, "choose_cuts", lambda *_: [5])

    def interrupt(n_read, _):
        if n_read == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answer(model, tokenizer, prompt, store, max_tokens=5, prompt_progress_callback=interrupt, prefill_step_size=4)
    assert store.fetch(prompt[:-1])[1] == 9
    assert answer(model, tokenizer, prompt, store, max_tokens=5) == answer(model, tokenizer, prompt, None, max_tokens=5)


def test_nothing_of_a_failed_pass_is_kept(trained, monkeypatch):
    """The GPU's error may come after steps that have computed nothing."""
    model, tokenizer = trained
    store, prompt, n_steps = PromptStore(model, 1 << 30), tokenizer.encode("import os\n" * 9), 0

    def fail(*_):
        raise RuntimeError(f"[METAL] {FAILED_PASS}")

    with pytest.raises(RuntimeError, match=FAILED_PASS):
        for _ in stream_generate(model, tokenizer, prompt, prompt_store=store, max_tokens=40):
            n_steps += 1
            monkeypatch.setattr(mx, "async_eval", fail)
    assert n_steps > 0
    assert store.fetch([*prompt, 1])[1] < len(prompt)  # up to the last cut


class Counting:
    """A processor that keeps state, and has seen each token once, in order."""

    def __init__(self):
        self.seen = []

    def __call__(self, tokens, logits):
        self.seen.append(tokens.tolist())
        return logits


@pytest.mark.parametrize("sampled", [False, True])
def test_processors_see_the_whole_prompt(sampled, trained):
    model, tokenizer = trained
    store, prompt = PromptStore(model, 1 << 30), tokenizer.encode("import os\nimport sys\nimport os\n")

    def text(store):
        options = dict(max_tokens=5, sampler=make_sampler(temp=1.0, seed=3) if sampled else None)
        options["logits_processors"] = make_logits_processors(repetition_penalty=1.5)
        return answer(model, tokenizer, prompt, store, **options)

    assert text(None) == text(store) == text(store)
    counting = Counting()
    tokens = answer(model, tokenizer, prompt, store, max_tokens=4, logits_processors=[counting])
    assert counting.seen == [prompt + tokens[:i] for i in range(4)]


def test_what_does_not_go_with_a_store(trained):
    for of, options, message in [
        (trained[0], dict(prompt_cache=[]), "prompt_store and prompt_cache"),
        (trained[0], dict(input_embeddings=mx.zeros((3, 4))), "prompt_store and input_embeddings"),
        (trained[0], dict(mtp=False), "requires mtp=True or copy_drafts"),
        (model_of("qwen3_5"), {}, "belongs to another model"),
    ]:
        with pytest.raises(ValueError, match=message):
            answer(*trained, [1, 2, 3], PromptStore(of, 0), **options)
