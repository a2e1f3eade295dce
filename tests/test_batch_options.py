"""What a batch and each of its prompts may ask for."""

import re

import mlx.core as mx
import pytest

from mlx_mtp import Depth, batch_generate
from mlx_mtp.batch.generator import BatchGenerator
from mlx_mtp.pacing.batch_depth import BatchDepth
from tests.support.batches import run
from tests.support.decoding import mtp, plain
from tests.support.models import model_of
from tests.support.scripted import script_copies

PROMPTS = [[3, 1, 4], [1, 5]]
N = 24

DRAFTS = "num_draft_tokens must be auto or from 0 to 8, not"
COPIES = "copy_drafts must be auto, off or from 1 to 16, not"
POSITIVE = "must be an integer of 1 or more, not"


OUT_OF_RANGE = [
    *(("num_draft_tokens", n, f"{DRAFTS} {n}.") for n in (-1, 9, 99, 2.0, 2.5, "3", "off")),
    *(("copy_drafts", n, f"{COPIES} {n}.") for n in (-1, 0, 17, 4.0, "4", "on")),
]


@pytest.mark.parametrize(("name", "value", "message"), OUT_OF_RANGE)
@pytest.mark.parametrize("use", [lambda model, **bad: mtp([1], model, **bad), BatchGenerator], ids=["alone", "batch"])
def test_refuses_drafts_out_of_range(use, name, value, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        use(model_of("qwen3_5"), **{name: value})


@pytest.mark.parametrize("name", ["max_tokens", "completion_batch_size", "prefill_step_size"])
@pytest.mark.parametrize("value", [0, -1, 2.5, None])
def test_generator_refuses_numbers_below_1(name, value):
    with pytest.raises(ValueError, match=f"{name} {POSITIVE} {value}."):
        BatchGenerator(model_of("qwen3_5"), **{name: value})


def test_insert_refuses_all_of_a_call():
    """What runs goes on, and the next uids are those that would have been."""
    model = model_of("qwen3_5")
    generator = BatchGenerator(model)
    (first,) = generator.insert([[9]], max_tokens=[8])
    texts = run(generator, n_steps=2)
    for name, value, message in [
        *((name, [2, value], message) for name, value, message in OUT_OF_RANGE),
        *(("max_tokens", [2, n], f"max_tokens of prompt 1 {POSITIVE} {n}.") for n in (0, -1, 2.5, None, "3")),
        ("num_draft_tokens", [Depth(3), None], DRAFTS),  # of one sequence
        ("num_draft_tokens", 0, "num_draft_tokens must have an entry for each prompt: 2, not 0."),
        ("copy_drafts", 0, "copy_drafts must have an entry for each prompt: 2, not 0."),
        ("copy_drafts", "auto", "copy_drafts must have an entry for each prompt: 2, not auto."),
        ("max_tokens", 5, "max_tokens must have an entry for each prompt: 2, not 5."),
        ("samplers", [None], "samplers must have an entry for each prompt: 2, not 1."),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            generator.insert(PROMPTS, **{name: value})
        assert len(generator) == 1
    assert generator.insert([[8]], max_tokens=[2]) == [first + 1]
    texts = run(generator, texts)
    assert [text.tokens for text in texts.values()] == [plain([t], model, max_tokens=n) for t, n in ((9, 8), (8, 2))]


def test_a_prompt_without_processors_of_its_own_has_none():
    """As in mlx-lm, ``None`` is not the generator's."""
    model, even = model_of("qwen3_5"), lambda tokens, logits: mx.where(mx.arange(logits.shape[-1]) % 2, -mx.inf, logits)
    generator = BatchGenerator(model, logits_processors=[even])
    generator.insert(PROMPTS, max_tokens=[8, 8], logits_processors=[None, [even]])
    want = [
        plain(p, model, max_tokens=8, logits_processors=processors) for p, processors in zip(PROMPTS, (None, [even]))
    ]
    assert [text.tokens for text in run(generator).values()] == want


def test_a_depth_of_one_sequence_is_refused():
    with pytest.raises(ValueError, match=DRAFTS):
        BatchGenerator(model_of("qwen3_5"), num_draft_tokens=Depth(3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(({"max_tokens": n}, f"max_tokens of prompt 0 {POSITIVE} {n}.") for n in (0, -1, 2.5, None)),
        ({"prompts": [[1], []]}, "Prompt 1 is empty."),
        ({"max_tokens": [3, 0]}, f"max_tokens of prompt 1 {POSITIVE} 0."),
        ({"max_tokens": [3]}, "max_tokens must have an entry for each prompt: 2, not 1."),
        ({"num_draft_tokens": 9}, f"{DRAFTS} 9."),
        ({"prefill_step_size": 0}, f"prefill_step_size {POSITIVE} 0."),
        ({"copy_drafts": 17}, f"{COPIES} 17."),
        ({"prompt_caches": [None, [1]]}, "The prompt cache has 1 entries, and this model needs 4"),
    ],
    ids=str,
)
def test_batch_generate_refuses(demo, change, message):
    arguments = dict(prompts=PROMPTS, max_tokens=[3, 3]) | change
    with pytest.raises(ValueError, match=re.escape(message)):
        batch_generate(model_of("qwen3_5"), demo[1], **arguments)


@pytest.mark.parametrize(
    "given", [{}, {"num_draft_tokens": 2}, {"num_draft_tokens": 0, "copy_drafts": "auto"}], ids=str
)
def test_prompts_take_what_the_generator_takes(given):
    """Every pair of options in one batch."""
    model = model_of("qwen3_5")
    pairs = [(n, copies) for n in (None, "auto", 0, 1, 8) for copies in (None, "auto", "off", 1, 16)]
    generator = BatchGenerator(model, **given)
    numbers, copies = zip(*pairs)
    generator.insert(
        [[9, 2, 6]] * len(pairs), max_tokens=[N] * len(pairs), num_draft_tokens=numbers, copy_drafts=copies
    )
    want = plain([9, 2, 6], model, max_tokens=N)
    for (n, most), text in zip(pairs, run(generator).values()):
        assert text.tokens == want
        counts = text.last.counts
        if 0 in (n, given.get("num_draft_tokens")):
            assert counts.drafted == []
        if most == "off" or (most is None and isinstance(n, int)):
            assert counts.copied == []


# Copies


@pytest.fixture
def copying(monkeypatch):
    """Where a text can be copied from, it is known: the copies are right."""
    model = model_of("qwen3_5")
    truths = [p + plain(p, model, max_tokens=N + 20) for p in PROMPTS]
    script_copies(monkeypatch, truths, lambda i: True)
    return model, [t[len(p) : len(p) + N] for p, t in zip(PROMPTS, truths)]


@pytest.mark.parametrize(("k", "n_copies"), [(0, 16), (1, 8), (2, 16), (8, 8), ("auto", 16)])
def test_a_number_of_copies_is_not_limited_by_the_drafts(copying, k, n_copies):
    """The other row takes the head's drafts, or none, in the same windows."""
    model, want = copying
    for options in ({"copy_drafts": [n_copies, "off"]}, {"copy_drafts": [n_copies, "off"], "num_draft_tokens": [0, 8]}):
        generator = BatchGenerator(model, num_draft_tokens=k)
        generator.insert(PROMPTS, max_tokens=[N, N], **options)
        copying_row, other = run(generator).values()
        assert [copying_row.tokens, other.tokens] == want
        assert len(copying_row.last.counts.copied) == n_copies
        assert copying_row.last.counts.copies_accepted == copying_row.last.counts.copied
        assert other.last.counts.copied == []
        assert len(other.last.counts.drafted) <= (8 if k == "auto" else k)


def test_the_generators_number_of_copies_is_for_all(copying):
    model, want = copying
    generator = BatchGenerator(model, num_draft_tokens=0, copy_drafts=8)
    generator.insert(PROMPTS, max_tokens=[N, N])
    texts = run(generator)
    assert [text.tokens for text in texts.values()] == want
    for text in texts.values():
        assert text.last.counts.drafted == []
        assert len(text.last.counts.copied) == 8
        # A window of 8 copies yields 9 tokens. The first step, which nothing was known before, may have none.
        assert text.last.counts.copied[0] <= 4


@pytest.mark.parametrize("k", [0, "auto"])
def test_auto_copies_are_as_many_as_the_depth_says(copying, monkeypatch, k):
    choose = BatchDepth.next
    monkeypatch.setattr(BatchDepth, "next", lambda self, n_rows, rates: (choose(self, n_rows, rates), 5)[1])
    model, want = copying
    generator = BatchGenerator(model, num_draft_tokens=k, copy_drafts="auto")
    generator.insert(PROMPTS, max_tokens=[N, N], num_draft_tokens=[0, 0], copy_drafts=["auto", "off"])
    copying_row, other = run(generator).values()
    assert [copying_row.tokens, other.tokens] == want
    assert len(copying_row.last.counts.copied) == 5
    assert (other.last.counts.copied, other.last.counts.drafted) == ([], [])


def test_no_depth_is_asked_for_where_nothing_is_drafted(monkeypatch):
    """Plain decoding, and rows whose copies are their own number."""
    monkeypatch.setattr(BatchDepth, "next", lambda self, n_rows, rates: 1 / 0)
    model = model_of("qwen3_5")
    for given in ({"num_draft_tokens": 0}, {"num_draft_tokens": 0, "copy_drafts": 4}):
        generator = BatchGenerator(model, **given)
        generator.insert(PROMPTS, max_tokens=[N, N])
        assert [text.tokens for text in run(generator).values()] == [plain(p, model, max_tokens=N) for p in PROMPTS]
