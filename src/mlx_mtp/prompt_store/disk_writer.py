"""The threads between a store and its folder: one writes in the background, so that no request waits for the disk, and one
reads ahead."""

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

from ..caches.prompt_cache import part_of
from . import array_file
from .arrays import Arrays, Format
from .shared_folder import LAYOUT, Entry, Outcome, SharedFolder
from .tree import Node, StoredArrays, Tokens

RETRY = 60.0  # seconds until the next attempt after the hourly limit was reached or a write failed
POLL = 0.05  # seconds between two checks of a file that another process is writing
FLUSH = 10.0  # seconds to write the rest when a store is closed
LAST_FILE = 5.0  # seconds more for the file that is being written at that time


def key_of(model: Any, format: Format) -> str:
    """The name of a model and a format: a hash of everything that the bits of the arrays depend on."""
    device = mx.device_info().get("device_name", "") if mx.metal.is_available() else str(mx.default_device())
    versions = LAYOUT, version("mlx"), version("mlx-lm")
    what = [versions, device, model.fingerprint().hex(), part_of(model), format]
    return sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:32]


class PendingWrite(NamedTuple):
    """A span or a snapshot to write.

    Args:
        node (Node): Its node.
        stored (StoredArrays): Its arrays in the tree, which get the file's name.
        arrays (Dict[str, mx.array]): The arrays to write, even if the store evicts them meanwhile.
        tokens (Tokens, optional): The tokens of a span, [n]; ``None`` for a snapshot.
        model (str): The model's name, see ``key_of``.
        parent (str): The file of the span above a span, or of a snapshot's own span; empty for none.
    """

    node: Node
    stored: StoredArrays
    arrays: Arrays
    tokens: Tokens | None
    model: str
    parent: str


class DiskWriter:
    """
    Args:
        folder (SharedFolder): The folder, which ``close`` closes, too.
        next_write (Callable[[bool], Optional[PendingWrite]]): Returns the next part to write. Its argument
          is whether the store is being closed: then more is written than before.
        on_written (Callable[[PendingWrite, Outcome, str], None]): Called with the outcome and the file's name.

    Attributes:
        reader (ThreadPoolExecutor): The thread that reads ahead. It has one worker, since MLX's streams belong to threads.
        bytes_written (int): Bytes that this process has written.
        bytes_read (int): Bytes that this process has read.
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
        """The files of a model that were completed after the one with this number."""
        try:
            return self.folder.entries(model, after)
        except sqlite3.Error as e:
            logging.warning(f"The index of {self.folder.path} cannot be read: {e}.")
            return []

    def read(self, name: str, model: str, parent: str, tokens: Tokens | None) -> Arrays | None:
        """The arrays of a file; ``None`` if it was removed. A damaged file, or one of another text, is removed.

        Args:
            tokens (Tokens, optional): The tokens of a span, which the file must have.
        """
        try:
            data = self.folder.read(name)
            found, metadata = array_file.decode(data)
            own = found.pop("tokens", None)
            is_meant = metadata == {"model": model, "parent": parent}
            if not is_meant or (tokens is not None and not np.array_equal(np.array(own), tokens)):
                raise ValueError(f"{self.folder.path}/{name} does not match the index: it holds another text.")
        except FileNotFoundError:  # another process has dropped it
            self._forget(name)
            return None
        except (OSError, ValueError) as e:
            logging.warning(f"{e} It is removed.")
            self._forget(name)
            return None
        self.bytes_read += len(data)
        return found

    def _forget(self, name: str) -> None:
        try:
            self.folder.forget(name)
        except (OSError, sqlite3.Error) as e:
            logging.warning(f"{self.folder.path}/{name} cannot be removed: {e}.")

    def touch(self, names: Sequence[str]) -> None:
        """Record that these files are in use."""
        self._touched.update(names)
        self.wake()

    def wake(self) -> None:
        """Have the writing thread look for parts to write."""
        self._wake.set()

    def close(self, seconds: float) -> None:
        """Write the rest, for at most this time."""
        if self._deadline is None:
            self.reader.submit(mx.clear_streams)
        self._deadline = time.monotonic() + seconds
        self.wake()
        self.reader.shutdown()
        self._thread.join(seconds + LAST_FILE)

    # In the thread

    def _run(self) -> None:
        is_last, wait, is_failing = False, None, False
        while not is_last:
            self._wake.wait(wait)
            self._wake.clear()
            is_last, n_bytes = self._deadline is not None, self.bytes_written
            try:
                wait = None if self._write_all(is_last) else RETRY
                is_failing = is_failing and self.bytes_written == n_bytes  # until something was written
            except Exception as e:
                if not is_failing:  # one line for all attempts in a row
                    is_known = isinstance(e, OSError | sqlite3.Error)
                    again = (
                        f"The prompt cache in {self.folder.path} cannot be written now and will be tried again: {e}."
                    )
                    logging.warning(again, exc_info=not is_known)
                wait, is_failing = RETRY, True
        self.folder.close()

    def _write_all(self, is_last: bool) -> bool:
        """Write all parts that are due -> whether nothing has to be tried again later."""
        if names := [self._touched.pop() for _ in range(len(self._touched))]:
            self.folder.touch(names)
        while (write := self.next_write(is_last)) is not None:
            if self._deadline is not None and (not is_last or time.monotonic() > self._deadline):
                return True  # begin again, with more parts, since the store is being closed; or the time is up
            outcome, name = self._write(write)
            if outcome is Outcome.LATER:
                return False
            if outcome is Outcome.BUSY:
                time.sleep(POLL)
            else:
                self.on_written(write, outcome, name)
        return True

    def _write(self, write: PendingWrite) -> tuple[Outcome, str]:
        """
        Raises:
            OSError, sqlite3.Error: The folder cannot be written to.
        """
        tokens, own = None, write.arrays
        if write.tokens is not None:
            tokens, own = write.tokens.tobytes(), {"tokens": mx.array(write.tokens)} | own
        try:
            name, data = array_file.encode(own, {"model": write.model, "parent": write.parent})
        except Exception:
            logging.exception("A part of a text is not written to the prompt cache.")
            return Outcome.FAILED, ""
        outcome = self.folder.write(write.model, write.parent, tokens, name, data)
        if outcome is Outcome.WRITTEN:
            self.bytes_written += len(data)
        return outcome, name
