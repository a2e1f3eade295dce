"""The commands of the chat, which begin with a slash."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ..distributed.ranks import from_rank_0
from .conversation import Conversation, load_messages, save_messages

EXIT = "/exit"


class Command(NamedTuple):
    argument: str  # "FILE", "[TEXT]" or none
    use: str  # the description in /help
    do: Callable[[Conversation, str], None]


def obey(line: str, conversation: Conversation) -> None:
    """Run the command in a line, or raise a ValueError or OSError."""
    name, _, argument = line.partition(" ")
    argument = argument.strip()
    command = COMMANDS.get(name)
    if command is None:
        raise ValueError(f"There is no command {name}: see /help, or put a space before it to send it to the model.")
    if command.argument == "FILE":
        argument = argument.strip("'\"")  # terminals quote dropped files
        if not argument:
            raise ValueError(f"{name} takes a file: {name} FILE.")
    if argument and not command.argument:
        raise ValueError(f"{name} takes no argument.")
    command.do(conversation, argument)


def _help(conversation: Conversation, _: str) -> None:
    print(HELP)


def _reset(conversation: Conversation, _: str) -> None:
    conversation.reset()
    print("Started a new conversation.")


def _think(conversation: Conversation, _: str) -> None:
    conversation.think(not conversation.thinking)
    print(f"Thinking is {'on' if conversation.thinking else 'off'}.")


def _figures(conversation: Conversation, _: str) -> None:
    conversation.figures = not conversation.figures
    print(f"Figures are {'on' if conversation.figures else 'off'}.")


def _system(conversation: Conversation, text: str) -> None:
    if text:
        conversation.instruct(text)
    print(f"System prompt: {conversation.system_prompt or 'none'}")


def _image(conversation: Conversation, file: str) -> None:
    conversation.attach(file)
    print(f"{Path(file).name} will be sent with the next question.")


def _save(conversation: Conversation, file: str) -> None:
    path, ranks = Path(file).expanduser(), conversation.ranks
    from_rank_0(ranks, lambda: save_messages(path, conversation.transcript))
    print(f"Saved {len(conversation.messages)} messages to {path}.")


def _load(conversation: Conversation, file: str) -> None:
    path, ranks = Path(file).expanduser(), conversation.ranks
    conversation.restore(from_rank_0(ranks, lambda: load_messages(path)))
    print(f"Loaded {len(conversation.messages)} messages from {path}.")


COMMANDS = {
    "/help": Command("", "list the commands", _help),
    EXIT: Command("", "end the chat (or Ctrl-D)", lambda conversation, _: None),
    "/reset": Command("", "start a new conversation", _reset),
    "/system": Command("[TEXT]", "set or show the system prompt", _system),
    "/image": Command("FILE", "send an image with the next question", _image),
    "/think": Command("", "turn thinking on or off", _think),
    "/figures": Command("", "turn the line about speed and drafts on or off", _figures),
    "/save": Command("FILE", "save the conversation", _save),
    "/load": Command("FILE", "continue a saved conversation", _load),
}
HELP = "\n".join(
    [
        *(f"  {f'{name} {command.argument}':<15}{command.use}" for name, command in COMMANDS.items()),
        "Enter sends. Alt-Enter, or Enter after a backslash, starts a new line. Ctrl-C stops an answer.",
    ]
)
