"""Send many different requests at once: each text must equal that of a single run, none may be lost, nothing may leak.

    python -m scripts.serve_many                200 requests, then 1,000 more
    python -m scripts.serve_many --soak 0       without the 1,000
    python -m scripts.serve_many --restarts 9   the 200 on ten servers, one after the other, with one --prompt-cache-dir
    python -m scripts.serve_many --ranks 2 --model DIR      in two processes; DIR in float32, for equal rounding

Up to ``--at-once`` requests run at once, with random lengths, sampling and penalties, streamed or not; some clients hang up
midway. The text of greedy and of seeded requests is compared with mlx-lm's own single run. Exit status 1 on any difference,
loss or leak.
"""

import random
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

from tqdm import tqdm

import mlx_mtp
from scripts.shared import MODULES, SOURCES, script_parser
from tests.support.decoding import text_alone
from tests.support.server_process import Server, serve

CACHE = "100MB"  # of the prompt cache, which is soon full


def random_request(rng: random.Random, longest: int = 2000) -> dict:
    text = SOURCES[rng.choice(MODULES)]
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


def ask(server: Server, body: dict, hang_up_after: int | None = None) -> str | None:
    """The text of a request; None if its client hangs up, after this number of events."""
    if not body["stream"] and hang_up_after is None:
        status, content = server.request("/v1/completions", body, timeout=3600)
        if status != 200:
            raise RuntimeError(f"{status}: {content}")
        return content["choices"][0]["text"]
    events = server.stream("/v1/completions", body)
    texts = [event["choices"][0]["text"] for event in islice(events, hang_up_after)]
    events.close()
    return "".join(texts) if hang_up_after is None else None


def plain_text(body: dict, model, tokenizer) -> str:
    return text_alone(model, tokenizer, **{name: value for name, value in body.items() if name != "stream"})


def run(server: Server, bodies: dict[int, dict], rng: random.Random, expected: dict[int, str], at_once: int) -> int:
    """The number of requests that were lost or got another text."""

    def one(i: int, hang_up_after: int | None, pause: float) -> str | None:
        time.sleep(pause)
        return ask(server, bodies[i], hang_up_after)

    wrong = 0
    with ThreadPoolExecutor(at_once) as pool:
        answers = {}
        for i in bodies:
            hang_up_after = rng.randint(1, 20) if rng.random() < 0.15 else None
            answers[i] = pool.submit(one, i, hang_up_after, rng.expovariate(rng.choice([8, 1])))
        for i, answer in tqdm(answers.items(), desc="at once", disable=None):
            error = answer.exception()
            text = f"{type(error).__name__}: {error}" if error else answer.result()
            want = "an answer" if error else text if text is None else expected.get(i, text)
            if text != want:
                wrong += 1
                print(f"request {i}: {text!r}, not {want!r}", flush=True)
    server.until_idle()
    return wrong


def stop(server: Server) -> int:
    """The number of processes that did not end well, and of tracebacks."""
    server.stop(signal.SIGTERM)
    statuses = server.statuses()
    print(f"exit status of the server: {', '.join(map(str, statuses))}", flush=True)
    return sum(status != 0 for status in statuses) + ("Traceback" in server.log.read_text())


def soak(server: Server, n: int, rng: random.Random, at_once: int) -> tuple[int, bool]:
    """(requests that were lost, whether the server's memory or threads grow)"""
    wrong, memory, threads = 0, [], []
    for part in range(1, 11):
        wrong += run(server, {i: random_request(rng, 200) for i in range(n // 10)}, rng, {}, at_once)
        used = server.resources()
        memory.append(used["VmRSS"] / 1e3)
        threads.append(used["Threads"])
        print(f"after {part * n // 10} more: {memory[-1]:.0f} MB, {threads[-1]} threads", flush=True)
    # The second half may need at most a tenth more memory than the first, and no more threads.
    return wrong, memory[-1] > 1.1 * max(memory[2:5]) or threads[-1] > max(threads[2:5])


def main() -> None:
    flags = dict(requests=200, soak=(1000, "Further requests, to find leaks."), model=str(mlx_mtp.DEMO), seed=0)
    flags |= dict(longest=(2000, "Characters of the longest prompt."), at_once=(8, "Requests at once."))
    flags |= dict(ranks=(1, "Processes that run the model together."), restarts=(0, "Of the server, on one folder."))
    args = script_parser(__doc__, **flags).parse_args()
    rng = random.Random(args.seed)
    model, tokenizer = mlx_mtp.load(args.model)
    bodies = dict(enumerate(random_request(rng, args.longest) for _ in range(args.requests)))
    known = {i: body for i, body in bodies.items() if "temperature" not in body or "seed" in body}
    expected = {i: plain_text(body, model, tokenizer) for i, body in tqdm(known.items(), desc="alone", disable=None)}
    del model

    folder, n = Path(tempfile.mkdtemp()), args.restarts + 1
    flags = ["--mtp", "--model", args.model, "--prompt-cache-bytes", CACHE]
    if args.restarts:
        flags += ["--prompt-cache-dir", str(folder / "prompts")]
    wrong, leaks = 0, False
    for k in range(n):
        with serve(folder / f"server{k}.log", *flags, ranks=args.ranks) as server:
            part = dict(islice(bodies.items(), k, None, n))
            wrong += run(server, part, rng, expected, args.at_once)
            metrics = server.metrics()
            prompts, cached = (metrics[f"mlx_mtp_{name}prompt_tokens_total"] for name in ("", "cached_"))
            memory = server.resources()["VmRSS"] / 1e3
            print(f"{len(part)} requests: {cached / prompts:.0%} of the prompts known, {memory:.0f} MB", flush=True)
            if args.soak and k == args.restarts:
                lost, leaks = soak(server, args.soak, rng, args.at_once)
                wrong += lost
            wrong += stop(server)
    print(f"{args.requests} requests, {len(expected)} compared: {wrong} wrong or lost; logs: {folder}")
    sys.exit(bool(wrong or leaks))


if __name__ == "__main__":
    main()
