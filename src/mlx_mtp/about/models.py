"""The command line of ``mlx_mtp models``: the published models by their names for ``--model``."""

import argparse

from ..checkpoint.catalog import published
from ..checkpoint.fetched import fetched_heads
from ..checkpoint.hub import cached_repositories
from ..cli.display import one_line_errors, table
from ..cli.parser import finish, parse
from ..memory import GB, Account

CONTEXT = 32_768  # tokens


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx_mtp models",
        description="List the published models by their names for --model: the size of the weights and the head, the memory "
        "of a context, whether the model fits this machine, and whether it is downloaded.",
    )
    parser.add_argument("--context", type=int, default=CONTEXT, help="Length of the context in tokens.")
    return finish(parser, {})


def main() -> None:
    parser = make_parser()
    with one_line_errors(parser.prog):
        args = parse(parser)
        if args.context < 1:
            raise ValueError(f"--context must be 1 or more, not {args.context}.")
        print(show(args.context))


def show(context: int) -> str:
    """A table of the published models, and a line about this machine."""
    cached, heads, account = cached_repositories(), {head.source for head in fetched_heads()}, Account()
    rows = [["name", "weights", "head", "image", "context", "fits here", "cached"]]
    for model in published().values():
        needs = model.needs(context)
        here = [use for use, has in (("weights", model.conversion in cached), ("head", model.original in heads)) if has]
        rows.append(
            [
                model.base,
                f"{needs.weights / GB:.1f}",
                f"{needs.head / GB:.2f}",
                "yes" if model.takes_images else "no",
                f"{needs.caches / GB:.1f}",
                "yes" if needs.total <= account.left else f"from {model.memory_gb} GB",
                "both" if len(here) == 2 else "".join(here) or "-",
            ]
        )
    note = (
        f"Sizes are in GB: weights in 4 bits (Bonsai 2: in 2), the head and {context:,} tokens of context in 16.\n"
        f"MLX may use {account.limit / GB:.0f} GB here. For more bits, add -8bit or -bf16 to a name, where published.\n"
        "`mlx_mtp generate --mtp --model NAME` downloads the weights and the head of the base model, and generates."
    )
    return "\n".join([*table(rows), "", note])
