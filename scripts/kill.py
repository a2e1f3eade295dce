"""Kill processes at random moments of writing, and look at what they leave.

    python -m scripts.kill             conversions: the target is absent or complete
    python -m scripts.kill --servers   servers with a small --prompt-cache-dir: see ``kill_servers``

Exit status 1 where it is otherwise.
"""

import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

import mlx_mtp
from mlx_mtp.checkpoint import DEMO
from scripts.serve_many import ask, plain_text, random_request
from scripts.shared import script_parser
from tests.support.checkpoints import first_layers
from tests.support.server_process import Server, serve

LIMIT = 10_000_000  # bytes of the folder: some texts
TEXTS, AT_ONCE = 40, 8  # prompts in all, requests at a moment
LAYERS = 4  # of the model that is served


def start_conversion(source: Path, target: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "mlx_mtp.convert", "--hf-path", str(source), "--mlx-path", str(target), "-q"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def kill_conversions(args: Namespace, folder: Path, rng: random.Random) -> None:
    tic = time.perf_counter()
    start_conversion(args.model, folder / "undisturbed").wait()
    took = time.perf_counter() - tic
    print(f"undisturbed: {took:.2f} s")
    for i in range(args.moments):
        target = folder / f"out-{i}"
        process = start_conversion(args.model, target)
        time.sleep(moment := rng.uniform(0.3, 1.1) * took)
        how = rng.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
        process.send_signal(how)
        process.wait()
        if is_there := target.exists():
            mlx_mtp.load(str(target))  # reads every tensor
        left = ", a temporary folder is left" * any(folder.glob(f".{target.name}.*"))
        print(f"{how.name} after {moment:.2f} s: {'complete' if is_there else 'absent'}{left}")


def kill_servers(args: Namespace, folder: Path, rng: random.Random) -> int:
    """A server answers requests, and at each moment it is killed; then files of its folder are damaged, and another one starts.

    Returns what was wrong: texts, tracebacks, and moments at which the folder was too large or had another owner.
    """
    path = shutil.copytree(args.model, folder / "model")
    first_layers(path, LAYERS)
    model, tokenizer = mlx_mtp.load(str(path))
    bodies = [random_request(rng) | {"temperature": 0.0, "max_tokens": rng.randint(1, 20)} for _ in range(TEXTS)]
    texts = [plain_text(body, model, tokenizer) for body in tqdm(bodies, desc="alone", disable=None)]
    prompts, log, found = folder / "prompts", folder / "log", Found()
    flags = ["--mtp", "--model", str(path), "--prompt-cache-dir", str(prompts), "--prompt-cache-disk-bytes", str(LIMIT)]
    for _ in tqdm(range(args.moments), desc="moments", disable=None):
        with serve(log, *flags) as server:
            kill_one(server, list(zip(bodies, texts)), rng, found)
        files = [file for file in prompts.iterdir() if ".safetensors" in file.name]
        found.wrong += sum(file.stat().st_size for file in files) > LIMIT
        found.wrong += has(log, "Traceback") + has(log, "is in use")
        for file in rng.sample(files, min(2, len(files))):
            damage(file, rng)
    print(f"{args.moments} moments: {found}")
    return found.wrong


@dataclass
class Found:
    """Answers and states that are wrong, answers that killed servers did not end, and what these had read from disk."""

    wrong: int = 0
    lost: int = 0
    bytes_read: int = 0


def kill_one(server: Server, asked: Sequence[tuple[dict, str]], rng: random.Random, found: Found) -> None:
    """Kill a server while it answers."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = [(want, pool.submit(ask, server, body)) for body, want in rng.sample(asked, AT_ONCE)]
        time.sleep(rng.uniform(0.0, 4.0))
        found.bytes_read += int(server.metrics()["mlx_mtp_prompt_cache_read_bytes_total"])
        server.process.kill()
        server.process.wait()
        for want, answer in answers:
            if answer.exception() is not None:
                found.lost += 1
            elif answer.result() != want:
                found.wrong += 1
                print(f"{answer.result()!r}, not {want!r}", flush=True)


def has(log: Path, what: str) -> bool:
    text = log.read_text()
    if found := what in text:
        print(text[text.index(what) :][:3000])
    return found


def damage(file: Path, rng: random.Random) -> None:
    """Change some bytes of a file, cut it, empty it, or put another one in its place."""
    data = bytearray(file.read_bytes())
    other = {"cut": data[: rng.randrange(len(data) + 1)], "empty": b"", "other": rng.randbytes(1000)}
    for _ in range(rng.randint(1, 4) if data else 0):
        data[rng.randrange(len(data))] ^= rng.randint(1, 255)
    file.write_bytes(other.get(rng.choice(["bytes", *other]), data))


def main() -> None:
    servers = (False, "Servers with a --prompt-cache-dir.")
    args = script_parser(__doc__, servers=servers, moments=20, model=DEMO, seed=0).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kill = kill_servers if args.servers else kill_conversions
        sys.exit(bool(kill(args, Path(folder), random.Random(args.seed))))


if __name__ == "__main__":
    main()
