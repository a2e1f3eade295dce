"""``mlx_mtp draft_vocab``: write a draft vocabulary for the user's own text.

Token ids are ranked by frequency in the text. Only the most frequent tokens are drafted, which makes the output layer for
drafts smaller. Verification uses all tokens. The list is a small JSON file in the checkpoint's folder, where ``mlx_mtp.load``
finds it.
"""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_config, load_tokenizer
from tqdm import tqdm

from .checkpoint.config import text_config_of
from .checkpoint.storage.hub import fetch
from .checkpoint.vocabulary import LIST_FILE, always_in, check_size, select
from .cli.errors import one_line_errors
from .cli.parser import finish, parse
from .files import check_source, check_target, write_atomic

CHUNK = 1 << 20  # characters tokenized at once


def count_tokens(tokenizer: TokenizerWrapper, files: Sequence[Path]) -> Counter[int]:
    """Count each token id in text files, which are read in chunks of whole lines.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file is not UTF-8.
    """
    counts: Counter[int] = Counter()
    for file in tqdm(files, desc="Counting", unit="file", disable=None):
        with file.open(encoding="utf-8") as f:
            try:
                while lines := f.readlines(CHUNK):
                    counts.update(tokenizer.encode("".join(lines), add_special_tokens=False, verbose=False))
            except UnicodeDecodeError as e:
                raise ValueError(f"{file} is not UTF-8 text: remove it from the corpus.") from e
    return counts


def rank(counts: Counter[int], vocab_size: int) -> list[int]:
    """Rank all ids by frequency, the most frequent first, ties in the order of the vocabulary."""
    return sorted(range(vocab_size), key=lambda i: (-counts[i], i))


def draft_vocab(model: str, corpus: Sequence[str | Path], size: int, output: str | Path | None = None) -> Path:
    """Write a draft vocabulary for a corpus.

    Args:
        model (str): The path or the Hugging Face repository of the checkpoint.
        corpus (Sequence[Union[str, Path]]): Files of text like the model's future output.
        size (int): The number of token ids, including special and stop tokens.
        output (Union[str, Path], optional): The file to write. Default: ``draft_vocab.json`` in the checkpoint's folder, where
          ``mlx_mtp.load`` finds it.

    Returns:
        Path: The file.

    Raises:
        OSError: A file cannot be read or written.
        ValueError: The size is impossible, or a file is not text.
    """
    for text in corpus:
        check_source(Path(text), "--corpus")
    if size < 1:
        raise ValueError(f"--size must be 1 or more, not {size}.")
    if output is not None:
        check_target(Path(output))
    path = fetch(model, None)
    vocab_size, tokenizer = _load_vocabulary(model, path)
    always = always_in(tokenizer, vocab_size)
    check_size(size, vocab_size, always)
    file = Path(output) if output is not None else path / LIST_FILE
    check_target(file)

    counts = count_tokens(tokenizer, [Path(file) for file in corpus])
    if not counts:
        raise ValueError("The corpus has no text: give files of text similar to the expected answers.")
    ids = select(rank(counts, vocab_size), size, always)
    write_atomic(file, json.dumps({"vocab_size": vocab_size, "ids": ids}) + "\n")
    covered = sum(counts[i] for i in ids) / counts.total()
    print(
        f"Wrote {file}: {len(ids)} of {vocab_size} token ids, {covered:.2%} of the {counts.total()} tokens of the corpus."
    )
    return file


def _load_vocabulary(model: str, path: Path) -> tuple[int, TokenizerWrapper]:
    if not (path / "config.json").exists():
        raise FileNotFoundError(f"{model} is not a model: it has no config.json.")
    config = load_config(path)
    vocab_size = text_config_of(config).get("vocab_size")
    if vocab_size is None:
        raise ValueError(f"The config.json of {model} has no vocab_size: download it again.")
    return vocab_size, load_tokenizer(path, eos_token_ids=config.get("eos_token_id"))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx_mtp draft_vocab",
        description="Write a draft vocabulary for a model, ranked by frequency in your own text.",
    )
    parser.add_argument("--model", required=True, help="The path to the local model directory or Hugging Face repo.")
    parser.add_argument(
        "--corpus", required=True, nargs="+", metavar="FILE", help="Files of text similar to the expected answers."
    )
    parser.add_argument(
        "--size",
        type=int,
        default=32768,
        help="Number of token ids, special and stop tokens included (default: 32768).",
    )
    parser.add_argument(
        "--output", metavar="FILE", help=f"The file to write (default: {LIST_FILE} in the model's folder)."
    )
    return finish(parser, {})


def main() -> None:
    parser = make_parser()
    with one_line_errors(parser.prog):
        args = parse(parser)
        draft_vocab(**vars(args))


if __name__ == "__main__":
    main()
