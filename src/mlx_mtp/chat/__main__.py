"""The command line of ``mlx_mtp chat``, that of ``mlx_lm.chat`` and the flags of MTP, its input and its commands."""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from mlx_lm.chat import setup_arg_parser
from platformdirs import user_state_path

from ..checkpoint.load import DEMO
from ..cli import flags
from ..cli.display import one_line_errors, sentence
from ..cli.parser import extend, finish, parse
from ..core.distributed import Ranks
from ..errors import MTPError, is_mendable, require
from ..files import make_folder
from ..generate.stream import GenerationResponse
from ..memory import advice
from .conversation import Conversation

EXIT = "/exit"
PROMPT, CONTINUATION = ">> ", ".. "


def make_parser() -> argparse.ArgumentParser:
    description = "Chat with a model, with drafts of its own MTP head."
    parser = extend(setup_arg_parser(), "mlx_mtp chat", description)
    flags.add_drafting(parser)
    parser.set_defaults(model=str(DEMO), min_tokens_to_keep=1)
    flags.add_sampling(parser)
    flags.add_flags(parser, ["--images"])
    thinking = "Turn thinking on or off (default: on, if the model supports it)."
    parser.add_argument("--thinking", choices=("on", "off"), help=thinking)
    return finish(parser)


def main() -> None:
    with one_line_errors("mlx_mtp chat"):
        require("chat", "mlx_mtp chat")
        run(parse(make_parser()))


def run(args: argparse.Namespace) -> None:
    flags.check_generation_flags(args)
    flags.check_prompt_cache_dir(args)
    flags.check_alone(args, "adapter_path", "prompt_cache_dir", "images")
    model, tokenizer, config = flags.load_model(args, args.images, vision="auto" if args.images else True)
    sampling = flags.set_sampling(args, getattr(model, "ranks", None))  # models of plain mlx-lm have no ranks
    flags.check_model_flags(args, config)
    flags.settle_drafts(args, model)
    with flags.open_prompt_store(args, model) as store:
        conversation = Conversation(args, model, tokenizer, store)
        print(f"[INFO] Starting chat session with {args.model}.\n[INFO] Sampling: {sampling}.\n{help_text()}")
        read = make_reader()
        while (line := ask(read, conversation.ranks)) != EXIT:
            respond(line, conversation)


def history_file() -> Path:
    return user_state_path("mlx_mtp", appauthor=False) / "chat_history"


def make_reader() -> Callable[[], str]:
    """What reads the user's input: with line editing, a history across chats, and completion of commands in a terminal. Enter
    sends it; Alt-Enter, or Enter after a backslash, begins a new line.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return lambda: input(PROMPT)
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings

    history: InMemoryHistory | FileHistory = InMemoryHistory()
    try:
        make_folder(history_file().parent, "The history is not kept")
        history = FileHistory(history_file())
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
    drafts = {"drafts": (response.drafted, response.accepted), "copies": (response.copied, response.copies_accepted)}
    parts += [f"{sum(accepted)} of {sum(made)} {name} accepted" for name, (made, accepted) in drafts.items() if made]
    if response.drafted or response.copied:
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


def _reset(conversation: Conversation, _: str) -> str:
    conversation.reset()
    return "Started a new conversation."


def _think(conversation: Conversation, _: str) -> str:
    conversation.think(not conversation.thinking)
    return f"Thinking is {'on' if conversation.thinking else 'off'}."


def _system(conversation: Conversation, text: str) -> str:
    if text:
        conversation.instruct(text)
    return f"System prompt: {conversation.system_prompt or 'none'}"


def _image(conversation: Conversation, file: str) -> str:
    conversation.attach(file)
    return f"{Path(file).name} will be sent with the next question."


# Its argument ("FILE", "[TEXT]" or none), its description in /help, and what it does, a function that returns what is printed
COMMANDS: dict[str, tuple[str, str, Callable[[Conversation, str], str]]] = {
    "/help": ("", "list the commands", lambda *_: help_text()),
    EXIT: ("", "end the chat (or Ctrl-D)", lambda *_: ""),
    "/reset": ("", "start a new conversation", _reset),
    "/system": ("[TEXT]", "set or show the system prompt", _system),
    "/image": ("FILE", "send an image with the next question", _image),
    "/think": ("", "turn thinking on or off", _think),
}


def help_text() -> str:
    lines = [f"  {f'{name} {argument}':<15}{use}" for name, (argument, use, _) in COMMANDS.items()]
    keys = "Enter sends. Alt-Enter, or Enter after a backslash, starts a new line. Ctrl-C stops an answer."
    return "\n".join([*lines, keys])


if __name__ == "__main__":
    main()
