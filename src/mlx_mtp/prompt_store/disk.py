"""The folder of a prompt store, with a file for each span and snapshot of a text, and the threads that write and read it.

    lock                     locked by the process that owns the folder, until it ends
    0f3a...9c.safetensors    a span: tokens, keys and values; or a snapshot: the states after a span's last token
    new.safetensors          the file that is being written

A file is named by digests of its header and tokens, which are checked when the folder is opened, and of its bytes, checked when
it is read. It names the span that it continues, and gets its name when it is complete.
"""

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import mlx.core as mx
import numpy as np
from safetensors import safe_open

from ..core.caches.prompt_cache import part_of
from ..errors import MTPError
from ..files import MAX_DISK_BYTES
from .arrays import Arrays, Format, Tokens, nbytes
from .tree import File, Forest, Node, StoredArrays, above

LAYOUT = "5"  # version of the files; files of another version are removed
FLUSH = 10.0  # seconds to write the rest when a store is closed
LAST_FILE = 5.0  # seconds more for the file that is being written at that time
READ_TIMEOUT = 5.0  # seconds to wait for a file; prefill takes over then
FREE_SHARE, FREE = 0.05, 1 << 30  # a share of the disk, and bytes: the smaller one is left free
HEADER = 1 << 8  # bytes of a file's header for each array, at most
OURS = re.compile(r"[0-9a-f]{32}\.safetensors")
NEW = "new.safetensors"


def key_of(model: Any, format: Format) -> str:
    """The name of a model and a format: a hash of everything that the bits of the arrays depend on."""
    device = mx.device_info().get("device_name", "") if mx.metal.is_available() else str(mx.default_device())
    versions = version("mlx"), version("mlx-lm")
    what = [versions, device, model.fingerprint().hex(), part_of(model), format]
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:32]


class Folder:
    """A folder of files, of which the least recently used go first when it is full. Several stores of a process may share it.

    Raises a BlockingIOError if another process owns it, or another ``Folder`` of this one.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_DISK_BYTES):
        self.path = path.expanduser()
        self.max_bytes = max_bytes
        # By name, the least recently used first. A file comes before the one that it continues.
        self.files: OrderedDict[str, File] = OrderedDict()
        self.n_users = 0  # stores; the last one to close gives up the folder
        self._mutex = threading.Lock()  # protects the order of the files; nothing waits for the disk while holding it
        self._writing = threading.Lock()
        _make_private(self.path)
        self._owner = _own(self.path)
        try:
            self._find_files()
        except BaseException:
            self.close_unused()
            raise

    def close_unused(self) -> None:
        """Let another process have the folder, if no store uses it."""
        if self.n_users == 0:
            self._owner.close()

    def _find_files(self) -> None:
        (self.path / NEW).unlink(missing_ok=True)
        ours = [file for file in self.path.iterdir() if OURS.fullmatch(file.name)]
        found = {file.stem: entry for file in ours if (entry := _read_entry(file)) is not None}
        n_found = -1
        while len(self.files) > n_found:  # each after the one that it continues
            n_found = len(self.files)
            self.files |= {name: file for name, file in found.items() if file.parent in ("", *self.files)}
        if lost := [file for file in ours if file.stem not in self.files]:
            logging.warning(f"{len(lost)} files in {self.path} are damaged, or of another version: they are removed.")
            for file in lost:
                file.unlink()
        for name in sorted(self.files, key=lambda name: self._file(name).stat().st_mtime_ns):
            self._move_to_end(name)

    def of(self, model: str) -> list[File]:
        """The files of a model, each after the one that it continues."""
        return [file for file in self._in_order()[::-1] if file.model == model]

    def touch(self, name: str) -> None:
        """Record that a file is in use, and those that it continues."""
        for file in self._move_to_end(name):
            with suppress(FileNotFoundError):
                os.utime(self._file(file.name))

    def read(self, name: str) -> Arrays | None:
        """For the reader: the arrays of a file; ``None`` if it is gone. A damaged one is removed, with all that continue it."""
        if (file := self.files.get(name)) is None:
            return None
        try:
            if _name_of(self._file(name), file.tokens) != name:
                raise MTPError(f"{self._file(name)} is damaged: its bytes do not match its name.")
            found: Any = mx.load(str(self._file(name)))
            mx.eval(found)
            if file.tokens is not None and not np.array_equal(found.pop("tokens"), file.tokens):
                raise MTPError(f"{self._file(name)} is damaged: it holds another text than before.")
        except (OSError, ValueError, RuntimeError) as e:
            if not isinstance(e, FileNotFoundError):
                logging.warning(f"{e} It is removed.")
            self._remove(name)
            return None
        return found

    def write(self, model: str, parent: str, tokens: Tokens | None, arrays: Arrays) -> File | None:
        """Write a file, and remove the least recently used ones to make space -> the file; ``None`` if there is no space."""
        arrays = arrays if tokens is None else {"tokens": mx.array(tokens)} | arrays
        with self._writing:
            before = self._move_to_end(parent)
            while nbytes(arrays) + HEADER * (len(arrays) + 1) > self._room():
                others = self._in_order()[: -len(before) or None]
                if not others:
                    return None
                self._remove(others[0].name)
            new = self.path / NEW
            try:
                new.touch(mode=0o600)
                mx.save_safetensors(str(new), arrays, {"layout": LAYOUT, "model": model, "parent": parent})
                file = File(_name_of(new, tokens), model, parent, tokens, new.stat().st_size)
                if file.name not in self.files:  # otherwise the same text, read alike
                    os.replace(new, self._file(file.name))
            finally:
                new.unlink(missing_ok=True)
            self.files[file.name] = file
            self._move_to_end(file.name)
            return file

    def _room(self) -> int:
        disk = shutil.disk_usage(self.path)
        free = disk.free - min(int(FREE_SHARE * disk.total), FREE)
        return min(free, self.max_bytes - sum(file.nbytes for file in self._in_order()))

    def _remove(self, name: str) -> None:
        """Remove a file, and all files that continue it."""
        for file in [file for file in self._in_order() if file.parent == name]:
            self._remove(file.name)
        with self._mutex:
            self.files.pop(name, None)
        with suppress(OSError):
            self._file(name).unlink()

    def _in_order(self) -> list[File]:
        with self._mutex:
            return [*self.files.values()]

    def _move_to_end(self, name: str) -> list[File]:
        """Make a file the last to go, except for those that it continues -> the file, the one that it continues, and so on."""
        path = []
        with self._mutex:
            while (file := self.files.get(name)) is not None:
                self.files.move_to_end(name)
                path.append(file)
                name = file.parent
        return path

    def _file(self, name: str) -> Path:
        return self.path / f"{name}.safetensors"


class Disk:
    """The threads between a store and its folder: no other thread waits for the disk. A lock protects the store's forest."""

    def __init__(self, folder: Folder, forest: Forest, lock: "threading.RLock"):
        self.folder = folder
        self.forest = forest
        self._lock = lock
        self.bytes_written = self.bytes_read = 0  # by this store
        self._touched: set[str] = set()
        self._wake = threading.Event()
        self._deadline: float | None = None  # once it is closed
        self._jobs: SimpleQueue[tuple[Callable[[], None], threading.Event] | None] = SimpleQueue()
        folder.n_users += 1
        self._writer = threading.Thread(target=self._write_all, name="prompt-store-writer", daemon=True)
        self._reader = threading.Thread(target=self._read_all, name="prompt-store-reader", daemon=True)
        self._writer.start()
        self._reader.start()

    def wake(self, used: Sequence[StoredArrays] = ()) -> None:
        """Have the writing thread look for parts to write, and record that the files of these parts are in use."""
        self._touched.update(part.name for part in used if part.name is not None)
        self._wake.set()

    def in_reader(self, call: Callable[[], None], timeout: float) -> None:
        """Make a call in the thread that reads, and wait for it while files arrive, at most ``timeout`` seconds for each."""
        is_done = threading.Event()
        n = self.bytes_read
        self._jobs.put((call, is_done))
        while not is_done.wait(timeout) and n != self.bytes_read:
            n = self.bytes_read

    def read(self, stored: StoredArrays) -> Arrays | None:
        """The arrays of a span or snapshot from its file; ``None`` if it is gone or damaged. For the reader alone."""
        if (found := self.folder.read(stored.name or "")) is not None:
            self.bytes_read += stored.nbytes
        return found

    def close(self, seconds: float) -> None:
        """Write the rest, for at most this time. A file that is being read is not waited for."""
        self._deadline = time.monotonic() + seconds
        self._jobs.put(None)
        self.wake()
        self._reader.join(1.0)
        self._writer.join(seconds + LAST_FILE)
        if not self._writer.is_alive():
            self.folder.n_users -= 1
            self.folder.close_unused()

    # In the reader

    def _read_all(self) -> None:
        while (job := self._jobs.get()) is not None:
            call, is_done = job
            try:
                call()
            except Exception:  # such as a change of the loaded model
                logging.debug("Reading from the prompt cache on disk failed.", exc_info=True)
            is_done.set()
        mx.clear_streams()

    # In the writer

    def _write_all(self) -> None:
        is_last = is_failing = False
        while not is_last:
            self._wake.wait()
            self._wake.clear()
            is_last = self._deadline is not None
            n_bytes = self.bytes_written
            try:
                while self._touched:
                    self.folder.touch(self._touched.pop())
                while self._write_next(is_last):
                    if self._deadline is not None and (not is_last or time.monotonic() > self._deadline):
                        break  # begin again, with more parts, since the store is being closed; or the time is up
                is_failing = is_failing and self.bytes_written == n_bytes
            except Exception as e:
                if not is_failing:  # one line for all attempts in a row
                    logging.warning(
                        f"The prompt cache in {self.folder.path} cannot be written now: {str(e).rstrip('.')}."
                    )
                is_failing = True  # the next text is the next attempt

    def _write_next(self, is_last: bool) -> bool:
        """Write the next part -> whether there was one."""
        with self._lock:
            if (found := self._find_next(is_last)) is None:
                return False
            node, stored = found
            is_span = stored is node.span
            arrays = stored.arrays
            key = self.forest.keys[next(format for format, r in self.forest.roots.items() if r is node.path()[0])]
        assert node.parent is not None
        parent = node.parent.span if is_span else node.span
        file = self.folder.write(key, parent.name or "", node.tokens if is_span else None, arrays)
        stored.refused = file is None
        if file is not None:
            stored.name = file.name
            self.bytes_written += file.nbytes
            with self._lock:
                siblings = [] if node.parent is None or not is_span else node.parent.children
                for twin in [n for n in siblings if n is not node and n.span.name == file.name]:
                    self.forest.merge(node, twin)  # this text was on disk alone
        return True

    def _find_next(self, is_last: bool) -> tuple[Node, StoredArrays] | None:
        """The next part to write: the spans above the most recently used snapshot that is worth it, then the snapshot."""
        waiting = [node for node in self.forest.nodes() if node.snapshot.in_memory and node.snapshot.name is None]
        for node in sorted(waiting, key=lambda node: -node.used):
            if node.snapshot.refused or not (_is_worth_writing(node) or (is_last and not node.children)):
                continue
            span = next((n for n in node.path()[1:] if n.span.name not in self.folder.files), None)
            if span is None:
                return node, node.snapshot
            if not span.span.in_memory:  # its file went to make space
                self.forest.remove(span)
            elif not span.span.refused:
                return span, span.span
        return None


def _is_worth_writing(node: Node) -> bool:
    """Whether a snapshot has at most the bytes of the keys and values since the one above, or other texts may need it."""
    last = above(node, lambda n: n.snapshot.name is not None)
    n_bytes = (node.length - last.length) * node.span.nbytes / len(node.tokens)
    return n_bytes >= node.snapshot.nbytes or node.uses > 1 or len({c.tokens.tobytes() for c in node.children}) > 1


def _read_entry(file: Path) -> File | None:
    """The entry of a file, by its header and tokens; ``None`` if it is damaged or of another version."""
    try:
        if not file.is_file():
            return None
        with safe_open(file, "np") as opened:  # checks that the file is complete
            metadata = opened.metadata()
            tokens = opened.get_tensor("tokens") if "tokens" in opened.keys() else None  # noqa: SIM118
        is_text = tokens is None or (tokens.dtype == np.int64 and tokens.ndim == 1 and len(tokens) > 0)
        if metadata["layout"] != LAYOUT or not is_text or not file.stem.startswith(_digest_of_header(file, tokens)):
            return None
        return File(file.stem, metadata["model"], metadata["parent"], tokens, file.stat().st_size)
    except Exception:  # whatever a damaged header leads to
        return None


def _name_of(file: Path, tokens: Tokens | None) -> str:
    """The digest of a file's header and tokens, followed by that of its bytes."""
    with file.open("rb") as opened:
        return _digest_of_header(file, tokens) + hashlib.file_digest(opened, "sha256").hexdigest()[:24]


def _digest_of_header(file: Path, tokens: Tokens | None) -> str:
    with file.open("rb") as opened:
        header = opened.read(min(int.from_bytes(opened.read(8), "little"), file.stat().st_size))
    return hashlib.sha256(header + (b"" if tokens is None else tokens.tobytes())).hexdigest()[:8]


def _own(path: Path) -> Any:
    """Become the owner of a folder -> its locked file. The system unlocks it when the process ends, however it ends."""
    file = open(path / "lock", "a+b", opener=lambda name, flags: os.open(name, flags, 0o600))  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        with file:
            file.seek(0)
            raise BlockingIOError(f"The prompt cache in {path} is in use by process {file.read().decode()}.") from e
    except BaseException:
        file.close()
        raise
    with suppress(OSError):  # a full disk
        os.ftruncate(file.fileno(), 0)
        os.write(file.fileno(), str(os.getpid()).encode())
    return file


def _make_private(path: Path) -> None:
    """Create a folder that only its owner may read, or restrict an existing one: the texts in it are private."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if status.st_mode & 0o077 == 0:
        return
    if status.st_uid == os.geteuid() and not status.st_mode & stat.S_ISVTX:
        with suppress(OSError):  # a file system without permissions
            path.chmod(0o700)
            return
    logging.warning(f"Other users can list {path}, and so see which texts are in it: use a folder of your own.")
