"""Token ids from outside: how a prompt may be passed, and that every id is one of the model's."""

import re
from collections import UserString, deque

import mlx.core as mx
import numpy as np
import pytest
from transformers import BatchEncoding

import mlx_mtp
from mlx_mtp import BatchGenerator, batch_generate, make_sampler, mtp_generate_step, stream_generate
from mlx_mtp.checkpoint.load import _load_model
from mlx_mtp.checkpoint.reader import CheckpointReader
from mlx_mtp.core.batch.ids import token_ids
from tests.support.batches import run
from tests.support.checkpoints import configure, write_tiny
from tests.support.decoding import mtp, plain
from tests.support.engine import Engine
from tests.support.models import model_of

MODEL = model_of("qwen3_5")  # with 32 tokens
IDS = [5, 6, 7]
ARRAYS = [np.array(IDS, kind) for kind in ("int8", "uint16", "int64", "uint64")] + [np.array([IDS])]
ARRAYS += [mx.array(IDS, kind) for kind in (mx.uint8, mx.int32, mx.uint32, mx.int64)] + [mx.array([IDS])]
ENCODED = {"attention_mask": [1, 1, 1]}
PROMPTS = [IDS, tuple(IDS), range(5, 8), deque(IDS), [np.int32(i) for i in IDS], [IDS], *ARRAYS]
PROMPTS += [BatchEncoding({"input_ids": ids} | ENCODED) for ids in (IDS, [IDS], np.array([IDS]))]
PROMPTS.append(BatchEncoding({"input_ids": IDS, "attention_mask": None}))
PROMPTS.append(BatchEncoding({name: mx.array([x]) for name, x in ({"input_ids": IDS} | ENCODED).items()}))

NOT_IDS = "The prompt must be the token ids of one text, a list or an array of integers, not "
WRONG = [
    *((x, f"{NOT_IDS}{kind}: encode a text with tokenizer.encode, messages with") for x, kind in (
        ("text", "str"), (None, "NoneType"), (5, "int"), ({1: 2}, "dict"), ({"input_ids": IDS}, "dict"), ({5, 6}, "set"),
        ([{"role": "user", "content": "a"}], "list of dict"), (["a", "b"], "list of str"), (b"text", "bytes"),
        (bytearray(b"text"), "bytearray"), (memoryview(b"text"), "memoryview"), ([5, 6.7], "list of float"),
        (mx.array([1.5], mx.bfloat16), "array of float"), (np.array([1.0]), "ndarray of float"),
        ([5, None], "list of NoneType"), ([5, True], "list of bool"), ([[5], [6, 7]], "list of list"),
        ([[5, 6], [7, 8]], "list of shape [2, 2]"),
        (mx.array([[IDS]]), r"array of shape [1, 1, 3]"), (mx.array(5), "array"), (iter(IDS), "list_iterator"),
    )),
    (UserString("text"), f"{NOT_IDS}UserString of "),
    (BatchEncoding({"input_ids": [0, *IDS], "attention_mask": [0, 1, 1, 1]}), "must have no padding"),
    *(([5, i, 99], f"The prompt has the token {i}, and the model's are 0 to 31.") for i in (32, -1, 2**31, 2**32 + 5, 2**70)),
]  # fmt: skip


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda x: f"{type(x).__name__} {getattr(x, 'dtype', '')}")
def test_sequences_and_arrays_of_integers_are_ids(prompt):
    assert token_ids(prompt, MODEL) == IDS


@pytest.mark.parametrize(("prompt", "message"), WRONG, ids=[message[len(NOT_IDS) :][:30] for _, message in WRONG])
def test_anything_else_is_refused(prompt, message):
    with pytest.raises(mlx_mtp.MTPError, match=re.escape(message)):
        token_ids(prompt, MODEL)


def tokens_of(generator, prompts, **options):
    generator.insert(prompts, **options)
    return [text.tokens for text in run(generator).values()]


def test_every_function_reads_prompts_alike(trained):
    """And what else has ids: the text in a cache, stop tokens, ids beside embeddings, drafts of a source."""
    model, tokenizer = trained
    want, V = plain(IDS, model, max_tokens=4), model.vocab_size
    several = {"return_token_ids": True, "max_tokens": 4}
    uses = [
        lambda x, **own: [t for t, *_ in mtp_generate_step(x, model, max_tokens=4, **own)],
        lambda x: [r.token for r in stream_generate(model, tokenizer, x, 4)],
        lambda x: [r.token for r in stream_generate(model, tokenizer, x, 4, mtp=False)],
        lambda x: batch_generate(model, tokenizer, [x], **several).token_ids[0],
        lambda x, **own: tokens_of(BatchGenerator(model, max_tokens=4), [x], **own)[0],
    ]
    for use in uses:
        assert use(mx.array([IDS], mx.int64)) == want
        for wrong in ([*IDS, V], [{"role": "user", "content": "a"}], b"text"):
            with pytest.raises(mlx_mtp.MTPError, match=f"has the token {V}|token ids of one text"):
                use(wrong)
    ragged = BatchEncoding({"input_ids": [IDS, [8]]})
    assert batch_generate(model, tokenizer, ragged, **several).token_ids == [want, plain([8], model, max_tokens=4)]
    for call, message in {
        lambda: batch_generate(model, tokenizer, None): "The prompts must be a list, with the token ids of each text",
        lambda: BatchGenerator(model).insert_segments(
            [None]
        ): "The prompts must be a list, with the token ids of each text",
        lambda: BatchGenerator(model, stop_tokens=[[V]]): f"stop_tokens has the token {V}",
        lambda: uses[0](IDS, all_tokens=[V]): f"all_tokens has the token {V}",
        lambda: uses[-1](IDS, all_tokens=[[-1]]): "all_tokens of prompt 0 has the token -1",
        lambda: uses[0]([V], input_embeddings=mx.zeros((1, 128))): f"has the token {V}",
        lambda: uses[0](IDS, input_embeddings=mx.zeros((3, 7))): r"floating-point numbers \[T, ",
    }.items():
        with pytest.raises(mlx_mtp.MTPError, match=message):
            call()


class Beyond:
    """A source of drafts that no model has."""

    name, fixed = "beyond", 3

    def observe(self, tokens): ...

    def acceptance_rates(self, n_unobserved):
        return [1.0] * 3

    def propose(self, k, n_unobserved):
        return mx.array([2**31, -1, 32][:k], mx.int64)


def test_drafts_of_a_source_that_the_model_does_not_have_are_rejected():
    def unchanged(tokens, logits):
        return logits

    unchanged.draft_source = Beyond
    want = plain(IDS, MODEL, max_tokens=8)
    assert mtp(IDS, MODEL, max_tokens=8, logits_processors=[unchanged], num_draft_tokens=2) == want


def test_a_stage_of_a_pipeline_has_the_rows_that_its_config_says(tmp_path):
    """Its weights are loaded without mlx-lm's comparison of shapes."""
    folder = write_tiny(tmp_path / "model", "qwen3_5")
    configure(folder, text={"vocab_size": 40})
    with pytest.raises(mlx_mtp.MTPError, match="has rows of 32 tokens, and its config says 40"):
        _load_model(CheckpointReader(str(folder)), None, {}, False, range(2))


@pytest.mark.parametrize("acceptance", ["rejection", "coupled", "match"])
def test_special_tokens_of_a_sampler_may_be_beyond_the_logits(acceptance):
    """XTC excludes the likeliest tokens but for the last that is special, here the first."""
    options = dict(temp=1.0, xtc_probability=1.0, xtc_threshold=0.1, acceptance=acceptance)
    logprobs = mx.log(mx.array([[0.5, 0.3, 0.2, 0.0]]))
    for special, allowed in (([4, 2**31 - 1, -3], {2}), ([0, 4], {0, 2})):
        sampler = make_sampler(**options, xtc_special_tokens=special)
        draw = sampler.at(0) if acceptance == "coupled" else sampler
        assert {draw(logprobs).item() for _ in range(40)} == allowed


def test_a_tokenizer_with_more_tokens_than_the_model(tmp_path, caplog):
    """One line at load; the server refuses these tokens by field, and excludes no end of text that the model does not have."""
    folder = write_tiny(tmp_path / "model", "qwen3_5")
    configure(folder, eos_token_id=[0, 400])
    model, tokenizer = mlx_mtp.load(str(folder), settings=False)
    (line,) = [r.message for r in caplog.records if "no weights" in r.message]
    assert line.endswith("has no weights for the tokens 32 to 511 of its tokenizer: prompts with them are refused.")
    text = next(word for word in ("import", "def") if max(tokenizer.encode(word)) >= 32)
    with pytest.raises(mlx_mtp.MTPError, match=r"The prompt has the token \d+, and the model's are 0 to 31\."):
        next(stream_generate(model, tokenizer, text))
    assert batch_generate(model, tokenizer, [IDS], max_tokens=2).texts
    with Engine("--model", str(folder)) as engine:
        good = {"prompt": IDS, "max_tokens": 3}
        for field, value in {
            "prompt": text, "stop_token_ids": [3, 32], "logit_bias": {"32": 1.0}, "top_k": 32,
        }.items():  # fmt: skip
            answer = engine.client.post("/v1/completions", json=good | {"min_tokens": 2, field: value})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
            assert "32" in answer.json()["error"]["message"] or "0 to 31" in answer.json()["error"]["message"]
        answer = engine.client.post("/v1/completions", json=good | {"ignore_eos": True, "stop_token_ids": [31]})
        assert answer.json()["usage"]["completion_tokens"] == 3
