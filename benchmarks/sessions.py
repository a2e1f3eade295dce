"""What the server reads of the prompts of whole sessions, beyond the least possible, with the prompt store and with mlx-lm's
prompt caches in its place.

    python -m benchmarks.sessions            all sessions, each with both
    python -m benchmarks.sessions --turns 6  shorter ones

The model is the first layers of the bundled demo, with a chat template as Qwen's; the answers are given. The least possible is
what no text before began with, however long ago. Tokens beyond it are a share of all tokens of the prompts.
"""

import argparse
import inspect
import json
import logging
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

from mlx_lm.models.cache import LRUPromptCache
from tqdm import tqdm

from mlx_mtp import cli
from mlx_mtp.checkpoint.load import DEMO
from mlx_mtp.server.caches import WholeCaches
from tests.support.checkpoints import first_layers
from tests.support.engine import Answered, Engine
from tests.support.tool_texts import MARKS, talk

MODULES = ["argparse", "ast", "bisect", "calendar", "cmd", "configparser", "difflib", "functools"]
SYSTEM, RESULT = 5000, 1200  # characters
LAYERS = 4  # one of them with keys and values
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Do {name.replace('_', ' ')}, and tell what came of it.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}},
        },
    }
    for name in ("read_file", "write_file", "list_files", "run_tests")
]
CALL = "<tool_call>\n<function=read_file>\n<parameter=path>\n{}\n</parameter>\n</function>\n</tool_call>"
Message = dict[str, Any]


@dataclass
class Figures:
    """Tokens of prompts: all, those that could not have been known, and those that were read."""

    n_prompt: int = 0
    n_least: int = 0
    n_read: int = 0

    @property
    def beyond(self) -> float:
        return (self.n_read - self.n_least) / self.n_prompt


class Client:
    """Who asks, and what is read for it.

    Args:
        model (Path): What is served.
        folder (Path, optional): The prompt store's. Without one, mlx-lm's caches.
    """

    def __init__(self, model: Path, folder: Path | None, seed: int = 0):
        self.rng, self.source = random.Random(seed), "".join(inspect.getsource(import_module(m)) for m in MODULES)
        self.flags = ["--mtp", "--num-draft-tokens", "0", "--model", str(model)]
        if folder is not None:
            self.flags += ["--prompt-cache-dir", str(folder)]
        self.is_baseline = folder is None
        self.seen: list[list[int]] = []
        self.start()

    def start(self) -> None:
        """What is counted begins anew; what was seen has been seen."""
        self.engine = Engine(*self.flags, caches=WholeCaches(LRUPromptCache()) if self.is_baseline else None)
        self.figures = Figures()

    def restart(self) -> None:
        self.engine.close()
        self.start()

    def text(self, n: int) -> str:
        start = self.rng.randrange(len(self.source) - n)
        return self.source[start : start + n]

    def system(self) -> Message:
        return {"role": "system", "content": self.text(SYSTEM)}

    def question(self) -> Message:
        return {"role": "user", "content": self.text(300)}

    def result(self) -> Message:
        return {"role": "tool", "content": self.text(RESULT)}

    def ask(self, messages: list[Message], tools: list[Any] | None = TOOLS) -> Message:
        """The answer: some reasoning and a call of a tool, or without tools a title."""
        reasoning, title = self.text(60).strip(), self.text(30).strip()
        path = self.text(40).strip()
        say = f"{reasoning}\n</think>\n\n{CALL.format(path) if tools else title}"
        self._count(self.engine.ask(messages, say, tools=tools, max_tokens=400))
        message = {"role": "assistant", "content": "" if tools else title, "reasoning_content": reasoning}
        call = {"name": "read_file", "arguments": json.dumps({"path": path})}
        return message | ({"tool_calls": [{"id": "1", "type": "function", "function": call}]} if tools else {})

    def _count(self, answered: Answered) -> None:
        prompt, figures = answered.prompt, self.figures
        known = min(max((_common(s, prompt) for s in self.seen), default=0), len(prompt) - 1)
        self.seen.append([*prompt, *answered.tokens])
        figures.n_prompt += len(prompt)
        figures.n_least += len(prompt) - known
        figures.n_read += answered.n_read


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


Rounds = Iterator[None]


def tool_loop(client: Client) -> Rounds:
    messages = [client.system(), client.question()]
    while True:
        messages += [client.ask(messages), client.result()]
        yield


def questions(client: Client) -> Rounds:
    """With each question, the reasoning of the turns before it leaves the prompt."""
    messages = [client.system()]
    while True:
        messages.append(client.question())
        for _ in range(3):
            messages += [client.ask(messages), client.result()]
        messages.append(client.ask(messages))
        yield


def two_agents(client: Client) -> Rounds:
    agents = [tool_loop(client), tool_loop(client)]
    while True:
        for agent in agents:
            next(agent)
        yield


def titles(client: Client) -> Rounds:
    """Another request between the turns, for a title of the first question."""
    system = {"role": "system", "content": "Give this chat a title of three words."}
    messages = [client.system(), client.question()]
    while True:
        messages += [client.ask(messages), client.result()]
        client.ask([system, messages[1]], tools=None)
        yield


def edit(client: Client) -> Rounds:
    """Message 18 of 20 becomes another one."""
    messages = [client.system(), client.question()]
    for _ in range(9):
        messages += [client.ask(messages), client.result()]
    client.ask(messages)
    while True:
        client.ask([*messages[:17], client.result(), *messages[18:]])
        yield


def changing_system(client: Client) -> Rounds:
    """The last line of the system's text is the time."""
    system, question = client.system()["content"], client.question()
    for i in count():
        client.ask([{"role": "system", "content": f"{system}\nIt is 12:{i:02}."}, question])
        yield


SESSIONS: dict[str, tuple[Callable[[Client], Rounds], int]] = {
    "a tool loop": (tool_loop, 20),
    "questions, whose reasoning is dropped": (questions, 5),
    "two agents in turn": (two_agents, 20),
    "a title between the turns": (titles, 20),
    "message 18 of 20 edited": (edit, 3),
    "the system's last line changed": (changing_system, 10),
}


def measure(session: Callable[[Client], Rounds], n: int, model: Path, folder: Path | None) -> list[Figures]:
    """The figures of n rounds, and of one more after a restart."""
    client = Client(model, folder)
    try:
        rounds, figures = session(client), []
        for n_rounds in (n, 1):
            for _ in range(n_rounds):
                next(rounds)
            figures.append(client.figures)
            client.restart()
        return figures
    finally:
        client.engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="What a server reads of the prompts of sessions.")
    parser.add_argument("--turns", type=int, default=20, help="The most turns of a session (default: 20).")
    args = parser.parse_args()
    logging.disable(logging.INFO)
    rows = [["", "prompts", "least", "mlx-lm's caches", "beyond", "prompt store", "beyond"]]
    with tempfile.TemporaryDirectory() as name:
        model = Path(shutil.copytree(DEMO, Path(name) / "model"))
        first_layers(model, LAYERS)
        talk(model, MARKS, Path(__file__).with_suffix(".jinja").read_text())
        for title, (session, n) in tqdm(SESSIONS.items(), disable=None):
            both = [measure(session, min(n, args.turns), model, folder) for folder in (None, Path(name) / title)]
            for when, (theirs, ours) in zip((title, "  after a restart"), zip(*both)):
                counts = [f"{n:,}" for n in (theirs.n_prompt, theirs.n_least)]
                read = [cell for f in (theirs, ours) for cell in (f"{f.n_read:,}", f"{f.beyond:.1%}")]
                rows.append([when, *counts, *read])
    print("\n".join(cli.table(rows)))


if __name__ == "__main__":
    main()
