"""What the server prefills of the prompts of whole sessions, over HTTP, beyond the least possible: with its prompt store, and
``mlx_lm.server`` with its prompt caches.

    python -m benchmarks.sessions            all sessions, each with both
    python -m benchmarks.sessions --turns 6  shorter ones

The model is the first layers of the bundled demo, with a chat template as Qwen's; the answers are given. The least possible is
what no text before began with, however long ago. What is beyond it is given in tokens, as a share of all tokens of the prompts,
and in messages of the session's mean length.
"""

import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import load as load_tokenizer
from tqdm import tqdm

from mlx_mtp.checkpoint import DEMO
from mlx_mtp.cli.display import table
from mlx_mtp.server.api.completions import ChatBody
from mlx_mtp.server.command_line import make_parser
from mlx_mtp.server.options import check
from scripts.shared import SOURCES, script_parser
from tests.support.checkpoints import first_layers
from tests.support.server_process import Server, serve
from tests.support.tool_texts import MARKS, talk

SYSTEM, RESULT = 5000, 1200  # characters
LAYERS = 4  # one of them with keys and values
OURS, THEIRS = "tests.support.scripted_server", "benchmarks.scripted_mlx_lm"  # servers
STORE = ("--mtp", "--num-draft-tokens", "0", "--prompt-cache-dir")
OPTIONS = check(make_parser().parse_args([]))  # for the bodies of requests
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}}
TOOLS = []
for name in ("read_file", "write_file", "list_files", "run_tests"):
    says = f"Do {name.replace('_', ' ')}, and tell what came of it."
    TOOLS.append({"function": {"name": name, "description": says, "parameters": PARAMETERS}, "type": "function"})
CALL = "<tool_call>\n<function=read_file>\n<parameter=path>\n{}\n</parameter>\n</function>\n</tool_call>"
Message = dict[str, Any]


@dataclass
class Figures:
    """Tokens of prompts: all, those that could not have been known, and those that were prefilled."""

    n_prompt: int = 0
    n_least: int = 0
    n_prefilled: int = 0
    n_messages: int = 0

    @property
    def beyond(self) -> list[str]:
        """What was prefilled beyond the least, in tokens, as a share of the prompts, and in messages."""
        n = self.n_prefilled - self.n_least
        return [f"{n:,}", f"{n / self.n_prompt:.1%}", f"{n * self.n_messages / self.n_prompt:.1f}"]


class Client:
    """Who asks ``server``, and what is prefilled for it; ``model`` is what is served."""

    server: Server

    def __init__(self, model: Path):
        self.rng, self.source = random.Random(0), "".join(SOURCES.values())
        self.tokenizer, self.seen, self.figures = load_tokenizer(model), list[list[int]](), Figures()

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
        body = {"messages": messages, "tools": tools, "max_tokens": 400, "chat_template_kwargs": {"say": say}}
        status, content = self.server.request("/v1/chat/completions", body)
        assert status == 200, content
        self._count(body, say, content["usage"])
        message = {"role": "assistant", "content": "" if tools else title, "reasoning_content": reasoning}
        call = {"name": "read_file", "arguments": json.dumps({"path": path})}
        return message | ({"tool_calls": [{"id": "1", "type": "function", "function": call}]} if tools else {})

    def _count(self, body: dict[str, Any], say: str, usage: dict[str, Any]) -> None:
        figures, (_, request) = self.figures, ChatBody.read_request(body, OPTIONS)
        prompt = self.tokenizer.apply_chat_template(request.messages, tools=request.tools, add_generation_prompt=True)
        assert len(prompt) == usage["prompt_tokens"]
        known = min(max((_common(s, prompt) for s in self.seen), default=0), len(prompt) - 1)
        self.seen.append([*prompt, *self.tokenizer.encode(say, add_special_tokens=False), self.tokenizer.eos_token_id])
        figures.n_prompt += len(prompt)
        figures.n_least += len(prompt) - known
        figures.n_prefilled += len(prompt) - usage["prompt_tokens_details"]["cached_tokens"]
        figures.n_messages += len(request.messages)


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


Rounds = Iterator[None]
Session = Callable[[Client], Rounds]


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


SESSIONS: dict[str, tuple[Session, int]] = {
    "a tool loop": (tool_loop, 20),
    "questions": (questions, 5),
    "two agents in turn": (two_agents, 20),
    "a title between the turns": (titles, 20),
    "message 18 of 20 edited": (edit, 3),
    "the system's last line changed": (changing_system, 10),
}


def measure(session: Session, n: int, model: Path, module: str, flags: Sequence[str]) -> list[Figures]:
    """The figures of n rounds, and of one more after a restart of the server."""
    client, log, found = Client(model), model.with_name("server.log"), []
    rounds = session(client)
    for n_rounds in (n, 1):
        with serve(log, "--model", str(model), *flags, module=module) as client.server:
            for _ in range(n_rounds):
                next(rounds)
            client.server.stop()
        found.append(client.figures)
        client.figures = Figures()  # what was seen has been seen
    return found


def main() -> None:
    args = script_parser(__doc__, turns=(20, "The most turns of a session.")).parse_args()
    rows = [["", "prompts", "least", "with mlx-lm's", "share", "messages", "with ours", "share", "messages"]]
    with tempfile.TemporaryDirectory() as name:
        model = Path(shutil.copytree(DEMO, Path(name) / "model"))
        first_layers(model, LAYERS)
        talk(model, MARKS, Path(__file__).with_suffix(".jinja").read_text())
        for title, (session, n) in tqdm(SESSIONS.items(), disable=None):
            ways = (THEIRS, []), (OURS, [*STORE, str(Path(name) / title)])
            both = [measure(session, min(n, args.turns), model, module, flags) for module, flags in ways]
            for when, (theirs, ours) in zip((title, "  after a restart"), zip(*both)):
                rows.append([when, f"{ours.n_prompt:,}", f"{ours.n_least:,}", *theirs.beyond, *ours.beyond])
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
