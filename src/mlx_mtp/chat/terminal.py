"""The chat's input: line editing, a history across chats, and completion of commands."""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from platformdirs import user_state_path
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from ..cli.display import sentence
from ..files import make_folder

PROMPT, CONTINUATION = ">> ", ".. "


def history_file() -> Path:
    return user_state_path("mlx_mtp", appauthor=False) / "chat_history"


def make_reader(commands: Iterable[str]) -> Callable[[], str]:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return lambda: input(PROMPT)
    session: PromptSession[str] = PromptSession(
        PROMPT,
        multiline=True,
        prompt_continuation=CONTINUATION,
        history=_open_history(history_file()),
        completer=WordCompleter([*commands], sentence=True),
        complete_while_typing=False,
        key_bindings=_key_bindings(),
    )
    return session.prompt


def _open_history(file: Path) -> History:
    try:
        make_folder(file.parent, "The history is not kept")
    except OSError as e:
        print(sentence(e), file=sys.stderr)
        return InMemoryHistory()
    return FileHistory(str(file))


def _key_bindings() -> KeyBindings:
    """Enter sends the input; Alt-Enter, or Enter after a backslash, begins a new line."""
    bindings = KeyBindings()

    @bindings.add("enter")
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.char_before_cursor == "\\":
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings
