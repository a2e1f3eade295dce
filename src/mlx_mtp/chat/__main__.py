"""The command line of ``mlx_mtp.chat``: that of ``mlx_lm.chat``, and the flags of MTP."""

import argparse
import sys
from contextlib import nullcontext
from functools import partial

import mlx.core as mx
from mlx_lm.chat import setup_arg_parser

from ..checkpoint.load import DEMO, load
from ..cli.arguments import (
    head_of,
    load_options,
    open_prompt_store,
    rank_groups,
    report_settings,
    set_sampling,
)
from ..cli.checks import check_alone, check_generation_flags, check_model_flags, check_prompt_cache_dir
from ..cli.errors import one_line_errors, sentence
from ..cli.flags import add_drafting, add_images, add_sampling
from ..cli.parser import extend, finish, parse
from ..drafts.options import asks_for_copies
from ..generate.stream import GenerationResponse
from .conversation import Conversation
from .history import history, history_file

EXIT = "/exit"
COMMANDS = (EXIT, "/reset", "/think", "/image", "/help")
HELP = f"""The command list:
- '{EXIT}' to exit, as Ctrl-D
- '/reset' to reset the chat
- '/think' to switch thinking on or off
- '/image FILE' to show a picture with the next question
- '/help' to display these commands
Ctrl-C ends an answer."""


def make_parser() -> argparse.ArgumentParser:
    """mlx-lm's parser, with the flags of MTP and of thinking added."""
    description = "Chat with a model, with drafts of its own MTP head."
    parser = extend(setup_arg_parser(), "mlx_mtp.chat", description)
    add_drafting(parser)
    parser.set_defaults(model=str(DEMO), min_tokens_to_keep=1)
    add_sampling(parser)
    add_images(parser)
    parser.add_argument(
        "--thinking",
        choices=("on", "off"),
        help="Let the model think before it answers (default: on where the model can).",
    )
    return finish(parser)


def main() -> None:
    with one_line_errors("mlx_mtp.chat"):
        run(parse(make_parser()))


def run(args: argparse.Namespace) -> None:
    """Load the model, and answer until the user ends the chat."""
    check_generation_flags(args)
    check_prompt_cache_dir(args)
    check_alone(args, "adapter_path", "prompt_cache_dir", "images")
    model, tokenizer, config = load(
        args.model,
        adapter_path=args.adapter_path,
        tokenizer_config={"trust_remote_code": args.trust_remote_code},
        return_config=True,
        trust_remote_code=args.trust_remote_code,
        mtp=head_of(args),
        copy_drafts=asks_for_copies(args.copy_drafts) or args.images,  # plain mlx-lm's models take none
        vision="auto" if args.images else True,
        **load_options(args),
        **rank_groups(args),
    )
    sampling = set_sampling(args, getattr(model, "ranks", None))  # a model of plain mlx-lm has none
    check_model_flags(args, config)
    report_settings(args, model)
    if args.seed is not None:
        mx.random.seed(args.seed)
    with open_prompt_store(args, model) as store:
        conversation = Conversation(model, tokenizer, args, store)
        print(f"[INFO] Starting chat session with {args.model}.\n[INFO] Sampling: {sampling}.\n{HELP}")
        with history(history_file()) if sys.stdin.isatty() else nullcontext():
            while (line := ask(conversation)) != EXIT:
                obey(line, conversation)


def ask(conversation: Conversation) -> str:
    """The line that the user types at rank 0; ``/exit`` at the end of the input."""
    line, ranks = EXIT, conversation.ranks
    if ranks is None or ranks.rank == 0:
        try:
            line = input(">> ").rstrip()
        except EOFError:
            print()
        except KeyboardInterrupt:
            if ranks is not None:
                raise
            print()
            line = ""  # as in a shell, a new line
    return line if ranks is None else str(ranks.broadcast(line))


def obey(line: str, conversation: Conversation) -> None:
    """Do what a command says, or answer. Commands begin with a slash, so that any word can be said to the model."""
    if line.startswith("/"):
        command, _, rest = line.partition(" ")
        try:
            do(command, rest.strip().strip("'\""), conversation)
        except (ValueError, OSError) as e:
            print(sentence(e))
    elif query := line.strip():
        response = conversation.answer(query, show=partial(print, end="", flush=True))
        print()
        if response is not None:
            print(f"[{figures(response)}]", flush=True)


def do(command: str, argument: str, conversation: Conversation) -> None:
    """
    Raises:
        ValueError: There is no such command, its argument is missing or too much, or the model cannot do it.
        OSError: A file cannot be read.
    """
    if command not in COMMANDS:
        raise ValueError(f"There is no command {command}: see /help, or put a space before it to say it to the model.")
    if bool(argument) != (command == "/image"):
        raise ValueError(
            "/image takes a file: /image FILE." if command == "/image" else f"{command} takes no argument."
        )
    if command == "/image":
        conversation.attach(argument)
    elif command == "/reset":
        conversation.reset()
    elif command == "/think":
        conversation.think(not conversation.thinking)
        print(f"Thinking is {'on' if conversation.thinking else 'off'}.")
    else:
        print(HELP)


def figures(response: GenerationResponse) -> str:
    """How fast an answer was, and the drafts that it took."""
    parts = [f"{response.generation_tokens} tokens" + " (--max-tokens)" * (response.finish_reason == "length")]
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


if __name__ == "__main__":
    main()
