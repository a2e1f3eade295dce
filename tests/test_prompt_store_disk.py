"""A prompt store's folder: what comes back after a restart, who may share it, and what happens where it is damaged or full."""

import errno
import os
import random
import sqlite3
import stat
import tempfile
import threading
import time
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models import cache as stock

from mlx_mtp.caches.prompt_cache import PromptCache
from mlx_mtp.prompt_store import PromptStore, array_file, disk_writer, shared_folder
from mlx_mtp.prompt_store.arrays import Format
from mlx_mtp.prompt_store.shared_folder import Outcome, SharedFolder
from tests.support.checkpoints import full_disk
from tests.support.models import FAMILIES, PACK, tiny_model
from tests.support.profiles import LONG, examples
from tests.support.prompt_store import KV, TEXT, assert_same_next, model_of, names, read

CUTS, ROOM = (4, 9), 1 << 30
SIXTY = [i % 32 for i in range(60)]  # the model's snapshots take as much as some 30 tokens
Folder = shared_folder.SharedFolder
SEEDS = pytest.mark.parametrize(
    "seeds", [range(4), pytest.param(range(4, 100), marks=pytest.mark.slow)], ids=["some", "many"]
)


def stored(path, model=None, **options):
    return PromptStore(model or model_of("qwen3_5"), ROOM, folder=path, **options)


def fill(path, model=None, text=TEXT, cuts=CUTS, kv=None, **options):
    with stored(path, model, **options) as store:
        read(store.model, text, cuts, store, kv)


def n_found(path, text=TEXT, model=None):
    """The tokens of a text that a new store of the folder has."""
    with stored(path, model) as store:
        return store.fetch([*text, 7])[1]


def pieces(path):
    return sorted(path.glob("*.safetensors"))


def size(path):
    return sum(file.stat().st_size for file in pieces(path))


def in_memory(store):
    """The bytes that its nodes have in memory."""
    nodes = [(node.span, node.snapshot) for node in store._forest.nodes()]
    return sum(part.nbytes for parts in nodes for part in parts if part is not None and part.in_memory)


def folder_of(path):
    return SharedFolder(path, ROOM, ROOM)


def forget_all(path):
    """Drop all files, as another process does that needs the space."""
    with closing(folder_of(path)) as other:
        for file in pieces(path):
            other.forget(file.stem)


def change_index(path, *statement):
    with closing(sqlite3.connect(path / "index.sqlite")) as db, db:
        db.execute(*statement)


def wait_until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def all_written(store):
    with store._lock:
        return store._files.next_write(False) is None


@pytest.mark.parametrize("kv", [None, KV], ids=["", "quantized"])
@pytest.mark.parametrize(
    ("family", "dtype"), [*zip(FAMILIES[:3], [mx.float32] * 3), ("qwen3_5", mx.bfloat16), (PACK, mx.float32)]
)
def test_a_restart(family, dtype, kv, tmp_path):
    """Bit for bit: the end of a text, which is written when the store is closed."""
    model = model_of(family, dtype=dtype)
    cuts = [n for n in CUTS if kv is None or n >= kv.quantized_kv_start]
    fill(tmp_path, model, kv=kv, cuts=cuts)
    with stored(tmp_path, model) as store:
        assert store.nbytes == 0
        fetched, n, _ = store.fetch([*TEXT, 7], kv)
        assert n == len(TEXT)
        fresh = read(model, TEXT, cuts, kv=kv)
        assert names(fetched) == names(fresh)
        assert_same_next(model, fetched, fresh, kv)
        assert store.nbytes < store.disk.bytes_read == size(tmp_path)


def test_numbers_below_0_stand_for_what_is_no_token(tmp_path):
    """As for the parts of an image, which a model reads otherwise: two images are two texts, and nothing of them is copied."""
    model, texts = model_of("qwen3_5"), [[*TEXT[:4], image, *TEXT[5:]] for image in (-5, -(2**40))]
    for text in texts:
        with stored(tmp_path) as store:
            store.insert(text, read(model, TEXT))
    with stored(tmp_path) as store:
        for text in texts:
            fetched, n, _ = store.fetch([*text, 7])
            assert n == len(TEXT)
            assert PromptCache(fetched, len(model.layers)).text == TEXT[5:]
        assert store.fetch([*TEXT, 7])[1] == 0


def test_nothing_is_written_twice(tmp_path):
    """And nothing of others is removed, but what a process left that was killed."""
    left = tmp_path / f"{'0' * 32}.safetensors"
    for name in ("mine.safetensors", "notes.txt", left.name, f"{left.name}.999999999.tmp"):
        (tmp_path / name).write_text("half")
    fill(tmp_path)
    for name in ("mine.safetensors", "notes.txt"):
        assert (tmp_path / name).read_text() == "half"
        (tmp_path / name).unlink()
    assert not list(tmp_path.glob("0*"))
    before = {file: file.stat().st_mtime_ns for file in pieces(tmp_path)}
    fill(tmp_path)  # resumed
    for file in tmp_path.glob("index*"):
        file.rename(tmp_path / f"other-{file.name}")
    assert {file: file.stat().st_mtime_ns for file in pieces(tmp_path)} == before
    fill(tmp_path / "other")
    assert [f.name for f in pieces(tmp_path / "other")] == [f.name for f in before]  # read alike, named alike
    fill(tmp_path / "other", text=[*TEXT[:9], 30, 31])
    # The part that is new, its snapshot, and the one where the texts part.
    assert len(pieces(tmp_path / "other")) == len(before) + 3


def test_stores_of_one_folder_see_what_the_others_write(tmp_path):
    other = [9, *TEXT]
    with stored(tmp_path) as a, stored(tmp_path) as b:
        for store in (a, b):
            read(store.model, TEXT, CUTS, store)
        a.close()
        assert b.fetch([*TEXT, 7])[1] == len(TEXT)
        read(b.model, [*TEXT, 8, 9], store=b)
    n = len(pieces(tmp_path))
    with stored(tmp_path) as store:
        assert store.fetch([*TEXT, 8, 9])[1] == len(TEXT) + 2
        assert len(pieces(tmp_path)) == n
        assert store.fetch(other)[1] == 0
        fill(tmp_path, text=other)
        assert store.fetch(other)[1] == len(other)
        forget_all(tmp_path)
        fill(tmp_path, text=TEXT[::-1])
        assert store.fetch(TEXT[::-1])[1] == len(TEXT)  # a number of the index is never given twice


def nodes_at(store, text):
    """The nodes at the end of a text."""
    store.fetch([text[0] + 1])  # reads the index
    return [node for node in store._forest.nodes() if node.length == len(text)]


def test_what_memory_gave_up_is_read_from_disk(tmp_path, monkeypatch):
    with stored(tmp_path) as store:
        read(store.model, SIXTY, (50,), store)
        wait_until(lambda: all_written(store))
        assert len(nodes_at(store, SIXTY[:50])) == 1  # what the index has of it is no second one
        store.trim_to(0)
        assert store.nbytes == 0
        fetched, n, _ = store.fetch(SIXTY)
        assert n == 50
        assert_same_next(store.model, fetched, read(store.model, SIXTY[:50]))
    with stored(tmp_path) as store:  # what was loaded needs no disk
        store.load(SIXTY)
        held, n_read = store.nbytes, store.disk.bytes_read
        monkeypatch.setattr(Folder, "read", None)
        assert store.fetch(SIXTY)[1] == 50
        assert (store.nbytes, store.disk.bytes_read) == (held, n_read)
        store.load([30])
        store.trim_to(0)
        assert store.nbytes == 0
    PromptStore(model_of("qwen3_5"), ROOM).load(TEXT)  # without a folder, nothing is to be done


def test_others_go_on_while_a_text_is_loaded(tmp_path, monkeypatch):
    fill(tmp_path)
    begun, go_on, read_file = threading.Event(), threading.Event(), Folder.read

    def slow(*args):
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            assert go_on.wait(30)
        return read_file(*args)

    with stored(tmp_path) as store:
        monkeypatch.setattr(Folder, "read", slow)
        loading = threading.Thread(target=store.load, args=([*TEXT, 7],))
        loading.start()
        assert begun.wait(30)
        other = [9, *TEXT]
        read(store.model, other, store=store)
        for text in (other, TEXT):  # also the one that is being loaded
            assert store.fetch([*text, 7])[1] == len(text)
        held = store.nbytes
        go_on.set()
        loading.join()
        assert store.nbytes == held
        store.trim_to(0)
        assert store.nbytes == 0


def test_nothing_is_left_of_what_cannot_be_loaded(tmp_path, caplog, monkeypatch):
    """The part before a damaged one is of no use, unless a snapshot is there; nor are spans whose snapshot is given up."""
    fill(tmp_path)
    read_file = Folder.read
    with stored(tmp_path) as store, monkeypatch.context() as patch:
        patch.setattr(Folder, "read", lambda *args: (store.trim_to(0), read_file(*args))[1])
        store.load([*TEXT, 7])
        patch.undo()
        store.trim_to(0)
        assert store.nbytes == in_memory(store) == 0
    with stored(tmp_path) as store:
        first, second, last = next(iter(nodes_at(store, TEXT))).path()[1:]
        first.snapshot = second.snapshot = None
        (tmp_path / f"{last.span.name}.safetensors").write_bytes(b"")
        store.load([*TEXT, 7])
        assert (store.nbytes, store.fetch([*TEXT, 7])[1]) == (0, 0)
    assert len(caplog.records) == 1


def test_only_snapshots_that_are_worth_it_are_written_behind(tmp_path):
    """A snapshot of these models takes as much as some 30 tokens: one in so many is written, and each end in the end."""
    text = [i % 32 for i in range(150)]
    with stored(tmp_path) as store:
        read(store.model, text, range(10, 150, 10), store)
        wait_until(lambda: all_written(store))
        states = [node for node in store._forest.nodes() if node.snapshot.name]
        n_token = sum(node.span.nbytes for node in store._forest.nodes()) / len(text)
        assert 2 <= len(states) < 10
        assert sum(node.snapshot.nbytes for node in states) <= len(text) * n_token
    assert n_found(tmp_path, text) == len(text)


def test_other_models_have_other_keys(tmp_path, monkeypatch):
    fill(tmp_path)
    for other in (model_of("qwen3_5", 1), model_of("qwen3_5", rms_norm_eps=1e-3)):
        assert n_found(tmp_path, model=other) == 0
    keys = {disk_writer.key_of(tiny_model("qwen3_5"), Format(None, True)) for _ in range(2)}
    assert len(keys) == 1
    monkeypatch.setattr(disk_writer, "version", lambda name: f"another {name}")
    assert n_found(tmp_path) == 0


# The limits


def test_the_folder_stays_within_its_limit(tmp_path, caplog):
    fill(tmp_path)
    most = size(tmp_path)
    for first in range(6):
        fill(tmp_path, text=[first, *TEXT[1:]], max_disk_bytes=most)
        assert size(tmp_path) <= most
    assert n_found(tmp_path, [5, *TEXT[1:]]) == len(TEXT)  # what was used last
    fill(tmp_path / "small", max_disk_bytes=10_000)
    assert size(tmp_path / "small") <= 10_000
    assert caplog.records == []


def test_the_hours_limit(tmp_path, monkeypatch):
    fill(tmp_path / "a")
    written, path = size(tmp_path / "a"), tmp_path / "b"
    fill(path, max_hourly_bytes=written)
    assert size(path) == written
    for hours in (0, 1):
        now = time.time() + 3600 * hours
        with monkeypatch.context() as m:
            m.setattr(shared_folder.time, "time", lambda now=now: now)
            fill(path, text=[*TEXT, 30, 31], max_hourly_bytes=written)
        assert (size(path) > written) == bool(hours)


def test_a_full_disk_is_one_line(tmp_path, caplog):
    with stored(tmp_path) as store, full_disk(40_000):
        for first in range(4):
            read(store.model, [first, *TEXT * 4], CUTS, store)
            assert store.fetch([first, *TEXT * 4])[1] == 1 + 4 * len(TEXT)
        store.disk.close(10)
    (record,) = caplog.records
    assert "cannot be written now" in record.message
    assert not list(tmp_path.glob("*.tmp"))


def test_a_disk_that_is_full_at_the_start_leaves_the_index_alone(tmp_path):
    fill(tmp_path)
    index = (tmp_path / "index.sqlite").read_bytes()
    with full_disk(len(index) // 2), pytest.raises(OSError, match="cannot be used"):
        stored(tmp_path)
    assert (tmp_path / "index.sqlite").read_bytes() == index
    assert n_found(tmp_path) == len(TEXT)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        stored(tmp_path / "file")


def test_a_disk_that_others_fill(tmp_path, monkeypatch, caplog):
    """What was used least recently makes space, and some is left free."""
    fill(tmp_path)
    most = size(tmp_path)
    left = lambda: 6 * most - size(tmp_path)  # noqa: E731
    monkeypatch.setattr(
        shared_folder.shutil, "disk_usage", lambda _: SimpleNamespace(total=100 * most, free=max(left(), 0))
    )
    for first in range(3):
        fill(tmp_path, text=[first, *TEXT[1:]])
        assert 0 < size(tmp_path) <= most
    assert n_found(tmp_path, [2, *TEXT[1:]]) == len(TEXT)
    left = lambda: 0  # noqa: E731
    fill(tmp_path, text=[7, *TEXT[1:]])
    assert size(tmp_path) == 0
    assert caplog.records == []


# Faults


def damage(file, rng):
    data = bytearray(file.read_bytes())
    kind = rng.choice(["bytes", "cut", "empty", "other"])
    if kind == "bytes":
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] ^= 1 + rng.randrange(255)
    file.write_bytes({"cut": data[: rng.randrange(len(data))], "empty": b"", "other": os.urandom(99)}.get(kind, data))


@SEEDS
@pytest.mark.parametrize("what", ["piece", "index"])
def test_damaged_files(what, seeds, tmp_path, caplog):
    """Never a wrong token, never an error: a shorter prefix, and one line for each piece."""
    model = model_of("qwen3_5")
    for seed in seeds:
        rng, path = random.Random(seed), tmp_path / str(seed)
        fill(path)
        damaged = rng.choice(pieces(path)) if what == "piece" else path / "index.sqlite"
        damage(damaged, rng)
        caplog.clear()
        with stored(path) as store:
            fetched, n, _ = store.fetch([*TEXT, 7])
            assert n in (0, *CUTS, len(TEXT))
            if n > 0:
                assert_same_next(model, fetched, read(model, TEXT[:n], CUTS))
            if n < len(TEXT) and what == "piece":
                assert len(caplog.records) == 1
                assert str(damaged.stem) in caplog.text
                assert not damaged.exists()
            read(model, TEXT, CUTS, store)
            assert store.fetch(TEXT)[1] == len(TEXT)
        if what == "piece":
            assert n_found(path) == len(TEXT)  # it was written again


def test_an_index_that_names_another_text_or_has_another_layout(tmp_path, caplog):
    fill(tmp_path, cuts=())
    with closing(sqlite3.connect(tmp_path / "index.sqlite")) as db:
        (tokens,) = db.execute("SELECT tokens FROM files WHERE tokens IS NOT NULL").fetchone()
    change_index(tmp_path, "UPDATE files SET tokens = ? WHERE tokens IS NOT NULL", (b"\x07" + tokens[1:],))
    # Its rows would give a text with other tokens the keys of these.
    assert n_found(tmp_path, [7, *TEXT[1:]]) == 0
    assert "holds another text" in caplog.text
    fill(tmp_path)
    change_index(tmp_path, "PRAGMA user_version=99")
    fill(tmp_path)
    assert "its layout is 99" in caplog.text
    assert (tmp_path / "index.damaged").exists()
    assert n_found(tmp_path) == len(TEXT)


# Faults of the writer


def test_a_piece_whose_text_was_dropped_is_written_with_it(tmp_path):
    """As where another process needed the space."""
    with stored(tmp_path) as store:
        read(store.model, TEXT, store=store)
        wait_until(lambda: all_written(store))
        while (work := store._files.next_write(True)) is not None:
            outcome, n = store.disk._write(work)
            assert outcome is Outcome.WRITTEN
            store._files.on_written(work, outcome, n)
        forget_all(tmp_path)
        read(store.model, [*TEXT, 30, 31], store=store)
    assert n_found(tmp_path, [*TEXT, 30, 31]) == len(TEXT) + 2


def test_what_is_given_up_while_it_is_written_is_written(tmp_path, caplog):
    with stored(tmp_path) as store:
        next_write = store.disk.next_write

        def give_up(is_last):
            found = next_write(is_last)
            store.trim_to(0)
            return found

        store.disk.next_write = give_up
        read(store.model, SIXTY, store=store)
        wait_until(lambda: pieces(tmp_path) and all_written(store))
        store.disk.next_write = next_write
        read(store.model, TEXT, CUTS, store)
    assert n_found(tmp_path) == len(TEXT)
    assert caplog.records == []


def test_the_writer_survives_what_cannot_be_written(tmp_path, monkeypatch, caplog):
    """It says so, leaves that part out, and goes on with other texts."""
    encode, failed = array_file.encode, []

    def fail(arrays, metadata):
        if "tokens" in arrays and arrays["tokens"].size == 60:
            failed.append(metadata)
            raise RuntimeError("[malloc] Unable to allocate")
        return encode(arrays, metadata)

    monkeypatch.setattr(array_file, "encode", fail)
    with stored(tmp_path) as store:
        read(store.model, SIXTY, store=store)
        wait_until(lambda: failed)
        read(store.model, TEXT, CUTS, store)
    assert n_found(tmp_path) == len(TEXT)
    (record,) = caplog.records
    assert "is not written" in record.message
    assert "Unable to allocate" in caplog.text


def test_the_writer_goes_on_when_the_folder_can_be_written_again(tmp_path, monkeypatch, caplog):
    """Until then it is one line of the log, also behind a pass that had nothing to write."""
    write, is_full = array_file.write, [True]

    def fail(*args):
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(*args)

    monkeypatch.setattr(array_file, "write", fail)
    with stored(tmp_path) as store:
        for first in range(3):
            store.trim_to(0)
            store.disk.wake()
            wait_until(lambda: not store.disk._wake.is_set())
            time.sleep(0.01)
            read(store.model, [first, *TEXT * 4], store=store)
            wait_until(lambda: caplog.records and not store.disk._wake.is_set())
        is_full.clear()
    assert len(caplog.records) == 1
    assert n_found(tmp_path, [2, *TEXT * 4]) == 1 + 4 * len(TEXT)


@pytest.mark.parametrize("spare", [0, ROOM], ids=["no room", "room"])
def test_readings_that_differ_are_not_held_to_compare_them(spare, tmp_path):
    model = model_of("qwen3_5")
    fill(tmp_path)
    other = read(model, TEXT, CUTS)
    for c in other:
        if isinstance(c, stock.KVCache):
            c.keys = c.keys.at[:, :, 3].add(1e-6)  # as another cut would round
    one = PromptStore(model, ROOM)
    one.insert(TEXT, other)
    with PromptStore(model, one.nbytes + spare, folder=tmp_path) as store:
        store.fetch([0])  # reads the index
        store.insert(TEXT, other)
        assert store.nbytes == in_memory(store) == one.nbytes
        store.trim_to(0)
        assert store.nbytes == in_memory(store) == 0


# Who may read it


def modes(path):
    return {file.name: stat.S_IMODE(file.stat().st_mode) for file in (path, *path.iterdir())}


def test_nobody_else_may_read_the_folder(tmp_path, caplog):
    before, path = os.umask(0), tmp_path / "new" / "prompts"
    closed = lambda: {*modes(path).values()} == {0o600, 0o700} and modes(path)["prompts"] == 0o700  # noqa: E731
    try:
        with stored(path) as store:
            read(store.model, SIXTY, store=store)
            wait_until(lambda: pieces(path) and all_written(store))
            endings = {name.rpartition(".")[2] for name in modes(path)}
            assert endings >= {"sqlite", "sqlite-wal", "writer", "safetensors"}
            assert closed()
        assert closed()
    finally:
        os.umask(before)
    # One that exists is closed to others.
    change_index(path, "PRAGMA user_version=2")
    path.chmod(0o755)
    for file in path.iterdir():
        file.chmod(0o644)
    fill(path)
    assert closed()
    caplog.clear()
    path.chmod(0o1777)  # shared by its owner's will, as /tmp
    fill(path)
    assert modes(path)["prompts"] == 0o1777
    (record,) = caplog.records
    assert "Other users" in record.message


# Several stores of one folder


def test_a_second_store_of_the_process_leaves_the_first_ones_writing_alone(tmp_path, monkeypatch):
    """As where a notebook's cell is run again, or a server loads another model."""
    write, begun = array_file.write, []

    def open_another(file, temporary, data):
        if not begun:
            begun.append(temporary)
            temporary.write_bytes(b"half")
            stored(tmp_path).close()
            assert temporary.exists()
        write(file, temporary, data)

    monkeypatch.setattr(array_file, "write", open_another)
    fill(tmp_path)
    assert begun
    assert n_found(tmp_path) == len(TEXT)


def test_a_file_that_another_store_is_writing_is_waited_for(tmp_path, caplog):
    """Else the parts of the text behind it have nothing to belong to."""
    name, data = array_file.encode({"a": mx.zeros(3)}, {})
    first, second = folder_of(tmp_path / "c"), folder_of(tmp_path / "c")
    assert first._reserve(name, "m", "", b"", len(data)) is Outcome.WRITTEN
    assert second.write("m", "", b"", name, data) is Outcome.BUSY
    first.close()  # as if it was killed: what it held is anybody's
    assert second.write("m", "", b"", name, data) is Outcome.WRITTEN
    assert second.write("m", "", b"", name, data) is Outcome.THERE
    second.close()
    fill(tmp_path / "a", text=SIXTY)
    held, tried = folder_of(tmp_path / "b"), threading.Event()
    for file in pieces(tmp_path / "a"):
        assert held._reserve(file.stem, "m", "", b"", 1) is Outcome.WRITTEN
    with stored(tmp_path / "b") as store:
        write = store.disk._write
        store.disk._write = lambda work: (write(work), tried.set())[0]
        read(store.model, SIXTY, CUTS, store)
        assert tried.wait(30)
        threading.Timer(0.3, held.close).start()
    assert [file.name for file in pieces(tmp_path / "b")] == [file.name for file in pieces(tmp_path / "a")]
    assert caplog.records == []


@examples(5)
@given(data=st.data())
def test_random_operations_of_two_stores(data):
    """Texts that are read, given up, damaged and written by two stores: what comes back is what the same cuts make, and no
    store holds more than its limit, nor the folder."""
    draw, model = data.draw, model_of("qwen3_5")
    held, on_disk = draw(st.sampled_from([30_000, 200_000, ROOM])), draw(st.sampled_from([60_000, ROOM]))
    actions = st.sampled_from(["read", "read", "read", "trim", "restart", "damage", "kill"])
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)

        def new():
            return PromptStore(model, held, folder=path, max_disk_bytes=on_disk)

        stores, texts = [new(), new()], [[]]
        for _ in range(30 if LONG else 10):
            i, action = draw(st.integers(0, 1)), draw(actions)
            if action == "restart":
                stores[i].close()
                stores[i] = new()
            elif action == "trim":
                stores[i].trim_to(0)
                assert stores[i].nbytes == in_memory(stores[i]) == 0
            elif action == "kill":
                leave_as_killed(path, f"{draw(st.integers(0, 9)):032}")
            elif action == "damage":
                write_over(pieces(path), draw(st.integers(0, 99)))
            else:
                base = draw(st.sampled_from(texts))
                more = draw(st.lists(st.integers(0, 3), min_size=1, max_size=20))
                texts.append(base[: draw(st.integers(0, len(base)))] + more)
                read_and_compare(stores[i], texts[-1], draw(st.lists(st.integers(1, len(texts[-1])), max_size=2)))
            assert stores[i].nbytes == in_memory(stores[i]) <= held
        for store in stores:
            store.close()
        new().close()
        assert size(path) <= on_disk
        assert not list(path.glob("*.tmp")) + list(path.glob("*.writer"))


def read_and_compare(store, text, cuts):
    """Read a text on from what is stored of it, and compare that with the same cuts read afresh."""
    fetched, n, handle = store.fetch(text)
    if n > 0:
        ends = [node.length for node in handle().path()[1:]]
        assert_same_next(store.model, fetched, read(store.model, text[:n], ends))
    read(store.model, text, cuts, store)


def leave_as_killed(path, name):
    """Leave what a process does that is killed while it writes a file: a row, half a file, and a lock that nobody holds."""
    folder = folder_of(path)
    folder._reserve(name, "m", "", b"", 1000)
    folder._temporary(name, folder._name).write_bytes(b"half")
    folder._writer._file.close()
    folder._db.close()


def write_over(files, i):
    """Damage a file. How many there are depends on the writers' threads."""
    with suppress(FileNotFoundError, ZeroDivisionError):  # it was dropped for space, or there is none
        file = files[i % len(files)]
        data = file.read_bytes()
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def test_files_are_safetensors(tmp_path):
    arrays = {"a": mx.arange(6.0).reshape(1, 2, 3), "b": mx.ones((2, 1), mx.bfloat16), "c": mx.array([1], mx.uint32)}
    arrays["d"] = mx.array([-1, 1 << 40], mx.int64)
    mx.eval(arrays)
    name, data = array_file.encode(arrays, {"model": "m"})
    assert array_file.encode(arrays, {"model": "m"}) == (name, data)
    path = tmp_path / f"{name}.safetensors"
    array_file.write(path, tmp_path / "temporary", data)
    for found, metadata in (mx.load(str(path), return_metadata=True), array_file.decode(array_file.read(path))):
        assert metadata == {"model": "m"}
        assert all(found[key].dtype == x.dtype and mx.array_equal(found[key], x) for key, x in arrays.items())
