"""The page at /: it loads its own files alone, and each token of a stream has a source, which it shows."""

import json
import re
from hashlib import sha256

import pytest

from mlx_mtp.cli.display import COLORS
from mlx_mtp.core.drafts.sources import SOURCES, PromptLookup, source_of
from mlx_mtp.generate.demo import CODE
from mlx_mtp.server.app import FOLDER
from tests.support.engine import Engine
from tests.support.requests import CHAT, client_of

OWN = sorted(path for path in FOLDER.iterdir() if path.is_file())
VENDORED = sorted(FOLDER.glob("vendor/*.js"))
# Each turns a text into HTML or code.
SINKS = r"innerHTML|outerHTML|insertAdjacentHTML|setHTML|document\.write|srcdoc|createContextualFragment|\beval\(|Function\("


@pytest.fixture(scope="module")
def client():
    with Engine("--mtp") as engine:
        yield engine.client


def test_page_loads_every_file_that_it_names(client):
    answer = client.get("/")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    named = re.findall(r'<(?:script|link)[^>]* (?:src|href)="((?!data:,)[^"]*)"', answer.text)  # but the empty icon
    named += [f"page/{name}" for path in OWN for name in re.findall(r'from "\./(.*)"', path.read_text())]
    assert {f"page/{path.relative_to(FOLDER)}" for path in [*OWN, *VENDORED]} - set(named) == {"page/page.html"}
    for name in set(named):
        file = client.get(f"/{name}")
        kind = "text/css" if name.endswith(".css") else "text/javascript"
        assert (file.status_code, file.headers["content-type"].partition(";")[0]) == (200, kind), name
    assert (client.head("/").status_code, client.head("/").content) == (200, b"")
    assert client.get("/page/%2e%2e/app.py").status_code == 404
    without = client_of(None, "--no-ui")
    assert (without.get("/").json()["name"], without.get("/page/main.js").status_code) == ("mlx_mtp", 404)


def test_page_runs_its_own_scripts_alone_and_asks_nobody_else(client):
    for path in ("/", "/page/page.html", "/page/main.js"):
        headers = client.get(path).headers
        policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
        assert {policy[name] for name in ("connect-src", "script-src", "style-src")} == {"'self'"}
        assert policy["default-src"] == policy["frame-ancestors"] == policy["form-action"] == "'none'"
        assert (policy["img-src"], policy["require-trusted-types-for"]) == ("'self' data:", "'script'")
        assert headers["x-content-type-options"] == "nosniff"
    assert not re.search(r"<(script|style)[^>]*>\s*[^<\s]|<[^>]* (on\w+|style)=", (FOLDER / "page.html").read_text())
    for path in OWN:
        assert not re.search(rf"https?://|@import|url\(|{SINKS}", path.read_text()), path.name


def test_text_of_the_model_becomes_html_in_one_place():
    users = [path.name for path in OWN if re.search(r"markdownit\(|DOMPurify\.", path.read_text())]
    assert users == ["markdown.js"]
    text = (FOLDER / "markdown.js").read_text()
    assert "markdownit({ html: false," in text
    assert re.findall(r"markdown\.render\(.*", text) == ["markdown.render(text), ALLOWED);"]
    allowed = set(re.findall(r'"(\w+)"', text.partition("ALLOWED_TAGS")[2].partition("ALLOWED_ATTR")[0]))
    assert {"pre", "code", "table"} <= allowed
    dangerous = "script style img svg math iframe object form input base template"
    assert not allowed & {*dangerous.split()}


def test_vendored_libraries_are_those_of_the_list_and_have_licences():
    rows = re.findall(r"^\| (\S+\.js) .*`([0-9a-f]{64})` \|$", (FOLDER / "vendor" / "README.md").read_text(), re.M)
    assert dict(rows) == {path.name: sha256(path.read_bytes()).hexdigest() for path in VENDORED}
    for path in VENDORED:
        assert "opyright" in path.with_name(path.name.replace(".min.js", ".LICENSE.txt")).read_text()
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 400_000


def test_what_the_api_says_of_itself_and_of_the_demo(client):
    assert "/v1/chat/completions" in client.get("/openapi.json").json()["paths"]
    assert [client.get(path).status_code for path in ("/docs", "/redoc")] == [404, 404]  # pages of a CDN
    model = client.get("/v1/models").json()["data"][0]
    assert (model["description"], model["has_chat_template"]) == ("Demo model: completes Python only", True)
    assert model["takes_images"] is False


def test_each_token_has_a_source_where_it_is_asked_for(client):
    ask = {"messages": [{"role": "user", "content": CODE}], "stream": True, "num_draft_tokens": 1, "max_tokens": 24}
    sources = {"stream_options": {"include_usage": True, "include_sources": True}}
    for copies, options in (("off", sources), (4, sources), ("off", {})):
        lines = client.post(CHAT, json={**ask, "copy_drafts": copies, **options}).text.splitlines()
        *chunks, last = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        if not options:
            assert not any("sources" in choice for chunk in chunks for choice in chunk["choices"])
            continue
        told = [source for chunk in chunks for source in chunk["choices"][0]["sources"]]
        assert len(told) == last["usage"]["completion_tokens"]
        assert set(told) == {"model", "head"} | ({"copies"} if copies == 4 else set())
        details = last["usage"]["completion_tokens_details"]
        assert len(told) - told.count("model") == details["accepted_prediction_tokens"]
        if copies == "off":  # a step with a draft has a token of the model
            assert details["rejected_prediction_tokens"] <= told.count("model") - told.count("head")
        assert details["accepted_copied_tokens"] == told.count("copies")


def test_ids_of_the_page_are_unique_and_scripts_name_no_others():
    ids = re.findall(r' id="([^"]+)"', (FOLDER / "page.html").read_text())
    named = {name for path in OWN if path.suffix == ".js" for name in re.findall(r'\$\("([^"]+)"\)', path.read_text())}
    assert len({*ids}) == len(ids)
    assert named <= {*ids}


def test_the_page_is_told_the_sources_and_others_are_counted_by_name(client, monkeypatch):
    assert client_of(None, "--api-key", "k").get("/page/sources.json").json() == {k: [*v] for k, v in SOURCES.items()}
    for _, color in (*SOURCES.values(), source_of("echo")):
        assert f".{color} {{" in (FOLDER / "style.css").read_text()
        assert color in COLORS
    monkeypatch.setattr(PromptLookup, "name", "echo")
    body = {"prompt": "import os\nimport sys\n" * 3, "max_tokens": 16, "copy_drafts": 4}
    details = client.post("/v1/completions", json=body).json()["usage"]["completion_tokens_details"]
    assert 0 < details["accepted_echo_tokens"] <= details["echo_tokens"]
    assert details["copied_tokens"] == 0
