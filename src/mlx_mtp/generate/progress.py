"""The progress of a prompt."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

DELAY = 1.0  # seconds that a prompt takes without a bar


@contextmanager
def prompt_progress() -> Iterator[Callable[[int, int], None]]:
    """The callback of a bar on stderr, where that is a terminal; it goes when the prompt is processed."""
    with tqdm(desc="Processing the prompt", unit=" tokens", delay=DELAY, leave=False, disable=None) as bar:

        def show(n_processed: int, n_prompt: int) -> None:
            bar.total = n_prompt
            bar.update(n_processed - bar.n)
            if n_processed >= n_prompt:
                bar.close()

        yield show
