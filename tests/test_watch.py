"""A rank that is lost ends the others: real processes, of which the test kills, stops or cuts off some.

Each holds its stderr open, and so does its watcher: when it has been read to the end, none of them is left.
"""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest

from mlx_mtp.distributed.connect import connect
from mlx_mtp.distributed.watcher import Fault, Link, Watcher
from tests.support import launch
from tests.support.profiles import LONG

RANKS = "tests.support.ranks"
BEAT = 0.1
WINDOW = 10.0  # a beat for as long as ranks may take to say what has become of them
PATIENCE = 30.0  # a loaded machine may let a process wait for seconds
SHORT = 8.0  # where it is to be exceeded: tests of that wait for several groups at once
TIMEOUT = 60  # seconds until a test fails
HOST = socket.gethostname()


class Group:
    """Processes inside ``watch``, each of which does a deed of support/ranks/watched.py."""

    def __init__(self, *deeds: str, shares: int = 3, beat: float = BEAT, patience: float = PATIENCE):
        self.processes, self.files = [], []
        env = {**os.environ, "MLX_JACCL_COORDINATOR": "127.0.0.1:1"}  # rank 0's address
        options = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=launch.ROOT, env=env)
        for rank, deed in enumerate(deeds):
            ours, theirs = socket.socketpair()
            words = map(str, [theirs.fileno(), rank, len(deeds), beat, patience, deed])
            command = [sys.executable, "-m", f"{RANKS}.watched", *words]
            self.processes.append(subprocess.Popen(command, pass_fds=[theirs.fileno()], **options))
            theirs.close()
            ours.settimeout(TIMEOUT)
            with ours:
                self.files.append(ours.makefile("rw"))
        for _ in range(shares):
            self.share()

    def share(self, change=lambda value: value) -> None:
        """Give every rank what rank 0 says."""
        values = [file.readline() for file in self.files]
        value = change(json.loads(values[0]))
        for file in self.files:
            file.write(json.dumps(value) + "\n")
            file.flush()

    def kill(self, rank: int, sig: signal.Signals) -> None:
        self.processes[rank].send_signal(sig)

    def watcher(self, rank: int) -> int:
        """Its process id."""
        pgrep = subprocess.run(["pgrep", "-P", str(self.processes[rank].pid)], capture_output=True, text=True)
        return int(pgrep.stdout)

    def end(self, ranks: Sequence[int] | None = None) -> tuple[list[int], list[str], list[str]]:
        """(exit statuses, lines on stderr, lines on stdout) of ranks that end by themselves"""
        processes = self.processes if ranks is None else [self.processes[r] for r in ranks]
        outputs = [process.communicate(timeout=TIMEOUT) for process in processes]
        out, errors = ([line for text in texts for line in text.splitlines()] for texts in zip(*outputs))
        return [process.returncode for process in processes], errors, out

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, *_) -> None:
        for process in self.processes:
            process.kill()  # its watcher ends with it
            process.communicate()
        for file in self.files:
            file.close()


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def died(rank):
    return f"mlx_mtp: error: Rank {rank} ({HOST}) has died."


@pytest.mark.parametrize(
    ("deeds", "culprit"),
    [
        (["wait"] * 2, 1),
        (["wait"] * 3, 0),
        slow(["wait"] * 2, 0),
        slow(["wait"] * 4, 2),
        (["wait", "leave"], 0),  # while the others are at the end
        (["leave", "wait"], 1),
        (["die", "fail"], 0),  # as a collective does, whose peer is lost
        (["fail", "die"], 1),
    ],
    ids=str,
)
def test_a_rank_that_is_killed_ends_the_others_with_one_line_that_names_it(deeds, culprit):
    with Group(*deeds, beat=WINDOW if "die" in deeds else BEAT) as group:
        if "die" not in deeds:
            group.kill(culprit, signal.SIGKILL)
        statuses, errors, out = group.end()
    assert (errors, out) == ([died(culprit)], [])
    assert statuses == [-signal.SIGKILL if rank == culprit else 1 for rank in range(len(deeds))]


def test_the_others_are_told_before_they_end():
    with Group("wait and tell", "wait and tell", "wait") as group:
        group.kill(2, signal.SIGKILL)
        statuses, _, out = group.end()
    assert [line.startswith(f"Rank 2 ({HOST}) ") for line in out] == [True, True]
    assert statuses == [1, 1, -signal.SIGKILL]


def test_ranks_that_do_not_answer_end_the_others_unless_they_hold_pythons_lock():
    """Where a rank is stopped, where a machine stands still, and where a rank takes longer than the patience."""
    cases = [(2, 1), (3, 0), *([(2, 0), (4, 2)] if LONG else [])]
    holding = ("hold the lock", "leave"), ("leave", "hold the lock")
    with ExitStack() as stack:

        def groups(*all_deeds):
            return [stack.enter_context(Group(*deeds, patience=SHORT)) for deeds in all_deeds]

        stopped, still = groups(*(["wait"] * size for size, _ in cases)), groups(*[["wait", "wait"]] * 2)
        for group, (_, culprit) in zip(stopped, cases):
            group.kill(culprit, signal.SIGSTOP)
        standing = [(group.watcher(rank), group.processes[rank].pid) for rank, group in enumerate(still)]
        for pid in itertools.chain(*standing):
            os.kill(pid, signal.SIGSTOP)
        held = groups(*holding)
        for group, (size, culprit) in zip(stopped, cases):
            statuses, (error,), _ = group.end()
            assert error.startswith(
                f"mlx_mtp: error: Rank {culprit} ({HOST}) does not answer: it has been stopped for "
            )
            assert statuses == [-signal.SIGKILL if rank == culprit else 1 for rank in range(size)]
        for culprit, group in enumerate(still):
            statuses, (error,), _ = group.end([1 - culprit])
            assert statuses == [1]
            assert error.startswith(f"mlx_mtp: error: Rank {culprit} ({HOST}) does not answer: it has been silent for ")
            for pid in reversed(standing[culprit]):  # a rank that still stands is killed
                os.kill(pid, signal.SIGCONT)
            assert group.end([culprit])[0] == [1]
        assert [group.end()[:2] for group in held] == [([0, 0], [])] * 2


@pytest.mark.parametrize(
    ("deeds", "culprit", "error"),
    [
        (["wait", "fail"], 1, "ValueError: no weights"),
        (["fail", "wait", "wait"], 0, "ValueError: no weights"),
        slow(["fail", "wait"], 0, "ValueError: no weights"),
        slow(["wait", "wait", "fail", "wait"], 2, "ValueError: no weights"),
        (["wait", "exit 2"], 1, "SystemExit: 2"),
    ],
    ids=str,
)
def test_an_exception_ends_the_others_which_say_whose_it_was(deeds, culprit, error):
    with Group(*deeds) as group:
        statuses, errors, out = group.end()
    assert statuses == [2 if deed == "exit 2" else 1 for deed in deeds]
    assert [e for e in errors if e.startswith("mlx_mtp")] == [
        f"mlx_mtp: error: Rank {culprit} ({HOST}) has failed: {error}"
    ]
    assert errors.count("ValueError: no") == deeds.count("fail")  # its own traceback
    assert out == []


def test_an_exception_that_all_ranks_raise_is_their_own():
    with Group("fail late", "fail", "fail late", beat=WINDOW) as group:
        statuses, errors, _ = group.end()
    assert statuses == [1, 1, 1]
    assert errors.count("ValueError: no") == 3
    assert not any(e.startswith("mlx_mtp") for e in errors)


@pytest.mark.parametrize("deeds", [("leave", "sleep"), ("sleep", "exit"), ("leave", "leave", "sleep", "exit")])
def test_ranks_wait_for_each_other_at_the_end(deeds):
    with Group(*deeds) as group:
        statuses, errors, out = group.end()
    assert (statuses, errors) == ([0] * len(deeds), [])
    assert out == ["whole"] * (len(deeds) - deeds.count("exit"))


def test_a_rank_that_holds_pythons_lock_is_killed_when_another_one_is_lost():
    with Group("hold the lock for ever", "wait") as group:
        group.files[0].readline()  # it holds the lock
        group.kill(1, signal.SIGKILL)
        assert group.end()[:2] == ([-signal.SIGKILL, -signal.SIGKILL], [died(1)])


def test_a_death_is_seen_although_a_process_of_its_own_lives_on():
    with Group("wait", "fork and wait") as group:
        group.kill(1, signal.SIGKILL)
        assert group.end([0])[:2] == ([1], [died(1)])


def test_a_rank_does_not_go_on_unwatched():
    with Group("wait", "wait") as group:
        os.kill(group.watcher(1), signal.SIGKILL)
        statuses, errors, _ = group.end()
    assert statuses == [1, 1]
    assert sorted(errors) == [died(1), f"mlx_mtp: error: The watcher of rank 1 ({HOST}) has died."]


def test_ranks_that_cannot_connect_say_so():
    def nobody_listens(value):
        where, *rest = value
        return [[[host, 9] for host, _ in where], *rest]

    with Group("wait", "wait", shares=0, patience=1.0) as group:  # rank 0 waits for twice as long
        group.share(nobody_listens)
        group.share()
        statuses, errors, _ = group.end()
    assert statuses == [1, 1]
    missing, refused = [e for e in errors if e.startswith("ConnectionError: ")]
    assert f"Rank 1 has not connected to rank 0 (rank 0 is {HOST} at 127.0.0.1 port " in missing
    assert f"Rank 1 cannot connect to rank 0: Connection refused (rank 0 is {HOST} at 127.0.0.1 port 9)" in refused


@pytest.mark.parametrize(("size", "who"), [(2, "Rank 1 was lost"), (3, "One of the 3 ranks was lost")])
def test_a_rank_that_is_lost_before_all_are_connected_is_named(size, who):
    def share(value):
        raise RuntimeError("[ring] connection to a peer was lost")

    with ExitStack() as sockets, pytest.raises(ConnectionError, match=who):
        connect(SimpleNamespace(rank=0, size=size, broadcast=share), sockets, 1.0)


def test_strangers_are_turned_away():
    def meet(value):
        for _, port in value[0]:
            for words in (b"", b"hello\n", b"0123 1 host\n", b"x" * 10_000, b"\xff \xff \xff\n"):
                with socket.create_connection(("127.0.0.1", port)) as stranger:
                    stranger.sendall(words)
        return value

    with Group("leave", "leave", shares=0) as group:
        group.share(meet)
        group.share()
        group.share()
        assert group.end() == ([0, 0], [], ["whole"] * 2)


@contextmanager
def watched(parent):
    """A watcher of rank 0, its pipes to its rank and to the other rank's watcher."""
    (rank, own), (other, link) = socket.socketpair(), socket.socketpair()
    with rank, own, other, link:
        yield Watcher(Link(own, 0, HOST), [Link(link, 1, HOST)], WINDOW, PATIENCE, parent), rank, other


def fault_of_1(seconds):
    """Rank 1's watcher says that it has died, found so many seconds before."""
    return json.dumps(["fault", 1, f"Rank 1 ({HOST}) has died.", False, seconds]).encode() + b"\n"


@pytest.mark.parametrize(("seconds", "first"), [(1.0, 1), (-1.0, 0)])
def test_the_first_of_two_deaths_is_named_once(capsys, seconds, first):
    """As where ``mlx.launch`` ends a rank because another has died."""
    with watched(-1) as (watcher, rank, other):
        rank.close()
        other.sendall(fault_of_1(seconds))
        with pytest.raises(Fault, match=f"^Rank 0 [(]{HOST}[)] has died.$") as found:
            watcher.watch()
        other.shutdown(socket.SHUT_WR)
        watcher.end(found.value)
        told = [json.loads(line) for line in other.makefile()]
    assert [rank for kind, rank, *_ in told if kind == "fault"][-1] == first
    # Rank 1's watcher says so of rank 0.
    assert capsys.readouterr().err == (f"{died(1)}\n" if first == 1 else "")


def test_a_rank_that_fails_and_is_then_ended_is_not_the_cause(capsys):
    """The other one died before, but its watcher says so last."""
    with watched(os.getppid()) as (watcher, rank, other):
        rank.sendall(b'["failed", "RuntimeError: recv"]\n')
        with pytest.raises(Fault, match="has failed: RuntimeError: recv") as found:
            watcher.watch()
        rank.close()
        other.sendall(fault_of_1(1.0))
        other.shutdown(socket.SHUT_WR)
        watcher.parent = -1  # it has ended
        watcher.end(found.value)
    assert capsys.readouterr().err == f"{died(1)}\n"


@pytest.mark.parametrize("deed", ["kill", *(pytest.param(d, marks=pytest.mark.slow) for d in ("stop", "fail"))])
def test_mlx_launch_ends_when_a_rank_is_lost_in_a_collective(deed, tmp_path):
    os.mkfifo(tmp_path / "errors")
    with open(os.open(tmp_path / "errors", os.O_RDONLY | os.O_NONBLOCK)) as file:
        program = ["bash", "-c", f'exec "$@" 2> {tmp_path}/errors', "bash", sys.executable, "-m", f"{RANKS}.collective"]
        run = launch.run(2, *program, deed, timeout=60)
        os.set_blocking(file.fileno(), True)
        lines = file.read().splitlines()  # of all watchers, too; mlx.launch reads no more when its ranks have ended
    errors = [line for line in lines if line.startswith("mlx_mtp")]
    assert len(errors) == 1
    assert errors[0].startswith(f"mlx_mtp: error: Rank 1 ({HOST}) ")
    assert run.stdout.splitlines() == ["sums"]
    assert deed != "fail" or "ValueError: of rank 1" in lines  # its own traceback
