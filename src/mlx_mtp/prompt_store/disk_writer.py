"""What a store has on disk: read at once, written behind by a thread, so that no answer waits for it."""

import json
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from importlib.metadata import version
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..models.prompt_cache import PromptCache, make_prompt_cache
from . import array_file
from .array_file import Damaged
from .arrays import Arrays, Format
from .shared_folder import LAYOUT, Entry, Outcome, SharedFolder
from .tree import Node, StoredArrays

RETRY = 60.0  # seconds until the next try where the hour's bytes are used up
FLUSH = 10.0  # seconds to write what is left when a store is closed,
LAST_PIECE = 5.0  # and for the piece that is being written then


def key_of(model: Any, format: Format) -> str:
    """Whose pieces these are: all that changes a bit of them."""
    part = PromptCache(make_prompt_cache(model), len(model.layers)).part
    device = mx.device_info().get("device_name", "") if mx.metal.is_available() else str(mx.default_device())
    versions = LAYOUT, version("mlx"), version("mlx-lm")
    what = [versions, device, model.fingerprint().hex(), part, vars(model.args), format]
    return sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:32]


class PendingWrite(NamedTuple):
    """A piece to write.

    Args:
        node (Node): Its node.
        piece (StoredArrays): Its span, or its snapshot.
        model (str): Whose it is.
        parent (str): The file of the span that it belongs to; empty for none.
    """

    node: Node
    piece: StoredArrays
    model: str
    parent: str

    @property
    def is_span(self) -> bool:
        return self.piece is self.node.span


class DiskWriter:
    """
    Args:
        folder (SharedFolder): Where the files are. Closed with this.
        next_write (Callable[[bool], Optional[PendingWrite]]): What to write next; before the end, when it is called with ``True``, more
          than before.
        on_written (Callable[[PendingWrite, Outcome, str], None]): Is told what became of it, and the file's name.

    Attributes:
        reader (ThreadPoolExecutor): The one thread that reads before a text is asked for: MLX's streams are a thread's own.
        bytes_written (int): By this process.
        bytes_read (int): By this process.
    """

    def __init__(
        self,
        folder: SharedFolder,
        next_write: Callable[[bool], PendingWrite | None],
        on_written: Callable[[PendingWrite, Outcome, str], None],
    ):
        self.folder, self.next_write, self.on_written = folder, next_write, on_written
        self.bytes_written = self.bytes_read = 0
        self.reader = ThreadPoolExecutor(1, "prompt-store-reader")
        self._touched: set[str] = set()
        self._wake = threading.Event()
        self._deadline: float | None = None  # once it is closed
        self._thread = threading.Thread(target=self._run, name="prompt-store", daemon=True)
        self._thread.start()

    def entries(self, model: str, after: int) -> list[Entry]:
        """The pieces of a model that were done after the one with this number."""
        try:
            return self.folder.entries(model, after)
        except sqlite3.Error as e:
            logging.warning(f"The index of {self.folder.path} cannot be read: {e}.")
            return []

    def read(self, piece: StoredArrays, model: str, parent: str, tokens: np.ndarray | None) -> Arrays | None:
        """The arrays of a piece, if its file is there and is the one that is meant. A damaged one is dropped."""
        name = piece.name
        assert name is not None
        try:
            found, metadata = self.folder.read(name)
            own = found.pop("tokens", None)
            is_meant = metadata == {"model": model, "parent": parent}
            if not is_meant or (tokens is not None and not np.array_equal(np.array(own), tokens)):
                raise Damaged(f"{self.folder.path}/{name} is another text's than the index says.")
        except FileNotFoundError:  # another process has dropped it
            self._forget(name)
            return None
        except (OSError, Damaged) as e:
            logging.warning(f"{e} It is removed.")
            self._forget(name)
            return None
        self.bytes_read += piece.nbytes
        return found

    def _forget(self, name: str) -> None:
        try:
            self.folder.forget(name)
        except (OSError, sqlite3.Error) as e:
            logging.warning(f"{self.folder.path}/{name} cannot be removed: {e}.")

    def touch(self, names: Sequence[str]) -> None:
        """These pieces are being used."""
        self._touched.update(names)
        self.wake()

    def wake(self) -> None:
        """There may be work."""
        self._wake.set()

    def close(self, seconds: float) -> None:
        """Write what is left, as far as it takes no longer than this."""
        if self._deadline is None:
            self.reader.submit(mx.clear_streams)
        self._deadline = time.monotonic() + seconds
        self.wake()
        self.reader.shutdown()
        self._thread.join(seconds + LAST_PIECE)
        if not self._thread.is_alive():
            self.folder.close()

    # In the thread

    def _run(self) -> None:
        try:
            is_last, wait = False, None
            while not is_last:
                self._wake.wait(wait)
                self._wake.clear()
                is_last = self._deadline is not None
                wait = None if self._write_all(is_last) else RETRY
        except (OSError, sqlite3.Error) as e:
            logging.warning(f"The prompt cache in {self.folder.path} is no longer written: {e}.")

    def _write_all(self, is_last: bool) -> bool:
        """Write what there is to write -> whether nothing is left for later."""
        if names := [self._touched.pop() for _ in range(len(self._touched))]:
            self.folder.touch(names)
        while (work := self.next_write(is_last)) is not None:
            if self._deadline is not None and (not is_last or time.monotonic() > self._deadline):
                return True  # begin again, with what is left at the end; or the time is up
            outcome, name = self._write(work)
            if outcome is Outcome.LATER:
                return False
            self.on_written(work, outcome, name)
        return True

    def _write(self, work: PendingWrite) -> tuple[Outcome, str]:
        arrays, tokens = work.piece.arrays, None
        if work.is_span:
            tokens = work.node.tokens.tobytes()
            arrays = {"tokens": mx.array(work.node.tokens)} | arrays  # first: they are the widest
        name, parts = array_file.encode(arrays, {"model": work.model, "parent": work.parent})
        outcome = self.folder.write(work.model, work.parent, tokens, name, parts)
        if outcome is Outcome.WRITTEN:
            self.bytes_written += sum(memoryview(part).nbytes for part in parts)
        return outcome, name
