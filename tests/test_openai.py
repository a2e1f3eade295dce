"""OpenAI's chat completions and completions, as its own Python client and its stream helpers get them."""

import json
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import openai
import pytest
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mlx_mtp.server.api.completions import ChatBody, ChatWriter
from mlx_mtp.server.engine.engine import _with_logprobs
from mlx_mtp.server.request import STARTED, Delta, Waiting
from mlx_mtp.text.grammar import llguidance_tokenizer
from mlx_mtp.text.tool_calls import Text
from tests.support.models import TRAINED
from tests.support.requests import ASK, client_of, tools_of
from tests.support.requests import CHAT as CHAT_PATH
from tests.support.scripted_server import said
from tests.support.server_process import server_of
from tests.support.tool_texts import FUNCTIONS, model_with, render

CHAT = {"model": "default_model", "messages": ASK}
TEXT = {"model": "default_model", "prompt": "import os\n", "max_tokens": 12}
TOOLS = tools_of(CHAT_PATH, *FUNCTIONS)
ADD = render("add", {"a": 1, "b": 2})
SET = render("set", {"value": None, "options": {"x": True}}, json_scalars=True)
# One says what it is told to.
server = server_of(lambda _: ["--model", model_with()])
drafting = server_of(lambda _: ["--model", TRAINED, "--mtp"])  # writes Python


@pytest.fixture(scope="module")
def writer(drafting):
    with openai.OpenAI(base_url=drafting.url, api_key="none", max_retries=0) as client:
        yield client


def joined(chunks) -> dict[int, dict]:
    """What the chunks of completions say, by choice."""
    found: dict[int, dict] = {}
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        whole = found.setdefault(choice.index, {"text": "", "logprobs": {}, "finish_reason": None})
        whole["text"] += choice.text
        for name, more in choice.logprobs.model_dump().items() if choice.logprobs else ():
            whole["logprobs"].setdefault(name, []).extend(more)
        assert whole["finish_reason"] is None
        whole["finish_reason"] = choice.finish_reason
    return found


# Streams


def test_the_stream_helper_gets_each_choice_and_usage(client):
    body = said(f"Hm.\n</think>\n\nI add.\n\n{ADD}", True)
    options = dict(**CHAT, n=2, tools=TOOLS, max_tokens=900, extra_body=body)
    with client.chat.completions.stream(**options, stream_options={"include_usage": True}) as stream:
        final = stream.get_final_completion()
    whole = client.chat.completions.create(**options)
    for found in (final.choices, whole.choices):
        assert [(c.index, c.finish_reason) for c in found] == [(0, "tool_calls"), (1, "tool_calls")]
        for message in (c.message for c in found):
            assert (message.role, message.content, message.reasoning) == ("assistant", "I add.", "Hm.")
            assert json.loads(message.tool_calls[0].function.arguments) == {"a": 1, "b": 2}
        assert len({c.message.tool_calls[0].id for c in found}) == 2
    assert final.usage.completion_tokens == whole.usage.completion_tokens > 0
    with client.chat.completions.stream(**CHAT, extra_body=said("")) as stream:  # without text, it has a role
        message = stream.get_final_completion().choices[0].message
    assert (message.role, message.content) == ("assistant", None)
    for text, stop in (("", None), ("So.", ["So"]), ("Hm.", None)):  # as OpenAI's: null beside calls only
        body = said(text, thinking=text == "Hm.")
        assert client.chat.completions.create(**CHAT, stop=stop, extra_body=body).choices[0].message.content == ""


def test_each_chunk_may_have_the_usage_so_far(server, client):
    """As in vLLM."""
    options = dict(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    for n in (1, 2):
        *chunks, last = client.chat.completions.create(**CHAT, **options, n=n, extra_body=said("Yes, I do."))
        counts = [chunk.usage.completion_tokens for chunk in chunks]
        assert (counts[0], counts[-1], counts) == (1, last.usage.completion_tokens, sorted(counts))
        assert len({*counts}) == counts[-1]
        for usage in (chunk.usage for chunk in (*chunks, last)):
            assert usage.prompt_tokens == last.usage.prompt_tokens > 0
            assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    chunks = client.completions.create(**TEXT, **options, extra_body=said("a b"))
    assert all(chunk.usage.prompt_tokens > 0 for chunk in chunks)


def test_progress_of_a_long_prompt_is_a_chunk_without_text():
    """For OpenAI's client and its stream helper, and for readers that take nothing but events."""

    async def generate(request):
        for item in (Waiting(0, 9), Waiting(4, 9), STARTED, Waiting(9, 9), Delta([Text("a")], 1, "stop")):
            yield item

    http = client_of(generate)
    c = openai.OpenAI(base_url="http://localhost/v1", api_key="none", http_client=http)
    for n in (1, 2):
        with http.stream("POST", CHAT_PATH, json={"messages": ASK, "stream": True, "n": n}) as response:
            assert all(line.startswith("data: ") for line in response.iter_lines() if line)
        with c.chat.completions.stream(**CHAT, n=n) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_completion()
        assert [choice.message.content for choice in final.choices] == ["a"] * n
        assert kinds.count("content.delta") == n
        deltas = [chunk.choices[0].delta for chunk in c.chat.completions.create(**CHAT, n=n, stream=True)]
        assert [delta.role for delta in deltas].count("assistant") == n
        assert "".join(delta.content or "" for delta in deltas) == "a" * n


# Log probabilities


def test_chat_logprobs_are_those_of_the_content(client):
    """Not of the reasoning, the calls or the template's line breaks; whole and streamed."""
    extra = said(f"Hm.\n</think>\n\nI add, naïve 日本.\n\n{ADD}", True)
    options = dict(**CHAT, tools=TOOLS, max_tokens=900, logprobs=True, extra_body=extra)
    with client.chat.completions.stream(**options, top_logprobs=20) as stream:
        deltas = [event.content for event in stream if event.type == "logprobs.content.delta"]
        streamed = stream.get_final_completion().choices[0]
    whole = client.chat.completions.create(**options, top_logprobs=20).choices[0]
    told = whole.logprobs.content
    assert told == streamed.logprobs.content
    assert len(deltas) > 1
    assert whole.message.content == "I add, naïve 日本."
    for say in (" os", "os", "  os"):  # the first space is kept in both
        spaced = client.chat.completions.create(**CHAT, logprobs=True, extra_body=said(say)).choices[0]
        assert spaced.message.content == "".join(t.token for t in spaced.logprobs.content) == say
    # One token has the full stop and the template's breaks.
    assert b"".join(bytes(t.bytes) for t in told).decode().removesuffix("\n\n") == whole.message.content
    for t in told:
        assert t.token == bytes(t.bytes).decode(errors="replace")
        assert [len(t.top_logprobs), max(t.top_logprobs, key=lambda x: x.logprob)] == [20, t.top_logprobs[0]]
    for top in (0, None):
        alone = client.chat.completions.create(**options, top_logprobs=top).choices[0].logprobs.content
        assert [(t.token, t.logprob, t.top_logprobs) for t in alone] == [(t.token, t.logprob, []) for t in told]
    assert client.chat.completions.create(**CHAT, extra_body=extra).choices[0].logprobs is None
    for wrong, message in (({}, "requires logprobs"), ({"logprobs": True}, "top_logprobs")):
        with pytest.raises(openai.BadRequestError, match=message):
            client.chat.completions.create(**CHAT, **wrong, top_logprobs=21 if wrong else 2)


def test_logprobs_are_those_of_the_tokens_that_were_drawn(writer, trained):
    """With a temperature, by the model's own pass over the text."""
    model, tokenizer = trained
    told = writer.completions.create(**TEXT | dict(temperature=2.0, seed=3, logprobs=1)).choices[0].logprobs
    bytes_of = llguidance_tokenizer(tokenizer).decode_bytes
    assert bytes_of([tokenizer.eos_token_id]) == tokenizer.eos_token.encode()
    ids = {bytes_of([i]): i for i in reversed(range(len(tokenizer)))}
    pieces = [t.encode() if not t.startswith("bytes:") else eval(f"b'{t[6:]}'") for t in told.tokens]
    answer, prompt = [ids[piece] for piece in pieces], tokenizer.encode(TEXT["prompt"])
    logits = model(mx.array([prompt + answer]))[0, len(prompt) - 1 : -1].astype(mx.float32)  # [T, V]
    own = nn.log_softmax(logits)[mx.arange(len(answer)), mx.array(answer)]
    assert told.token_logprobs == pytest.approx(own.tolist(), abs=0.07)  # bfloat16
    likeliest = [max(top.values()) for top in told.top_logprobs]
    assert sum(a < b for a, b in zip(told.token_logprobs, likeliest)) > 3
    assert [top[token] for token, top in zip(told.tokens, told.top_logprobs)] == told.token_logprobs


def test_completions_have_logprobs_of_their_own_form(writer, client):
    options = {**TEXT, "logprobs": 5}
    whole = writer.completions.create(**options).choices[0]
    told = whole.logprobs
    assert "".join(told.tokens) == whole.text
    assert told.text_offset == [len("".join(told.tokens[:i])) for i in range(12)]
    assert {len(top) for top in told.top_logprobs} == {5}
    likeliest = [max(top.values()) for top in told.top_logprobs]
    assert told.token_logprobs == likeliest  # without a temperature
    streamed = joined(writer.completions.create(**options, stream=True))
    assert streamed == {0: {"text": whole.text, "logprobs": told.model_dump(), "finish_reason": "length"}}
    assert writer.completions.create(**TEXT).choices[0].logprobs is None
    answer = writer.completions.create(**options, stop=whole.text[5:9])
    cut = answer.choices[0]
    assert (cut.text, cut.finish_reason, answer.usage.completion_tokens < 12) == (whole.text[:5], "stop", True)
    assert "".join(cut.logprobs.tokens).startswith(cut.text)
    assert cut.logprobs.text_offset[-1] < 5
    for say in (" os", "os", "  os"):  # a completion begins with its space
        answer = client.completions.create(**TEXT | dict(prompt="import", logprobs=0), extra_body=said(say)).choices[0]
        assert answer.text == "".join(answer.logprobs.tokens) == say


# Several answers


def test_several_answers_read_a_prompt_once(drafting, writer):
    prompt = "class Stack:\n" + "    def push(self, item):\n        self.items.append(item)\n\n" * 6
    options = {**TEXT, "prompt": prompt, "temperature": 1.5}
    before = drafting.metrics()
    answer = writer.completions.create(**options, n=4, seed=2**64 - 2)
    after = drafting.metrics()
    names = "mlx_mtp_prompt_tokens_total", "mlx_mtp_cached_prompt_tokens_total"
    n_read, n_cached = (after[name] - before[name] for name in names)
    n, usage = answer.usage.prompt_tokens, answer.usage
    assert n_read == 4 * n
    assert n_read - n_cached <= n + 3 * 2  # the last token is read again
    assert (usage.completion_tokens, usage.total_tokens) == (4 * 12, n + 4 * 12)
    assert usage.prompt_tokens_details.cached_tokens == 0
    alone = [writer.completions.create(**options, seed=seed) for seed in (-2, -1, 0, 1)]
    assert [(c.index, c.text) for c in answer.choices] == [*enumerate(a.choices[0].text for a in alone)]
    assert len({c.text for c in answer.choices}) == 4


def test_several_prompts_as_texts_and_as_tokens(writer, trained):
    texts = ["import os\n", "def f(x):\n", "class A:\n"]
    tokens = [trained[1].encode(text) for text in texts]
    alone = [writer.completions.create(**{**TEXT, "prompt": text}) for text in texts]
    want = [a.choices[0].text for a in alone]
    for prompt in (texts, tokens):
        answer = writer.completions.create(**{**TEXT, "prompt": prompt})
        assert [(c.index, c.text) for c in answer.choices] == [*enumerate(want)]
        assert answer.usage.prompt_tokens == sum(a.usage.prompt_tokens for a in alone)
        assert answer.usage.completion_tokens == sum(a.usage.completion_tokens for a in alone)
    assert writer.completions.create(**{**TEXT, "prompt": tokens[1]}).choices[0].text == want[1]
    options = dict(n=2, stream=True, stream_options={"include_usage": True}, logprobs=0)
    chunks = list(writer.completions.create(**TEXT | {"prompt": texts}, **options))
    streamed = joined(chunks)
    assert [streamed[i]["text"] for i in range(6)] == [text for text in want for _ in range(2)]
    assert {len(streamed[i]["logprobs"]["tokens"]) for i in range(6)} == {12}
    assert chunks[-1].usage.completion_tokens == 72


def test_choices_come_in_order_first():
    """OpenAI's client takes a chunk of a choice only behind chunks of those before it."""
    body = ChatBody(messages=ASK, n=3, stream=True)
    chunks = ChatWriter(body).add(Delta([Text("a"), Text("b")], 1, None), 2).decode().split("\n\n")[:-1]
    choices = [json.loads(chunk.removeprefix("data: "))["choices"][0] for chunk in chunks]
    role = {"role": "assistant"}
    want = [(0, role), (1, role), (2, role | {"content": "a"}), (2, {"content": "b"})]
    assert [(c["index"], c["delta"]) for c in choices] == want


def test_the_bytes_of_each_token(demo):
    """Also of a byte that no UTF-8 has."""
    tokenizer, byte_of = demo[1], {c: b for b, c in bytes_to_unicode().items()}
    words = {i: word for word, i in tokenizer.get_vocab().items() if i not in tokenizer.added_tokens_decoder}
    logprobs = mx.array([float(-i) for i in range(tokenizer.vocab_size)])
    n = 300  # all bytes are among the first tokens
    delta = _with_logprobs(Delta([], 1, None), SimpleNamespace(logprobs=logprobs), n, tokenizer)
    found = {round(-logprob): piece for piece, logprob in delta.logprobs[1:]}
    assert [found[i] for i in words if i < n] == [bytes(byte_of[c] for c in words[i]) for i in words if i < n]
    assert b"\xff" in found.values()


# A last message of the assistant


def test_a_last_message_of_the_assistant_is_continued(server, client, writer):
    """Its space is kept, and no thinking begins."""
    messages = [*ASK, {"role": "assistant", "content": "The answer is"}]
    options = {"model": "default_model", "messages": messages, "extra_body": said(" 42.", thinking=True)}
    whole = client.chat.completions.create(**options)
    with client.chat.completions.stream(**options) as stream:
        streamed = stream.get_final_completion()
    for answer in (whole, streamed):
        message = answer.choices[0].message
        assert (message.content, getattr(message, "reasoning", None)) == (" 42.", None)
    prompt = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nThe answer is"
    assert whole.usage.prompt_tokens == client.completions.create(**{**TEXT, "prompt": prompt}).usage.prompt_tokens
    body = {"messages": messages, "response_format": {"type": "json_object"}}
    status, content = server.request(CHAT_PATH, body)
    assert (status, content["error"]["param"]) == (400, "response_format")
    assert "a last message of the assistant" in content["error"]["message"]
    # Without a template, the model's text would begin a message of its own.
    with pytest.raises(openai.BadRequestError, match="cannot be continued without a chat template"):
        writer.chat.completions.create(model="default_model", messages=messages)


def test_llama_cpps_and_vllms_fields(writer, trained):
    """n_predict, json_schema, ignore_eos, min_tokens and stop_token_ids."""
    tokenizer = trained[1]
    text = {**TEXT, "max_tokens": 60}
    whole = writer.completions.create(**text, logprobs=0).choices[0]
    short = writer.completions.create(**{**text, "max_tokens": None}, extra_body={"n_predict": 5})
    assert short.usage.completion_tokens == 5
    piece = whole.logprobs.tokens[4]
    (stop,) = tokenizer.encode(piece, add_special_tokens=False)
    first = whole.logprobs.tokens.index(piece)
    for body, n_stop in (({}, first), ({"min_tokens": 20}, None)):
        answer = writer.completions.create(**text, extra_body={"stop_token_ids": [stop], **body})
        assert (answer.choices[0].text == "".join(whole.logprobs.tokens[:first])) == (n_stop is not None)
        assert answer.usage.completion_tokens >= (20 if n_stop is None else n_stop)
    biased = {"logit_bias": {str(tokenizer.eos_token_id): 50}, "max_tokens": 9}  # the text ends at once
    for body, n_tokens in (({}, 1), ({"min_tokens": 4}, 5), ({"ignore_eos": True}, 9)):
        answer = writer.completions.create(**{**text, **biased}, extra_body=body)
        assert answer.usage.completion_tokens == n_tokens, body
    schema = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"], "additionalProperties": False}
    for body in ({"json_schema": schema}, {"response_format": {"type": "json_object", "schema": schema}}):
        answer = writer.chat.completions.create(**CHAT, max_tokens=60, extra_body=body)
        assert json.loads(answer.choices[0].message.content) == {"a": 7}


# Tool calls and reasoning, in a stream as without


def say(client, text: str, thinking: bool = False, **options) -> dict:
    """The choice of an answer, which must be the same in a stream."""
    options = {**CHAT, "tools": TOOLS, "max_tokens": 900, "extra_body": said(text, thinking), **options}
    with client.chat.completions.stream(**options) as stream:
        answers = client.chat.completions.create(**options), stream.until_done().current_completion_snapshot
    whole, streamed = (answer.choices[0].model_dump(exclude_none=True) for answer in answers)
    for choice in (whole, streamed):
        calls = choice["message"].get("tool_calls", [])
        ids = [call.pop("id") for call in calls]
        assert len({*ids}) == len(ids)
        functions = [call["function"] for call in calls]
        choice["message"]["tool_calls"] = [{"name": f["name"], "arguments": f["arguments"]} for f in functions]
    assert whole == streamed
    return whole


def test_an_answer_is_taken_apart(client):
    call, in_thought = ("add", {"a": 1, "b": 2}), f"I shall add.\n\n{ADD}"
    for text, thinking, reasoning, content, calls in (
        (f"\n\n{ADD}\n{SET}", False, None, None, [call, ("set", {"value": None, "options": {"x": True}})]),
        # Line breaks of the template are not the text's.
        (f"\nHm.\n</think>\n\nI add.\n\n{ADD}\n{ADD}\nDone.\n", True, "Hm.", "I add.\n\nDone.\n", [call] * 2),
        ("<think>\nHm.\n</think>\n\nYes.", False, "Hm.", "Yes.", []),  # begun by the model itself
        ("\n\n  Yes. </think> <think>\n", False, None, "\n\n  Yes. </think> <think>\n", []),
        # A call in reasoning is one only if nothing closes that.
        (in_thought, True, in_thought, None, [call]),
        (f"I could add:\n{ADD}\nbut no.\n</think>\n\nNo.", True, f"I could add:\n{ADD}\nbut no.", "No.", []),
    ):
        choice = say(client, text, thinking)
        message = choice["message"]
        assert (message.get("reasoning"), message.get("content")) == (reasoning, content), text
        assert [(call["name"], json.loads(call["arguments"])) for call in message["tool_calls"]] == calls, text
        assert choice["finish_reason"] == ("tool_calls" if calls else "stop"), text


@pytest.mark.parametrize(("limit", "reason"), [(900, "tool_calls"), (50, "length")])
def test_arguments_come_token_by_token(server, client, limit, reason):
    """Also those of a call that the limit cuts."""
    arguments = {"content": "import os\n" * 20}
    text, whole = render("write", arguments), json.dumps(arguments)
    body = {"messages": ASK, "tools": TOOLS, "max_tokens": limit, **said(text)}
    deltas = [chunk["choices"][0]["delta"] for chunk in server.stream(CHAT_PATH, body)]
    pieces = [delta["tool_calls"][0]["function"]["arguments"] for delta in deltas if "tool_calls" in delta]
    assert len(pieces) > 15
    assert max(map(len, pieces)) < 20
    assert whole.startswith("".join(pieces))
    assert ("".join(pieces) == whole) == (reason == "tool_calls")
    assert say(client, text, max_tokens=limit)["finish_reason"] == reason
