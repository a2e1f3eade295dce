"""A prompt store's folder: what comes back after a restart, who may share it, and what happens where it is damaged or full."""

import errno
import os
import random
import sqlite3
import stat
import tempfile
import threading
import time
from contextlib import suppress
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

CUTS = (4, 9)
ROOM = 1 << 30
HEADED = Format(None, True)


def stored(path, model=None, **options):
    return PromptStore(model or model_of("qwen3_5"), ROOM, folder=path, **options)


def pieces(path):
    return sorted(path.glob("*.safetensors"))


def size(path):
    return sum(file.stat().st_size for file in pieces(path))


def fill(path, model=None, text=TEXT, cuts=CUTS, kv=None):
    with stored(path, model) as store:
        read(store.model, text, cuts, store, kv)


@pytest.mark.parametrize("kv", [None, KV], ids=["", "quantized"])
@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((family, mx.float32) for family in FAMILIES[:3]), ("qwen3_5", mx.bfloat16), (PACK, mx.float32)],
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
    model, images = model_of("qwen3_5"), (-5, -(2**40))
    for image in images:
        with stored(tmp_path) as store:
            store.insert([*TEXT[:4], image, *TEXT[5:]], read(model, TEXT))
    with stored(tmp_path) as store:
        for image in images:
            fetched, n, _ = store.fetch([*TEXT[:4], image, *TEXT[5:], 7])
            assert n == len(TEXT)
            assert PromptCache(fetched, len(model.layers)).text == TEXT[5:]
        assert store.fetch([*TEXT, 7])[1] == 0


def test_nothing_is_written_twice(tmp_path):
    fill(tmp_path)
    before = {file: file.stat().st_mtime_ns for file in pieces(tmp_path)}
    fill(tmp_path)  # resumed
    for file in tmp_path.glob("index*"):
        file.rename(tmp_path / f"other-{file.name}")
    assert {file: file.stat().st_mtime_ns for file in pieces(tmp_path)} == before
    with stored(tmp_path / "other") as store:
        read(store.model, TEXT, CUTS, store)
    assert [file.name for file in pieces(tmp_path / "other")] == [
        file.name for file in before
    ]  # read alike, named alike
    fill(tmp_path / "other", text=[*TEXT[:9], 30, 31])
    # The part that is new, its snapshot, and the one where the texts part.
    assert len(pieces(tmp_path / "other")) == len(before) + 3


def test_two_stores_on_one_folder(tmp_path):
    with stored(tmp_path) as a, stored(tmp_path) as b:
        read(a.model, TEXT, CUTS, a)
        read(b.model, TEXT, CUTS, b)
        a.close()
        assert b.fetch([*TEXT, 7])[1] == len(TEXT)
        read(b.model, [*TEXT, 8, 9], store=b)
    n = len(pieces(tmp_path))
    with stored(tmp_path) as c:
        assert c.fetch([*TEXT, 8, 9])[1] == len(TEXT) + 2
    assert len(pieces(tmp_path)) == n


def test_a_running_store_sees_what_another_one_has_written(tmp_path):
    with stored(tmp_path) as a:
        assert a.fetch(TEXT)[1] == 0
        fill(tmp_path)
        assert a.fetch(TEXT)[1] == len(TEXT)


def test_what_memory_gave_up_is_read_from_disk(tmp_path):
    with stored(tmp_path) as store:
        text = [i % 32 for i in range(60)]  # the model's snapshots take as much as some 30 tokens
        read(store.model, text, (50,), store)
        wait_until(lambda: not any_unwritten(store))
        assert len(store_of(store, text[:50])) == 1  # what the index has of it is no second one
        store.trim_to(0)
        assert store.nbytes == 0
        fetched, n, _ = store.fetch(text)
        assert n == 50
        assert_same_next(store.model, fetched, read(store.model, text[:50]))


def test_what_was_loaded_needs_no_disk(tmp_path, monkeypatch):
    fill(tmp_path)
    with stored(tmp_path) as store:
        store.load([*TEXT, 7])
        held, n_read = store.nbytes, store.disk.bytes_read
        monkeypatch.setattr(shared_folder.SharedFolder, "read", None)
        assert store.fetch([*TEXT, 7])[1] == len(TEXT)
        assert (store.nbytes, store.disk.bytes_read) == (held, n_read)
        store.load([30])
        store.trim_to(0)
        assert store.nbytes == 0
    PromptStore(model_of("qwen3_5"), ROOM).load(TEXT)  # without a folder, nothing is to be done


def test_others_go_on_while_a_text_is_loaded(tmp_path, monkeypatch):
    fill(tmp_path)
    begun, go_on, read_file = threading.Event(), threading.Event(), shared_folder.SharedFolder.read

    def slow(*args):
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            assert go_on.wait(30)
        return read_file(*args)

    with stored(tmp_path) as store:
        monkeypatch.setattr(shared_folder.SharedFolder, "read", slow)
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


def test_nothing_is_left_of_what_cannot_be_loaded(tmp_path, caplog):
    """The part before a damaged one is of no use, unless a snapshot is there."""
    fill(tmp_path, cuts=(4, 9))
    with stored(tmp_path) as store:
        first, second, last = next(iter(store_of(store, TEXT))).path()[1:]
        first.snapshot = second.snapshot = None
        (tmp_path / f"{last.span.name}.safetensors").write_bytes(b"")
        store.load([*TEXT, 7])
        assert (store.nbytes, store.fetch([*TEXT, 7])[1]) == (0, 0)
    assert len(caplog.records) == 1


def store_of(store, text):
    """The nodes at the end of a text."""
    store.fetch([text[0] + 1])  # reads the index
    return [node for node in store._forest.nodes() if node.length == len(text)]


def any_unwritten(store):
    with store._lock:
        return store._files.next_write(False) is not None


def wait_until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_only_snapshots_that_are_worth_it_are_written_behind(tmp_path, monkeypatch):
    """A snapshot of these models takes as much as some 30 tokens: one in so many is written, and each end in the end."""
    model, text = model_of("qwen3_5"), [i % 32 for i in range(150)]
    with stored(tmp_path) as store:
        read(model, text, range(10, 150, 10), store)
        wait_until(lambda: not any_unwritten(store))
        states = [node for node in store._forest.nodes() if node.snapshot.name]
        n_token = sum(node.span.nbytes for node in store._forest.nodes()) / len(text)
        assert 2 <= len(states) < 10
        assert sum(node.snapshot.nbytes for node in states) <= len(text) * n_token
    with stored(tmp_path) as store:
        assert store.fetch(text)[1] == len(text)


@pytest.mark.parametrize("change", ["weights", "rope", "layout"])
def test_other_models_have_other_keys(change, tmp_path, monkeypatch):
    fill(tmp_path)
    model = model_of("qwen3_5")
    if change == "weights":
        model = model_of("qwen3_5", 1)
    if change == "rope":
        model = model_of("qwen3_5", rope_theta=5000.0)
    if change == "layout":
        monkeypatch.setattr(disk_writer, "version", lambda name: f"another {name}")
    with stored(tmp_path, model) as store:
        assert store.fetch(TEXT)[1] == 0
    assert disk_writer.key_of(tiny_model("qwen3_5"), HEADED) == disk_writer.key_of(tiny_model("qwen3_5"), HEADED)


# The limits


def test_the_folder_stays_within_its_limit(tmp_path):
    fill(tmp_path)
    most = size(tmp_path)
    for first in range(6):
        with stored(tmp_path, max_disk_bytes=most) as store:
            read(store.model, [first, *TEXT[1:]], CUTS, store)
        assert size(tmp_path) <= most
    with stored(tmp_path) as store:
        assert store.fetch([5, *TEXT[1:]])[1] == len(TEXT)  # what was used last


def test_the_hours_limit(tmp_path, monkeypatch):
    fill(tmp_path / "a")
    written = size(tmp_path / "a")
    with stored(tmp_path / "b", max_hourly_bytes=written) as store:
        read(store.model, TEXT, CUTS, store)
    assert size(tmp_path / "b") == written
    for hours in (0, 1):
        now = time.time() + 3600 * hours
        with monkeypatch.context() as m:
            m.setattr(shared_folder.time, "time", lambda now=now: now)
            with stored(tmp_path / "b", max_hourly_bytes=written) as store:
                read(store.model, [*TEXT, 30, 31], CUTS, store)
        assert (size(tmp_path / "b") > written) == bool(hours)


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
    with stored(tmp_path) as store:
        assert store.fetch(TEXT)[1] == len(TEXT)


def test_a_disk_that_others_fill(tmp_path, monkeypatch, caplog):
    """What was used least recently makes space, and some is left free."""
    fill(tmp_path)
    most = size(tmp_path)
    total = 100 * most
    usage = lambda _: SimpleNamespace(total=total, free=6 * most - size(tmp_path))  # noqa: E731
    monkeypatch.setattr(shared_folder.shutil, "disk_usage", usage)
    for first in range(3):
        with stored(tmp_path) as store:
            read(store.model, [first, *TEXT[1:]], CUTS, store)
        assert 0 < size(tmp_path) <= most
    with stored(tmp_path) as store:
        assert store.fetch([2, *TEXT[1:]])[1] == len(TEXT)
        monkeypatch.setattr(shared_folder.shutil, "disk_usage", lambda _: SimpleNamespace(total=total, free=0))
        read(store.model, [7, *TEXT[1:]], CUTS, store)
    assert size(tmp_path) == 0
    assert caplog.records == []


def test_too_large_for_the_folder(tmp_path, caplog):
    with stored(tmp_path, max_disk_bytes=10_000) as store:
        read(store.model, TEXT, CUTS, store)
    assert size(tmp_path) <= 10_000
    assert caplog.records == []


# Faults


def damage(file, rng):
    data = bytearray(file.read_bytes())
    kind = rng.choice(["bytes", "cut", "empty", "other"])
    if kind == "bytes":
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] ^= 1 + rng.randrange(255)
    file.write_bytes({"cut": data[: rng.randrange(len(data))], "empty": b"", "other": os.urandom(99)}.get(kind, data))


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 100), marks=pytest.mark.slow)], ids=["some", "many"])
def test_damaged_files(seeds, tmp_path, caplog):
    """Never a wrong token, never an error: a shorter prefix, and one line for each."""
    model = model_of("qwen3_5")
    for seed in seeds:
        rng, path = random.Random(seed), tmp_path / str(seed)
        fill(path)
        damaged = rng.choice(pieces(path))
        damage(damaged, rng)
        caplog.clear()
        with stored(path) as store:
            fetched, n, _ = store.fetch([*TEXT, 7])
            assert n in (0, *CUTS, len(TEXT))
            if n > 0:
                assert_same_next(model, fetched, read(model, TEXT[:n], CUTS))
            if n < len(TEXT):
                assert len(caplog.records) == 1
                assert str(damaged.stem) in caplog.text
                assert not damaged.exists()
            read(model, TEXT, CUTS, store)
        with stored(path) as store:
            assert store.fetch([*TEXT, 7])[1] == len(TEXT)  # it was written again


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 100), marks=pytest.mark.slow)], ids=["some", "many"])
def test_a_damaged_index(seeds, tmp_path, caplog):
    model = model_of("qwen3_5")
    for seed in seeds:
        rng, path = random.Random(seed), tmp_path / str(seed)
        fill(path)
        damage(path / "index.sqlite", rng)
        with stored(path) as store:
            fetched, n, _ = store.fetch([*TEXT, 7])
            if n > 0:
                assert_same_next(model, fetched, read(model, TEXT[:n], CUTS))
            read(model, TEXT, CUTS, store)
            assert store.fetch(TEXT)[1] == len(TEXT)


def test_an_index_that_names_another_text(tmp_path, caplog):
    """Its rows would give a text with other tokens the keys of these."""
    fill(tmp_path, cuts=())
    with sqlite3.connect(tmp_path / "index.sqlite") as db:
        (tokens,) = db.execute("SELECT tokens FROM files WHERE tokens IS NOT NULL").fetchone()
        db.execute("UPDATE files SET tokens = ? WHERE tokens IS NOT NULL", (b"\x07" + tokens[1:],))
    db.close()
    with stored(tmp_path) as store:
        assert store.fetch([7, *TEXT[1:]])[1] == 0
    assert "holds another text" in caplog.text


def test_alien_files_stay(tmp_path):
    (tmp_path / "mine.safetensors").write_bytes(b"1")
    (tmp_path / "notes.txt").write_bytes(b"2")
    left = tmp_path / f"{'0' * 32}.safetensors"
    for file in (left, tmp_path / f"{left.name}.999999999.tmp"):
        file.write_bytes(b"of a process that was killed")
    fill(tmp_path)
    assert (tmp_path / "mine.safetensors").read_bytes() + (tmp_path / "notes.txt").read_bytes() == b"12"
    assert not list(tmp_path.glob("0*"))


def test_an_index_of_another_layout_is_put_aside(tmp_path, caplog):
    fill(tmp_path)
    with sqlite3.connect(tmp_path / "index.sqlite") as db:
        db.execute("PRAGMA user_version=99")
    db.close()
    fill(tmp_path)
    assert "its layout is 99" in caplog.text
    assert (tmp_path / "index.damaged").exists()
    with stored(tmp_path) as store:
        assert store.fetch(TEXT)[1] == len(TEXT)


def test_a_folder_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        stored(tmp_path / "file")


def test_a_piece_whose_text_was_dropped_is_written_with_it(tmp_path):
    """As where another process needed the space."""
    with stored(tmp_path) as store:
        read(store.model, TEXT, store=store)
        store._files.next_write(True)
        other = SharedFolder(tmp_path, 1, ROOM)
        wait_until(lambda: not any_unwritten(store))
        work = store._files.next_write(True)
        while work is not None and store.disk._write(work)[0] is Outcome.WRITTEN:
            store._files.on_written(work, Outcome.WRITTEN, store.disk._write(work)[1])
            work = store._files.next_write(True)
        for file in pieces(tmp_path):
            other.forget(file.stem)
        other.close()
        read(store.model, [*TEXT, 30, 31], store=store)
    with stored(tmp_path) as store:
        assert store.fetch([*TEXT, 30, 31])[1] == len(TEXT) + 2


# Faults of the writer


def test_what_is_given_up_while_it_is_written_is_written(tmp_path, caplog):
    with stored(tmp_path) as store:
        next_write = store.disk.next_write

        def give_up(is_last):
            found = next_write(is_last)
            store.trim_to(0)
            return found

        store.disk.next_write = give_up
        read(store.model, [i % 32 for i in range(60)], store=store)
        wait_until(lambda: pieces(tmp_path) and not any_unwritten(store))
        store.disk.next_write = next_write
        read(store.model, TEXT, CUTS, store)
    with stored(tmp_path) as store:
        assert store.fetch(TEXT)[1] == len(TEXT)
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
        read(store.model, [i % 32 for i in range(60)], store=store)
        wait_until(lambda: failed)
        read(store.model, TEXT, CUTS, store)
    with stored(tmp_path) as store:
        assert store.fetch(TEXT)[1] == len(TEXT)
    assert ["is not written" in record.message for record in caplog.records] == [True]
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
    with stored(tmp_path) as store:
        assert store.fetch([2, *TEXT * 4])[1] == 1 + 4 * len(TEXT)


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
        assert store.nbytes == sum(in_memory(store)) == one.nbytes
        store.trim_to(0)
        assert store.nbytes == sum(in_memory(store)) == 0


def test_spans_whose_snapshot_was_given_up_while_they_were_loaded_are_given_up(tmp_path, monkeypatch):
    fill(tmp_path)
    read_file = shared_folder.SharedFolder.read
    with stored(tmp_path) as store:

        def trim(*args):
            store.trim_to(0)
            return read_file(*args)

        monkeypatch.setattr(shared_folder.SharedFolder, "read", trim)
        store.load([*TEXT, 7])
        monkeypatch.undo()
        store.trim_to(0)
        assert store.nbytes == sum(in_memory(store)) == 0


# Who may read it


def modes(path):
    return {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()}


def test_nobody_else_may_read_the_folder(tmp_path):
    before = os.umask(0)
    try:
        path = tmp_path / "new" / "prompts"
        with stored(path) as store:
            read(store.model, [i % 32 for i in range(60)], store=store)
            wait_until(lambda: pieces(path) and not any_unwritten(store))
            assert {name.rpartition(".")[2] for name in modes(path)} >= {
                "sqlite",
                "sqlite-wal",
                "writer",
                "safetensors",
            }
            assert {*modes(path).values()} == {0o600}
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert {*modes(path).values()} == {0o600}
    finally:
        os.umask(before)


def test_a_folder_that_exists_is_closed_to_others(tmp_path, caplog):
    fill(tmp_path)
    with sqlite3.connect(tmp_path / "index.sqlite") as db:
        db.execute("PRAGMA user_version=2")
    db.close()
    tmp_path.chmod(0o755)
    for file in tmp_path.iterdir():
        file.chmod(0o644)
    fill(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700
    assert {*modes(tmp_path).values()} == {0o600}
    caplog.clear()
    tmp_path.chmod(0o1777)  # shared by its owner's will, as /tmp
    fill(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o1777
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
    with stored(tmp_path) as store:
        assert store.fetch([*TEXT, 7])[1] == len(TEXT)


def folder_of(path):
    return SharedFolder(path, ROOM, ROOM)


def test_a_file_that_another_store_is_writing_is_waited_for(tmp_path):
    """Else the parts of the text behind it have nothing to belong to."""
    name, data = array_file.encode({"a": mx.zeros(3)}, {})
    first, second = folder_of(tmp_path), folder_of(tmp_path)
    assert first._reserve(name, "m", "", b"", len(data)) is Outcome.WRITTEN
    assert second.write("m", "", b"", name, data) is Outcome.BUSY
    first.close()  # as if it was killed: what it held is anybody's
    assert second.write("m", "", b"", name, data) is Outcome.WRITTEN
    assert second.write("m", "", b"", name, data) is Outcome.THERE
    second.close()


def test_a_store_waits_for_another_ones_file_and_goes_on(tmp_path, caplog):
    with stored(tmp_path / "a") as store:
        read(store.model, TEXT, CUTS, store)
    held = folder_of(tmp_path / "b")
    for file in pieces(tmp_path / "a"):
        assert held._reserve(file.stem, "m", "", b"", 1) is Outcome.WRITTEN
    with stored(tmp_path / "b") as store:
        read(store.model, TEXT, CUTS, store)
        threading.Timer(0.3, held.close).start()
    assert [file.name for file in pieces(tmp_path / "b")] == [file.name for file in pieces(tmp_path / "a")]
    assert caplog.records == []


def test_a_running_store_sees_what_takes_the_place_of_dropped_files(tmp_path):
    """A number of the index is never given twice."""
    with stored(tmp_path) as store:
        fill(tmp_path)
        assert store.fetch(TEXT)[1] == len(TEXT)
        other = folder_of(tmp_path)
        for file in pieces(tmp_path):
            other.forget(file.stem)
        other.close()
        fill(tmp_path, text=TEXT[::-1])
        assert store.fetch(TEXT[::-1])[1] == len(TEXT)


@examples(5)
@given(data=st.data())
def test_random_operations_of_two_stores(data):
    """Texts that are read, given up, damaged and written by two stores: what comes back is what the same cuts make, and no
    store holds more than its limit, nor the folder."""
    draw, model = data.draw, model_of("qwen3_5")
    held, on_disk = draw(st.sampled_from([30_000, 200_000, ROOM])), draw(st.sampled_from([60_000, ROOM]))
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)

        def new():
            return PromptStore(model, held, folder=path, max_disk_bytes=on_disk)

        stores, texts = [new(), new()], [[]]
        for _ in range(30 if LONG else 10):
            i, action = (
                draw(st.integers(0, 1)),
                draw(st.sampled_from(["read", "read", "read", "trim", "restart", "damage", "kill"])),
            )
            if action == "restart":
                stores[i].close()
                stores[i] = new()
            elif action == "trim":
                stores[i].trim_to(0)
                assert stores[i].nbytes == sum(in_memory(stores[i])) == 0
            elif action == "kill":
                leave_as_killed(path, f"{draw(st.integers(0, 9)):032}")
            elif action == "damage":
                write_over(pieces(path), draw(st.integers(0, 99)))
            else:
                base = draw(st.sampled_from(texts))
                texts.append(
                    base[: draw(st.integers(0, len(base)))] + draw(st.lists(st.integers(0, 3), min_size=1, max_size=20))
                )
                read_and_compare(stores[i], texts[-1], draw(st.lists(st.integers(1, len(texts[-1])), max_size=2)))
            assert stores[i].nbytes == sum(in_memory(stores[i])) <= held
        for store in stores:
            store.close()
        new().close()
        assert size(path) <= on_disk
        assert not list(path.glob("*.tmp")) + list(path.glob("*.writer"))


def read_and_compare(store, text, cuts):
    """Read a text on from what is stored of it, and compare that with the same cuts read afresh."""
    fetched, n, handle = store.fetch(text)
    if n > 0:
        assert_same_next(
            store.model, fetched, read(store.model, text[:n], [node.length for node in handle().path()[1:]])
        )
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


def in_memory(store):
    for node in store._forest.nodes():
        yield sum(part.nbytes for part in (node.span, node.snapshot) if part is not None and part.in_memory)


def test_files_are_safetensors(tmp_path):
    arrays = {"a": mx.arange(6.0).reshape(1, 2, 3), "b": mx.ones((2, 1), mx.bfloat16), "c": mx.array([1], mx.uint32)}
    arrays["d"] = mx.array([-1, 1 << 40], mx.int64)
    mx.eval(arrays)
    name, data = array_file.encode(arrays, {"model": "m"})
    assert array_file.encode(arrays, {"model": "m"}) == (name, data)
    path = tmp_path / f"{name}.safetensors"
    array_file.write(path, tmp_path / "temporary", data)
    theirs, metadata = mx.load(str(path), return_metadata=True)
    ours, own_metadata = array_file.decode(array_file.read(path))
    assert metadata == own_metadata == {"model": "m"}
    for found in (theirs, ours):
        assert all(found[key].dtype == x.dtype and mx.array_equal(found[key], x) for key, x in arrays.items())
