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
from contextlib import ExitStack
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
        environment = {**os.environ, "MLX_JACCL_COORDINATOR": "127.0.0.1:1"}  # rank 0's address
        for rank, deed in enumerate(deeds):
            ours, theirs = socket.socketpair()
            words = [theirs.fileno(), rank, len(deeds), beat, patience, deed]
            command = [sys.executable, "-m", f"{RANKS}.watched", *map(str, words)]
            self.processes.append(
                subprocess.Popen(
                    command,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    pass_fds=[theirs.fileno()],
                    cwd=launch.ROOT,
                    env=environment,
                )
            )
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
        errors = [line for _, err in outputs for line in err.splitlines()]
        return (
            [process.returncode for process in processes],
            errors,
            [line for out, _ in outputs for line in out.splitlines()],
        )

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, *_) -> None:
        for process in self.processes:
            process.kill()  # its watcher ends with it
            process.communicate()
        for file in self.files:
            file.close()


CULPRITS = pytest.mark.parametrize(
    ("size", "culprit"), [(2, 1), (3, 0), *(pytest.param(*p, marks=pytest.mark.slow) for p in ((2, 0), (4, 2)))]
)


@CULPRITS
def test_a_rank_that_is_killed_ends_the_others_with_one_line_that_names_it(size, culprit):
    with Group(*["wait"] * size) as group:
        group.kill(culprit, signal.SIGKILL)
        statuses, errors, out = group.end()
    assert errors == [f"mlx_mtp: error: Rank {culprit} ({HOST}) has died."]
    assert statuses == [-signal.SIGKILL if rank == culprit else 1 for rank in range(size)]
    assert out == []


def test_the_others_are_told_before_they_end():
    with Group("wait and tell", "wait and tell", "wait") as group:
        group.kill(2, signal.SIGKILL)
        statuses, _, out = group.end()
    assert [line.startswith(f"Rank 2 ({HOST}) ") for line in out] == [True, True]
    assert statuses == [1, 1, -signal.SIGKILL]


def test_a_rank_that_is_stopped_ends_the_others_and_is_killed():
    cases = [(2, 1), (3, 0), *([(2, 0), (4, 2)] if LONG else [])]
    with ExitStack() as stack:
        groups = [stack.enter_context(Group(*["wait"] * size, patience=SHORT)) for size, _ in cases]
        for group, (_, culprit) in zip(groups, cases):
            group.kill(culprit, signal.SIGSTOP)
        for group, (size, culprit) in zip(groups, cases):
            statuses, (error,), _ = group.end()
            what = f"mlx_mtp: error: Rank {culprit} ({HOST}) does not answer: it has been stopped for "
            assert error.startswith(what)
            assert statuses == [-signal.SIGKILL if rank == culprit else 1 for rank in range(size)]


def test_a_machine_that_stands_still_ends_the_others_and_its_rank_when_it_goes_on():
    with ExitStack() as stack:
        groups = [stack.enter_context(Group("wait", "wait", patience=SHORT)) for _ in range(2)]
        stopped = [(group.watcher(rank), group.processes[rank].pid) for rank, group in enumerate(groups)]
        for pid in itertools.chain(*stopped):
            os.kill(pid, signal.SIGSTOP)
        for culprit, group in enumerate(groups):
            statuses, (error,), _ = group.end([1 - culprit])
            assert statuses == [1]
            what = f"mlx_mtp: error: Rank {culprit} ({HOST}) does not answer: it has been silent for "
            assert error.startswith(what)
            for pid in reversed(stopped[culprit]):  # a rank that still stands is killed
                os.kill(pid, signal.SIGCONT)
            assert group.end([culprit])[0] == [1]


@CULPRITS
def test_an_exception_ends_the_others_which_say_whose_it_was(size, culprit):
    deeds = ["wait"] * size
    deeds[culprit] = "fail"
    with Group(*deeds) as group:
        statuses, errors, out = group.end()
    assert statuses == [1] * size
    assert [e for e in errors if e.startswith("mlx_mtp")] == [
        f"mlx_mtp: error: Rank {culprit} ({HOST}) has failed: ValueError: no weights"
    ]
    assert errors.count("ValueError: no") == 1  # its own traceback
    assert out == []


def test_an_exception_that_all_ranks_raise_is_their_own():
    with Group("fail late", "fail", "fail late", beat=WINDOW) as group:
        statuses, errors, _ = group.end()
    assert statuses == [1, 1, 1]
    assert errors.count("ValueError: no") == 3
    assert not any(e.startswith("mlx_mtp") for e in errors)


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_death_is_named_although_the_others_fail_of_it(culprit):
    deeds = ["fail", "fail"]  # as a collective does, whose peer is lost
    deeds[culprit] = "die"
    with Group(*deeds, beat=WINDOW) as group:
        statuses, errors, _ = group.end()
    assert statuses[1 - culprit] == 1
    assert errors == [f"mlx_mtp: error: Rank {culprit} ({HOST}) has died."]


@pytest.mark.parametrize("deeds", [("leave", "sleep"), ("sleep", "exit"), ("leave", "leave", "sleep", "exit")])
def test_ranks_wait_for_each_other_at_the_end(deeds):
    with Group(*deeds) as group:
        statuses, errors, out = group.end()
    assert (statuses, errors) == ([0] * len(deeds), [])
    assert out == ["whole"] * (len(deeds) - deeds.count("exit"))


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_is_lost_while_the_others_are_at_the_end_is_missed(culprit):
    deeds = ["leave", "leave"]
    deeds[culprit] = "wait"
    with Group(*deeds) as group:
        group.kill(culprit, signal.SIGKILL)
        statuses, errors, out = group.end()
    assert statuses[1 - culprit] == 1
    assert errors == [f"mlx_mtp: error: Rank {culprit} ({HOST}) has died."]
    assert out == []


def test_a_nonzero_exit_ends_the_others():
    with Group("wait", "exit 2") as group:
        statuses, errors, _ = group.end()
    assert statuses == [1, 2]
    assert errors == [f"mlx_mtp: error: Rank 1 ({HOST}) has failed: SystemExit: 2"]


def test_a_rank_that_holds_pythons_lock_is_not_lost_however_long_it_takes():
    with ExitStack() as stack:
        deeds = ("hold the lock", "leave"), ("leave", "hold the lock")  # for longer than the patience
        groups = [stack.enter_context(Group(*both, patience=SHORT)) for both in deeds]
        assert [group.end()[:2] for group in groups] == [([0, 0], [])] * 2


def test_a_rank_that_holds_pythons_lock_is_killed_when_another_one_is_lost():
    with Group("hold the lock for ever", "wait") as group:
        group.files[0].readline()  # it holds the lock
        group.kill(1, signal.SIGKILL)
        statuses, errors, _ = group.end()
    assert statuses == [-signal.SIGKILL, -signal.SIGKILL]
    assert errors == [f"mlx_mtp: error: Rank 1 ({HOST}) has died."]


def test_a_death_is_seen_although_a_process_of_its_own_lives_on():
    with Group("wait", "fork and wait") as group:
        group.kill(1, signal.SIGKILL)
        statuses, errors, _ = group.end([0])
    assert (statuses, errors) == ([1], [f"mlx_mtp: error: Rank 1 ({HOST}) has died."])


def test_a_rank_does_not_go_on_unwatched():
    with Group("wait", "wait") as group:
        os.kill(group.watcher(1), signal.SIGKILL)
        statuses, errors, _ = group.end()
    assert statuses == [1, 1]
    assert sorted(errors) == [
        f"mlx_mtp: error: Rank 1 ({HOST}) has died.",
        f"mlx_mtp: error: The watcher of rank 1 ({HOST}) has died.",
    ]


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


@pytest.mark.parametrize(("seconds", "first"), [(1.0, 1), (-1.0, 0)])
def test_the_first_of_two_deaths_is_named_once(capsys, seconds, first):
    """As where ``mlx.launch`` ends a rank because another has died."""
    (rank, own), (other, link) = socket.socketpair(), socket.socketpair()
    with other:
        rank.close()
        fault = ["fault", 1, f"Rank 1 ({HOST}) has died.", False, seconds]  # found so many seconds before
        other.sendall(json.dumps(fault).encode() + b"\n")
        watcher = Watcher(Link(own, 0, HOST), [Link(link, 1, HOST)], WINDOW, PATIENCE, -1)
        with own, pytest.raises(Fault, match=f"^Rank 0 [(]{HOST}[)] has died.$") as found:
            watcher.watch()
        other.shutdown(socket.SHUT_WR)
        watcher.end(found.value)
        told = [json.loads(line) for line in other.makefile()]
    assert [rank for kind, rank, *_ in told if kind == "fault"][-1] == first
    # Rank 1's watcher says so of rank 0.
    assert capsys.readouterr().err == (f"mlx_mtp: error: Rank 1 ({HOST}) has died.\n" if first == 1 else "")


def test_a_rank_that_fails_and_is_then_ended_is_not_the_cause(capsys):
    """The other one died before, but its watcher says so last."""
    (rank, own), (other, link) = socket.socketpair(), socket.socketpair()
    with other:
        rank.sendall(b'["failed", "RuntimeError: recv"]\n')
        watcher = Watcher(Link(own, 0, HOST), [Link(link, 1, HOST)], WINDOW, PATIENCE, os.getppid())
        with own, pytest.raises(Fault, match="has failed: RuntimeError: recv") as found:
            watcher.watch()
        rank.close()
        other.sendall(json.dumps(["fault", 1, f"Rank 1 ({HOST}) has died.", False, 1.0]).encode() + b"\n")
        other.shutdown(socket.SHUT_WR)
        watcher.parent = -1  # it has ended
        watcher.end(found.value)
    assert capsys.readouterr().err == f"mlx_mtp: error: Rank 1 ({HOST}) has died.\n"


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
