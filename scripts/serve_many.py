"""Send many different requests at once: each text must equal that of a single run, none may be lost, nothing may leak.

    python -m scripts.serve_many                200 requests, then 1,000 more
    python -m scripts.serve_many --soak 0       without the 1,000
    python -m scripts.serve_many --restarts 9   the 200 on ten servers, one after the other, with one --prompt-cache-dir
    python -m scripts.serve_many --ranks 2 --model DIR      in two processes; DIR in float32, for equal rounding

Up to ``--at-once`` requests run at once, with random lengths, sampling and penalties, streamed or not; some clients hang up
midway. The text of greedy and of seeded requests is compared with mlx-lm's own single run. Exit status 1 on any difference,
loss or leak.
"""

import argparse
import http.client
import inspect
import json
import random
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import mlx.core as mx
from mlx_lm.sample_utils import make_logits_processors
from tqdm import tqdm

import mlx_mtp
from mlx_mtp import make_sampler
from mlx_mtp.checkpoint.load import DEMO
from tests.support.decoding import plain, text_of
from tests.support.server_process import Server, serve

TIMEOUT = 3600  # seconds for an answer, also on a machine that does much else
MODULES = ["argparse", "ast", "bisect", "calendar", "cmd", "configparser", "difflib", "functools"]


def random_request(rng: random.Random, source: dict[str, str], longest: int = 2000) -> dict:
    text = source[rng.choice(MODULES)]
    start = rng.randrange(len(text) - 3000) if rng.random() < 0.5 else 0  # half of them begin alike
    body = {"prompt": text[start : start + rng.randint(1, longest)], "max_tokens": rng.choice([1, 2, 5, 20, 60, 120])}
    if rng.random() < 0.4:
        body |= {"temperature": rng.choice([0.3, 0.7, 1.5]), "top_p": rng.choice([0.8, 1.0])}
        if rng.random() < 0.2:
            body["seed"] = rng.randrange(100)
    if rng.random() < 0.3:
        body["repetition_penalty"] = 1.2
    body["stream"] = rng.random() < 0.7
    return body


def ask(server: Server, body: dict, hang_up_after: int | None) -> str | None:
    """The text of a request; None if its client hangs up, after this number of bytes."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body))
        response = connection.getresponse()
        if hang_up_after is not None:
            response.read(hang_up_after)
            return None
        raw = response.read().decode()
    finally:
        connection.close()
    if response.status != 200:
        raise RuntimeError(f"{response.status}: {raw}")
    if not body["stream"]:
        return json.loads(raw)["choices"][0]["text"]
    lines = [line[6:] for line in raw.splitlines() if line.startswith("data: ")]
    if lines[-1] != "[DONE]":
        raise RuntimeError(f"The stream has no end: {lines[-1]}")
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])


def plain_text(body: dict, model, tokenizer) -> str:
    processors = make_logits_processors(repetition_penalty=body.get("repetition_penalty", 0.0))
    prompt = tokenizer.encode(body["prompt"])
    sampler = make_sampler(body.get("temperature", 0.0), body.get("top_p", 0.0), seed=body.get("seed"))
    tokens = plain(prompt, model, max_tokens=body["max_tokens"], logits_processors=processors, sampler=sampler)
    return text_of(tokenizer, tokens, prompt)


def run(
    server: Server, bodies: dict[int, dict], rng: random.Random, expected: dict[int, str], desc: str, at_once: int
) -> int:
    """The number of requests that were lost or got another text."""
    plans = {
        i: (rng.randint(1, 4000) if rng.random() < 0.15 else None, rng.expovariate(rng.choice([8, 1]))) for i in bodies
    }
    wrong = 0

    def one(i: int) -> None:
        nonlocal wrong
        hang_up_after, pause = plans[i]
        time.sleep(pause)
        try:
            text = ask(server, bodies[i], hang_up_after)
        except Exception as e:
            text = f"{type(e).__name__}: {e}"
        if hang_up_after is None and i in expected and text != expected[i]:
            with lock:
                wrong += 1
                print(f"request {i}: {text!r}, not {expected[i]!r}", flush=True)
        elif text is not None and text.startswith(("RuntimeError", "ConnectionError", "Timeout")):
            with lock:
                wrong += 1
                print(f"request {i}: {text}", flush=True)

    lock = threading.Lock()
    with ThreadPoolExecutor(at_once) as pool:
        list(tqdm(pool.map(one, bodies), total=len(bodies), desc=desc, disable=None))
    return wrong


def run_once(
    log: Path, flags: list[str], bodies: dict[int, dict], rng: random.Random, expected: dict[int, str], at_once: int
) -> int:
    """As ``run``, on a server of its own."""
    with serve(log, *flags) as server:
        wrong = run(server, bodies, rng, expected, "at once", at_once)
        server.until_idle()
        metrics, (memory, _) = server.metrics(), resources(server)
        n, cached = (metrics[f"mlx_mtp_{name}prompt_tokens_total"] for name in ("", "cached_"))
        status = server.stop(signal.SIGTERM)
        print(
            f"{len(bodies)} requests: {cached / n:.0%} of the prompts known, {memory:.0f} MB, exit status {status}",
            flush=True,
        )
        return wrong + ("Traceback" in log.read_text()) + (status != 0)


def resources(server: Server) -> tuple[float, int]:
    """(resident memory in MB, threads)"""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return int(fields["VmRSS"].split()[0]) / 1e3, int(fields["Threads"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare many requests at once with single runs.")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--soak", type=int, default=1000, help="Further requests, to find leaks (default: 1000).")
    parser.add_argument("--model", default=str(DEMO))
    parser.add_argument("--longest", type=int, default=2000, help="Characters of the longest prompt (default: 2000).")
    parser.add_argument("--at-once", type=int, default=8, help="Requests at once (default: 8).")
    parser.add_argument("--ranks", type=int, default=1, help="Processes that run the model together (default: 1).")
    parser.add_argument(
        "--restarts", type=int, default=0, help="Of the server, on one --prompt-cache-dir (default: 0)."
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    source = {name: inspect.getsource(import_module(name)) for name in MODULES}
    model, tokenizer = mlx_mtp.load(args.model)
    bodies = [random_request(rng, source, args.longest) for _ in range(args.requests)]
    known = {i: body for i, body in enumerate(bodies) if "temperature" not in body or "seed" in body}
    expected = {i: plain_text(body, model, tokenizer) for i, body in tqdm(known.items(), desc="alone", disable=None)}
    del model
    mx.clear_cache()

    folder, n = Path(tempfile.mkdtemp()), args.restarts + 1
    log, flags = folder / "server.log", ["--mtp", "--model", args.model]
    if args.restarts:
        flags += ["--prompt-cache-dir", str(folder / "prompts")]
    *before, last = [{i: bodies[i] for i in range(k, len(bodies), n)} for k in range(n)]
    wrong = sum(run_once(log, flags, part, rng, expected, args.at_once) for part in before)
    with serve(log, *flags, ranks=args.ranks) as server:
        wrong += run(server, last, rng, expected, "at once", args.at_once)
        server.until_idle()
        metrics = server.metrics()
        switches = {to: metrics.get(f'mlx_mtp_mode_switches_total{{to="{to}"}}', 0) for to in ("mtp", "batch")}
        print(
            f"{args.requests} requests, {len(expected)} compared: {wrong} wrong or lost; switches: {switches}",
            flush=True,
        )
        leaks = False
        if args.soak:
            more, leaks = soak(server, args, rng, source)
            wrong += more
        wrong += "Traceback" in log.read_text()
        if wrong:
            print(f"the server's log: {log}")
        server.stop(signal.SIGTERM)
        print(f"exit status of the server: {', '.join(map(str, server.statuses()))}")
    sys.exit(bool(wrong or leaks))


def soak(server: Server, args: argparse.Namespace, rng: random.Random, source: dict[str, str]) -> tuple[int, bool]:
    """(requests that were lost, whether the server's memory or threads grow)"""
    wrong, used = 0, [resources(server)]
    for part in range(10):
        bodies = [random_request(rng, source, 200) for _ in range(args.soak // 10)]
        wrong += run(server, dict(enumerate(bodies)), rng, {}, f"soak {part + 1} of 10", args.at_once)
        server.until_idle()
        memory, threads = resources(server)
        used.append((memory, threads))
        print(f"after {args.requests + (part + 1) * len(bodies)}: {memory:.0f} MB, {threads} threads", flush=True)
    # The second half may need at most a tenth more memory than the first, and no more threads.
    leaks = used[-1][0] > 1.1 * max(m for m, _ in used[3:6]) or used[-1][1] > max(t for _, t in used[3:6])
    return wrong, leaks


if __name__ == "__main__":
    main()
