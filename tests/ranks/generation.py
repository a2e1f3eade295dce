"""Generation on several ranks beside one process with the whole model: python generation.py tensor|pipeline MANY FOLDER..."""

import sys

import mlx.core as mx
from helpers import PROMPT, mtp, plain
from launch import report

import mlx_mtp
from mlx_mtp.decoding.decoder import Decoder
from mlx_mtp.decoding.pace import DraftCounts

how, many, *folders = sys.argv[1:]
group = mx.distributed.init()
rank = group.rank()
REPEATED = mx.tile(PROMPT, 5)


def load(folder, **kwargs):
    """The model on all ranks, and the whole model."""
    ours = mlx_mtp.load(folder, settings=False, **{f"{how}_group": group}, **kwargs)[0]
    return ours, mlx_mtp.load(folder, settings=False, **kwargs)[0]


def tokens_are_the_same(name, model, whole):
    want = plain(PROMPT, whole, max_tokens=24)
    for k in (0, 1, 2, 3, 4, "auto"):
        report(f"{name}, {k}", mtp(PROMPT, model, max_tokens=24, num_draft_tokens=k) == want)
    report(f"{name}, unsure drafts dropped", mtp(PROMPT, model, max_tokens=24, draft_p_min=0.3) == want)
    report(f"{name}, plain", plain(PROMPT, model, max_tokens=24) == want)
    mx.synchronize(mlx_mtp.decoding.loop.generation_stream)
    want = plain(REPEATED, whole, max_tokens=40)
    for copies in (3, "auto"):
        report(f"{name}, copies {copies}", mtp(REPEATED, model, max_tokens=40, copy_drafts=copies) == want)
    quantized = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 20}
    want = plain(PROMPT, whole, max_tokens=24, **quantized)
    report(f"{name}, quantized cache", mtp(PROMPT, model, max_tokens=24, num_draft_tokens=2, **quantized) == want)


def samples_are_the_same(name, model, whole):
    sampler = mlx_mtp.make_sampler(0.8, seed=5)
    want = mtp(PROMPT, whole, max_tokens=24, sampler=sampler)
    report(f"{name}, seed", mtp(PROMPT, model, max_tokens=24, sampler=sampler) == want)
    sampler = mlx_mtp.make_sampler(1.0, top_p=0.95)
    mx.random.seed(7)
    want = mtp(PROMPT, whole, max_tokens=24, num_draft_tokens=2, sampler=sampler)
    mx.random.seed(7 + rank)
    report(f"{name}, random state", mtp(PROMPT, model, max_tokens=24, num_draft_tokens=2, sampler=sampler) == want)
    sampler = mlx_mtp.make_sampler(1.0, acceptance="coupled")  # takes a random seed
    report(f"{name}: coupled", mtp(PROMPT, model, max_tokens=24, sampler=sampler))


def caches_last(name, model, whole):
    """Three turns in one cache, of which the second is left early, and the third drafts."""
    cache, text = mlx_mtp.make_prompt_cache(model), []
    for turn, (k, n) in enumerate([("auto", 9), (2, 5), (3, 12)]):
        text += PROMPT.tolist()
        want = plain(text, whole, max_tokens=n)
        steps = mlx_mtp.mtp_generate_step(PROMPT, model, max_tokens=20, num_draft_tokens=k, prompt_cache=cache)
        got = [next(steps)[0] for _ in range(n)]
        steps.close()
        report(f"{name}, turn {turn}", got == want)
        text += got
    report(f"{name}, rows of the head", cache[-2].offset == len(text) - 1)


def counts_collectives(name, model):
    """At most one for each pass more than mlx-lm, and those of the head."""
    n, passes = [0], [0]
    for collective in ("all_sum", "all_gather", "send", "recv_like"):
        count(mx.distributed, collective, n)
    count(Decoder, "_verify", passes)
    plain(PROMPT, model, max_tokens=1)  # a pass for the prompt, one for its last token, one ahead
    of_a_pass = n[0] // 3
    mx.synchronize(mlx_mtp.decoding.loop.generation_stream)
    n[0], counts = 0, DraftCounts()
    mtp(PROMPT, model, max_tokens=60, counts=counts, num_draft_tokens="auto", copy_drafts="off")
    of_the_head = 3 * sum(counts.drafted) + 2 * 2  # two sums and the logits; the prompt's rows, and the last ones
    to_begin, prompt = 3, of_a_pass
    most = passes[0] * (of_a_pass + 1) + of_the_head + to_begin + prompt
    report(f"{name}, collectives", [n[0] <= most, passes[0] > 10, of_a_pass > 1, n[0], most])


def count(owner, name, n):
    original = getattr(owner, name)

    def counted(*args, **kwargs):
        n[0] += 1
        return original(*args, **kwargs)

    setattr(owner, name, counted)


for folder in folders:
    name = folder.rpartition("/")[2]
    model, whole = load(folder)
    tokens_are_the_same(name, model, whole)
    if folder == folders[0]:
        samples_are_the_same(name, model, whole)
        caches_last(name, model, whole)
        long = {"max_tokens": 300 if many == "many" else 150, "num_draft_tokens": "auto"}
        want = mtp(PROMPT, whole, **long)
        for i in range(10 if many == "many" else 1):
            report(f"{name}, long {i}", mtp(PROMPT, model, **long) == want)
        if how == "tensor":
            exact = mtp(PROMPT, model, max_tokens=24, num_draft_tokens=2, exact=True)
            report(f"{name}, exact", exact == plain(PROMPT, whole, max_tokens=24))
        cheaper, _ = load(folder, draft_vocab=400, mtp_bits=8)
        want = plain(PROMPT, whole, max_tokens=24)
        report(f"{name}, cheaper drafts", mtp(PROMPT, cheaper, max_tokens=24, num_draft_tokens=3) == want)
        counts_collectives(name, model)
