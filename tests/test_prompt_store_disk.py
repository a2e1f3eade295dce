"""A prompt store's folder: what comes back after a restart, its one owner, its limits, and what happens where it is damaged,
slow or full."""

import logging
import os
import random
import signal
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_mtp.core.caches.prompt_cache import PromptCache
from mlx_mtp.prompt_store import PromptStore, disk
from mlx_mtp.prompt_store.arrays import Format
from mlx_mtp.prompt_store.disk import Folder
from mlx_mtp.prompt_store.tree import StoredArrays
from tests.support.checkpoints import full_disk
from tests.support.models import FAMILIES, FLASH, KV_FAMILIES, tiny_model
from tests.support.profiles import LONG, examples
from tests.support.prompt_store import KV, TEXT, assert_same_next, model_of, names, read

CUTS, ROOM = (4, 9), 1 << 30
SIXTY = [i % 32 for i in range(60)]  # the model's snapshots take as much as some 30 tokens


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
    nodes = [(node.span, node.snapshot) for node in store._forest.nodes()]
    return sum(part.nbytes for parts in nodes for part in parts if part.in_memory)


def wait_until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def all_written(store):
    with store._lock:
        return store.disk._find_next(False) is None


RESTARTS = [*((family, mx.float32, None) for family in FAMILIES), ("qwen3_5", mx.bfloat16, None)]
RESTARTS += [(family, mx.float32, KV) for family in (KV_FAMILIES if LONG else ("qwen3_5", FLASH))]
RESTARTS += [("qwen3_5", mx.bfloat16, KV)] * LONG


@pytest.mark.parametrize(("family", "dtype", "kv"), RESTARTS, ids=str)
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
        assert store.nbytes < store.disk.bytes_read <= size(tmp_path)
        # Small snapshots, without states, are written at earlier cuts as well.
        assert not model.recurrent_layers or store.disk.bytes_read == size(tmp_path)


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
    """And nothing of others is removed, but what a killed process or an earlier version left."""
    old = [f"{'0' * 32}.safetensors", "new.safetensors"]
    for name in ("mine.safetensors", "notes.txt", *old):
        (tmp_path / name).write_text("half")
    fill(tmp_path)
    for name in ("mine.safetensors", "notes.txt"):
        assert (tmp_path / name).read_text() == "half"
        (tmp_path / name).unlink()
    assert not [name for name in old if (tmp_path / name).exists()]
    before = {file: file.stat().st_ino for file in pieces(tmp_path)}
    fill(tmp_path)  # resumed
    assert {file: file.stat().st_ino for file in pieces(tmp_path)} == before
    fill(tmp_path / "other")
    assert [f.name for f in pieces(tmp_path / "other")] == [f.name for f in before]  # read alike, named alike
    fill(tmp_path / "other", text=[*TEXT[:9], 30, 31])
    # The part that is new, its snapshot, and the one where the texts part.
    assert len(pieces(tmp_path / "other")) == len(before) + 3


def test_what_memory_gave_up_is_read_from_disk(tmp_path, monkeypatch):
    with stored(tmp_path) as store:
        read(store.model, SIXTY, (50,), store)
        wait_until(lambda: all_written(store))
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
        assert store.nbytes == store.fetch(SIXTY, timeout=0)[1] == 0  # what memory has alone
    monkeypatch.undo()
    with PromptStore(model_of("qwen3_5"), held - 1, folder=tmp_path) as store:  # a limit holds for what is loaded, too
        store.load(SIXTY)
        assert store.nbytes == in_memory(store) < held
    PromptStore(model_of("qwen3_5"), ROOM).load(TEXT)  # without a folder, nothing is to be done


def test_a_text_is_waited_for_while_its_files_arrive(tmp_path, monkeypatch):
    fill(tmp_path)
    read_file, tic = Folder.read, time.monotonic()
    monkeypatch.setattr(Folder, "read", lambda *args: (time.sleep(0.15), read_file(*args))[1])
    with stored(tmp_path) as store:
        assert store.fetch([*TEXT, 7], timeout=0.4)[1] == len(TEXT)
    assert time.monotonic() - tic > 0.45  # longer than the time for one file


def test_nothing_is_left_of_what_cannot_be_loaded(tmp_path, caplog, monkeypatch):
    fill(tmp_path)
    read_file = Folder.read
    with stored(tmp_path) as store, monkeypatch.context() as patch:
        patch.setattr(Folder, "read", lambda *args: (store.trim_to(0), read_file(*args))[1])
        store.load([*TEXT, 7])
        patch.undo()
        store.trim_to(0)
        assert store.nbytes == in_memory(store) == 0
        last = next(node for node in store._forest.nodes() if node.length == len(TEXT))
        for node in last.path()[1:-1]:
            node.snapshot = StoredArrays(None, 0)
        (tmp_path / f"{last.span.name}.safetensors").write_bytes(b"")
        assert store.fetch([*TEXT, 7])[1] == 0
        store.trim_to(0)
        assert store.nbytes == in_memory(store) == 0
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
    keys = {disk.key_of(tiny_model("qwen3_5"), Format(None, True)) for _ in range(2)}
    assert len(keys) == 1
    monkeypatch.setattr(disk, "version", lambda name: f"another {name}")
    assert n_found(tmp_path) == 0


def test_the_folder_stays_within_its_limit(tmp_path, caplog):
    """What was used least recently makes space, also what an earlier process used."""
    fill(tmp_path)
    most, first_texts = 3 * size(tmp_path), [[first, *TEXT[1:]] for first in range(6)]
    for text in first_texts:
        fill(tmp_path, text=text, max_disk_bytes=most)
        assert size(tmp_path) <= most
        assert n_found(tmp_path, text) == len(TEXT)
    assert n_found(tmp_path, first_texts[4]) == len(TEXT)  # used once more
    fill(tmp_path, text=[7, *TEXT[1:]], max_disk_bytes=most)
    assert n_found(tmp_path, first_texts[4]) == len(TEXT)
    assert n_found(tmp_path, first_texts[3]) < len(TEXT)
    fill(tmp_path / "small", max_disk_bytes=10_000)
    assert size(tmp_path / "small") <= 10_000
    assert caplog.records == []


def test_a_disk_that_others_fill(tmp_path, monkeypatch, caplog):
    fill(tmp_path)
    most = size(tmp_path)
    left = lambda: 7 * most - size(tmp_path)  # noqa: E731
    usage = lambda _: SimpleNamespace(total=100 * most, free=max(left(), 0))  # noqa: E731
    monkeypatch.setattr(disk.shutil, "disk_usage", usage)
    for first in range(3):
        fill(tmp_path, text=[first, *TEXT[1:]])
        assert 0 < size(tmp_path) <= 2 * most
    assert n_found(tmp_path, [2, *TEXT[1:]]) == len(TEXT)
    left = lambda: 0  # noqa: E731
    fill(tmp_path, text=[7, *TEXT[1:]])
    assert size(tmp_path) == 0
    assert caplog.records == []


def test_a_full_disk_is_one_line_and_tried_again(tmp_path, caplog):
    fill(tmp_path)
    with stored(tmp_path) as store:
        with full_disk(20_000):
            for first in range(4):
                read(store.model, [first, *TEXT * 4], CUTS, store)
                assert store.fetch([first, *TEXT * 4])[1] == 1 + 4 * len(TEXT)
                wait_until(lambda: caplog.records and not store.disk._wake.is_set())
            wait_until(lambda: not (tmp_path / "new.safetensors").exists())
        (record,) = caplog.records
        assert "cannot be written now" in record.message
        read(store.model, [9, *TEXT * 4], CUTS, store)
    for first in (0, 9):
        assert n_found(tmp_path, [first, *TEXT * 4]) == 1 + 4 * len(TEXT)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        stored(tmp_path / "file")


# Faults


def damage(file, rng):
    data = bytearray(file.read_bytes())
    kind = rng.choice(["bytes", "cut", "empty", "other", "another's"])
    if kind == "bytes":
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] ^= 1 + rng.randrange(255)
    another = rng.choice(pieces(file.parent)).read_bytes() if kind == "another's" else b""
    others = {"cut": data[: rng.randrange(len(data))], "empty": b"", "other": rng.randbytes(99), "another's": another}
    file.write_bytes(others.get(kind, data)[: len(data)])  # the folder becomes no larger


@pytest.mark.parametrize("is_open", [False, True], ids=["before", "after"])
def test_damaged_files(is_open, tmp_path, caplog):
    """Before or after the folder is opened: never a wrong token, never an error, but a shorter prefix and one line."""
    model = model_of("qwen3_5")
    for seed in range(100 if LONG else 4):
        rng, path = random.Random(seed), tmp_path / str(seed)
        fill(path)
        damaged = rng.choice(pieces(path))
        if not is_open:
            damage(damaged, rng)
        caplog.clear()
        with stored(path) as store:
            if is_open:
                damage(damaged, rng)
            fetched, n, _ = store.fetch([*TEXT, 7])
            assert n in (0, *CUTS, len(TEXT))
            if n > 0:
                assert_same_next(model, fetched, read(model, TEXT[:n], CUTS))
            if n < len(TEXT):
                (record,) = caplog.records
                assert str(path) in record.message
                assert not damaged.exists()
            read(model, TEXT, CUTS, store)
            assert store.fetch(TEXT)[1] == len(TEXT)
        assert n_found(path) == len(TEXT)  # it was written again


def test_a_piece_whose_text_was_dropped_is_written_with_it(tmp_path):
    """As where another store of the folder needed the space."""
    with stored(tmp_path) as store:
        read(store.model, SIXTY, store=store)
        wait_until(lambda: all_written(store))
        for name in [*store.disk.folder.files]:
            store.disk.folder._remove(name)
        read(store.model, [*SIXTY, 30, 31], store=store)
    assert n_found(tmp_path, [*SIXTY, 30, 31]) == 62


def test_what_is_given_up_while_it_is_written_is_written(tmp_path, caplog, monkeypatch):
    write = Folder.write
    with stored(tmp_path) as store:
        monkeypatch.setattr(Folder, "write", lambda *args: (store.trim_to(0), write(*args))[1])
        read(store.model, SIXTY, store=store)
        wait_until(lambda: pieces(tmp_path) and all_written(store))
        monkeypatch.undo()
        read(store.model, TEXT, CUTS, store)
    assert n_found(tmp_path) == len(TEXT)
    assert caplog.records == []


# Its owner


def modes(path):
    return {file.name: stat.S_IMODE(file.stat().st_mode) for file in (path, *path.iterdir())}


def test_nobody_else_may_read_the_folder(tmp_path, caplog):
    before, path = os.umask(0), tmp_path / "new" / "prompts"
    try:
        with stored(path) as store:
            read(store.model, SIXTY, store=store)
            wait_until(lambda: pieces(path) and all_written(store))
            assert {*modes(path).values()} == {0o600, 0o700}
    finally:
        os.umask(before)
    path.chmod(0o755)  # one that exists is closed to others
    fill(path)
    assert modes(path)["prompts"] == 0o700
    caplog.clear()
    path.chmod(0o1777)  # shared by its owner's will, as /tmp
    fill(path)
    assert modes(path)["prompts"] == 0o1777
    (record,) = caplog.records
    assert "Other users" in record.message


def test_a_folder_has_one_owner(tmp_path, caplog):
    """A second one says so, and keeps its prompts in memory. Stores of one process can share a ``Folder``."""
    path, models = tmp_path / "prompts", [model_of("qwen3_5", seed) for seed in (0, 1)]
    with stored(path) as first, stored(path) as second:
        read(first.model, TEXT, CUTS, first)
        assert second.disk is None
        read(second.model, TEXT, CUTS, second)
        assert second.fetch([*TEXT, 7])[1] == len(TEXT)
    (record,) = caplog.records
    in_use = f"The prompt cache in {path} is in use by process {os.getpid()}."
    assert record.message == f"{in_use} Prompts are kept in memory alone."
    folder = Folder(path)
    with stored(folder, models[0]) as first, stored(folder, models[1]) as second:
        for store in (first, second):
            read(store.model, SIXTY, CUTS, store)
    for model in models:
        assert n_found(path, SIXTY, model) == len(SIXTY)


WRITER = """
import sys
from pathlib import Path
from tests.test_prompt_store_disk import CUTS, read, stored

store = stored(Path(sys.argv[1]))
for i in range(10_000):
    read(store.model, [*divmod(i, 32), *[i % 32 for i in range(60)]], CUTS, store)
    print(flush=True)
"""


def test_a_killed_process_leaves_whole_files_and_no_owner(tmp_path, caplog):
    """What comes back is what the same cuts make, and the next process owns the folder."""
    caplog.set_level(logging.WARNING)
    for i in range(4 if LONG else 1):
        with subprocess.Popen([sys.executable, "-c", WRITER, tmp_path], stdout=subprocess.PIPE) as process:
            for _ in range(4 + i):
                process.stdout.readline()
            process.send_signal(signal.SIGKILL)
        with stored(tmp_path) as store:
            assert store.disk is not None
            assert not (tmp_path / "new.safetensors").exists()
            for first in range(4):
                read_and_compare(store, [0, first, *SIXTY], CUTS)
        assert len(pieces(tmp_path)) > 0
    assert caplog.records == []


@examples(5)
@given(data=st.data())
def test_random_operations(data):
    """Texts that are read, given up, damaged and written by two stores of a folder: what comes back is what the same cuts make,
    and no store holds more than its limit, nor the folder."""
    draw, models = data.draw, [model_of("qwen3_5", seed) for seed in (0, 1)]
    held, on_disk = draw(st.sampled_from([30_000, 200_000, ROOM])), draw(st.sampled_from([60_000, ROOM]))
    actions = st.sampled_from(["read", "read", "read", "trim", "restart", "damage"])
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)

        def new():
            folder = Folder(path, on_disk)
            return [PromptStore(model, held, folder=folder) for model in models]

        stores, texts = new(), [[]]
        for _ in range(30 if LONG else 10):
            store, action = stores[draw(st.integers(0, 1))], draw(actions)
            if action == "restart":
                for each in stores:
                    each.close()
                if draw(st.booleans()):
                    (path / "new.safetensors").write_bytes(b"half")
                stores = new()
            elif action == "trim":
                store.trim_to(0)
                assert store.nbytes == in_memory(store) == 0
            elif action == "damage":
                rng = random.Random(draw(st.integers(0, 99)))
                # It may be dropped for space, there may be none, or it is empty.
                with suppress(FileNotFoundError, IndexError, ValueError):
                    damage(rng.choice(pieces(path)), rng)
            else:
                base = draw(st.sampled_from(texts))
                more = draw(st.lists(st.integers(0, 3), min_size=1, max_size=20))
                texts.append(base[: draw(st.integers(0, len(base)))] + more)
                read_and_compare(store, texts[-1], draw(st.lists(st.integers(1, len(texts[-1])), max_size=2)))
            assert all(store.nbytes == in_memory(store) <= held for store in stores)
        for store in stores:
            store.close()
        assert size(path) <= on_disk


def read_and_compare(store, text, cuts):
    """Read a text on from what is stored of it, and compare that with the same cuts read afresh."""
    fetched, n, handle = store.fetch(text)
    if n > 0:
        ends = [node.length for node in handle().path()[1:]]
        assert_same_next(store.model, fetched, read(store.model, text[:n], ends))
    read(store.model, text, cuts, store)
