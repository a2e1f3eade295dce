"""The command line of ``mlx_mtp chat``: that of ``mlx_lm.chat``, and the flags of MTP."""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.chat import setup_arg_parser
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..checkpoint.load import DEMO, check_family, load
from ..cli.display import one_line_errors, sentence
from ..cli.flags import (
    add_drafting,
    add_flags,
    add_sampling,
    check_alone,
    check_generation_flags,
    check_model_flags,
    check_prompt_cache_dir,
    load_options,
    open_prompt_store,
    sampler_of,
    set_sampling,
    settle_drafts,
    text_options,
)
from ..cli.parser import extend, finish, parse
from ..distributed.ranks import Ranks, from_rank_0
from ..drafts.options import asks_for_copies
from ..extras import require
from ..generate.stream import GenerationResponse
from ..memory import is_device_error
from ..models.mixin import MTPModel
from ..prompt_store import PromptStore
from .conversation import Conversation, Options, load_messages, save_messages

EXIT = "/exit"


def make_parser() -> argparse.ArgumentParser:
    """mlx-lm's parser, with the flags of MTP and of thinking added."""
    description = "Chat with a model, with drafts of its own MTP head."
    parser = extend(setup_arg_parser(), "mlx_mtp chat", description)
    add_drafting(parser)
    parser.set_defaults(model=str(DEMO), min_tokens_to_keep=1)
    add_sampling(parser)
    add_flags(parser, ["--images"])
    parser.add_argument(
        "--thinking", choices=("on", "off"), help="Turn thinking on or off (default: on, if the model supports it)."
    )
    parser.add_argument(
        "--no-figures",
        dest="figures",
        action="store_false",
        help="Omit the line about speed and drafts below each answer.",
    )
    return finish(parser)


def main() -> None:
    with one_line_errors("mlx_mtp chat"):
        require("chat", "mlx_mtp chat")
        run(parse(make_parser()))


def run(args: argparse.Namespace) -> None:
    """Load the model, and chat until the user ends it."""
    from .terminal import make_reader  # with the libraries of the extra

    check_generation_flags(args)
    check_prompt_cache_dir(args)
    check_alone(args, "adapter_path", "prompt_cache_dir", "images")
    if args.mtp is True:
        check_family(args.model)
    model, tokenizer, config = load(
        args.model,
        adapter_path=args.adapter_path,
        tokenizer_config={"trust_remote_code": args.trust_remote_code},
        return_config=True,
        trust_remote_code=args.trust_remote_code,
        copy_drafts=asks_for_copies(args.copy_drafts) or args.images or args.prompt_cache_dir is not None,
        vision="auto" if args.images else True,
        **load_options(args),
    )
    sampling = set_sampling(args, getattr(model, "ranks", None))  # models of plain mlx-lm have no ranks
    check_model_flags(args, config)
    settle_drafts(args, model)
    if args.seed is not None:
        mx.random.seed(args.seed)
    with open_prompt_store(args, model) as store:
        conversation = start(args, model, tokenizer, store)
        print(f"[INFO] Starting chat session with {args.model}.\n[INFO] Sampling: {sampling}.\n{HELP}")
        read = make_reader({name: command.argument for name, command in COMMANDS.items()})
        while (line := ask(read, conversation.ranks)) != EXIT:
            respond(line, conversation)


def start(args: argparse.Namespace, model: Any, tokenizer: TokenizerWrapper, store: PromptStore | None) -> Conversation:
    """Start a conversation with the options of the flags."""
    options = Options(
        model=args.model,
        system_prompt=args.system_prompt,
        is_ours=isinstance(model, MTPModel),
        max_kv_size=args.max_kv_size,
        show_drafts=args.show_drafts,
        generation={"mtp": args.mtp, "options": text_options(args), "prefill_step_size": args.prefill_step_size},
        sampler=partial(sampler_of, args),
    )
    conversation = Conversation(model, tokenizer, options, store)
    conversation.figures = args.figures
    if args.thinking is not None:
        conversation.think(args.thinking == "on")
    return conversation


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
            obey(line, conversation)
        elif query := line.strip():
            response = conversation.answer(query, show=partial(print, end="", flush=True))
            print()
            if response is not None and (conversation.figures or is_cut(response)):
                print(f"[{figures(response) if conversation.figures else length(response)}]", flush=True)
    except (ValueError, OSError, RuntimeError) as e:
        if isinstance(e, RuntimeError) and not is_device_error(e):
            raise
        print(sentence(e))


def is_cut(response: GenerationResponse) -> bool:
    return response.finish_reason == "length"


def length(response: GenerationResponse) -> str:
    """The number of tokens of an answer, and whether it was cut."""
    n = f"{response.generation_tokens} tokens"
    return f"stopped at {n} (--max-tokens)" if is_cut(response) else n


def figures(response: GenerationResponse) -> str:
    """The speed of an answer, and its drafts."""
    parts = [length(response)]
    parts.append(f"{response.generation_tps:.1f} tokens-per-sec")
    for name, drafted, accepted in (
        ("drafts", response.drafted, response.accepted),
        ("copies", response.copied, response.copies_accepted),
    ):
        if drafted:
            parts.append(f"{sum(accepted)} of {sum(drafted)} {name} accepted")
    if response.drafted or response.copied:
        parts.append(f"{response.tokens_per_step:.2f} tokens-per-step")
    return ", ".join(parts)


# Commands, which begin with a slash


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


if __name__ == "__main__":
    main()
