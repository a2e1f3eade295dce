"""A folder of pieces of texts, and an SQLite index that says what there is. Several processes may share it.

    index.sqlite             one row for each file
    0f3a...9c.safetensors    a span: tokens and their rows; or a snapshot: the states after a span's last token

A row is made before its file is written, with the number of the process that writes it, and is done when the file has its
name. So the folder is never larger than its limit, and what a killed process has left is known. A file without a row is
nobody's. Files are not forced to the disk: what a power failure damages has another digest.
"""

import logging
import os
import re
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from pathlib import Path
from typing import Any, NamedTuple

from . import array_file
from .array_file import SUFFIX
from .arrays import Arrays

LAYOUT = 2  # of the index and the files
DAMAGE = (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)  # what SQLite says of a damaged index
FREE_SHARE, FREE = 0.05, 1 << 30  # of the disk, and bytes: the lesser is left free for others
BUSY = 10.0  # seconds to wait for another process that writes to the index
OURS = re.compile(rf"([0-9a-f]{{32}}){re.escape(SUFFIX)}(\.(\d+)\.tmp)?")
TABLES = """
CREATE TABLE IF NOT EXISTS pieces (
    id INTEGER PRIMARY KEY,        -- in the order in which they were done
    name TEXT UNIQUE NOT NULL,     -- of the file
    model TEXT NOT NULL,           -- whose it is
    parent TEXT NOT NULL,          -- the span before a span, '' for none; the span that a snapshot is at the end of
    tokens BLOB,                   -- of a span; NULL for a snapshot
    nbytes INTEGER NOT NULL,       -- of the file
    used REAL NOT NULL,            -- when it was last used, in seconds since 1970
    writer INTEGER                 -- the process that writes it; NULL where it is done
);
CREATE INDEX IF NOT EXISTS children ON pieces (parent);
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
    """Of writing a piece."""

    WRITTEN = auto()
    THERE = auto()  # somebody wrote it before
    ORPHAN = auto()  # what it belongs to is no longer there
    NO_SPACE = auto()
    LATER = auto()  # the hour's bytes are used up


class SharedFolder:
    """
    Args:
        path (Path): It is made if it does not exist.
        max_bytes (int): The most that all files may take.
        max_hourly (int): The most bytes that all processes may write in an hour.

    Raises:
        OSError: The folder cannot be written to.
    """

    def __init__(self, path: Path, max_bytes: int, max_hourly: int):
        self.path, self.max_bytes, self.max_hourly = path, max_bytes, max_hourly
        self._lock = threading.Lock()  # of the connection, which two threads use
        path.mkdir(parents=True, exist_ok=True)
        index = path / "index.sqlite"
        try:
            self._open(index)
        except sqlite3.DatabaseError as e:
            if not _is_damage(e):  # it is locked, or the disk is full: what is there stays
                raise OSError(f"{index} cannot be used: {e}.") from e
            logging.warning(f"{index} cannot be used ({e}): it is put aside, and the prompt cache begins anew.")
            for suffix in ("-wal", "-shm"):
                Path(f"{index}{suffix}").unlink(missing_ok=True)
            index.replace(index.with_suffix(".damaged"))
            self._open(index)
        try:
            self._sweep()
        except sqlite3.Error as e:
            self.close()
            raise OSError(f"{index} cannot be used: {e}.") from e

    def _open(self, index: Path) -> None:
        self._db = sqlite3.connect(index, timeout=BUSY, isolation_level=None, check_same_thread=False)
        try:
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute("PRAGMA wal_autocheckpoint=64")  # pages: the log is small beside the files
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, LAYOUT):
                raise sqlite3.DatabaseError(f"its layout is {version}, not {LAYOUT}")
            if (found := self._db.execute("PRAGMA quick_check").fetchone()[0]) != "ok":
                raise sqlite3.DatabaseError(found)
            self._db.executescript(TABLES)
            if version == 0:
                self._db.execute(f"PRAGMA user_version={LAYOUT}")
            self._db.execute("SELECT id, name, model, parent, tokens, nbytes, used, writer FROM pieces").fetchone()
            self._db.execute("SELECT hour, nbytes FROM written").fetchone()
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        with self._lock:
            self._db.close()

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
        """Remove what killed processes have left."""
        with self._transaction() as db:
            writers = [pid for (pid,) in db.execute("SELECT DISTINCT writer FROM pieces WHERE writer IS NOT NULL")]
            for pid in writers:
                if pid == os.getpid() or not _is_alive(pid):
                    db.execute("DELETE FROM pieces WHERE writer = ?", (pid,))
            known = {name for (name,) in db.execute("SELECT name FROM pieces")}
            for file in self.path.iterdir():
                if (match := OURS.fullmatch(file.name)) is None:
                    continue
                name, is_temporary, pid = match.groups()
                if name not in known or (is_temporary and not _is_alive(int(pid))):
                    file.unlink(missing_ok=True)

    # What there is

    def entries(self, model: str, after: int) -> list[Entry]:
        """The pieces of a model that were done after the one with this number."""
        query = "SELECT id, name, parent, tokens, nbytes FROM pieces WHERE model = ? AND id > ? AND writer IS NULL"
        with self._lock:
            return [Entry(*row) for row in self._db.execute(f"{query} ORDER BY id", (model, after))]

    @property
    def nbytes(self) -> int:
        with self._lock:
            return _total(self._db)

    def read(self, name: str) -> tuple[Arrays, dict[str, str]]:
        """
        Raises:
            Damaged: The file is damaged.
            OSError: It cannot be read, as where it was dropped.
        """
        return array_file.read(self._file(name))

    def touch(self, names: Iterable[str]) -> None:
        """These pieces are being used."""
        with self._transaction() as db:
            db.executemany("UPDATE pieces SET used = ? WHERE name = ?", [(time.time(), name) for name in names])

    def forget(self, name: str) -> None:
        """Drop a piece, and all that builds on it."""
        below = "WITH RECURSIVE below(name) AS (SELECT ? UNION SELECT p.name FROM pieces p JOIN below b ON p.parent = b.name)"
        with self._transaction() as db:
            for (found,) in db.execute(f"{below} SELECT name FROM below", (name,)).fetchall():
                self._drop(db, found)

    # Write

    def write(self, model: str, parent: str, tokens: bytes | None, name: str, parts: list[Any]) -> Outcome:
        """Write a piece, and drop those that were used least recently to make space.

        Raises:
            OSError: The disk is full, or the folder cannot be written to.
        """
        nbytes = sum(memoryview(part).nbytes for part in parts)
        outcome = self._reserve(name, model, parent, tokens, nbytes)
        if outcome is not Outcome.WRITTEN:
            return outcome
        try:
            array_file.write(self._file(name), parts)
        except BaseException:
            with self._transaction() as db:
                self._drop(db, name)
            raise
        with self._transaction() as db:
            done = "UPDATE pieces SET writer = NULL, id = (SELECT MAX(id) + 1 FROM pieces) WHERE name = ?"
            if db.execute(done, (name,)).rowcount == 0:  # somebody took this process for dead
                self._file(name).unlink(missing_ok=True)
                return Outcome.ORPHAN
        return outcome

    def _reserve(self, name: str, model: str, parent: str, tokens: bytes | None, nbytes: int) -> Outcome:
        """Make a row for a file, and space for it."""
        hour = int(time.time() // 3600)
        if nbytes > self.max_bytes:
            return Outcome.NO_SPACE
        with self._transaction() as db:
            if db.execute("SELECT 1 FROM pieces WHERE name = ?", (name,)).fetchone():
                return Outcome.THERE
            has_parent = "SELECT 1 FROM pieces WHERE name = ? AND tokens IS NOT NULL AND writer IS NULL"
            if parent and not db.execute(has_parent, (parent,)).fetchone():
                return Outcome.ORPHAN
            written = db.execute("SELECT nbytes FROM written WHERE hour = ?", (hour,)).fetchone()
            if (written[0] if written else 0) + nbytes > self.max_hourly:
                return Outcome.LATER
            while nbytes > min(self.max_bytes - _total(db), self._room_on_disk()):
                if not self._drop_oldest(db, parent):
                    return Outcome.NO_SPACE
            row = (name, model, parent, tokens, nbytes, time.time(), os.getpid())
            db.execute(
                "INSERT INTO pieces (name, model, parent, tokens, nbytes, used, writer) VALUES (?, ?, ?, ?, ?, ?, ?)",
                row,
            )
            db.execute(
                "INSERT INTO written VALUES (?, ?) ON CONFLICT (hour) DO UPDATE SET nbytes = nbytes + excluded.nbytes",
                (hour, nbytes),
            )
            db.execute("DELETE FROM written WHERE hour < ?", (hour,))
        return Outcome.WRITTEN

    def _room_on_disk(self) -> int:
        disk = shutil.disk_usage(self.path)
        return disk.free - min(int(FREE_SHARE * disk.total), FREE)

    def _drop_oldest(self, db: sqlite3.Connection, needed: str) -> bool:
        """Drop the piece that was used least recently of those on which no other builds -> whether there was one."""
        oldest = db.execute(
            "SELECT name FROM pieces p WHERE writer IS NULL AND name != ? "
            "AND NOT EXISTS (SELECT 1 FROM pieces c WHERE c.parent = p.name) ORDER BY used, id DESC LIMIT 1",
            (needed,),
        ).fetchone()
        if oldest is not None:
            self._drop(db, oldest[0])
        return oldest is not None

    def _drop(self, db: sqlite3.Connection, name: str) -> None:
        self._file(name).unlink(missing_ok=True)
        db.execute("DELETE FROM pieces WHERE name = ?", (name,))

    def _file(self, name: str) -> Path:
        return self.path / f"{name}{SUFFIX}"


def _total(db: sqlite3.Connection) -> int:
    total: int = db.execute("SELECT COALESCE(SUM(nbytes), 0) FROM pieces").fetchone()[0]
    return total


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    """Whether the index is no index, or another one's: all else is not its fault."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    return code & 0xFF in DAMAGE or code == sqlite3.SQLITE_IOERR_SHORT_READ


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
