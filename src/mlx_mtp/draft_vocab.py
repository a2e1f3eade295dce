"""``python -m mlx_mtp.draft_vocab``: the draft vocabulary of a user's own text.

Token ids are ranked by how often they come in the text. Drafts are then chosen from the first of them alone, which makes
the output layer of a draft as much smaller; verification goes on choosing from all. The list is a small JSON file beside the
checkpoint, where ``mlx_mtp.load`` finds it.
"""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mlx_lm.utils import load_config, load_tokenizer
from tqdm import tqdm

from .checkpoint.files import check_target, write_whole
from .checkpoint.hub import fetch
from .checkpoint.vocabulary import LIST_FILE, always_in, check_size, select
from .cli import one_line_errors

CHUNK = 1 << 20  # characters that are tokenized at once


def count_tokens(tokenizer, files: Sequence[Path]) -> Counter[int]:
    """How often each token id comes in text files.

    Args:
        tokenizer (TokenizerWrapper): The model's.
        files (Sequence[Path]): In UTF-8. Each is read in pieces that end with a line.

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
                raise ValueError(f"{file} is not text in UTF-8: leave it out of the corpus.") from e
    return counts


def rank(counts: Counter[int], vocab_size: int) -> list[int]:
    """All ids, the most frequent first; those of equal frequency, unseen ones too, in the order of the vocabulary."""
    return sorted(range(vocab_size), key=lambda i: (-counts[i], i))


def draft_vocab(model: str, corpus: Sequence[str | Path], size: int, output: str | Path | None = None) -> Path:
    """
    Write the draft vocabulary of a corpus.

    Args:
        model (str): The path or the huggingface repository of the checkpoint.
        corpus (Sequence[Union[str, Path]]): Text files like what the model is to write.
        size (int): The number of token ids, special and stop tokens included.
        output (Union[str, Path], optional): The file to write, whole or not at all. Default: ``draft_vocab.json`` beside the
          checkpoint, where ``mlx_mtp.load`` finds it.

    Returns:
        Path: The file.

    Raises:
        OSError: A file cannot be read or written.
        ValueError: The size is not possible, or a file is not text.
    """
    path = fetch(model, None)
    if not (path / "config.json").exists():
        raise FileNotFoundError(f"{model} is not a model: it has no config.json.")
    config = load_config(path)
    vocab_size = config.get("text_config", config).get("vocab_size")
    if vocab_size is None:
        raise ValueError(f"The config.json of {model} has no vocab_size: download it again.")
    tokenizer = load_tokenizer(path, eos_token_ids=config.get("eos_token_id"))
    always = always_in(tokenizer, vocab_size)
    check_size(size, vocab_size, always)
    file = Path(output) if output is not None else path / LIST_FILE
    check_target(file)

    counts = count_tokens(tokenizer, [Path(file) for file in corpus])
    if not counts:
        raise ValueError("The corpus has no text: give it files like what the model is to write.")
    ids = select(rank(counts, vocab_size), size, always)
    write_whole(file, json.dumps({"vocab_size": vocab_size, "ids": ids}) + "\n")
    covered = sum(counts[i] for i in ids) / counts.total()
    print(
        f"Wrote {file}: {len(ids)} of {vocab_size} token ids, {covered:.2%} of the {counts.total()} tokens of the corpus."
    )
    return file


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx_mtp.draft_vocab",
        description="Write a model's draft vocabulary, ranked by frequency in your own text.",
    )
    parser.add_argument("--model", required=True, help="The path to the local model directory or Hugging Face repo.")
    parser.add_argument(
        "--corpus", required=True, nargs="+", metavar="FILE", help="Text like what the model is to write."
    )
    parser.add_argument(
        "--size",
        type=int,
        default=32768,
        help="Number of token ids, special and stop tokens included (default: 32768).",
    )
    parser.add_argument(
        "--output", metavar="FILE", help=f"The file to write (default: {LIST_FILE} beside the checkpoint)."
    )
    return parser


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    with one_line_errors(parser.prog):
        draft_vocab(**vars(args))


if __name__ == "__main__":
    main()
