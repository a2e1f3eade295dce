"""What MTP gains on two processes, by the time that an exchange between them takes.

    python -m benchmarks.latency

Both run on this machine, with the ring backend. Each connection of the ring goes through a relay that holds every message back,
so that each exchange (a sum over both) takes so much longer. Plain mlx-lm and MTP (auto) generate in turn in the same two
processes. "parts allow" is the ratio that the measured parts allow: see src/mlx_mtp/benchmark/parts.py.
"""

import argparse
import inspect
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from threading import Thread
from typing import Any

import mlx.core as mx
from tqdm import tqdm

import mlx_mtp
from mlx_mtp.benchmark import parts, runs
from mlx_mtp.distributed.ranks import Ranks
from mlx_mtp.distributed.watch import watch

# Of MLX's ring: in a sum over two processes one message each way follows upon another.
MESSAGES = 2
DEPTH = 8


def relay(port: int, target: int, delay: float) -> None:
    """Pass on what comes to a port, each message so many seconds later."""
    server = socket.create_server(("127.0.0.1", port))

    def serve() -> None:
        while True:
            near = server.accept()[0]
            far = _connect(target)
            for source, sink in ((near, far), (far, near)):
                sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                Thread(target=_pass_on, args=(source, sink, delay), daemon=True).start()

    Thread(target=serve, daemon=True).start()


def _connect(port: int) -> socket.socket:
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            time.sleep(0.1)  # the rank is not there yet


def _pass_on(source: socket.socket, sink: socket.socket, delay: float) -> None:
    try:
        while data := source.recv(1 << 20):
            time.sleep(delay)
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # a process has ended


def launch(n: int, delay: float, options: list[str]) -> dict[str, Any]:
    """What rank 0 of n processes measures."""
    command = [sys.executable, __file__, *options, "--measure"]
    if n == 1:
        return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    first = random.randrange(20_000, 30_000, 4)
    own, through = (first, first + 1), (first + 2, first + 3)
    if delay == 0:
        through = own
    else:
        for rank in range(n):
            relay(through[rank], own[rank], delay / MESSAGES)
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(n):
            ports = [own[r] if r == rank else through[r] for r in range(n)]
            hostfile = Path(folder) / f"{rank}.json"
            hostfile.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
            env = {**os.environ, "MLX_HOSTFILE": str(hostfile), "MLX_RANK": str(rank)}
            processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE))
        outputs = [process.communicate()[0] for process in processes]
        if any(process.returncode for process in processes):
            raise SystemExit("A rank has failed.")
    return json.loads(outputs[0])


def measure(args: argparse.Namespace, group: mx.distributed.Group) -> dict[str, Any]:
    """The speeds of both runs, and what the parts allow."""
    model, tokenizer = mlx_mtp.load(args.model, tensor_group=group if group.size() > 1 else None, settings=False)
    prompt = mx.array(tokenizer.encode(inspect.getsource(argparse))[: args.prompt_tokens])
    kinds: list[runs.Run] = [runs.PLAIN, runs.NO_COPIES]

    def generate(kind: runs.Run) -> runs.Generation:
        generation = runs.generate(model, prompt, args.max_tokens, kind)
        mx.synchronize()
        return generation

    for kind in kinds:  # warm
        generate(kind)
    turns = [{kind: generate(kind) for kind in runs.in_turn(kinds, i)} for i in range(args.repeat)]
    counts = runs.sum_counts([turn[runs.NO_COPIES].counts for turn in turns])
    timed = parts.time_parts(model, prompt, DEPTH)
    n_tokens = sum(turn[runs.NO_COPIES].n_timed for turn in turns)
    n_steps = sum(turn[runs.NO_COPIES].n_steps for turn in turns)
    return {
        "equal": all(turn[runs.NO_COPIES].tokens == turn[runs.PLAIN].tokens for turn in turns),
        "plain": statistics.median((args.max_tokens - 1) / turn[runs.PLAIN].seconds for turn in turns),
        "ratios": [turn[runs.PLAIN].seconds / turn[runs.NO_COPIES].seconds for turn in turns],
        "allowed": n_tokens * timed.verify[0] / timed.seconds(n_steps, counts),
        "exchange": timed.exchange.get(1, 0.0),
        "n_exchanges": timed.n_exchanges,
        "verify": timed.verify,
        "tokens_per_step": counts.tokens_per_step,
        "drafts": sum(counts.drafted) / max(1, counts.drafted[0]) if counts.drafted else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delays", type=float, nargs="+", default=[0, 0.1, 1, 5], help="Milliseconds, of an exchange.")
    parser.add_argument("--model", default=str(mlx_mtp.DEMO))
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=64, help="Tokens of a run (default: 64).")
    parser.add_argument("--repeat", type=int, default=5, help="Turns (default: 5).")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        group = mx.distributed.init()
        with watch(Ranks(group) if group.size() > 1 else None):
            print(json.dumps(measure(args, group)))
        return
    options = [a for a in sys.argv[1:]]
    print(
        "processes  added ms  exchange ms  V(1) ms  V(2)/V(1)  V(4)/V(1)  plain tokens/s  MTP/plain  low to high   parts allow"
    )
    for n, delay in tqdm([(1, 0.0), *((2, d) for d in args.delays)], disable=None, leave=False):
        m = launch(n, delay / 1e3, options)
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
