"""What MTP gains on two processes, by the time that an exchange between them takes.

    python -m benchmarks.latency

Both run on this machine, with the ring backend. Each connection of the ring goes through a relay that holds every message back,
so that each exchange (a sum over both) takes so much longer. Plain mlx-lm and MTP (auto) alternate in the same two
processes. "parts allow" is the ratio that the measured parts allow: see src/mlx_mtp/benchmark/parts.py.
"""

import inspect
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import mlx.core as mx
from tqdm import tqdm

import mlx_mtp
from benchmarks.timing import take_turns
from mlx_mtp.benchmark import parts, runs
from mlx_mtp.distributed.ranks import Ranks
from mlx_mtp.distributed.watch import watch
from scripts.shared import script_parser
from tests.support.launch import free_ports

# Of MLX's ring: in a sum over two processes one message each way follows upon another.
MESSAGES = 2
DEPTH = 8


def relay(port: int, target: int, delay: float) -> None:
    """Pass on what comes to a port, each message so many seconds later."""

    def serve(server: socket.socket) -> None:
        while True:
            near, far = server.accept()[0], connect(target)
            for source, sink in ((near, far), (far, near)):
                sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                Thread(target=pass_on, args=(source, sink, delay), daemon=True).start()

    Thread(target=serve, args=(socket.create_server(("127.0.0.1", port)),), daemon=True).start()


def connect(port: int) -> socket.socket:
    while True:
        with suppress(ConnectionRefusedError):
            return socket.create_connection(("127.0.0.1", port))
        time.sleep(0.1)  # the rank is not there yet


def pass_on(source: socket.socket, sink: socket.socket, delay: float) -> None:
    with suppress(OSError):  # a process has ended
        while data := source.recv(1 << 20):
            time.sleep(delay)
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


def launch(n: int, delay: float, options: list[str]) -> dict[str, Any]:
    """What rank 0 of n processes measures."""
    command = [sys.executable, "-m", "benchmarks.latency", *options, "--measure"]
    ports = free_ports(2 * n)
    own, through = ports[:n], ports[n:] if delay > 0 else ports[:n]
    for port, target in zip(through, own) if delay > 0 else ():
        relay(port, target, delay / MESSAGES)
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(n):
            hosts = Path(folder) / f"{rank}.json"
            seen = [own[r] if r == rank else through[r] for r in range(n)]
            hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in seen]))
            env = {"MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)} if n > 1 else {}
            processes.append(subprocess.Popen(command, env={**os.environ, **env}, stdout=subprocess.PIPE))
        outputs = [process.communicate()[0] for process in processes]
        if any(process.returncode for process in processes):
            raise SystemExit("A rank has failed.")
    return json.loads(outputs[0])


def measure(args: Namespace, group: mx.distributed.Group) -> dict[str, Any]:
    """The speeds of both runs, and what the parts allow."""
    model, tokenizer = mlx_mtp.load(args.model, tensor_group=group if group.size() > 1 else None, settings=False)
    prompt = mx.array(tokenizer.encode(inspect.getsource(inspect))[: args.prompt_tokens])

    def generate(run: runs.Run) -> runs.Generation:
        generation = runs.generate(model, prompt, args.max_tokens, run)
        mx.synchronize()
        return generation

    turns = take_turns({run: partial(generate, run) for run in (runs.PLAIN, runs.NO_COPIES)}, args.repeat + 1)
    plain, mtp = (turns[run][1:] for run in turns)  # the first round warms up
    counts, timed = runs.sum_counts([g.counts for g in mtp]), parts.time_parts(model, prompt, DEPTH)
    return {
        "equal": all(a.tokens == b.tokens for a, b in zip(plain, mtp)),
        "plain": statistics.median(g.n_timed / g.seconds for g in plain),
        "ratios": [a.seconds / b.seconds for a, b in zip(plain, mtp)],
        "allowed": sum(g.n_timed for g in mtp) * timed.verify[0] / timed.seconds(sum(g.n_steps for g in mtp), counts),
        "exchange": timed.exchange.get(1, 0.0),
        "verify": timed.verify,
        "tokens_per_step": counts.tokens_per_step,
        "drafts": sum(counts.drafted) / max(1, counts.drafted[0]) if counts.drafted else 0.0,
    }


def main() -> None:
    flags = dict(delays=([0.0, 0.1, 1.0, 5.0], "Milliseconds, of an exchange."), model=str(mlx_mtp.DEMO))
    flags |= dict(prompt_tokens=256, max_tokens=(64, "Tokens of a run."), repeat=(5, "Turns."))
    args = script_parser(__doc__, measure=(False, "Be one of the processes."), **flags).parse_args()
    if args.measure:
        group = mx.distributed.init()
        with watch(Ranks(group) if group.size() > 1 else None):
            print(json.dumps(measure(args, group)))
        return
    head = "processes  added ms  exchange ms  V(1) ms  V(2)/V(1)  V(4)/V(1)  plain tokens/s"
    print(f"{head}  MTP/plain  low to high   parts allow")
    for n, delay in tqdm([(1, 0.0), *((2, d) for d in args.delays)], disable=None, leave=False):
        m = launch(n, delay / 1e3, sys.argv[1:])
        ratios, V = m["ratios"], m["verify"]
        print(
            f"{n:9}  {delay:8g}  {m['exchange'] * 1e3:11.2f}  {V[0] * 1e3:7.1f}  {V[1] / V[0]:9.2f}  {V[3] / V[0]:9.2f}"
            f"  {m['plain']:14.1f}  {statistics.median(ratios):9.2f}  {min(ratios):.2f} to {max(ratios):.2f}"
            f"  {m['allowed']:11.2f}  {m['drafts']:.2f} drafts, {m['tokens_per_step']:.2f} tokens a step"
            + ("" if m["equal"] else "  tokens differ"),
            flush=True,
        )


if __name__ == "__main__":
    main()
