"""The scripted model of tests, scripts and benchmarks does what its script says."""

import pytest

from mlx_mtp import BatchGenerator, DraftCounts
from tests.support.batches import run
from tests.support.decoding import mtp
from tests.support.models import tiny_model
from tests.support.scripted import Scripted

PROMPTS = [[1, 2], [3, 4, 5], [6]]
SAID = [[7 * i % 32 for i in range(n, n + 30)] for n in (1, 2, 3)]


@pytest.mark.parametrize("is_right", [True, False])
def test_one_sequence_is_said_and_drafted_by_the_script(is_right):
    model, counts = Scripted(tiny_model("qwen3_5"), PROMPTS[0] + SAID[0], lambda i: is_right, says=True), DraftCounts()
    assert mtp(PROMPTS[0], model, max_tokens=20, num_draft_tokens=3, copy_drafts="off", counts=counts) == SAID[0][:20]
    assert sum(counts.drafted) > 0
    assert sum(counts.accepted) == (sum(counts.drafted) if is_right else 0)


def test_several_sequences_are_said_and_drafted_by_the_script():
    """Each at its own pace, and one that comes later."""
    model = Scripted(tiny_model("qwen3_5"), {}, lambda uid, i: uid > 0, says=True)
    generator = BatchGenerator(model, num_draft_tokens=3, copy_drafts="off", max_tokens=20)
    model.decoder = generator.decoder
    uids = generator.insert(PROMPTS[:2])
    model.texts.update({uid: PROMPTS[uid] + SAID[uid] for uid in range(3)})
    texts = run(generator, n_steps=3)
    uids += generator.insert(PROMPTS[2:])
    texts = run(generator, texts)
    assert [texts[uid].tokens for uid in uids] == [text[:20] for text in SAID]
    assert [texts[uid].n_from_draft > 10 for uid in uids] == [False, True, True]
    assert texts[0].n_from_draft == 0
