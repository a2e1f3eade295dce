"""Send 30 streams at once to a server of little memory: each is answered as it is alone, or refused, and the limit holds.

    python -m scripts.serve_limited                   --max-memory of 64 MB above what the loaded model takes
    python -m scripts.serve_limited --spare 32        of 32 MB
    python -m scripts.serve_limited --cgroup          in a cgroup of 5 % more, as root: beyond it, the system ends the server
    python -m scripts.serve_limited --address-space   the process has no more address space either (ulimit -v)

Long prompts that begin alike, prompts with a picture, and a prompt store on disk. The texts are compared with those of a server
without a limit that has one request at a time. Exit status 1 where a text differs, a request is lost, the server ends, or its
memory goes more than 5 % beyond the limit.
"""

import base64
import json
import os
import resource
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from examples.captions import make_checkpoint
from scripts.shared import MODULES, SOURCES, script_parser
from tests.support.server_process import ROOT, Server, serve

PICTURES = ROOT / "tests" / "data" / "captions"
TOKENS = 40  # of an answer
OVER = 1.05  # of the limit
STACK = 8000  # KB of address space for the thread of a request
GROUPS = Path("/sys/fs/cgroup/memory")
TEMPLATE = """{% for part in messages[0].content if messages[0].content is not string %}\
{% if part.type == 'text' %}{{ part.text }}{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}\
{% else %}{{ messages[0].content }}{% endfor %}"""


def bodies(n: int, longest: int) -> list[dict]:
    """n requests: of four, one has a picture, and two begin alike."""
    found = []
    for i in range(n):
        text = SOURCES[MODULES[i % len(MODULES)]]
        content: str | list[dict] = text[: longest // 3 + longest * 2 * i // (3 * n)]
        if i % 4 == 3:
            picture = sorted(PICTURES.glob("*.png"))[i % 24].read_bytes()
            url = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
            parts = json.loads((PICTURES / "captions.json").read_text())["prompt"]
            content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": parts}]
        found.append({"messages": [{"role": "user", "content": content}], "max_tokens": TOKENS})
    return found


def ask(server: Server, body: dict) -> str | int:
    """The text of an answer, or 507 where it is refused for want of memory, also in its middle; other errors as they are."""
    try:
        events = list(server.stream("/v1/chat/completions", body))
    except RuntimeError as e:
        return 507 if str(e).startswith("507") else str(e)
    if (error := next((event["error"] for event in events if "error" in event), None)) is not None:
        return 507 if error["code"] == "insufficient_memory" else str(error)
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


@contextmanager
def cgroup(limit: float) -> Iterator[Path]:
    """Start processes in a memory cgroup (version 1) of this many MB."""
    folder, this = GROUPS / "mlx_mtp", str(os.getpid())
    folder.mkdir(exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit:.0f}M")
    (folder / "memory.max_usage_in_bytes").write_text("0")
    (folder / "cgroup.procs").write_text(this)
    try:
        yield folder
    finally:
        (GROUPS / "cgroup.procs").write_text(this)


def main() -> None:
    flags = dict(streams=(30, "Requests at once."), longest=(4000, "Characters of the longest prompt."))
    flags |= dict(spare=(64, "MB above the loaded model's."), cgroup=(False, "Limit the memory by a cgroup, too."))
    args = script_parser(__doc__, address_space=(False, "Limit the address space, too."), **flags).parse_args()
    folder = Path(tempfile.mkdtemp())
    model, asked = make_checkpoint(folder / "model"), bodies(args.streams, args.longest)
    flags = ["--mtp", "--temp", "0", "--model", str(model), "--chat-template", TEMPLATE]
    flags += ["--prefill-step-size", "256", "--prompt-cache-dir", str(folder / "prompts")]
    with serve(folder / "alone.log", *flags) as server:
        loaded = server.resources()
        expected = [ask(server, body) for body in asked]
        server.stop(signal.SIGTERM)
    limit = loaded["VmRSS"] / 1e3 + args.spare  # MB
    space = int(1e3 * (loaded["VmSize"] + 1e3 * OVER * args.spare + STACK * args.streams))
    flags[-1] = str(folder / "others")
    with ExitStack() as stack:
        if args.cgroup:
            group = stack.enter_context(cgroup(OVER * limit))
        server = stack.enter_context(serve(folder / "limited.log", "--max-memory", f"{limit:.0f}MB", *flags))
        if args.address_space:
            resource.prlimit(server.process.pid, resource.RLIMIT_AS, (space, space))
        with ThreadPoolExecutor(args.streams) as pool:
            texts = list(pool.map(lambda body: ask(server, body), asked))
        again = ask(server, asked[0])  # a server that has refused goes on
        server.until_idle()
        used, held = server.resources(), server.metrics()
        ended = server.stop(signal.SIGTERM)
    outcomes = Counter({507: "refused", want: "right"}.get(text, "wrong") for text, want in zip(texts, expected))
    held_mb, most = held["mlx_mtp_memory_held_bytes"] / 1e6, used["VmHWM"] / 1e3
    memory = f"loaded {loaded['VmRSS'] / 1e3:.0f} MB, limit {limit:.0f} MB, most held {most:.0f} MB"
    memory += f" ({most / limit:.1%}), at the end {held_mb:.0f} MB; address space {used['VmPeak'] / 1e3:.0f} MB"
    print(f"{args.streams} streams: {dict(outcomes)}; {memory}; exit status {ended}")
    if args.cgroup:
        in_group = int((group / "memory.max_usage_in_bytes").read_text()) / 1e6
        print(f"The cgroup had at most {in_group:.0f} MB, file cache included")
    is_bad = outcomes["wrong"] or most > OVER * limit or again != expected[0] or ended != 0
    for i, (text, want) in enumerate(zip([*texts, again], [*expected, expected[0]])):
        if text not in (want, 507):
            print(f"request {i}: {text!r}, not {want!r}; logs: {folder}")
    sys.exit(bool(is_bad))


if __name__ == "__main__":
    main()
