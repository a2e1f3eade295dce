"""The command line of ``mlx_mtp cache``: list and remove fetched heads."""

import argparse
from collections.abc import Iterator

from huggingface_hub import constants

from ..checkpoint.fetched import fetched_heads, remove
from ..checkpoint.originals import HEADS, folder_of
from ..cli.display import one_line_errors, table
from ..cli.parser import finish, parse


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx_mtp cache",
        description="List the downloaded MTP heads. `hf cache ls` lists the models.",
    )
    parser.add_argument(
        "--remove", metavar="BASE_MODEL", help="Remove the head of this base model; all removes all heads."
    )
    return finish(parser, {})


def main() -> None:
    parser = make_parser()
    with one_line_errors(parser.prog):
        run(parse(parser))


def run(args: argparse.Namespace) -> None:
    heads = [*fetched_heads()]
    if args.remove is None:
        rows = [["original", "revision", "size"]]
        rows += [[head.source, head.revision[:8], f"{head.nbytes / 1e6:.1f} MB"] for head in heads]
        print("\n".join(table(rows)) if heads else "There are no downloaded heads.")
        for use, folder in cache_folders():
            print(f"{use} are in {folder}")
        return
    chosen = [head for head in heads if args.remove in ("all", head.source)]
    if not chosen:
        raise ValueError(f"There is no downloaded head of {args.remove}: `mlx_mtp cache` lists the heads.")
    for head in chosen:
        removed = f"Removed the head of {head.source}, {head.nbytes / 1e6:.1f} MB"
        remove(head)
        print(removed)


def cache_folders() -> Iterator[tuple[str, str]]:
    """The folders of caches, each with its purpose."""
    yield "Models", str(constants.HF_HUB_CACHE)
    yield "Heads", str(folder_of(HEADS))
