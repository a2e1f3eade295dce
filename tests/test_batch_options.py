"""What a batch and each of its prompts may ask for."""

import re

import mlx.core as mx
import pytest

from mlx_mtp import Depth, batch_generate
from mlx_mtp.batch.generator import BatchGenerator
from mlx_mtp.pacing.step_times import FREE, Plan
from tests.support.batches import run
from tests.support.decoding import mtp, plain
from tests.support.models import model_of
from tests.support.scripted import script_copies

PROMPTS = [[3, 1, 4], [1, 5]]
N = 24

DRAFTS = "num_draft_tokens must be auto or from 0 to 8, not"
COPIES = "copy_drafts must be auto, off or from 1 to 16, not"
POSITIVE = "must be an integer of 1 or more, not"
EACH = "must have an entry for each prompt: 2, not"
OUT_OF_RANGE = [
    *(("num_draft_tokens", n, f"{DRAFTS} {n}.") for n in (-1, 9, 99, 2.0, 2.5, "3", "off")),
    *(("copy_drafts", n, f"{COPIES} {n}.") for n in (-1, 0, 17, 4.0, "4", "on")),
]


def test_refuses_options_out_of_range():
    """Alone, in a batch, and of one prompt of a batch: all of a call, what runs goes on, and uids are those to come."""
    model = model_of("qwen3_5")
    generator = BatchGenerator(model)
    (first,) = generator.insert([[9]], max_tokens=[8])
    texts = run(generator, n_steps=2)
    numbers = ("max_tokens", "completion_batch_size", "prefill_step_size")
    cases = [
        *((use, {name: value}, message) for use in ("alone", "batch") for name, value, message in OUT_OF_RANGE),
        *(("batch", {name: n}, f"{name} {POSITIVE} {n}.") for name in numbers for n in (0, -1, 2.5, None)),
        *((use, dict(max_kv_size=64), "max_kv_size is not supported: the caches of") for use in ("alone", "batch")),
        ("batch", dict(num_draft_tokens=Depth(3)), DRAFTS),  # of one sequence
        *(("insert", {name: [2, value]}, message) for name, value, message in OUT_OF_RANGE),
        *(
            ("insert", dict(max_tokens=[2, n]), f"max_tokens of prompt 1 {POSITIVE} {n}.")
            for n in (0, -1, 2.5, None, "3")
        ),
        ("insert", dict(num_draft_tokens=[Depth(3), None]), DRAFTS),
        ("insert", dict(num_draft_tokens=0), f"num_draft_tokens {EACH} 0."),
        *(("insert", dict(copy_drafts=value), f"copy_drafts {EACH} {value}.") for value in (0, "auto")),
        ("insert", dict(max_tokens=5), f"max_tokens {EACH} 5."),
        ("insert", dict(samplers=[None]), f"samplers {EACH} 1."),
    ]
    uses = dict(
        alone=lambda **bad: mtp([1], model, **bad),
        batch=lambda **bad: BatchGenerator(model, **bad),
        insert=lambda **bad: generator.insert(PROMPTS, **bad),
    )
    for use, options, message in cases:
        with pytest.raises(ValueError, match=re.escape(message)):
            uses[use](**options)
        assert len(generator) == 1
    assert generator.insert([[8]], max_tokens=[2]) == [first + 1]
    texts = run(generator, texts)
    assert [text.tokens for text in texts.values()] == [plain([t], model, max_tokens=n) for t, n in ((9, 8), (8, 2))]


def test_batch_generate_refuses(demo):
    for change, message in [
        (dict(max_tokens=None), f"max_tokens of prompt 0 {POSITIVE} None."),
        (dict(prompts=[[1], []]), "Prompt 1 is empty."),
        (dict(max_tokens=[3]), f"max_tokens {EACH} 1."),
        (dict(num_draft_tokens=9), f"{DRAFTS} 9."),
        (dict(prompt_caches=[None, [1]]), "The prompt cache has 1 entries, and this model needs 4"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            batch_generate(model_of("qwen3_5"), demo[1], **dict(prompts=PROMPTS, max_tokens=[3, 3]) | change)


def test_a_prompt_without_processors_of_its_own_has_none():
    """As in mlx-lm, ``None`` is not the generator's."""
    model, even = model_of("qwen3_5"), lambda tokens, logits: mx.where(mx.arange(logits.shape[-1]) % 2, -mx.inf, logits)
    generator = BatchGenerator(model, logits_processors=[even])
    generator.insert(PROMPTS, max_tokens=[8, 8], logits_processors=[None, [even]])
    want = [plain(p, model, max_tokens=8, logits_processors=own) for p, own in zip(PROMPTS, (None, [even]))]
    assert [text.tokens for text in run(generator).values()] == want


GIVEN = [dict(), dict(num_draft_tokens=2), dict(num_draft_tokens=0, copy_drafts="auto")]


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_prompts_take_what_the_generator_takes(given):
    """Every pair of options in one batch."""
    model, generator = model_of("qwen3_5"), BatchGenerator(model_of("qwen3_5"), **given)
    pairs = [(n, copies) for n in (None, "auto", 0, 1, 8) for copies in (None, "auto", "off", 1, 16)]
    numbers, copies = zip(*pairs)
    generator.insert([[9, 2, 6]] * 25, max_tokens=[N] * 25, num_draft_tokens=numbers, copy_drafts=copies)
    want = plain([9, 2, 6], model, max_tokens=N)
    for (n, most), text in zip(pairs, run(generator).values()):
        assert text.tokens == want
        counts = text.last.counts
        assert counts.drafted == [] or 0 not in (n, given.get("num_draft_tokens"))
        assert counts.copied == [] or not (most == "off" or (most is None and isinstance(n, int)))


# Copies


@pytest.fixture
def copying(monkeypatch):
    """Where a text can be copied from, it is known: the copies are right."""
    model = model_of("qwen3_5")
    truths = [p + plain(p, model, max_tokens=N + 20) for p in PROMPTS]
    script_copies(monkeypatch, truths, lambda i: True)
    return model, [t[len(p) : len(p) + N] for p, t in zip(PROMPTS, truths)]


def rows_of(copying, given, **options):
    """The counts of two rows, whose texts are right."""
    model, want = copying
    generator = BatchGenerator(model, **given)
    generator.insert(PROMPTS, max_tokens=[N, N], **options)
    texts = run(generator).values()
    assert [text.tokens for text in texts] == want
    return [text.last.counts for text in texts]


@pytest.mark.parametrize(("k", "n_copies"), [(0, 16), (1, 8), (2, 16), (8, 8), ("auto", 16)])
def test_a_number_of_copies_is_not_limited_by_the_drafts(copying, k, n_copies):
    """The other row takes the head's drafts, or none, in the same windows."""
    for options in ({}, dict(num_draft_tokens=[0, 8])):
        own, other = rows_of(copying, dict(num_draft_tokens=k), copy_drafts=[n_copies, "off"], **options)
        assert len(own.copied) == n_copies
        assert own.copies_accepted == own.copied
        assert other.copied == []
        assert len(other.drafted) <= (8 if k == "auto" else k)


def test_the_generators_number_of_copies_is_for_all(copying):
    for counts in rows_of(copying, dict(num_draft_tokens=0, copy_drafts=8)):
        assert counts.drafted == []
        assert len(counts.copied) == 8
        # A window of 8 copies yields 9 tokens. The first step, which nothing was known before, may have none.
        assert counts.copied[0] <= 4


@pytest.mark.parametrize("k", [0, "auto"])
def test_auto_copies_are_as_many_as_the_depth_says(copying, monkeypatch, k):
    monkeypatch.setattr(Depth, "next", lambda self, offers, least=0: Plan(5, FREE if k == 0 else "head"))
    given, options = dict(num_draft_tokens=k, copy_drafts="auto"), dict(num_draft_tokens=[0, 0])
    own, other = rows_of(copying, given, copy_drafts=["auto", "off"], **options)
    assert len(own.copied) == 5
    assert (other.copied, other.drafted) == ([], [])


@pytest.mark.parametrize("given", [dict(num_draft_tokens=0), dict(num_draft_tokens=0, copy_drafts=4)], ids=str)
def test_no_depth_is_asked_for_where_nothing_is_drafted(monkeypatch, copying, given):
    """Plain decoding, and rows whose copies are their own number."""
    monkeypatch.setattr(Depth, "next", lambda *_: 1 / 0)
    rows_of(copying, given)
