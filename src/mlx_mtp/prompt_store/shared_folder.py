"""A folder of arrays of texts, and an SQLite index of its files. Several processes may share it.

    index.sqlite             one row for each file
    0f3a...9c.safetensors    a span: tokens, keys and values; or a snapshot: the states after a span's last token
    5be1...07.writer         locked as long as a writing process is alive

A row with the name of its writer is made before its file is written, and is completed when the file is. So the folder never
exceeds its limit, and the index lists what a killed process leaves behind. A file without a row is removed. Files are not
synchronized with the disk: a power failure may damage some, which is recognized by their digests.
"""

import logging
import os
import re
import shutil
import sqlite3
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum, auto
from pathlib import Path
from typing import NamedTuple

from . import array_file
from .array_file import SUFFIX
from .writer_lock import SUFFIX as LOCK_SUFFIX
from .writer_lock import WriterLock, is_alive

LAYOUT = 3  # version of the index and the files; files of another version are removed
DAMAGE = (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)  # SQLite's codes for a damaged index
FREE_SHARE, FREE = 0.05, 1 << 30  # a share of the disk, and bytes: the smaller one is left free
BUSY = 10.0  # seconds to wait while another process writes to the index
OURS = re.compile(rf"([0-9a-f]{{32}}){re.escape(SUFFIX)}(\.(\w+)\.tmp)?")
TABLES = """
CREATE TABLE IF NOT EXISTS files (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- in the order in which they were done; none is given twice
    name TEXT UNIQUE NOT NULL,     -- of the file
    model TEXT NOT NULL,           -- whose it is
    parent TEXT NOT NULL,          -- the span before a span, '' for none; the span that a snapshot is at the end of
    tokens BLOB,                   -- of a span; NULL for a snapshot
    nbytes INTEGER NOT NULL,       -- of the file
    used REAL NOT NULL,            -- when it was last used, in seconds since 1970
    writer TEXT                    -- its writer; NULL when it is complete
);
CREATE INDEX IF NOT EXISTS children ON files (parent);
CREATE TABLE IF NOT EXISTS written (hour INTEGER PRIMARY KEY, nbytes INTEGER NOT NULL);
"""


class Entry(NamedTuple):
    """A row of the index."""

    id: int
    name: str
    parent: str
    tokens: bytes | None
    nbytes: int


class Outcome(Enum):
    """The outcome of writing a file."""

    WRITTEN = auto()
    THERE = auto()  # it was written before
    BUSY = auto()  # another process is writing it
    ORPHAN = auto()  # the span that it belongs to was removed
    NO_SPACE = auto()
    FAILED = auto()  # the arrays cannot be written
    LATER = auto()  # the hourly limit is reached


class SharedFolder:
    """
    Args:
        path (Path): The folder, which is created if it does not exist. Only its owner may read it and its files.
        max_bytes (int): The maximum size of all files.
        max_hourly (int): The maximum number of bytes that all processes together write in an hour.

    Raises:
        OSError: The folder cannot be written to.
    """

    def __init__(self, path: Path, max_bytes: int, max_hourly: int):
        self.path, self.max_bytes, self.max_hourly = path, max_bytes, max_hourly
        self._lock = threading.Lock()  # protects the connection, which two threads use
        self._writer: WriterLock | None = None
        _make_private(path)
        index = path / "index.sqlite"
        try:
            self._db = _connect(index)
        except sqlite3.DatabaseError as e:
            if not _is_damage(e):  # it is locked, or the disk is full: the index is kept
                raise OSError(f"{index} cannot be used: {e}.") from e
            logging.warning(f"{index} cannot be used ({e}): it is moved aside, and the prompt cache starts empty.")
            for suffix in ("-wal", "-shm"):
                Path(f"{index}{suffix}").unlink(missing_ok=True)
            index.replace(index.with_suffix(".damaged"))
            self._db = _connect(index)
        try:
            self._sweep()
        except BaseException as e:
            self.close()
            if not isinstance(e, sqlite3.Error):
                raise
            raise OSError(f"{index} cannot be used: {e}.") from e

    def close(self) -> None:
        with self._lock:
            self._db.close()
        if self._writer is not None:
            self._writer.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def _sweep(self) -> None:
        """Remove the files that killed processes left behind, and become a writer."""
        with self._transaction() as db:
            self._writer = WriterLock(self.path)
            for (writer,) in db.execute("SELECT DISTINCT writer FROM files WHERE writer IS NOT NULL").fetchall():
                if not is_alive(self.path, writer):
                    db.execute("DELETE FROM files WHERE writer = ?", (writer,))
            known = {name for (name,) in db.execute("SELECT name FROM files")}
            for file in self.path.iterdir():
                if (match := OURS.fullmatch(file.name)) is not None:
                    name, is_temporary, writer = match.groups()
                    is_left = name not in known or (is_temporary and not is_alive(self.path, writer))
                else:
                    is_left = file.suffix == LOCK_SUFFIX and not is_alive(self.path, file.stem)
                if is_left:
                    file.unlink(missing_ok=True)

    # Read

    def entries(self, model: str, after: int) -> list[Entry]:
        """The files of a model that were completed after the one with this number."""
        query = "SELECT id, name, parent, tokens, nbytes FROM files WHERE model = ? AND id > ? AND writer IS NULL"
        with self._lock:
            return [Entry(*row) for row in self._db.execute(f"{query} ORDER BY id", (model, after))]

    def read(self, name: str) -> bytes:
        """
        Raises:
            ValueError: The file is damaged.
            OSError: It cannot be read, for example because it was removed.
        """
        return array_file.read(self._file(name))

    def touch(self, names: Iterable[str]) -> None:
        """Record that these files are in use."""
        with self._transaction() as db:
            db.executemany("UPDATE files SET used = ? WHERE name = ?", [(time.time(), name) for name in names])

    def forget(self, name: str) -> None:
        """Remove a file, and all files that continue it."""
        below = "WITH RECURSIVE below(name) AS (SELECT ? UNION SELECT p.name FROM files p JOIN below b ON p.parent = b.name)"
        with self._transaction() as db:
            for (found,) in db.execute(f"{below} SELECT name FROM below", (name,)).fetchall():
                self._drop(db, found)

    # Write

    def write(self, model: str, parent: str, tokens: bytes | None, name: str, data: memoryview) -> Outcome:
        """Write a file, and remove the least recently used files to make space.

        Raises:
            OSError: The disk is full, or the folder cannot be written to.
        """
        outcome = self._reserve(name, model, parent, tokens, len(data))
        if outcome is not Outcome.WRITTEN:
            return outcome
        try:
            array_file.write(self._file(name), self._temporary(name, self._name), data)
        except BaseException:
            with self._transaction() as db:
                self._drop(db, name)
            raise
        columns = "name, model, parent, tokens, nbytes, used"
        done = f"REPLACE INTO files ({columns}) SELECT {columns} FROM files WHERE name = ? AND writer = ?"
        with self._transaction() as db:
            if db.execute(done, (name, self._name)).rowcount == 0:  # another process has removed it
                self._file(name).unlink(missing_ok=True)
                return Outcome.ORPHAN
        return outcome

    def _reserve(self, name: str, model: str, parent: str, tokens: bytes | None, nbytes: int) -> Outcome:
        """Make a row for a file, and space for it."""
        hour = int(time.time() // 3600)
        if nbytes > self.max_bytes:
            return Outcome.NO_SPACE
        with self._transaction() as db:
            if (row := db.execute("SELECT writer FROM files WHERE name = ?", (name,)).fetchone()) is not None:
                if row[0] is None:
                    return Outcome.THERE
                if is_alive(self.path, row[0]):
                    return Outcome.BUSY
                self._temporary(name, row[0]).unlink(missing_ok=True)
                self._drop(db, name)
            has_parent = "SELECT 1 FROM files WHERE name = ? AND tokens IS NOT NULL AND writer IS NULL"
            if parent and not db.execute(has_parent, (parent,)).fetchone():
                return Outcome.ORPHAN
            written = db.execute("SELECT nbytes FROM written WHERE hour = ?", (hour,)).fetchone()
            if (written[0] if written else 0) + nbytes > self.max_hourly:
                return Outcome.LATER
            while nbytes > min(self.max_bytes - _total(db), _room_on_disk(self.path)):
                if not self._drop_oldest(db, parent):
                    return Outcome.NO_SPACE
            row = (name, model, parent, tokens, nbytes, time.time(), self._name)
            db.execute(
                "INSERT INTO files (name, model, parent, tokens, nbytes, used, writer) VALUES (?, ?, ?, ?, ?, ?, ?)",
                row,
            )
            db.execute(
                "INSERT INTO written VALUES (?, ?) ON CONFLICT (hour) DO UPDATE SET nbytes = nbytes + excluded.nbytes",
                (hour, nbytes),
            )
            db.execute("DELETE FROM written WHERE hour < ?", (hour,))
        return Outcome.WRITTEN

    def _drop_oldest(self, db: sqlite3.Connection, needed: str) -> bool:
        """Remove the least recently used file that no other file continues -> whether there was one."""
        oldest = db.execute(
            "SELECT name FROM files p WHERE writer IS NULL AND name != ? "
            "AND NOT EXISTS (SELECT 1 FROM files c WHERE c.parent = p.name) ORDER BY used, id DESC LIMIT 1",
            (needed,),
        ).fetchone()
        if oldest is not None:
            self._drop(db, oldest[0])
        return oldest is not None

    def _drop(self, db: sqlite3.Connection, name: str) -> None:
        self._file(name).unlink(missing_ok=True)
        db.execute("DELETE FROM files WHERE name = ?", (name,))

    @property
    def _name(self) -> str:
        """The name of this writer in the index."""
        assert self._writer is not None
        return self._writer.name

    def _file(self, name: str) -> Path:
        return self.path / f"{name}{SUFFIX}"

    def _temporary(self, name: str, writer: str) -> Path:
        return self.path / f"{name}{SUFFIX}.{writer}.tmp"


def _connect(index: Path) -> sqlite3.Connection:
    """
    Raises:
        sqlite3.DatabaseError: The index is damaged, of another layout, locked, or the disk is full.
    """
    for file in index.parent.glob("index.*"):  # of an earlier version
        with suppress(OSError):
            file.chmod(0o600)
    with suppress(FileExistsError), open(index, "xb", opener=array_file.private):
        pass  # SQLite gives the other files of the index the mode of this one
    db = sqlite3.connect(index, timeout=BUSY, isolation_level=None, check_same_thread=False)
    try:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        db.execute("PRAGMA wal_autocheckpoint=64")  # pages: the log is small beside the files
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, LAYOUT):
            raise sqlite3.DatabaseError(f"its layout is {version}, not {LAYOUT}")
        if (found := db.execute("PRAGMA quick_check").fetchone()[0]) != "ok":
            raise sqlite3.DatabaseError(found)
        db.executescript(TABLES)
        if version == 0:
            db.execute(f"PRAGMA user_version={LAYOUT}")
        db.execute("SELECT id, name, model, parent, tokens, nbytes, used, writer FROM files").fetchone()
        db.execute("SELECT hour, nbytes FROM written").fetchone()
    except BaseException:
        db.close()
        raise
    return db


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


def _room_on_disk(path: Path) -> int:
    disk = shutil.disk_usage(path)
    return disk.free - min(int(FREE_SHARE * disk.total), FREE)


def _total(db: sqlite3.Connection) -> int:
    total: int = db.execute("SELECT COALESCE(SUM(nbytes), 0) FROM files").fetchone()[0]
    return total


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    """Whether the error means that the index is damaged or of another program, rather than locked or without space."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    return code & 0xFF in DAMAGE or code == sqlite3.SQLITE_IOERR_SHORT_READ
