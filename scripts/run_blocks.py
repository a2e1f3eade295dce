"""Run the code blocks of the pages, with small models in place of the published ones.

    python -m scripts.run_blocks                                     all pages
    python -m scripts.run_blocks docs/images.md docs/server.md       these pages
    unshare -n sh -c 'ip link set lo up; python -m scripts.run_blocks docs/*.md'   without a network

Each page runs in a copy of the repository, from its first block to its last, with a HOME of its own and a stand-in for
the Hugging Face hub. The published models, `MODEL` and other names are the demo with a small vision encoder and a chat
template. A server keeps running until the page starts the next one. Requires port 8080, and for README's installation the
network. A block below `<!-- not run: REASON -->` does not run.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import mlx.core as mx

from examples.captions import make_checkpoint
from mlx_mtp.checkpoint.catalog import published
from scripts.shared import script_parser
from tests.support.checkpoints import configure, drop, edit, make_adapter, no_head
from tests.support.hub_stand_in import Hub
from tests.support.pages import PAGES, ROOT, Block, blocks

SERVER = re.compile(r"^(mlx\.launch .*)?mlx_mtp[. ]server (?!.*--print-config)", re.MULTILINE)
# Measuring, fitting and long answers take minutes: the same commands for a short time.
SHORT = """
mlx_mtp() {
  local name=$1
  shift
  case $name in
    benchmark)
      set -- "${@/#copying/MY_PROMPTS}"
      [[ "$*" == *--prompts* ]] || set -- "$@" --prompts MY_PROMPTS
      [[ "$*" == *--tune* ]] && set -- "$@" --repeat 2 || set -- "$@" --repeat 1
      set -- "$@" --max-tokens 8 ;;
    fit)
      set -- "$@" --iters 40 --learning-rate 1e-3 --max-seq-length 64 --max-tokens 20 --drafts 1 --steps-per-eval 20 ;;
    generate | chat) set -- "$@" --max-tokens 20 ;;
    server) set -- "$@" --max-tokens 40 ;;
  esac
  command mlx_mtp $name "$@"
}
pip() {  # into the environment of the page, or none
  if [ -d .venv ]; then command pip "$@"; else command pip "$@" --dry-run; fi
}
"""
TEMPLATE = "{% for m in messages %}{{ m.content if m.content is string else m.content[-1].text }}\n{% endfor %}"
FOLDERS = ("PATH_OR_REPO", "PATH", "MODEL", "CONVERSION", "BASE_MODEL", "REPO_WITHOUT_HEAD")
TEXTS = ("LONG_TEXT", "FILES", "edit_this_file.txt", "src/main.py")


def make_models(folder: Path) -> dict[str, Path]:
    """A checkpoint with everything, one without head and vision encoder, one with a worse head, and a head alone."""
    full = make_checkpoint(folder / "full")
    (full / "chat_template.jinja").write_text(TEMPLATE)
    # Texts end at a token that no text has: the demo would stop at once on prompts that it has not learned.
    (full / "generation_config.json").write_text(json.dumps({"eos_token_id": 185}))
    settings = json.loads((full / "tokenizer_config.json").read_text())
    (full / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "<|video_pad|>"}))
    bare = shutil.copytree(full, folder / "bare")
    no_head(bare)
    drop(bare, lambda name: name.startswith("model.visual."))
    changed = shutil.copytree(full, folder / "changed")
    edit(changed, add_noise)
    drafter = shutil.copytree(full, folder / "drafter")
    drop(drafter, lambda name: not name.startswith("mtp."))
    configure(drafter, model_type="qwen3_5_mtp")
    return {"full": full, "bare": bare, "changed": changed, "drafter": drafter}


def add_noise(weights: dict[str, mx.array]) -> None:
    """Make a head worse, so that fitting improves it."""
    w = weights["mtp.fc.weight"]
    weights["mtp.fc.weight"] = w + (0.05 * mx.random.normal(w.shape)).astype(w.dtype)


def publish(hub: Hub, models: dict[str, Path], folder: Path) -> None:
    """The published models: originals with everything, and conversions whose cards name them."""
    hub.publish("mlx-community/Qwen3.6-27B-MTP-bf16", models["drafter"])
    for model in published().values():
        conversion = shutil.copytree(models["bare"], folder / model.name, symlinks=True)
        (conversion / "README.md").write_text(f"---\nbase_model: {model.original}\n---\n")
        hub.publish(model.original, models["full"])
        hub.publish(model.conversion, conversion)


def make_project(folder: Path, models: dict[str, Path]) -> Path:
    """A copy of the repository with the files that pages name."""
    ignored = shutil.ignore_patterns(".venv", ".git", "build", "*_cache", "__pycache__", "*.egg-info")
    project = shutil.copytree(ROOT, folder / "project", ignore=ignored)
    for name in FOLDERS:
        kind = {"MODEL": "changed", "CONVERSION": "bare", "REPO_WITHOUT_HEAD": "bare"}.get(name, "full")
        shutil.copytree(models[kind], project / name)
    make_adapter(models["full"], project / "ADAPTER")
    text = "\n---\n".join(page.read_text(encoding="utf-8")[:300] for page in PAGES[:6])
    for name in TEXTS:
        (project / name).write_text(text)
    (project / "MY_PROMPTS").write_text("def read_lines(path):\n---\nclass Stack:\n")
    (project / "key.txt").write_text("secret\n")
    (project / "hosts.json").write_text(json.dumps([{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}] * 2))
    shutil.copy(ROOT / "tests/data/captions/16-shape.png", project / "screenshot.png")
    return project


class Runner:
    """Runs the blocks of one page, in order."""

    def __init__(self, project: Path, hub: Hub):
        self.project, self.server = project, None
        path = os.pathsep.join([f"{project}/.venv/bin", f"{Path(sys.executable).parent}", os.environ["PATH"]])
        keep = {name: os.environ[name] for name in ("LANG", "OMP_NUM_THREADS") if name in os.environ}
        home = {"HOME": str(project.parent), "PATH": path, "HF_ENDPOINT": hub.url, "PYTHONUNBUFFERED": "1"}
        self.env = {**keep, **home, "PYTHONPATH": str(project / "src")}

    def run(self, block: Block) -> str | None:
        """-> what went wrong"""
        if block.language == "sh" and SERVER.search(block.code):
            return self.start(block.code)
        command = [sys.executable, "-c"] if block.language == "python" else ["bash", "-euo", "pipefail", "-c"]
        code = (
            SHORT + block.code if block.language == "sh" else re.sub(r"max_tokens=\d{3,}", "max_tokens=40", block.code)
        )
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with subprocess.Popen([*command, code], text=True, **pipes, **self.options()) as process:
            try:
                output, _ = process.communicate("y\n", timeout=600)  # the answer where a command asks
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return "not done after 600 s"
        return None if process.returncode == 0 else f"exit status {process.returncode}\n{output[-3000:]}"

    def options(self) -> dict:
        return {"cwd": self.project, "env": self.env, "start_new_session": True}

    def start(self, code: str) -> str | None:
        self.stop()
        log = self.project / "server.log"
        with log.open("wb") as file:
            streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
            code = "trap : TERM\n" + SHORT + code  # bash waits for the server, which frees its port
            self.server = subprocess.Popen(["bash", "-c", code], **streams, **self.options())
        for _ in range(1200):
            if self.server.poll() is not None:
                return f"the server ended\n{log.read_text()[-3000:]}"
            with suppress(OSError), socket.create_connection(("127.0.0.1", 8080), timeout=1):
                return None
            time.sleep(0.1)
        return f"no server after two minutes\n{log.read_text()[-3000:]}"

    def stop(self) -> None:
        if self.server is not None and self.server.poll() is None:
            os.killpg(self.server.pid, signal.SIGTERM)
            self.server.wait(60)


def run_page(page: Path, models: dict[str, Path], hub: Hub) -> Iterator[tuple[Block, float, str | None]]:
    with tempfile.TemporaryDirectory(prefix="page-") as folder:
        runner = Runner(make_project(Path(folder), models), hub)
        try:
            for block in filter(lambda b: b.is_run, blocks(page)):
                start = time.monotonic()
                error = runner.run(block)
                yield block, time.monotonic() - start, error
        finally:
            runner.stop()


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("pages", nargs="*", type=Path, metavar="PAGE", help="Pages (default: all).")
    pages = [page.resolve() for page in parser.parse_args().pages] or PAGES
    n_failed = 0
    with tempfile.TemporaryDirectory(prefix="models-") as folder:
        models, hub = make_models(Path(folder)), Hub()
        publish(hub, models, Path(folder))
        for page in pages:
            for block, seconds, error in run_page(page, models, hub):
                n_failed += error is not None
                print(f"{block}: {error or 'ok'} ({seconds:.0f} s)", flush=True)
    print(f"{n_failed} failed")
    sys.exit(bool(n_failed))


if __name__ == "__main__":
    main()
