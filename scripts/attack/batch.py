"""Fuzz the batch: sequences of all kinds come and go, hooks raise, calls are refused.

    python -m scripts.attack.batch --count 300 --seed 1

Each text is compared with mlx-lm's own generation of its prompt alone, and the prompt cache that it leaves with one that mlx-lm
fills with the same tokens. A sampler or processor that raises must end its own text with its own error; a call of ``insert``
that is refused must change nothing. Exit status 1 and the case's own seed where they do not.
"""

import random

from mlx_lm.sample_utils import make_logits_processors

from mlx_mtp import make_sampler
from scripts.attack import driver
from tests.support.batches import Fault, Faulty, Text, run
from tests.support.decoding import assert_goes_on, plain
from tests.support.models import tiny_model
from tests.support.scripted import scripted

FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
VOCAB, N_STEPS = 32, 2000
DRAFTS = [None, "auto", 0, 1, 2, 3, 5, 8]
COPIES = [None, "auto", "off", 1, 2, 8, 16]
REFUSED = [
    *({"num_draft_tokens": [n]} for n in (-1, 9, 99, 1.5, "off", "4")),
    *({"copy_drafts": [n]} for n in (-1, 0, 17, 2.0, "4")),
    *({"max_tokens": [n]} for n in (0, -1, 2.5)),
    {"num_draft_tokens": 0},
    {"copy_drafts": "auto"},
    {"samplers": [None, None]},
    {"caches": [[1]]},
]


def random_prompt(r: random.Random) -> list[int]:
    """Some say the same again, which can be copied."""
    tokens = [r.randrange(VOCAB) for _ in range(r.choice([1, 2, 3, 7, 20]))]
    return tokens * r.choice([1, 1, 3])


def random_row(r: random.Random) -> dict:
    """A sequence: what it asks for, and when it comes and goes."""
    hook = r.choice(["none", "none", "call", "copy", "rollback"])
    has = (hook,) if hook in ("copy", "rollback") else r.choice([(), ("copy",), ("rollback",)])
    return dict(
        prompt=random_prompt(r),
        max_tokens=r.randint(1, 30),
        arrival=r.randint(0, 20),
        stay=r.choice([None, None, None, r.randint(1, 15)]),
        right=r.choice([0.1, 0.5, 0.9]),
        options=dict(num_draft_tokens=r.choice(DRAFTS), copy_drafts=r.choice(COPIES)),
        is_seeded=r.random() < 0.3,
        penalties=r.choice([{}, {}, {"repetition_penalty": 1.3}]),
        processor=r.choice([None, None, (hook, r.randint(0, 12), has)]),
    )


def random_case(r: random.Random) -> dict:
    """What a case does, as keyword arguments of ``run_case``."""
    return dict(
        family=r.choice(FAMILIES),
        coins=r.randrange(2**32),
        rows=[random_row(r) for _ in range(r.randint(1, 6))],
        k=r.choice(DRAFTS),
        options=dict(
            copy_drafts=r.choice(COPIES),
            completion_batch_size=r.choice([1, 2, 32]),
            prefill_step_size=r.choice([1, 5, 2048]),
            return_prompt_caches=r.random() < 0.8,
        ),
        seed=r.randrange(2**64),
        refused={r.randint(0, 20): r.choice(REFUSED) for _ in range(3)},
    )


def run_case(family, coins, rows, k, options, seed, refused) -> None:
    """
    Raises:
        AssertionError: A text, its end or its cache differs from a single run's.
    """
    model, sampler, r = tiny_model(family), make_sampler(temp=1.0, top_p=0.9, seed=seed), random.Random(coins)
    of_uid, texts, removed = {}, {}, {}
    generator, _ = scripted(model, [], [], lambda uid, i: r.random() < of_uid[uid]["right"], k, **options)
    for step in range(N_STEPS):
        if step in refused:
            insert_refused(generator, refused[step])
        for row in [row for row in rows if row["arrival"] == step]:
            processors = make_logits_processors(**row["penalties"])
            own = [] if row["processor"] is None else [Faulty(*row["processor"])]
            (uid,) = generator.insert(
                [row["prompt"]], max_tokens=[row["max_tokens"]], samplers=[sampler if row["is_seeded"] else None],
                logits_processors=[processors + own], **{name: [value] for name, value in row["options"].items()},
            )  # fmt: skip
            single = processors + ([] if row["processor"] is None else [Faulty("none", 0)])
            want = plain(
                row["prompt"], model, max_tokens=row["max_tokens"], logits_processors=single,
                sampler=sampler if row["is_seeded"] else None,
            )  # fmt: skip
            generator.model.texts[uid] = row["prompt"] + want
            of_uid[uid], texts[uid] = row | {"want": want}, Text()
        for uid, row in of_uid.items():
            if row["stay"] is not None and row["arrival"] + row["stay"] == step and texts[uid].finish_reason is None:
                removed |= generator.remove([uid], return_prompt_caches=True)
                texts[uid].finish_reason = "removed"
        run(generator, texts, 1)
        if len(generator) == 0 and step > 20:
            break
    assert len(generator) == len(generator.decoder) == 0, "it never ends"
    for uid, row in of_uid.items():
        check(model, row, texts[uid], removed.get(uid), options["return_prompt_caches"])


def insert_refused(generator, options) -> None:
    n, uid = len(generator), generator._uid_count
    try:
        generator.insert([[1, 2]], **options)
    except ValueError:
        assert (len(generator), generator._uid_count) == (n, uid), f"half of {options} was inserted"
    else:
        raise AssertionError(f"{options} was let through")


def check(model, row, text, removed, has_caches) -> None:
    """One text: its tokens, its end, its counts and its cache."""
    n, last = len(text.tokens), text.last
    assert text.tokens == row["want"][:n], (row, text.tokens)
    if text.finish_reason == "removed":
        cache, tokens = removed or (None, [])
        assert tokens == (row["prompt"] + row["want"])[: len(tokens)]
    elif text.finish_reason == "error":
        assert isinstance(last.error, Fault), last.error
        assert str(last.error) == row["processor"][0], "another row's error"
        cache, tokens = last.prompt_cache, row["prompt"] + text.tokens
        assert last.all_tokens == tokens
    else:
        assert (text.finish_reason, n, last.error) == ("length", row["max_tokens"], None)
        cache, tokens = last.prompt_cache, row["prompt"] + text.tokens
    if last is not None:
        most, copies = row["options"]["num_draft_tokens"], row["options"]["copy_drafts"]
        assert len(last.counts.drafted) <= (most if isinstance(most, int) else 8)
        assert copies is None or len(last.counts.copied) <= {"auto": 8, "off": 0}.get(copies, copies)
    if tokens and (has_caches or text.finish_reason == "removed"):
        assert_goes_on(model, cache, tokens)


if __name__ == "__main__":
    driver.main("Fuzz the batch against single runs.", random_case, run_case, count=300)
