"""The page at /: one file that asks this server alone; and where each token of a stream came from, which it shows."""

import json
import re
from types import SimpleNamespace

import pytest
from starlette.testclient import TestClient

from mlx_mtp.server.__main__ import make_engine
from mlx_mtp.server.app import PAGE, make_app
from mlx_mtp.server.arguments import check, make_parser
from mlx_mtp.server.engine.frontend import Frontend
from mlx_mtp.server.engine.metrics import Metrics

PROMPT = "import os\nimport sys\nimport re\n\nimport os\nimport sys\n"


@pytest.fixture(scope="module")
def client():
    options = check(make_parser().parse_args(["--mtp"]))
    engine = make_engine(options, None)
    yield TestClient(make_app(Frontend(options, engine), None, ["*"]))
    engine.stop_and_join()


def test_page_asks_nobody_else(client):
    answer = client.get("/")
    assert (answer.status_code, answer.text) == (200, PAGE)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "connect-src 'self'" in answer.headers["content-security-policy"]
    assert not re.search(r"https?://|\bsrc=|@import|innerHTML|eval\(", PAGE)
    assert (client.head("/").status_code, client.head("/").content) == (200, b"")


def test_no_page_with_no_ui():
    options = check(make_parser().parse_args(["--no-ui"]))
    generator = SimpleNamespace(options=options, metrics=Metrics())
    assert TestClient(make_app(generator, None, ["*"])).get("/").json()["name"] == "mlx_mtp"


def stream(client, **body) -> list[dict]:
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 60, "stream": True, **body}
    lines = client.post("/v1/chat/completions", json=body).text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


@pytest.mark.parametrize(("copies", "sources"), [("off", {"model", "head"}), (4, {"model", "head", "copies"})])
def test_each_token_has_a_source(client, copies, sources):
    options = {"include_usage": True, "include_sources": True}
    *chunks, last = stream(client, stream_options=options, copy_drafts=copies, num_draft_tokens=1)
    told = [source for chunk in chunks for source in chunk["choices"][0]["sources"]]
    usage = last["usage"]
    assert len(told) == usage["completion_tokens"]
    assert set(told) == sources
    details = usage["completion_tokens_details"]
    assert len(told) - told.count("model") == details["accepted_prediction_tokens"]
    # A step may go on behind the last token.
    assert 0 <= details["accepted_copied_tokens"] - told.count("copies") <= 16


def test_no_source_where_nobody_asks(client):
    assert not any("sources" in choice for chunk in stream(client, max_tokens=2) for choice in chunk["choices"])
