"""mlx_mtp beside mlx-vlm's MTP drafter: the same checkpoint, prompts and machine, alternating in one process.

    python3 -m venv .vlm && .vlm/bin/pip install . mlx-vlm==0.7.10        on Linux also 'mlx[cpu]'
    .vlm/bin/python examples/compare_mlx_vlm.py --model PATH_OR_REPO

mlx-vlm drafts with the head alone, in a folder that its own `split_mtp` makes of the checkpoint. Its block is the confirmed
token and the drafts. So the first comparison is with auto that does not copy; mlx-vlm has no copies that could be compared with
auto's. Times are from the first token to the last, and a text stops where the model ends it.
"""

import argparse
import statistics
import time
from collections.abc import Collection, Iterator
from tempfile import TemporaryDirectory

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_vlm.generate.ar import generate_step as vlm_generate_step
from mlx_vlm.speculative.drafters import load_drafter
from mlx_vlm.split_mtp import split_mtp
from mlx_vlm.utils import load_model
from tqdm import tqdm

import mlx_mtp
from mlx_mtp import prompts
from mlx_mtp.benchmark.measure import loop_warning, repeated_share
from mlx_mtp.checkpoint.hub import fetch

PLAIN, VLM_PLAIN = "mlx-lm, plain", "mlx-vlm, plain"
NO_COPIES, AUTO = "mlx_mtp, auto, no copies", "mlx_mtp, auto"


def timed(steps: Iterator, stop: Collection[int]) -> tuple[list[int], float]:
    """Tokens, and the seconds from the first of them to the last."""
    tokens, start = [], 0.0
    for token, *_ in steps:
        if not tokens:
            start = time.perf_counter()
        tokens.append(int(token))
        if tokens[-1] in stop:
            break
    return tokens, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description="mlx_mtp beside mlx-vlm's MTP drafter.")
    parser.add_argument("--model", help="Local directory or Hugging Face repo (default: the bundled demo).")
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 3, 4], help="Drafts in a step of mlx-vlm.")
    parser.add_argument("--max-tokens", "-m", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()

    path = fetch(args.model or str(mlx_mtp.DEMO), None)
    model, tokenizer = mlx_mtp.load(str(path))
    vlm = load_model(path)
    with TemporaryDirectory() as folder:
        drafter, kind = load_drafter(str(split_mtp(str(path), f"{folder}/drafter")))
        mx.eval(drafter.parameters())
    texts = prompts.nine_kinds() if args.model else prompts.python_beginnings()
    tokens = {name: prompts.encode(tokenizer, text) for name, text in texts.items()}
    stop = tokenizer.eos_token_ids
    depths = {name: mlx_mtp.Depth(mlx_mtp.MAX_DRAFT_TOKENS) for name in (NO_COPIES, AUTO)}

    n = args.max_tokens
    runs = {
        PLAIN: lambda p: generate_step(p, model, max_tokens=n),
        NO_COPIES: lambda p: mlx_mtp.mtp_generate_step(
            p, model, max_tokens=n, num_draft_tokens=depths[NO_COPIES], copy_drafts="off"
        ),
        AUTO: lambda p: mlx_mtp.mtp_generate_step(
            p, model, max_tokens=n, num_draft_tokens=depths[AUTO], copy_drafts="auto"
        ),
        VLM_PLAIN: lambda p: vlm_generate_step(p[None], vlm, None, None, max_tokens=n, temperature=0.0),
    }
    for k in args.depths:
        options = {"draft_model": drafter, "draft_kind": kind, "draft_block_size": k + 1}
        runs[f"mlx-vlm, {k} drafts"] = lambda p, options=options: vlm_generate_step(
            p[None], vlm, None, None, max_tokens=n, temperature=0.0, **options
        )

    for steps in runs.values():
        timed(steps(next(iter(tokens.values()))), ())
    names = list(runs)
    rounds: list[dict[str, float]] = []  # tokens per second
    said: dict[str, list[int]] = {}
    same = dict.fromkeys(names, True)
    for i in tqdm(range(args.repeat), disable=None):
        seconds, n_tokens = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0)
        for j, (kind, prompt) in enumerate(tokens.items()):
            turn = (i + j) % len(names)
            got = {}
            for name in names[turn:] + names[:turn]:
                got[name], s = timed(runs[name](prompt), stop)
                seconds[name] += s
                n_tokens[name] += len(got[name]) - 1
            for name in names:
                same[name] &= got[name] == got[PLAIN]
            said[kind] = got[PLAIN]
        rounds.append({name: n_tokens[name] / seconds[name] for name in names})

    print(f"{'':24} tokens/s  to plain mlx-lm  head alone to it  with copies to it  same tokens")
    for name in names:
        tps = statistics.median(r[name] for r in rounds)
        to_plain, alone, auto = (
            statistics.median(r[a] / r[b] for r in rounds) for a, b in ((name, PLAIN), (NO_COPIES, name), (AUTO, name))
        )
        print(f"{name:24} {tps:8.1f} {to_plain:16.2f} {alone:17.2f} {auto:18.2f}  {'yes' if same[name] else 'no':>11}")
    if loops := loop_warning({name: repeated_share(t.tolist(), said[name]) for name, t in tokens.items()}):
        print(loops)


if __name__ == "__main__":
    main()
