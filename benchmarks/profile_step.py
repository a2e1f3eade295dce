"""The profile of a step: calls and microseconds of the host by function, and the device's time by kind of operation.

    python -m benchmarks.profile_step
    python -m benchmarks.profile_step --shape 4b-layers      four layers of a 4B's shapes, random weights in float32

The host's part is by cProfile, which makes calls slower than they are. The device's part, on MLX's CPU backend only, is by
``perf`` (Debian's linux-perf), if it is installed: the share of samples by the innermost function of MLX.
"""

import cProfile
import os
import pstats
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx

from benchmarks.synthetic import COMMON, synthetic_model
from mlx_mtp import DEMO, load, mtp_generate_step
from mlx_mtp.cli.display import table
from mlx_mtp.prompts import python_beginnings
from scripts.shared import script_parser

LAYERS_OF_4B = {
    **COMMON, "model_type": "qwen3_5", "vocab_size": 4096, "hidden_size": 2560, "intermediate_size": 9216,
    "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 4, "linear_num_value_heads": 32,
    "tie_word_embeddings": True,
}  # fmt: skip
N_FUNCTIONS = 14
KIND = re.compile(r"mlx::core::(?:cpu::|\(anonymous namespace\)::|detail::|fast::)*(\w+)")


def host(steps: Any, n: int) -> list[list[str]]:
    profile = cProfile.Profile()
    profile.enable()
    n_tokens = sum(1 for _ in islice(steps, n))
    profile.disable()
    stats: Any = pstats.Stats(profile)
    rows = sorted(((own, calls, where) for where, (_, calls, own, _, _) in stats.stats.items()), reverse=True)
    shown = [["calls", "us", "function, a token"], [f"{sum(r[1] for r in rows) / n_tokens:.0f}", "", "all"]]
    for own, calls, (file, line, name) in rows[:N_FUNCTIONS]:
        shown.append([f"{calls / n_tokens:.1f}", f"{1e6 * own / n_tokens:.0f}", f"{name} ({Path(file).name}:{line})"])
    return shown


def device(steps: Any, n: int) -> list[list[str]]:
    """The share of samples of this process by kind of operation, while it generates n tokens."""
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/perf.data"
        record = subprocess.Popen(["perf", "record", "-q", "-e", "cpu-clock", "-o", file, "-p", str(os.getpid())])
        for _ in islice(steps, n):
            pass
        record.send_signal(2)
        record.wait()
        command = ["perf", "report", "--stdio", "-i", file, "-F", "overhead,dso,symbol", "--no-demangle"]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    lines = subprocess.run(
        ["c++filt"], input="\n".join(lines), capture_output=True, text=True, check=True
    ).stdout.splitlines()
    shares: Counter[str] = Counter()
    for line in lines:
        if found := re.match(r"\s*([\d.]+)%\s+(\S+)\s+\[.\] (.*)", line):
            share, library, symbol = found.groups()
            kind = KIND.search(symbol)
            name = kind[1] if kind else symbol.split("(")[0] if "mlx" in library else library
            shares[name[:60]] += float(share)
    return [["share", "operation or library"], *([f"{x:.1f}%", name] for name, x in shares.most_common(N_FUNCTIONS))]


def main() -> None:
    flags = dict(
        shape=("demo", "demo or 4b-layers."), drafts=([0, 3], "Drafts in a step."), tokens=(120, "Tokens of each part.")
    )
    args = script_parser(__doc__, **flags).parse_args()
    model, tokenizer = load(str(DEMO), settings=False)
    prompt = mx.array(tokenizer.encode(next(iter(python_beginnings().values()))))
    if args.shape != "demo":
        model = synthetic_model(LAYERS_OF_4B)
        model.set_dtype(mx.float32)
    for k in args.drafts:
        options: dict[str, Any] = {"num_draft_tokens": k, "copy_drafts": "off", "max_tokens": -1}
        steps = mtp_generate_step(prompt, model, **options)
        for _ in islice(steps, 16):  # traces and kernels
            pass
        print(f"{args.shape}, {k} drafts", *table(host(steps, args.tokens)), "", sep="\n")
        if mx.default_device() == mx.Device(mx.cpu) and shutil.which("perf"):
            print(*table(device(steps, args.tokens)), "", sep="\n", flush=True)
        steps.close()


if __name__ == "__main__":
    main()
