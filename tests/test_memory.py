"""The account of memory: what models and texts need, what a process may hold, and what gives way."""

import asyncio
import itertools
import logging
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import mlx.core as mx
import pytest

import mlx_mtp
from benchmarks.synthetic import COMMON, FOUR_BITS, synthetic_model
from mlx_mtp import DEMO, BatchGenerator, make_prompt_cache
from mlx_mtp import memory as account_of
from mlx_mtp.checkpoint.checks import self_test
from mlx_mtp.checkpoint.checks.memory import check_memory, needs_of_checkpoint
from mlx_mtp.checkpoint.config import skeleton
from mlx_mtp.checkpoint.reader import CheckpointReader, Tensor
from mlx_mtp.core.models.head_weights import is_head
from mlx_mtp.memory import STEP, Account, needs_of, sizes_of
from mlx_mtp.server.request import ApiError
from tests.support.batches import AT_ONCE
from tests.support.checkpoints import edit, write_tiny
from tests.support.commands import refused
from tests.support.decoding import prefill
from tests.support.engine import Engine
from tests.support.hub_stand_in import HEADER_BYTES
from tests.support.models import FLASH, QWEN, TRAINED, tiny_model
from tests.support.profiles import LONG
from tests.support.published import model_of
from tests.support.requests import admission_with, request_of
from tests.support.scripted_server import fail

SMALL = {
    **COMMON, "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "tie_word_embeddings": True,
}  # fmt: skip
EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256,
    "norm_topk_prob": True,
}  # fmt: skip
MODELS = {
    "the demo": lambda: mlx_mtp.load(str(DEMO)),
    "experts in float32": lambda: [synthetic_model({**SMALL, **EXPERTS, "model_type": "qwen3_5_moe"})],
    "4 bits": lambda: [synthetic_model({**SMALL, **FOUR_BITS, "model_type": "qwen3_5"})],
}


@pytest.fixture
def unlimited():
    before = mx.set_memory_limit(0)
    mx.set_memory_limit(before)
    yield
    mx.set_memory_limit(before)


# What a model needs


@pytest.mark.parametrize("name", MODELS)
def test_what_is_used_is_what_was_estimated(name):
    (model, *_), n, chunk = MODELS[name](), 80, 48
    model.device = replace(model.device, compiled=False)
    mx.clear_cache()
    mx.reset_peak_memory()
    before, needs = mx.get_active_memory(), needs_of(model, n, chunk)
    options = dict(prompt_cache=make_prompt_cache(model), prefill_step_size=chunk, copy_drafts="off")
    prefill(mx.arange(n, dtype=mx.uint32), model, **options)
    # Other tests hold arrays too.
    used = mx.get_peak_memory() - before + needs.weights + needs.head
    assert 0.9 < needs.total / used < 1.1


@pytest.mark.parametrize("kv_bits", [None, 8])
@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_next", FLASH])
def test_bytes_of_a_text(kind, kv_bits):
    """As its caches have them, whose keys and values come in blocks of 256 tokens."""
    model = tiny_model(kind, head_dim=64)
    cache, options = make_prompt_cache(model), {"kv_bits": kv_bits, "kv_group_size": 32}
    prefill(mx.zeros(256, mx.uint32), model, prompt_cache=cache, quantized_kv_start=0, **options)
    assert sum(c.nbytes for c in cache[:-1]) == sizes_of(model).caches(256, **options)


SCORES = 24 * 2 + 1  # bytes for each pair of tokens: 24 heads in 16 bits, and the mask


def test_scores_of_a_chunk(monkeypatch):
    """As in the routing of MLX 0.32.4: a 27B with a chunk of 2,048 tokens at 100,000 takes 10.0 GB, or 5.0 on an M5."""
    config = model_of("27B")[1]
    for architecture, macos, head_dim, kv_bits, n_scored in (
        (None, "", 256, None, 2048),  # not Metal
        ("applegpu_g13s", "26.3", 256, None, 2048),  # M1 Max
        ("applegpu_g17s", "26.1", 256, None, 2048),
        ("applegpu_g17s", "26.2", 256, None, 1023),  # M5 Max: the end of a prompt has fewer than 1,024 tokens
        ("applegpu_g17s", "26.2", 256, 8, 2048),
        ("applegpu_g17s", "26.2", 192, None, 2048),
        ("applegpu_g13s", "14.4", 128, None, 8),
        ("applegpu_g13s", "14.4", 128, 4, 2048),
    ):
        monkeypatch.setattr(mx.metal, "is_available", lambda a=architecture: a is not None)
        monkeypatch.setattr(mx, "device_info", lambda a=architecture: {"architecture": a})
        monkeypatch.setattr("platform.mac_ver", lambda m=macos: (m, ("", "", ""), "arm64"))
        config["text_config"]["head_dim"] = head_dim
        sizes = sizes_of(skeleton(config, "27B"), 2)
        without = replace(sizes, score_bytes=0)
        chunk = [each.chunk(2048, 100_000, kv_bits=kv_bits) for each in (sizes, without)]
        assert chunk[0] - chunk[1] == n_scored * 100_000 * SCORES


def test_bytes_of_texts_together():
    model = tiny_model("qwen3_5")
    generator = BatchGenerator(model, num_draft_tokens=0, **AT_ONCE)
    generator.insert([[1] * 20, [2] * 300], max_tokens=[90, 90])
    while len(generator.decoder.sequences) < 2:
        generator.next()
    generator.next()
    assert generator.prompt_cache_nbytes == sizes_of(model).caches_of_several([20, 300])
    generator.close()


@pytest.mark.parametrize(("n", "start"), [(300, 1000), (300, 300), (300, 299), (300, 200), (300, 0), (9, 0), (1, 0)])
def test_what_a_request_is_admitted_for_is_what_it_takes(n, start):
    """Neither more nor less, where its keys and values are quantized at once, later, or not yet; nor does a step need more."""
    model, bits = tiny_model("qwen3_5", head_dim=64), {"kv_bits": 4, "kv_group_size": 32}
    flags = ("--kv-bits", "4", "--kv-group-size", "32", "--quantized-kv-start", str(start))
    admission, request = admission_with(model, *flags), request_of(n)
    admission.sizes = sizes = replace(sizes_of(model), chunk_bytes=0, score_bytes=0, fixed_bytes=0)
    admission.account.left = 0
    generator = BatchGenerator(model, num_draft_tokens=1, quantized_kv_start=start, **bits, **AT_ONCE)
    admission.batch = generator
    need = admission.need(request, [request])  # in a batch, caches are in whole steps
    generator.insert([request.encoded.tokens] * 2, max_tokens=[40, 40])
    while len(generator.decoder) < 2 or generator.decoder.drafter.cache.nbytes == 0:
        generator.next()
    if start == n:  # the last token of the prompt is there after the first step
        generator.next()
    is_quantized = start <= n
    own = bits if is_quantized else {}
    held = generator.prompt_cache_nbytes
    assert held == sizes.caches_of_several([n, n], **own)
    twice = 0
    if is_quantized:  # not before the prompt's last token; the keys and values then exist twice
        at = max(start, n - 1, 1)
        twice = sizes.caches(at) + sizes.caches(at, **bits) - sizes.state_bytes - sizes.caches(n, **bits)
    assert need == held + max(twice, 0)
    step = sizes.caches(STEP, **own) - sizes.state_bytes
    assert admission.lack() == 2 * step
    generator.insert([[2] * 20], max_tokens=[9])
    assert admission.lack() == 2 * step + sizes.caches(STEP) - sizes.state_bytes
    assert admission.held_by(request) == sizes.caches(n, **own)


# What a process may hold


def test_usable_memory(monkeypatch):
    assert account_of.usable_memory() > 1 << 28
    for info in ({"max_recommended_working_set_size": 3, "memory_size": 4}, {"total_memory": 3}):
        monkeypatch.setattr(mx, "device_info", lambda info=info: info)
        assert account_of.usable_memory() == 3


def test_memory_of_the_process():
    """Its footprint, where psutil has it, as on macOS."""
    for of_process, expected in (({}, 3), ({"memory_info_ex": {}}, 3), ({"memory_info_ex": {"phys_footprint": 7}}, 7)):
        told = {"memory_info": {"rss": 3}, **of_process}
        process = SimpleNamespace(**{name: partial(SimpleNamespace, **values) for name, values in told.items()})
        assert account_of.host_memory(process) == expected


def test_an_array_is_held_until_it_is_dropped():
    account, n = Account(), 1 << 26
    before, array = account.held, mx.zeros(n, mx.uint8)
    mx.eval(array)
    assert n <= account.held - before < 1.2 * n
    del array
    account.release()
    assert account.held < before + 0.2 * n
    assert account.cache_budget == pytest.approx(account.left / 2, rel=0.01)


def test_room_is_kept_for_what_python_will_take(monkeypatch):
    """Arrays may not take it, and it is not counted twice when Python has."""
    monkeypatch.setattr(account_of, "EVERY", 0)
    account, n = Account(), 1 << 26
    left = account.left - n
    account.expect_growth(n)
    assert account.left == pytest.approx(left, abs=0.2 * n)
    taken = b"x" * n
    assert account.left == pytest.approx(left, abs=0.2 * n)
    taken += b"x" * n  # more than expected
    assert account.left == pytest.approx(left - n, abs=0.2 * n)
    assert len(taken) == 2 * n


def test_a_limit_is_mlx_s_too(unlimited):
    account = Account(1 << 40)
    assert 0 < mx.set_memory_limit(1 << 41) < 1 << 40  # less what Python holds
    account.restrict(0)
    assert account.left < 0
    assert account.cache_budget == 0


# A model that does not fit


def test_a_model_that_does_not_fit_is_refused_before_it_is_read(monkeypatch, unlimited):
    """The memory limit is then as before."""
    monkeypatch.setattr(mx, "load", lambda *args, **kwargs: 1 / 0)
    mx.set_memory_limit(123 << 30)
    needs = r"does not fit: it needs [\d.]+ MB \(weights 9\.8 MB.*are in use"
    for free, options, message in [
        (5_000_000, dict(mtp=True), needs.replace(r"9\.8 MB", r"9\.8 MB.*head 0\.5 MB")),
        (5_000_000, dict(mtp=False), needs.replace(r"9\.8 MB", r"9\.8 MB(?!.*head 0\.5 MB)")),
        (60_000_000, dict(context=100_000), r"The longest context that fits is \d+ tokens\."),
        (5_000_000, dict(context=100_000), r"End other programs, or give --max-memory more\."),
    ]:
        refused(message, mlx_mtp.load, str(DEMO), max_memory=Account().held + free, **options)
    assert mx.set_memory_limit(0) == 123 << 30


def test_a_tensor_larger_than_an_array_is_refused_before_it_is_read(monkeypatch):
    info = mx.device_info()
    monkeypatch.setattr(mx, "device_info", lambda: {**info, "max_buffer_length": 1_000_000})
    monkeypatch.setattr(mx, "load", lambda *args, **kwargs: 1 / 0)
    message = r"embed_tokens.weight takes 1\.0 MB, and an array on this GPU at most 1"
    for mtp in (True, False):
        refused(message, mlx_mtp.load, str(DEMO), mtp=mtp)
    # Experts that are stored one by one are one array
    monkeypatch.setattr(mx, "device_info", lambda: {"max_buffer_length": 300})
    tensor = Tensor("model.safetensors", "BF16", [8, 10], 0, 160)
    experts = {f"layers.0.mlp.experts.{i}.up_proj.weight": tensor for i in range(2)}
    given = dict(model_map=dict.fromkeys(experts, "model.safetensors"), has=lambda file: True)
    checkpoint = SimpleNamespace(name="model", folder="", tensors=lambda names: {n: experts[n] for n in names}, **given)
    refused(r"experts.up_proj.weight takes 0\.3 kB", check_memory, checkpoint, None, Account(), 0)


def test_a_model_that_barely_fits_is_warned_about(unlimited, caplog, demo):
    with caplog.at_level(logging.WARNING):
        mlx_mtp.load(str(DEMO), max_memory=Account().held + int(1.06 * needs_of(demo[0], 2048).total))
    assert "barely fits: it needs" in caplog.text


def test_a_model_that_memory_or_the_disk_has_no_room_for_is_not_downloaded(hub, unlimited, monkeypatch):
    hub.publish("org/large", DEMO)
    message = r"org/large does not fit: it needs [\d.]+ MB"
    for mtp in (True, "cached", False):
        refused(message, mlx_mtp.load, "org/large", max_memory=Account().held + 5_000_000, mtp=mtp)
    assert hub.served["model.safetensors"] <= 3 * HEADER_BYTES
    hub.publish("org/no-room", DEMO)
    hub.reset_counts()
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=5_000_000))
    message = r"org/no-room is not downloaded: it takes .* MB, .* disk of .* 5\.0 MB free"
    refused(message, mlx_mtp.load, "org/no-room", error=OSError)
    assert hub.served["model.safetensors"] == 0


def test_the_longest_context_that_fits_does():
    account, demo = SimpleNamespace(held=0, limit=20_000_000, left=20_000_000), CheckpointReader(str(DEMO))
    check = partial(check_memory, demo, demo, account)
    n = int(re.search(r"(\d+) tokens", refused("longest", check, 100_000))[1])
    check(n)
    refused(f"fits is {n} tokens", check, n + 1)


F32, F16, BF16 = mx.float32, mx.float16, mx.bfloat16
STORED = [(F32, F32), (BF16, F32), (F32, F16), (BF16, BF16)]
TYPES = list(itertools.product(["qwen3_5", FLASH], STORED, ["auto", "bfloat16", "float16"]))


@pytest.mark.parametrize(("family", "stored", "dtype"), TYPES if LONG else [*TYPES[:12:2], *TYPES[12::4]], ids=str)
def test_a_checkpoint_is_counted_in_the_type_that_it_gets(family, stored, dtype, tmp_path):
    """Its backbone and its head, which takes the type of the backbone, and a text. In plain mlx-lm its backbone alone."""
    folder = write_tiny(tmp_path / "model", family, vocab_size=512)
    types = {True: stored[1], False: stored[0]}
    edit(folder, lambda ws: ws.update({name: w.astype(types[is_head(name)]) for name, w in ws.items()}))
    checkpoint = CheckpointReader(str(folder))
    found, _ = needs_of_checkpoint(checkpoint, checkpoint, 64, dtype)
    used = needs_of(mlx_mtp.load(str(folder), mtp=True, dtype=dtype, ngram_memory=False)[0], 64)
    assert (found.head, found.caches) == (used.head, used.caches)
    assert found.weights == pytest.approx(used.weights, rel=0.001)  # the decay of a recurrence stays in float32
    for source, n_bytes in [(checkpoint, found.total)] + [(None, found.weights)] * (family != FLASH):
        check = partial(check_memory, checkpoint, source, dtype=dtype, is_plain=source is None, ngram_memory=False)
        check(SimpleNamespace(held=0, limit=n_bytes, left=n_bytes), 64)
        refused("does not fit", check, SimpleNamespace(held=0, limit=n_bytes - 1, left=n_bytes - 1), 64)


# A server

HELLO = [{"role": "user", "content": "import os"}]


@pytest.fixture(scope="module")
def engine():
    with Engine("--mtp", "--temp", "0", "--model", TRAINED) as engine:
        yield engine


def assert_507(error, message):
    assert re.match(message, error.message)
    assert (error.status, error.code) == (507, "insufficient_memory")


def test_a_lower_limit_holds_from_the_next_step_on(unlimited, engine, monkeypatch):
    """The process goes on, and so do answers when there is memory again."""
    account, right = engine.engine.admission.account, engine.ask(HELLO, max_tokens=20).tokens
    step, n_steps = engine.engine._advance, []

    def advance(*args):
        step(*args)
        n_steps.append(account.limit)
        if len(n_steps) == 3:
            account.restrict(account.held // 2)

    monkeypatch.setattr(engine.engine, "_advance", advance)
    for message in (r"The answer was stopped after \d+ tokens: ", r"The prompt of \d+ tokens needs"):
        with pytest.raises(ApiError) as refused:
            engine.ask(HELLO, max_tokens=400)
        assert_507(refused.value, message)
        assert len(n_steps) == 3
    account.restrict(1 << 40)
    assert engine.ask(HELLO, max_tokens=20).tokens == right


def test_where_a_step_lacks_memory_the_newest_request_ends(unlimited, engine, monkeypatch):
    """First the prompt store is emptied, then the newest answer ends, and the first one goes on."""
    alone = engine.ask(HELLO, max_tokens=80).tokens
    admission, account = engine.engine.admission, engine.engine.admission.account
    assert admission.caches.nbytes > 0
    lack, ends = admission.lack, []

    def short_once():
        """The second step of two requests lacks a byte."""
        if len(engine.engine.running) == 2 and not ends:
            ends.append([*engine.engine.running.values()][-1])
            account.limit = account.held // 2
            needed = lack()
            account.limit = 1 << 40
            assert needed > 0
            assert admission.caches.nbytes == 0
            return 1
        return lack()

    monkeypatch.setattr(admission, "lack", short_once)

    texts = (HELLO, [{"role": "user", "content": "import re"}])

    async def both():
        asked = [engine.answer(messages, max_tokens=80) for messages in texts]
        return await asyncio.gather(*asked, return_exceptions=True)

    answers = asyncio.run(both())
    assert len(ends) == 1
    (error,) = (a for a in answers if isinstance(a, ApiError))
    assert_507(error, r"The answer was stopped after \d+ tokens: the server has reached its memory limit of ")
    assert ends[0].messages[0]["content"] == texts[answers.index(error)][0]["content"]
    if answers[1] is error:
        assert answers[0].tokens == alone
    assert engine.ask(HELLO, max_tokens=80).tokens == alone


def out_of_memory(_):
    """The account did not foresee it: other programs may have taken the memory."""
    raise RuntimeError("[metal::malloc] Unable to allocate 9 bytes.")


@pytest.mark.parametrize(("error", "status", "code"), [(out_of_memory, 507, "insufficient_memory"), (fail, 500, None)])
def test_an_error_of_a_step_ends_what_runs_and_the_server_goes_on(engine, monkeypatch, error, status, code):
    right, advance = engine.ask(HELLO, max_tokens=20).tokens, engine.engine._advance

    def failing(*args):
        engine.engine._advance = advance
        error(mx.zeros((1, 8)))

    monkeypatch.setattr(engine.engine, "_advance", failing)
    with pytest.raises(ApiError, match="Generation failed") as refused:
        engine.ask(HELLO, max_tokens=20)
    assert (refused.value.status, refused.value.code) == (status, code)
    assert engine.ask(HELLO, max_tokens=20).tokens == right
    engine.ask(HELLO, max_tokens=2, temperature=1.0)  # ``fail`` has left a random state that gives no numbers


LARGE = dict(linear_num_value_heads=16, linear_key_head_dim=64, linear_value_head_dim=64, linear_num_key_heads=8)
LARGE_HEAD = dict(num_key_value_heads=2, head_dim=256)
SIZES = [("qwen3_5", LARGE), ("qwen3_5_moe", LARGE_HEAD), ("qwen3_next", LARGE)]


@pytest.mark.parametrize(("family", "sizes"), itertools.product(QWEN, (LARGE, LARGE_HEAD)) if LONG else SIZES, ids=str)
def test_the_test_of_the_device_takes_no_more_than_estimated(family, sizes):
    """With large recurrent states, and with a large cache of the head."""
    model = tiny_model(family, **sizes)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    self_test.run(model)
    assert mx.get_peak_memory() - before < sizes_of(model).of_test
