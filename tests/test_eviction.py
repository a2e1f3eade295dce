"""Where snapshots are made, and which are kept."""

from hypothesis import given
from hypothesis import strategies as st

from mlx_mtp.prompt_store.store import EVERY, LAST, LINE, choose_cuts, message_ends
from mlx_mtp.prompt_store.tree import score


@given(st.lists(st.integers(1, 30_000)), st.integers(1, 30_000), st.integers(0, 30_000), st.integers(1, 5000))
def test_cuts(ends, n_tokens, n_common, every):
    cuts = choose_cuts(ends, n_tokens, n_common, every)
    known = sorted({end for end in ends if end < n_tokens})
    assert cuts == sorted({*cuts})
    assert all(0 < cut < n_tokens for cut in cuts)
    assert {*known[1:][-LAST:]} <= {*cuts}
    assert all(b - a <= every for a, b in zip([0, *cuts], cuts))
    assert n_tokens == 1 or cuts[-1] >= (known[-1] if known else n_tokens - 1)


def test_cuts_of_a_prompt():
    ends = [6000, 6200, 9000, 9100, 9200, 9300, 9400, 9500]
    assert choose_cuts(ends, 9504) == [EVERY, 6000 - LINE, 9200, 9300, 9400, 9500]
    assert choose_cuts([*ends, 30_000], 30_004)[-4:] == [9500 + EVERY * i for i in (3, 4, 5)] + [30_000]
    assert choose_cuts([], 100) == [99]
    # Where it parts from the texts before
    assert choose_cuts([3000, 3200], 3204, 2800) == [2800 - LINE, 3000 - LINE, 3200]
    for n_common in (5, 2990, 3001, 3203):
        assert choose_cuts([3000, 3200], 3204, n_common) == [3000 - LINE, 3200]
    assert choose_cuts([100, 3200], 3204) == [3200]  # a short one saves little
    assert choose_cuts([], 1) == []
    # The ends of messages, by the tokens that begin one; the text begins with one, too
    tokens = [1, 5, 6, 1, 7, 1, 1, 8]
    for opening, message_starts in (([1], [3, 5, 6]), ([1, 7], [3]), ([1, 5], []), ([], [])):
        assert message_ends(tokens, opening) == message_starts
    # They stay where they are as a text grows, or one that is resumed in the middle would not be read as before
    ends = [6000, *(6000 + 900 * i for i in range(1, 40))]
    long = choose_cuts(ends, ends[-1] + 4)
    for i in range(2, len(ends)):
        cuts = choose_cuts(ends[:i], ends[i - 1] + 4)
        assert [c for c in long if c < cuts[0]] == []
        assert {c for c in cuts if c not in long} <= {*ends[max(i - LAST, 0) : i]}


def test_the_snapshot_that_saves_least_goes_first():
    for snapshots, order in [
        ([(300, 1000, 0), (200, 1000, 0), (400, 1000, 0)], [1, 0, 2]),
        ([(300, 1000, 0), (300, 1000, 5), (300, 1000, 2)], [1, 2, 0]),  # what is older
        ([(300, 1000, 5, 9), (300, 1000, 5)], [1, 0]),  # what was not used
        ([(300, 9000, 0), (300, 1000, 0)], [0, 1]),  # what is larger
        ([(300, 1000, 0, 0, True), (300, 1000, 0)], [0, 1]),  # what is on disk
    ]:
        assert sorted(range(len(snapshots)), key=lambda i: score(*snapshots[i])) == order
