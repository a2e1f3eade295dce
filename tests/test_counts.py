"""Drafts behind the end of a text are made, but not accepted: in an answer's usage, its line of the log and the metrics."""

import re

import pytest

from mlx_mtp import DraftCounts
from tests.support.engine import Engine

BODY = {"prompt": "import os\nimport sys\nimport re\n\nimport os\nimport sys\n", "max_tokens": 24}


@pytest.fixture(scope="module")
def engine():
    with Engine() as engine:
        yield engine


def ask(engine, caplog, **body) -> tuple[dict, str, int, int]:
    """The answer to a request, its line of the log, and the drafts and accepted ones that it adds to /metrics."""

    def counted(kind: str) -> int:
        numbers = re.findall(
            rf"^mlx_mtp_{kind}_tokens_total{{.*}} (.*)$", engine.client.get("/metrics").text, re.MULTILINE
        )
        return round(sum(map(float, numbers)))

    caplog.set_level("INFO")
    before = [counted(kind) for kind in ("drafted", "accepted")]
    answer = engine.client.post("/v1/completions", json=BODY | body).json()
    (line,) = [r.message for r in caplog.records if r.message.startswith('testclient - "POST')]
    return answer, line, *(counted(kind) - n for kind, n in zip(("drafted", "accepted"), before))


def test_counts_are_read_while_a_source_drafts_for_the_first_time():
    """In another thread, such as for the log of a request whose client has left."""
    counts = DraftCounts()
    counts.add(2, 1)
    read = iter(counts.by_source.items())
    counts.add(1, 1, "copies")
    assert [*read] == [("head", ([1, 1], [1, 0]))]
    assert (counts.n_drafted, counts.of("grammar"), [*counts.by_source]) == (3, ([], []), ["head", "copies"])


@pytest.mark.parametrize("options", [{"copy_drafts": 8}, {"num_draft_tokens": 3}])
@pytest.mark.parametrize("end", [{}, {"stop": ["\n"]}, {"stop_token_ids": [199]}])
def test_accepted_drafts_are_tokens_of_the_answer(engine, caplog, end, options):
    answer, line, drafted, accepted = ask(engine, caplog, **options, **end)
    usage = answer["usage"]["completion_tokens_details"]
    assert usage["accepted_prediction_tokens"] == accepted < answer["usage"]["completion_tokens"]
    assert usage["accepted_copied_tokens"] <= accepted
    assert usage["rejected_prediction_tokens"] == drafted - accepted
    assert line.endswith(f"{accepted} of {drafted} drafts accepted")


@pytest.mark.parametrize("how", ["fails", "is cancelled"])
def test_drafts_of_a_request_that_fails_or_is_cancelled_count(engine, caplog, monkeypatch, how):
    batch, steps = engine.engine.admission.batch, []

    def step():
        steps.append(1)
        if len(steps) == 5 and how == "fails":
            raise ValueError("of a step")
        for request in engine.engine.running.values():
            request.is_gone = len(steps) == 5
        return type(batch).next(batch)

    monkeypatch.setattr(batch, "next", step)
    _, line, drafted, accepted = ask(engine, caplog, num_draft_tokens=3)
    assert drafted > accepted > 0
    assert f"{accepted} of {drafted} drafts accepted" in line
