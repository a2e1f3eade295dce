"""The prompt store of the server: what a request reads, that its answer is the same, and that none fails for it."""

import asyncio
import os
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import mlx.core as mx
import pytest

from mlx_mtp.core.caches.prompt_cache import PromptCache
from mlx_mtp.errors import FAILED_PASS
from mlx_mtp.prompt_store import PromptStore
from mlx_mtp.prompt_store.disk import Folder
from mlx_mtp.prompt_store.store import LINE
from mlx_mtp.server.engine import models as caches
from mlx_mtp.server.engine.models import Stores
from mlx_mtp.server.request import ApiError, Prompt
from tests.support.engine import Engine
from tests.support.models import tiny_model
from tests.support.prompt_store import TEXT, read
from tests.support.requests import options_of
from tests.support.tool_texts import MARKS, model_with, render

SYSTEM = {"role": "system", "content": "You write Python. " * 9}
MESSAGES = [SYSTEM, {"role": "user", "content": "Add the numbers in the file. " * 3}]
CALL = render("add", {"a": 1, "b": 2})
CALLED = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
RESULT = {"role": "tool", "content": "3 is the sum of the numbers. " * 3}


@pytest.fixture
def model():
    return model_with(*MARKS)


def called(reasoning):
    return {"role": "assistant", "content": "", "reasoning_content": reasoning, "tool_calls": [CALLED]}


def test_a_tool_loop_reads_only_what_is_new(model):
    """Whatever role the last message has, and whether the template renders the answer as it was generated or not."""
    with Engine("--mtp", "--num-draft-tokens", "0", "--model", model) as engine:
        messages, before = [*MESSAGES], engine.ask(MESSAGES, "I add.\n</think>\n\n" + CALL, max_tokens=90)
        for i in range(3):
            messages += [called("I add." if i < 2 else "Other thoughts."), RESULT]
            now = engine.ask(messages, "I add.\n</think>\n\n" + CALL, max_tokens=90)
            spoken = [*before.prompt, *before.tokens]
            opening = len(before.prompt) - 1 - before.prompt[::-1].index(now.prompt[0])
            assert now.n_cached == (len(spoken) if i < 2 else opening)
            before = now
        edited = [*messages[:2], called("I add."), {**RESULT, "content": "4"}]
        assert engine.ask(edited, max_tokens=1).n_read < 40


DRAFTS = "--mtp", "--num-draft-tokens", "2"


@pytest.mark.parametrize(
    "flags", [DRAFTS, (*DRAFTS, "--kv-bits", "8", "--kv-group-size", "32"), ()], ids=["", "8 bits", "without drafts"]
)
def test_answers_are_those_of_a_prompt_read_afresh(flags, model, tmp_path, monkeypatch):
    """Bit for bit: from memory, and from disk after a restart, where the generation thread waits for no file."""
    flags = [*flags, "--model", model, "--prompt-cache-dir", str(tmp_path)]
    messages, threads, read_file = [*MESSAGES, called("I add."), RESULT], set(), Folder.read

    def files():
        return {file: file.stat().st_ino for file in tmp_path.glob("*.safetensors")}

    def note(*args):
        threads.add(threading.current_thread().name)
        return read_file(*args)

    monkeypatch.setattr(Folder, "read", note)
    with Engine(*flags) as engine:
        first, again = (engine.ask(messages, max_tokens=12) for _ in range(2))
        assert (first.n_cached, first.tokens, first.logprobs) == (0, again.tokens, again.logprobs)
        assert 0 < again.n_read < 10
    before = files()
    with Engine(*flags) as engine:
        restarted = engine.ask(messages, max_tokens=12)
        assert (restarted.n_cached, restarted.logprobs) == (again.n_cached, again.logprobs)
        metric = engine.engine.metrics.registry.get_sample_value
        assert metric("mlx_mtp_prompt_cache_read_bytes_total") > 0
        assert metric("mlx_mtp_cached_prompt_tokens_total") == again.n_cached
    assert files() == before
    assert threads == {"prompt-store-reader"}


def test_a_disk_that_does_not_answer_delays_only_the_texts_on_it(model, tmp_path, monkeypatch):
    """And those for a limited time: then the prompt is prefilled. The server ends without it."""
    flags = ["--mtp", "--num-draft-tokens", "0", "--model", model, "--prompt-cache-dir", str(tmp_path)]
    other = [{"role": "user", "content": "Another text. " * 9}]
    monkeypatch.setattr(PromptStore.load, "__defaults__", (None, 1.0))
    with Engine(*flags) as engine:
        want = engine.ask(MESSAGES, max_tokens=2)
    with Engine(*flags) as engine:
        files = [*tmp_path.glob("*.safetensors")]
        for file in files:
            file.unlink()
            os.mkfifo(file)  # whoever opens it waits for a writer

        async def ask():
            chats = MESSAGES, other, other, MESSAGES
            first, *others, last = (asyncio.ensure_future(engine.answer(chat, max_tokens=2)) for chat in chats)
            await asyncio.gather(*others)
            assert (first.done(), last.done()) == (False, False)
            # The first to give up is prefilled, and the other one may find it in memory.
            stalled = await asyncio.gather(first, last)
            assert min(a.n_cached for a in stalled) == 0
            assert [a.tokens for a in stalled] == [want.tokens] * 2

        asyncio.run(ask())
        assert engine.engine.stop_and_join()
    for file in filter(Path.exists, files):
        with suppress(OSError):  # nobody waits for it
            os.close(os.open(file, os.O_WRONLY | os.O_NONBLOCK))


def test_no_request_fails_for_the_stores_sake(model, monkeypatch, caplog):
    with Engine("--mtp", "--num-draft-tokens", "0", "--model", model) as engine:
        want = engine.ask(MESSAGES, max_tokens=5)
        for name in ("insert", "fetch"):
            monkeypatch.setattr(PromptStore, name, Mock(side_effect=RuntimeError("[malloc] Unable to allocate")))
            assert engine.ask(MESSAGES, max_tokens=5).logprobs == want.logprobs
    for what in ("a text is not cached", "the whole prompt is prefilled"):
        assert what in caplog.text


@pytest.mark.parametrize("name", ["eval", "synchronize"])
def test_nothing_of_a_failed_pass_is_kept(model, tmp_path, monkeypatch, name):
    """Neither in memory nor on disk, also where MLX reports it late, when a text is stored."""
    error = RuntimeError(f"[METAL] {FAILED_PASS}: Insufficient Memory")
    with Engine("--mtp", "--num-draft-tokens", "1", "--model", model, "--prompt-cache-dir", str(tmp_path)) as engine:
        with monkeypatch.context() as m, pytest.raises(ApiError) as failed:
            m.setattr(mx, name, Mock(side_effect=error))
            engine.ask(MESSAGES, max_tokens=5)
        assert failed.value.status == 507
        assert engine.frontend.caches.nbytes == 0
    assert not [*tmp_path.glob("*.safetensors")]


def test_a_folder_that_cannot_be_used_is_known_at_the_start(model, tmp_path, monkeypatch):
    """Also one that could be written to before the model was loaded."""
    ended, clear = [], mx.clear_streams
    monkeypatch.setattr(mx, "clear_streams", lambda: ended.append(clear()))
    monkeypatch.setattr(caches, "PromptStore", Mock(side_effect=OSError("The disk is full.")))
    with pytest.raises(OSError, match=r"The disk is full\."):
        Engine("--mtp", "--model", model, "--prompt-cache-dir", str(tmp_path))
    assert ended  # threads of streams that were left would abort the process, with another exit status


def use(stores, key, model):
    stores.use(key, model, SimpleNamespace(has_chat_template=False, chat_template=None), 1 << 30)


def test_models_share_the_space_and_find_their_texts_again():
    models = [tiny_model("qwen3_5", seed) for seed in (0, 1)]
    stores = Stores(options_of("--mtp"))
    for key, model in zip("ab", models):
        use(stores, key, model)
        assert stores.fetch(Prompt([*TEXT]))[1] == 0
        stores.insert(Prompt([*TEXT]), TEXT, read(model, TEXT))
        stores.store.model = None
    use(stores, "a", models[0])
    assert stores.fetch(Prompt([*TEXT, 7]))[1] == len(TEXT)
    one = stores.store.nbytes
    assert stores.nbytes == 2 * one
    stores.trim_to(one)  # what is not loaded goes first
    assert (stores.store.nbytes, stores.nbytes) == (one, one)
    stores.trim_to(-1)
    assert stores.nbytes == 0
    stores.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_text_goes_on_from_where_all_ranks_can(rank):
    """Rank 1 has given up what is behind the 4th token. Rank 0 says where the prompt is cut."""
    numbers, sent = iter([[[8, 200], [4, 16]], [[4, 200], [4, 16]]]), []

    def gather(mine, _):
        theirs = next(numbers)
        sent.append((mine[0], theirs[rank][0]))
        return mx.array(theirs)

    stores = Stores(options_of("--mtp"), SimpleNamespace(gather=gather))
    use(stores, "a model", tiny_model("qwen3_5"))
    for n in (4, 8)[: 2 - rank]:
        stores.store.insert(TEXT[:n], read(stores.store.model, TEXT[:n]))
    prompt = Prompt([*TEXT[:9], *[30] * 300])
    cache, n = stores.fetch(prompt)
    assert [mine for mine, _ in sent] == [theirs for _, theirs in sent]
    assert n == PromptCache(cache, len(stores.store.model.layers)).n_tokens == prompt.handle().length == 4
    assert [len(s) for s in prompt.segments] == [200 - LINE - 4, 108 + LINE, 1]
