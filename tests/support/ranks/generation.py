"""Generation on several ranks beside one process with the whole model.

python -m tests.support.ranks.generation all|some tensor:FOLDER|pipeline:FOLDER ...
"""

import sys
from contextlib import nullcontext
from unittest.mock import Mock, patch

import mlx.core as mx
from mlx_lm.generate import generation_stream

import mlx_mtp
from mlx_mtp.checkpoint import load as loading
from mlx_mtp.core.decoding.counts import DraftCounts
from mlx_mtp.core.decoding.decoder import Decoder
from tests.support.batches import run
from tests.support.decoding import PROMPT, mtp, plain
from tests.support.launch import report
from tests.support.models import PACK, uncompiled

how_much, *models = sys.argv[1:]
group = mx.distributed.init()
rank = group.rank()
REPEATED, N = mx.tile(PROMPT, 3), 6
loading.ensure_tested = lambda *_: None  # as in all tests


def load(folder, **kwargs):
    """The model on all ranks, and the whole model."""
    ours = mlx_mtp.load(folder, settings=False, **{f"{how}_group": group}, **kwargs)[0]
    return ours, mlx_mtp.load(folder, settings=False, **kwargs)[0]


def options_work(name, model, whole):
    want = plain(PROMPT, whole, max_tokens=N)
    report(f"{name}, plain", plain(PROMPT, model, max_tokens=N) == want)
    mx.synchronize(generation_stream)
    options = {"max_tokens": N, "num_draft_tokens": 2}
    report(f"{name}, unsure drafts dropped", mtp(PROMPT, model, draft_p_min=0.3, **options) == want)
    bits = None if PACK in folder else 4  # the output layer of a pack has 2 bits already
    cheaper, _ = load(folder, draft_vocab=400, draft_head_bits=bits)
    report(f"{name}, cheaper drafts", mtp(PROMPT, cheaper, **options) == want)
    quantized = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 15}
    want = plain(PROMPT, whole, max_tokens=N, **quantized)
    report(f"{name}, quantized cache", mtp(PROMPT, model, **options, **quantized) == want)
    want = plain(REPEATED, whole, max_tokens=N)
    for copies in (3, "auto") if how_much == "all" else (3,):
        report(f"{name}, copies {copies}", mtp(REPEATED, model, max_tokens=N, copy_drafts=copies) == want)


def samples_are_the_same(name, model, whole):
    options = {"max_tokens": N, "num_draft_tokens": 2}
    sampler = mlx_mtp.make_sampler(0.8, seed=5)
    want = mtp(PROMPT, whole, sampler=sampler, **options)
    report(f"{name}, seed", mtp(PROMPT, model, sampler=sampler, **options) == want)
    sampler = mlx_mtp.make_sampler(1.0, top_p=0.95)
    mx.random.seed(7)
    want = mtp(PROMPT, whole, sampler=sampler, **options)
    mx.random.seed(7 + rank)
    report(f"{name}, random state", mtp(PROMPT, model, sampler=sampler, **options) == want)
    sampler = mlx_mtp.make_sampler(1.0, acceptance="coupled")  # takes a random seed
    seed = sampler.seed
    report(f"{name}: coupled", mtp(PROMPT, model, sampler=sampler, **options))
    report(f"{name}, the caller's seed", sampler.seed == seed)


def two_at_once(name, model, whole):
    """They take turns, and share the times of their steps with each other, but not with those of another rank."""
    depth = mlx_mtp.Depth(8, {0: 0.5 + rank, 1: 0.6, 4: 0.9})
    prompts = [PROMPT, REPEATED]
    texts = [mlx_mtp.mtp_generate_step(prompt, model, num_draft_tokens=depth) for prompt in prompts]
    tokens = [[], []]
    for n in (1, N, 1, 1, N):
        for text, got in zip(texts, tokens):
            got += [next(text)[0] for _ in range(n)]
    for text in texts:
        text.close()
    report(f"{name}, two at once", tokens == [plain(prompt, whole, max_tokens=len(tokens[0])) for prompt in prompts])
    report(f"{name}: times", sorted((plan, round(t, 6)) for plan, t in depth.times.seconds.items()))


def caches_last(name, model, whole):
    """Three turns in one cache, of which the second is left early, and the third drafts."""
    cache, text = mlx_mtp.make_prompt_cache(model), []
    for turn, (k, n) in enumerate([("auto", 5), (2, 3), (2, 6)]):
        text += PROMPT.tolist()
        want = plain(text, whole, max_tokens=n)
        steps = mlx_mtp.mtp_generate_step(PROMPT, model, max_tokens=20, num_draft_tokens=k, prompt_cache=cache)
        got = [next(steps)[0] for _ in range(n)]
        steps.close()
        report(f"{name}, turn {turn}", got == want)
        text += got
    report(f"{name}, rows of the head", cache[-2].offset == len(text) - 1)


def rows_are_the_same(name, model, whole):
    prompts = [PROMPT.tolist()[:n] for n in (11, 6, 9)]
    want = [plain(prompt, whole, max_tokens=8) for prompt in prompts]
    for k in (0, 2) if how_much == "all" else (2,):
        generator = mlx_mtp.BatchGenerator(model, num_draft_tokens=k, max_tokens=8)
        generator.insert(prompts)
        texts = run(generator)
        generator.close()
        mx.synchronize(generation_stream)
        report(f"{name}, several rows, {k}", [text.tokens for text in texts.values()] == want)


def differences_are_found(name, model):
    def stubborn(logprobs):
        return (mx.argmax(logprobs, axis=-1) + (rank > 0)) % logprobs.shape[-1]

    for k in (0, 2, "auto") if how_much == "all" else ("auto",):  # with a number, it takes 8 passes
        error = "none"
        try:
            mtp(PROMPT, model, max_tokens=200, num_draft_tokens=k, sampler=stubborn)
        except RuntimeError as e:
            error = str(e)
        report(f"{name}, other tokens, {k}", error.startswith("Ranks 1") and "other tokens" in error)
    try:
        mtp(PROMPT[min(rank, 1) :], model)
    except ValueError as e:
        report(f"{name}, other prompts", "other prompts" in str(e))


def counts_collectives(name, model):
    """At most one for each pass more than mlx-lm, and those of the head."""
    names = ("all_sum", "all_gather", "send", "recv_like")
    collectives = {name: Mock(wraps=getattr(mx.distributed, name)) for name in names}
    verify = patch.object(Decoder, "verify", autospec=True, side_effect=Decoder.verify)
    with patch.multiple(mx.distributed, **collectives), verify as passes:
        plain(PROMPT, model, max_tokens=1)  # a pass for the prompt, one for its last token, one ahead
        before = sum(made.call_count for made in collectives.values())
        mx.synchronize(generation_stream)
        counts, n_tokens = DraftCounts(), 40 if how_much == "all" else 24
        mtp(PROMPT, model, max_tokens=n_tokens, counts=counts, num_draft_tokens="auto", copy_drafts="off")
    n = sum(made.call_count for made in collectives.values()) - before
    of_a_pass = before // 3
    of_the_head = 3 * sum(counts.drafted) + 2 * 3  # sums and logits; the prompt's rows, twice, and the last ones
    to_begin, prompt = 3, of_a_pass
    n_passes = passes.call_count + 1  # the prompt's last token is a pass more
    most = n_passes * (of_a_pass + 1) + of_the_head + to_begin + prompt
    report(f"{name}, collectives", [n <= most, n_passes > 11, of_a_pass > 1, n, most])


# While a rank compiles kernels, the other one spins.
with nullcontext() if how_much == "all" else uncompiled():
    for i, (how, folder) in enumerate(argument.split(":") for argument in models):
        name = f"{how}, {folder.rpartition('/')[2]}"
        model, whole = load(folder)
        want = plain(PROMPT, whole, max_tokens=N)
        for k in (0, 1, 2, 3, 4, "auto") if how_much == "all" else (0, 3, "auto") if i == 0 else (2,):
            report(f"{name}, {k}", mtp(PROMPT, model, max_tokens=N, num_draft_tokens=k) == want)
        if how_much == "all" or "qwen3_5/" in folder + "/" or how == "pipeline":  # its stage may have no attention
            caches_last(name, model, whole)
        if how_much == "all" or "qwen3_5/" in folder + "/":
            rows_are_the_same(name, model, whole)
        if how_much == "all" or i == 0:
            options_work(name, model, whole)
            samples_are_the_same(name, model, whole)
            two_at_once(name, model, whole)
            differences_are_found(name, model)
            counts_collectives(name, model)
