"""Measure how long the prompt store takes to restore a text, beside reading it.

    python -m benchmarks.restore
    python -m benchmarks.restore --model PATH_OR_REPO --tokens 4096 16384 65536

Each text is read once, with the cuts of a prompt. Then it is fetched from memory, and by another store from disk, whose files
the system has in its cache by then.
"""

import statistics
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx

import mlx_mtp
from benchmarks.timing import seconds
from mlx_mtp import PromptStore
from mlx_mtp.cli.display import table
from mlx_mtp.prompt_store.store import choose_cuts
from scripts.shared import script_parser
from tests.support.decoding import prefill

ROOT = Path(__file__).parents[1]


def text(tokenizer: Any, n: int) -> list[int]:
    source = "".join(path.read_text() for path in sorted((ROOT / "src").rglob("*.py")))
    tokens: list[int] = tokenizer.encode(f"# {n} tokens\n{source[: 10 * n]}")
    if len(tokens) < n:
        raise ValueError(f"The text has {len(tokens)} tokens, not {n}.")
    return tokens[:n]


def read(model: Any, tokens: list[int], store: PromptStore) -> None:
    prompt_cache, n, handle = store.fetch(tokens[:-1])
    for cut in choose_cuts([], len(tokens)):
        prefill(mx.array(tokens[n:cut]), model, prompt_cache=prompt_cache)
        handle = store.insert(tokens[:cut], prompt_cache, handle=handle)
        n = cut


def measure(model: Any, tokens: list[int], repeat: int) -> tuple[int, float, float, float]:
    """Bytes, and the seconds of reading, of restoring from memory and from disk."""

    def fetch(store: PromptStore) -> None:
        assert store.fetch(tokens[:-1])[1] == len(tokens) - 1

    with tempfile.TemporaryDirectory() as folder:
        with PromptStore(model, folder=folder) as store:
            took = seconds(lambda: read(model, tokens, store))
            memory = statistics.median(seconds(lambda: fetch(store)) for _ in range(repeat))
            n_bytes = store.nbytes
        disk = []
        for _ in range(repeat):
            with PromptStore(model, folder=folder) as store:
                disk.append(seconds(lambda s=store: fetch(s)))
        return n_bytes, took, memory, statistics.median(disk)


def main() -> None:
    flags = dict(model=str(mlx_mtp.DEMO), tokens=[4096, 16384], repeat=(3, "Of restoring."))
    args = script_parser(__doc__, **flags).parse_args()
    model, tokenizer = mlx_mtp.load(args.model)
    read(model, text(tokenizer, args.tokens[0]), PromptStore(model, 0))  # what is compiled is compiled
    rows = [["tokens", "MB", "reading", "from memory", "ratio", "from disk", "ratio"]]
    for n in args.tokens:
        n_bytes, took, memory, disk = measure(model, text(tokenizer, n), args.repeat)
        ratios = [cell for t in (memory, disk) for cell in (f"{1e3 * t:.1f} ms", f"{took / t:.0f}")]
        rows.append([f"{n:,}", f"{n_bytes / 1e6:.0f}", f"{took:.2f} s", *ratios])
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
