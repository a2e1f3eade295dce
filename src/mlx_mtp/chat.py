"""``mlx_mtp chat``: the command line of ``mlx_lm.chat`` and the flags of MTP, the conversation, and the user's input."""

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_lm.models import cache as stock
from mlx_lm.tokenizer_utils import TokenizerWrapper
from platformdirs import user_state_path

from .checkpoint.settings import sampling_defaults
from .cli import arguments
from .cli.display import one_line_errors, paint, prompt_progress, sentence, typed
from .cli.parser import parse
from .cli.parsers import chat_parser
from .core.caches.prompt_cache import make_prompt_cache, n_tokens
from .core.distributed import Ranks
from .core.models.mixin import MTPModel
from .errors import MTPError, advice, as_mtp_error, is_mendable, require
from .files import make_folder
from .generate.stream import GenerationResponse, accepted_of, stream_generate
from .images.open import open_image
from .images.prompt import PLACEHOLDER, vision_of
from .prompt_store import PromptStore

if TYPE_CHECKING:
    from PIL.Image import Image

EXIT = "/exit"
PROMPT = ">> "
CONTINUATION = ".. "
HISTORY = user_state_path("mlx_mtp", appauthor=False) / "chat_history"


@one_line_errors("mlx_mtp chat")
def main() -> None:
    require("chat", "mlx_mtp chat")
    args = parse(chat_parser())
    arguments.check_generation_flags(args)
    arguments.check_prompt_cache_dir(args)
    arguments.check_alone(args, "adapter_path", "prompt_cache_dir", "images")
    model, tokenizer, config = arguments.load_model(args, args.images, vision="auto" if args.images else True)
    ranks = getattr(model, "ranks", None)  # missing in models of plain mlx-lm
    sampling = sampling_defaults(args.model, arguments.given_sampling(args), ranks)
    vars(args).update(sampling.arguments)
    arguments.check_model_flags(args, config)
    arguments.settle_drafts(args, model)
    with arguments.open_prompt_store(args, model) as store:
        conversation = Conversation(args, model, tokenizer, store)
        print(f"[INFO] Starting chat session with {args.model}.\n[INFO] Sampling: {sampling}.\n{HELP}")
        read = make_reader()
        while (line := ask(read, ranks)) != EXIT:
            respond(line, conversation)


class Conversation:
    """A conversation whose prompt cache or prompt store has all turns, so that each turn prefills only new tokens."""

    def __init__(
        self, args: argparse.Namespace, model: Any, tokenizer: TokenizerWrapper, store: PromptStore | None = None
    ):
        self.args = args
        self.model = model
        self.tokenizer = tokenizer
        self.store = store
        self.ranks = getattr(model, "ranks", None)
        self.system_prompt: str | None = args.system_prompt
        self.thinking: bool = tokenizer.has_thinking  # whether the model thinks before it answers
        self.reset()
        if args.thinking is not None:
            self.think(args.thinking == "on")

    def reset(self) -> str:
        """Forget all turns. Return a line about it, as the methods of the other commands."""
        # The questions and the answers for the template, and the files of a question's images, which are before its text
        self.messages: list[dict[str, Any]] = []
        self.attached: list[str] = []  # the files of images for the next question
        self.turn = 0
        self._rewind()
        return "Started a new conversation."

    def _rewind(self) -> None:
        """Make the next turn prefill all messages."""
        model: Any = self.model
        self.cache: list[Any] | None = None
        if self.store is None:
            is_ours = isinstance(model, MTPModel)  # with a prompt cache that also has the head's part
            self.cache = make_prompt_cache(model) if is_ours else stock.make_prompt_cache(model, self.args.max_kv_size)
        self.n_rendered = 0  # messages that the cache holds
        # The tokens before the next prompt that the cache lacks: with a store, the earlier turns.
        self.text: list[int] = []
        self.is_cut = False  # the last answer has no end marker
        self.shown: list[Image] = []  # in the earlier turns, with a store

    def instruct(self, text: str) -> str:
        """Set the system prompt, unless the text is empty."""
        if text:
            self.system_prompt = text
            self._rewind()
        return f"System prompt: {self.system_prompt or 'none'}"

    def attach(self, file: str) -> str:
        """Send an image with the next question."""
        vision_of(self.model)
        path = Path(file).expanduser()
        open_image(path)
        self.attached.append(str(path.absolute()))
        return f"{path.name} will be sent with the next question."

    def think(self, thinking: bool) -> str:
        question = [{"role": "user", "content": "a"}]
        if self._render(question, True) == self._render(question, False):
            raise MTPError(f"The chat template of {self.args.model} has no switch for thinking.")
        self.thinking = thinking
        return f"Thinking is {'on' if thinking else 'off'}."

    def answer(self, query: str, show: Callable[[str], None]) -> GenerationResponse | None:
        """Generate an answer, show each piece, and return the last response; ``None`` after Ctrl-C before the first token."""
        content = PLACEHOLDER * len(self.attached) + query
        question = {"role": "user", "content": content, "images": self.attached}
        new = [*self.messages[self.n_rendered :], question]
        images = [open_image(Path(file)) for message in new for file in message.get("images", ())]
        text = self.text + self._encode(new)
        self.messages.append(question)
        self.attached, self.n_rendered, self.is_cut = [], len(self.messages), True
        response = None
        tokens = []
        pieces = []
        n_before = n_tokens(self.cache or [])
        try:
            with prompt_progress() as progress:
                responses = stream_generate(
                    self.model,
                    self.tokenizer,
                    text,
                    mtp=self.args.mtp,
                    options=arguments.text_options(self.args),
                    prefill_step_size=self.args.prefill_step_size,
                    sampler=arguments.sampler_of(self.args, self.tokenizer, self.turn),
                    prompt_cache=self.cache,
                    prompt_store=self.store,
                    images=[*self.shown, *images],
                    prompt_progress_callback=progress,
                )
                with closing(responses):
                    for response in responses:
                        tokens.append(response.token)
                        pieces.append(response.text)
                        show(paint(response.text, response.source) if self.args.show_drafts else response.text)
        except KeyboardInterrupt:
            if self.ranks is not None:
                raise  # the other ranks are at another point
            if response is None:
                if self.store is None and not images and isinstance(self.model, MTPModel):
                    self.text = text[n_tokens(self.cache or []) - n_before :]  # the next turn prefills the rest
                else:
                    self._rewind()  # the next turn prefills all messages, or what the store lacks of them
                return None
        except Exception:
            self.messages.pop()
            self._rewind()
            raise
        if response is not None:
            self.messages.append({"role": "assistant", "content": "".join(pieces)})
            self.n_rendered += 1
            self.text = []
            if self.store is not None:
                self.text = text + tokens
                self.shown = [*self.shown, *images]
        self.is_cut = response is None or response.finish_reason != "stop"
        self.turn += 1
        return response

    def _encode(self, new: Sequence[dict[str, Any]]) -> list[int]:
        has_template = self.tokenizer.has_chat_template
        end = [self.tokenizer.eos_token_id] if has_template and self.is_cut else []
        return end + self.tokenizer.encode(self._render(new, self.thinking), add_special_tokens=not has_template)

    def _render(self, new: Sequence[dict[str, Any]], thinking: bool) -> str:
        if not self.tokenizer.has_chat_template:
            return "".join(f"{message['content']}\n" for message in new)
        messages = [{name: message[name] for name in ("role", "content")} for message in new]
        if self.system_prompt is not None and self.n_rendered == 0:
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        with as_mtp_error(f"The chat template of {self.args.model} cannot be rendered"):
            text: str = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False, enable_thinking=thinking
            )
        return text


def make_reader() -> Callable[[], str]:
    """What reads the user's input: with line editing, a history across chats, and completion of commands in a terminal. Enter
    sends it; Alt-Enter, or Enter after a backslash, begins a new line.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return lambda: typed(lambda: input(PROMPT))
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings

    history: InMemoryHistory | FileHistory = InMemoryHistory()
    try:
        make_folder(HISTORY.parent, "The history is not kept")
        history = FileHistory(HISTORY)
    except OSError as e:
        print(sentence(e), file=sys.stderr)
    bindings = KeyBindings()

    @bindings.add("enter")
    def send(event: Any) -> None:
        buffer = event.current_buffer
        if buffer.document.char_before_cursor == "\\":
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def begin_line(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(
        PROMPT,
        multiline=True,
        prompt_continuation=CONTINUATION,
        history=history,
        completer=WordCompleter([*COMMANDS], sentence=True),
        complete_while_typing=False,
        key_bindings=bindings,
    )
    return session.prompt


def ask(read: Callable[[], str], ranks: Ranks | None) -> str:
    """Read the user's input at rank 0; ``/exit`` at the end of the input."""
    line = EXIT
    if ranks is None or ranks.rank == 0:
        try:
            line = read().rstrip()
        except EOFError:
            print()
        except KeyboardInterrupt:
            if ranks is not None:
                raise
            print()
            line = ""  # a new line, as in a shell
    return line if ranks is None else str(ranks.broadcast(line))


def respond(line: str, conversation: Conversation) -> None:
    """Run a command, or generate an answer. Commands begin with a slash, so that any word can be sent to the model."""
    try:
        if line.startswith("/"):
            print(obey(line, conversation))
        elif query := line.strip():
            response = conversation.answer(query, show=partial(print, end="", flush=True))
            print()
            if response is not None:
                print(f"[{figures(response)}]", flush=True)
    except Exception as e:
        if not is_mendable(e) and advice(e) is None:
            raise
        print(sentence(e))


def figures(response: GenerationResponse) -> str:
    """The number of tokens of an answer and whether it was cut, its speed, and its drafts."""
    n = f"{response.generation_tokens} tokens"
    parts = [f"stopped at {n} (--max-tokens)" if response.finish_reason == "length" else n]
    parts.append(f"{response.generation_tps:.1f} tokens-per-sec")
    parts += accepted_of(response.counts)
    if response.counts:
        parts.append(f"{response.tokens_per_step:.2f} tokens-per-step")
    return ", ".join(parts)


def obey(line: str, conversation: Conversation) -> str:
    name, _, argument = line.partition(" ")
    argument = argument.strip()
    if name not in COMMANDS:
        raise MTPError(f"There is no command {name}: see /help, or put a space before it to send it to the model.")
    takes, _, do = COMMANDS[name]
    if takes == "FILE":
        argument = argument.strip("'\"")  # terminals quote dropped files
        if not argument:
            raise MTPError(f"{name} takes a file: {name} FILE.")
    if argument and not takes:
        raise MTPError(f"{name} takes no argument.")
    return do(conversation, argument)


# Its argument ("FILE", "[TEXT]" or none), its description in /help, and what it does, a function that returns what is printed
COMMANDS: dict[str, tuple[str, str, Callable[[Conversation, str], str]]] = {
    "/help": ("", "list the commands", lambda *_: HELP),
    EXIT: ("", "end the chat (or Ctrl-D)", lambda *_: ""),
    "/reset": ("", "start a new conversation", lambda conversation, _: conversation.reset()),
    "/system": ("[TEXT]", "set or show the system prompt", Conversation.instruct),
    "/image": ("FILE", "send an image with the next question", Conversation.attach),
    "/think": ("", "turn thinking on or off", lambda conversation, _: conversation.think(not conversation.thinking)),
}
USES = "\n".join(f"  {f'{name} {argument}':<15}{use}" for name, (argument, use, _) in COMMANDS.items())
HELP: str = f"{USES}\nEnter sends. Alt-Enter, or Enter after a backslash, starts a new line. Ctrl-C stops an answer."


if __name__ == "__main__":
    main()
