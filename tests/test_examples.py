"""The notebook and the chat do what they show."""

import ast
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from mlx_lm.models.cache import make_prompt_cache
from nbclient import NotebookClient

import mlx_mtp
from mlx_mtp import stream_generate

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOK, CHAT = EXAMPLES / "quickstart.ipynb", [sys.executable, str(EXAMPLES / "chat.py")]


def shown(notebook) -> str:
    """All that a notebook prints."""
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", [])]
    return "".join(o.text for o in outputs if o.output_type == "stream" and o.name == "stdout")


def pictures(notebook) -> list[str]:
    return [
        o.data["image/png"] for c in notebook.cells for o in c.get("outputs", []) if "image/png" in o.get("data", {})
    ]


@pytest.mark.slow
def test_notebook_runs_and_shows_what_is_committed():
    committed = nbformat.read(NOTEBOOK, as_version=4)
    fresh = nbformat.read(NOTEBOOK, as_version=4)
    briefly = {"max_tokens=32": "max_tokens=6", "repeat=2": "repeat=1", "run(mtp=False), run()": ""}
    for cell in fresh.cells:  # its figures are not looked at
        for text, short in briefly.items():
            cell.source = cell.source.replace(text, short)
    fresh.cells.insert(
        0, nbformat.v4.new_code_cell("import mlx_mtp.benchmark.parts\nmlx_mtp.benchmark.parts.N_CALLS = 1")
    )
    NotebookClient(fresh, timeout=300, kernel_name="python3").execute()  # raises where a cell does
    assert "the same tokens: True" in shown(fresh)
    # All but the measured figures is the same.
    figures = re.compile(r" *[\d.]+")
    assert figures.sub("#", shown(fresh)) == figures.sub("#", shown(committed))
    assert len(pictures(fresh)) == len(pictures(committed)) == 1


def test_chat_imports_only_what_is_public():
    names = set()
    for node in ast.walk(ast.parse(Path(CHAT[1]).read_text())):
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("mlx_mtp") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mlx_mtp"):
            assert node.module == "mlx_mtp"
            names |= {alias.name for alias in node.names}
    assert names
    assert names <= set(mlx_mtp.__all__)


def test_notebook_was_run_in_order_and_shows_no_paths():
    committed = nbformat.read(NOTEBOOK, as_version=4)
    code = [cell for cell in committed.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not re.search(r"/(root|home|Users|tmp|usr)/", NOTEBOOK.read_text())
    assert not any(o.output_type == "stream" and o.name == "stderr" for cell in code for o in cell.outputs)


def test_chat_continues_over_turns(demo):
    model, tokenizer = demo
    turns = ["def read(path):", "class Reader:"]
    cache, want = make_prompt_cache(model), []
    for turn in turns:
        prompt = tokenizer.encode(turn + "\n")
        answer = stream_generate(model, tokenizer, prompt, max_tokens=20, mtp=False, prompt_cache=cache)
        want.append("".join(r.text for r in answer))
    again = "\n".join([*turns, "r", turns[1], "h", "q", "not reached"])
    done = subprocess.run([*CHAT, "-m", "20"], input=again, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    answers = re.findall(
        r">> (?:>> )?(.*?)\n\[20 tokens, [\d.]+ tokens-per-sec, ([\d.]+) tokens-per-step", done.stdout, re.S
    )
    texts = [text for text, _ in answers]
    assert texts[:2] == want
    assert len(texts) == 3
    assert texts[2] != texts[1]  # after r the first turn is forgotten
    assert all(float(rate) >= 1 for _, rate in answers)
    assert "not reached" not in done.stdout


def test_chat_shows_its_figures_and_restores_the_terminal():
    master, slave = pty.openpty()
    chat = subprocess.Popen([*CHAT, "-m", "6"], stdin=subprocess.PIPE, stdout=slave)
    os.close(slave)
    assert chat.stdin is not None
    chat.stdin.write(b"import os\n")
    chat.stdin.close()
    out = b""
    while True:
        try:
            chunk = os.read(master, 4096)
        except OSError:  # closed at the other end
            break
        if not chunk:
            break
        out += chunk
    os.close(master)
    assert chat.wait(timeout=60) == 0
    live = re.findall(rb"\x1b\[2K\x1b\[2m(\d+) tokens, [\d.]+ tokens-per-sec, [\d.]+ tokens-per-step", out)
    assert [int(n) for n in live] == [1, 2, 3, 4, 5, 6]
    assert out.rindex(b"\x1b[r") > out.rindex(b"\x1b[2m")  # all lines scroll again


def test_chat_without_a_model_is_one_line():
    done = subprocess.run([*CHAT, "--model", "/no/such/model"], capture_output=True, text=True, input="")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
