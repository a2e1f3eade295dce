"""Anthropic's Messages and OpenAI's Responses, as their own Python clients get them, from a scripted model."""

import json
import re
import time
from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace

import anthropic
import openai
import pytest

from mlx_mtp.server.api import messages
from mlx_mtp.server.api.history import MEANINGLESS, REASONING, REFUSED
from mlx_mtp.server.app import APIS
from mlx_mtp.server.engine.encode import BoundedTokenizer
from mlx_mtp.server.request import ApiError
from mlx_mtp.server.structured_output import make_output_grammar
from mlx_mtp.text.formats import GLM
from tests.support.engine import Engine
from tests.support.prompts import Prompts
from tests.support.requests import ASK, CHAT, MESSAGES, RESPONSES, TEXT, body_with, options_of, read, tools_of
from tests.support.requests import text as part
from tests.support.scripted_server import said
from tests.support.sdk_types import values_of
from tests.support.server_process import server_of
from tests.support.tool_texts import FUNCTIONS, GLM_47, GLM_MARKS, SCHEMAS, model_with, render

QUESTION, THEN = ({"role": "user", "content": text} for text in ("q", "so?"))
ANSWER = {"role": "assistant", "content": "x"}
ADD, NOW = render("add", {"a": 1, "b": 2}), render("now", {})
TOOLS_OF = {path: tools_of(path, *FUNCTIONS) for path in (CHAT, MESSAGES, RESPONSES)}
server = server_of(lambda _: ["--served-model-name", "tiny", "--model", model_with()])


@pytest.fixture(scope="module")
def prompts():
    return Prompts()


# Messages


def message(claude, text, **options) -> dict:
    """What the client makes of an answer, which must be the same in a stream."""
    options = {"model": "default_model", "max_tokens": 400, "messages": ASK, **options}
    body = said(text, "thinking" in options)
    whole = claude.messages.create(**options, extra_body=body).model_dump()
    with claude.messages.stream(**options, extra_body=body) as stream:
        kinds = [event.delta.type if event.type == "content_block_delta" else event.type for event in stream]
        streamed = stream.get_final_message().model_dump()
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    # Anthropic's clients drop a thought without a signature: one, before its block ends.
    signed = [kinds[i + 1 : i + 3] for i, kind in enumerate(kinds) if kind == "signature_delta"]
    n_thoughts = sum(block["type"] == "thinking" for block in whole["content"])
    assert signed == [["signature", "content_block_stop"]] * n_thoughts
    for answer in (whole, streamed):
        del answer["id"]
        for block in answer["content"]:
            block.pop("id", None)
    assert {**whole, "usage": None} == {**streamed, "usage": None}
    assert whole["usage"]["output_tokens"] == streamed["usage"]["output_tokens"] > 0
    return whole


def blocks(answer: dict) -> list[dict]:
    return [{name: value for name, value in block.items() if value is not None} for block in answer["content"]]


def test_message_has_text_thinking_and_calls(claude):
    options = dict(tools=TOOLS_OF[MESSAGES], thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=2000)
    answer = message(claude, f"\nHm.\n</think>\n\nI add.\n\n{ADD}", **options)
    assert blocks(answer) == [
        {"type": "thinking", "thinking": "Hm.", "signature": messages.SIGNATURE},
        {"type": "text", "text": "I add."},
        {"type": "tool_use", "name": "add", "input": {"a": 1, "b": 2}},
    ]
    found = [answer[name] for name in ("stop_reason", "stop_sequence", "type", "role", "model")]
    assert found == ["tool_use", None, "message", "assistant", "default_model"]


def test_message_says_why_it_ends(claude):
    text = "Yes, in every case."
    for options, said_of_it, reason, word in (
        ({}, text, "end_turn", None),
        ({"max_tokens": 3}, None, "max_tokens", None),
        ({"stop_sequences": ["no", "every"]}, "Yes, in ", "stop_sequence", "every"),
    ):
        answer = message(claude, text, **options)
        assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, word)
        assert answer["content"][0]["text"] == (said_of_it or "Yes, in"[: len(answer["content"][0]["text"])])


def test_message_thinks_within_its_budget(server, claude):
    """Also where nothing drafts."""
    thinking, thought = {"type": "enabled", "budget_tokens": 9}, []
    for _ in range(2):  # the second time behind a cached prompt
        answer = claude.messages.create(model="default_model", max_tokens=30, messages=ASK, thinking=thinking)
        thought.append(answer.content[0].thinking)
    assert answer.usage.cache_read_input_tokens > 0
    assert thought[0] == thought[1]
    body = {"input": "a", "max_output_tokens": 30, "thinking_budget": 9}
    _, answer = server.request("/v1/responses", body)
    assert answer["output"][0]["content"][0]["text"] == thought[0]
    assert 9 <= answer["usage"]["output_tokens_details"]["reasoning_tokens"] <= 11


def test_an_answer_may_have_one_call_only(claude, client):
    text = f"First.\n\n{NOW}\n{NOW}\nDone."
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    answer = message(claude, text, tools=TOOLS_OF[MESSAGES], tool_choice=choice)
    call = {"type": "tool_use", "name": "now", "input": {}}
    assert (blocks(answer), answer["stop_reason"]) == ([{"type": "text", "text": "First."}, call], "tool_use")
    answer = response(client, text, tools=TOOLS_OF[RESPONSES], parallel_tool_calls=False)
    assert [item["type"] for item in answer["output"]] == ["message", "function_call"]
    json_calls = "<tool_call>\n" + json.dumps([{"name": "now", "arguments": {}}] * 2) + "\n</tool_call>"
    for says, parallel in ((text, True), (text, False), (json_calls, False)):
        options = dict(tools=TOOLS_OF[CHAT], parallel_tool_calls=parallel, extra_body=said(says))
        answer = client.chat.completions.create(model="default_model", messages=ASK, **options)
        assert len(answer.choices[0].message.tool_calls) == 1 + parallel


THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": ""}
USE = {"type": "tool_use", "id": "1", "name": "read", "input": {"path": "x"}}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": [part("no file")], "is_error": True}
READ = {"name": "read", "description": "Reads.", "input_schema": {"type": "object"}, "cache_control": {}}
MESSAGES_BODY = dict(
    system=[
        part("x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch=00000;"),
        {**part("You are a coder."), "cache_control": {"type": "ephemeral"}},
        part("x-anthropic-billing-header: cch=2f;\nBe kind.\n"),
    ],
    messages=[
        {"role": "user", "content": [part("a"), part("b")]}, {"role": "system", "content": "Be short."},
        {"role": "assistant", "content": [THOUGHT, part("I read."), USE]},
        {"role": "user", "content": [RESULT, part("Well?")]},
    ],
    tools=[READ, {"type": "web_search_20250305", "name": "web_search"}], metadata={"user_id": "1"},
    context_management={"edits": []}, output_config={"effort": "high"}, thinking={"type": "adaptive"},
)  # fmt: skip


def test_messages_become_those_of_a_chat_template():
    request = read(MESSAGES, **MESSAGES_BODY)
    call = {"id": "1", "type": "function", "function": {"name": "read", "arguments": {"path": "x"}}}
    assert request.messages == [
        {"role": "system", "content": "You are a coder.\n\nBe kind."},
        {"role": "user", "content": "a\nb"},
        {"role": "user", "content": "<system>\nBe short.\n</system>"},
        {"role": "assistant", "content": "I read.", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "content": "Error: no file", "tool_call_id": "1"},
        {"role": "user", "content": "Well?"},
    ]
    function = {"name": "read", "description": "Reads.", "parameters": {"type": "object"}}
    assert request.tools == [{"type": "function", "function": function}]
    assert request.args.chat_template_kwargs == {"enable_thinking": True, "reasoning_effort": "high"}


def test_a_runner_of_tools_sends_the_whole_conversation(server, claude):
    """Whose threads are refused in Anthropic's words: a lone result would be all that the model sees."""
    body = {"messages": [{"role": "user", "content": [RESULT]}], "max_tokens": 1}
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        status, content = server.request(MESSAGES, {**body, "thread": thread})
        assert (status, content["error"]["type"]) == (400, "invalid_request_error")
        assert content["error"]["details"] == {"error_code": "thread_unsupported_request", "unsupported": []}
    assert server.request(MESSAGES, {**body, "thread": None})[0] == 200
    import anthropic

    @anthropic.beta_tool
    def now() -> str:
        """The time."""
        return "It is noon. " * 20

    asked = dict(model="default_model", max_tokens=200, messages=ASK, tools=[now], max_iterations=2)
    first, second = claude.beta.messages.tool_runner(**asked, extra_body=said(NOW))
    used = [answer.usage.input_tokens + answer.usage.cache_read_input_tokens for answer in (first, second)]
    assert used[1] > used[0] + first.usage.output_tokens + 20


def test_errors_are_those_that_the_clients_know(claude, client):
    import anthropic  # its import takes seconds, and other workers do without

    error = {"type": "not_found_error", "message": "The model 'other' is not served here."}
    with pytest.raises(anthropic.NotFoundError) as theirs:
        claude.models.retrieve("other")
    assert theirs.value.body == {"type": "error", "error": error}
    with pytest.raises(openai.NotFoundError) as ours:
        client.models.retrieve("other")
    assert ours.value.body == {**error, "param": "model", "code": "model_not_found"}


def test_each_answer_has_an_id_that_the_log_has(server, claude, client):
    """In the headers of both packages; also an error and a stream."""
    options = dict(model="m", max_tokens=2, messages=ASK)
    ids = [claude.messages.create(**options)._request_id, client.chat.completions.create(**options)._request_id]
    ids.append(client.chat.completions.create(**options, stream=True).response.headers["x-request-id"])
    with pytest.raises(openai.NotFoundError) as e:
        client.models.retrieve("other")
    ids.append(e.value.request_id)
    assert len({*ids}) == 4
    for id in ids:
        assert re.fullmatch("req_[0-9a-f]{32}", id)
    deadline = time.monotonic() + 60
    while not all(id in server.log.read_text() for id in ids):  # a line is written when the answer was sent
        assert time.monotonic() < deadline


def test_any_name_means_the_only_model(server, claude, client):
    """Claude Code has names of its own. Nothing is downloaded for one."""
    body = said("Yes.")
    answer = claude.messages.create(model="claude-opus-9", max_tokens=9, messages=ASK, extra_body=body)
    assert (answer.content[0].text, answer.model) == ("Yes.", "claude-opus-9")
    answer = client.responses.create(model="org/name", input="a", extra_body=body)
    assert (answer.output_text, answer.model) == ("Yes.", "org/name")
    assert server.log.read_text().count("Prompt caches: up to") == 1  # as where a model is loaded
    assert [[model.id for model in of.models.list()] for of in (claude, client)] == [["tiny"]] * 2
    assert claude.models.retrieve("tiny").display_name == client.models.retrieve("tiny").id == "tiny"


# Responses


def response(client, text, **options) -> dict:
    """What the client makes of an answer, which must be the same in a stream."""
    options = {"model": "default_model", "input": "a", **options}
    extra = options.pop("thinking", False)
    body = said(text, extra)
    whole = client.responses.create(**options, extra_body=body).model_dump()
    events = list(client.responses.create(**options, extra_body=body, stream=True))
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == f"response.{whole['status']}"
    streamed = events[-1].response.model_dump()
    assert joined(events) == [comparable(item) for item in streamed["output"]]
    assert [comparable(item) for item in whole["output"]] == joined(events)
    assert whole["usage"]["output_tokens"] == streamed["usage"]["output_tokens"] > 0
    return whole


def comparable(item: dict) -> dict:
    return {name: value for name, value in item.items() if name not in ("id", "call_id")}


def joined(events) -> list[dict]:
    """The items that the events begin, extend and end."""
    ids, items = [], []
    for event in events:
        if event.type == "response.output_item.added":
            ids.append(event.item.id)
            text = ""
        elif event.type.endswith(".delta"):
            assert event.item_id == ids[-1]
            text += event.delta
        elif event.type == "response.output_item.done":
            item = event.item.model_dump()
            assert (event.output_index, item["id"]) == (len(items), ids[-1])
            content = item.get("content")
            assert text == (content[0]["text"] if content else item.get("arguments", item.get("input")))
            items.append(comparable(item))
    return items


def test_response_has_reasoning_text_and_calls(client):
    answer = response(client, f"\nHm.\n</think>\n\nI add.\n\n{ADD}", tools=TOOLS_OF[RESPONSES], thinking=True)
    reasoning, text, call = answer["output"]
    assert (reasoning["type"], reasoning["content"][0]["text"]) == ("reasoning", "Hm.")
    assert (text["type"], text["content"][0]["text"]) == ("message", "I add.")
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "add", {"a": 1, "b": 2})
    assert answer["status"] == "completed"
    back = dict(thinking=True, include=["reasoning.encrypted_content"], store=False)
    reasoning, text = response(client, "Hm.\n</think>\n\nYes.", **back)["output"]
    items = [{"type": "reasoning", "summary": [], "encrypted_content": reasoning["encrypted_content"]}, text]
    assistant = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    assert read(RESPONSES, input=items).messages == [assistant]


def test_reasoning_is_counted_in_tokens(server, client, claude):
    """Also where several tokens are a character, or their text waits for the next ones."""
    thought = "Hm, naïve 日本, in many words.\nA line.\n\nA third."
    n = len(server.engine.engine.admission.models.tokenizer.encode(thought, add_special_tokens=False))
    body = said(f"{thought}\n</think>\n\nI add.\n\n{ADD}", thinking=True)
    options = {"model": "default_model", "extra_body": body}
    assert client.responses.create(**options, input="a").usage.output_tokens_details.reasoning_tokens == n
    assert (
        claude.messages.create(**options, messages=ASK, max_tokens=999).usage.output_tokens_details.thinking_tokens == n
    )
    for choices in (1, 2):
        usage = client.chat.completions.create(**options, messages=ASK, n=choices).usage
        assert usage.completion_tokens_details.reasoning_tokens == choices * n


def test_reasoning_is_its_own_summary(client):
    """For clients that ask for a summary, and show that alone."""
    options = {"model": "default_model", "input": "a", "extra_body": said("Hm, so.\n</think>\n\nYes.", thinking=True)}
    whole = client.responses.create(**options, reasoning={"summary": "auto"}).output[0]
    events = list(client.responses.create(**options, reasoning={"summary": "auto"}, stream=True))
    told = [event for event in events if event.type.startswith("response.reasoning_summary_")]
    kinds = [event.type.removeprefix("response.reasoning_summary_") for event in told]
    n = kinds.count("text.delta")
    assert n > 1
    assert kinds == ["part.added", *["text.delta"] * n, "text.done", "part.done"]
    assert "".join(event.delta for event in told[1:-2]) == told[-2].text == told[-1].part.text == "Hm, so."
    (done,) = (event.item for event in events if event.type == "response.output_item.done" and event.output_index == 0)
    for item in (whole, done):
        assert [part.text for part in (*item.summary, *item.content)] == ["Hm, so."] * 2
    events = list(client.responses.create(**options, reasoning={"effort": "high"}, stream=True))
    assert not any("summary" in event.type for event in events)


SUMMARY = [{"type": "summary_text", "text": "Hm."}]


@pytest.mark.parametrize("fields", [
    {"encrypted_content": "SG0u"}, {"summary": SUMMARY}, {"summary": SUMMARY, "encrypted_content": "gAAAA_not-ours"},
    {"summary": SUMMARY, "encrypted_content": ""}, {"encrypted_content": "SG0u", "summary": [{"text": "Short."}]},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("content", [{}, {"content": []}, {"content": None}, {"content": [{"type": "reasoning_text"}]}])
def test_reasoning_comes_back_in_each_of_its_forms(fields, content):
    """The text itself, the one that clients get encoded, or its summary."""
    items = [{"type": "reasoning", "id": "rs_1", **content, **fields}, {**ANSWER, "content": "Yes."}]
    assert read(RESPONSES, input=items).messages == [{**ANSWER, "content": "Yes.", "reasoning_content": "Hm."}]


def test_response_logprobs_are_those_of_its_text(client):
    body = said("Hm.\n</think>\n\nI add, naïve 日本.", thinking=True)
    options = {"model": "default_model", "input": "a", "extra_body": body}
    asked = {**options, "include": ["message.output_text.logprobs"], "top_logprobs": 3}
    whole = client.responses.create(**asked).output[1].content[0]
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        streamed = stream.get_final_response().output[1].content[0]
    assert whole.logprobs == streamed.logprobs
    assert b"".join(bytes(t.bytes) for t in whole.logprobs).decode() == whole.text
    assert {len(t.top_logprobs) for t in whole.logprobs} == {3}
    told = [t for event in events if event.type == "response.output_text.delta" for t in event.logprobs]
    (done,) = (event for event in events if event.type == "response.output_text.done")
    for found in (told, done.logprobs):
        assert [(t.token, t.logprob) for t in found] == [(t.token, t.logprob) for t in whole.logprobs]
    assert client.responses.create(**options).output[1].content[0].logprobs == []
    assert client.responses.create(**asked | {"top_logprobs": 0}).output[1].content[0].logprobs[0].top_logprobs == []


OF_TEXTS = ["max_completion_tokens", "max_tokens", "n_predict"]
LIMITS = {RESPONSES: ["max_output_tokens"], MESSAGES: ["max_tokens"], CHAT: OF_TEXTS, TEXT: OF_TEXTS}


@pytest.mark.parametrize("path", LIMITS)
def test_limits_of_answers(path):
    """Without one, and with -1, an answer goes on to the end of the context, unless the operator has set a limit. Agents send
    32,000 to /v1/messages, whatever the model's context is: there, it is the rest of the context."""
    tokenizer = BoundedTokenizer(SimpleNamespace(), n_ids=1, context_length=1000)
    context = "This model's maximum context length is 1000 tokens"
    body = body_with(path, "a" if path == TEXT else ASK)

    def completed(flags=("--max-tokens", "5"), n_prompt=300, **fields):
        request = APIS[path].read_request({**body, **fields}, options_of(*flags))[1]
        tokenizer.complete([0] * n_prompt, request)
        return request.args

    assert [completed(flags).max_tokens for flags in ((), ("--max-tokens", "-1"))] == [700, 700]
    assert completed().max_tokens == 5
    for limit in LIMITS[path]:
        assert completed(**{limit: 9}).max_tokens == 9
        free = completed(**{limit: -1}, top_k=-1)
        assert (free.max_tokens, free.sampling.top_k) == (700, 0), limit
        if path == MESSAGES:
            assert completed(**{limit: 701}).max_tokens == 700
            continue
        with pytest.raises(ApiError, match=f"^{context}, but the prompt has 300, and {limit} is 701.$") as e:
            completed(**{limit: 701})
        assert (e.value.param, e.value.code) == (limit, "context_length_exceeded")
    for limits in ({}, {LIMITS[path][0]: 5}):
        with pytest.raises(ApiError) as e:
            completed(n_prompt=1001, **limits)
        assert (e.value.status, e.value.code, e.value.param in body) == (400, "context_length_exceeded", True)
        theirs, ours = "prompt is too long: 1001 tokens > 1000 maximum", f"{context}, but the prompt has 1001."
        assert APIS[path].error_content(e.value)["error"]["message"] == (theirs if path == MESSAGES else ours)


def test_response_says_what_was_asked(client):
    asked = {"model": "default_model", "input": "a", "max_output_tokens": 1}
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    text = {"format": {"type": "json_schema", "name": "a", "schema": schema, "strict": True}}
    answer = client.responses.create(**asked, text=text, metadata={"run": "7"})
    assert answer.text.format.model_dump(by_alias=True, exclude_none=True) == text["format"]
    assert answer.metadata == {"run": "7"}
    answer = client.responses.create(**asked)
    assert (answer.text.format.type, answer.metadata) == ("text", {})


def test_responses_count_their_tokens(client):
    asked = {"model": "default_model", "input": "a " * 50, "instructions": "Be short.", "tools": TOOLS_OF[RESPONSES]}
    counted = client.responses.input_tokens.count(**asked)
    used = client.responses.create(**asked, max_output_tokens=1).usage.input_tokens
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", used)
    answer = response(client, "Yes, in every case.", max_output_tokens=3)
    assert (answer["status"], answer["incomplete_details"]["reason"]) == ("incomplete", "max_output_tokens")


def test_custom_and_namespaced_tools(client):
    tools = [
        {"type": "custom", "name": "now", "description": "Takes text."},
        {"type": "namespace", "name": "math", "description": "", "tools": TOOLS_OF[RESPONSES]},
        {"type": "web_search"},
    ]
    text = render("now", {"input": "*** Begin\n+a"}) + "\n" + render("math__add", {"a": 1, "b": 2})
    custom, call = response(client, text, tools=tools)["output"]
    assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "now", "*** Begin\n+a")
    assert (call["namespace"], call["name"], json.loads(call["arguments"])) == ("math", "add", {"a": 1, "b": 2})
    # A custom call that is cut has its text so far.
    text = render("now", {"input": '*** Begin "a" of a long patch' + " with many more words" * 9})
    (item,) = response(client, text, tools=tools, max_output_tokens=60)["output"]
    assert (item["type"], item["status"]) == ("custom_tool_call", "incomplete")
    assert item["input"].startswith('*** Begin "a" of')
    assert len(item["input"]) < 200


@pytest.mark.parametrize(("syntax", "definition"), [("lark", 'start: "+" /[ab]+/'), ("regex", r"\+[ab]+")])
def test_the_grammar_of_a_custom_tool_binds_its_input(prompts, syntax, definition):
    form = {"type": "grammar", "syntax": syntax, "definition": definition}
    tool = {"type": "custom", "name": "patch", "format": form}
    tokenizer = prompts.tokenizer
    for choice in ("auto", "required", {"type": "custom", "name": "patch"}):
        request = read(RESPONSES, input="a", tools=[tool], tool_choice=choice)
        assert json.dumps(definition)[1:-1] in json.dumps(request.tools)
        for text, is_allowed in (("+ab", True), ("-ab", False), ("+abc", False)):
            (grammar,) = make_output_grammar(tokenizer, request, False)
            tokens = tokenizer.encode(render("patch", {"input": text}), add_special_tokens=False)
            assert grammar.advance_to([*tokens, *tokenizer.eos_token_ids]) == is_allowed, (choice, text)
    form["definition"] = "start: other" if syntax == "lark" else "(?=a)b"
    with pytest.raises(ApiError, match=r"patch\.parameters\.properties\.input cannot be enforced"):
        make_output_grammar(tokenizer, read(RESPONSES, input="a", tools=[tool]), False)


def test_tools_of_vendors_that_the_client_runs_are_refused():
    for path, kind in product(
        (RESPONSES, MESSAGES), ("local_shell", "shell", "apply_patch", "bash_20250124", "computer_toolset_20260801")
    ):
        with pytest.raises(ApiError, match=f"tools: {kind} is not supported"):
            read(path, **body_with(path, tools=[{"type": kind, "name": "a"}]))


FREE = {"name": "free", "description": "Frees.", "input_schema": {"type": "object"}}


def change(kind, tool, **more):
    form = {"type": "tool_definition", "definition": tool} if isinstance(tool, dict) else {"name": tool}
    return {"type": f"tool_{kind}", "tool": {"type": "tool_reference", **form}, **more}


@pytest.mark.parametrize(("changes", "names"), [
    ([], ["read"]), ([change("addition", FREE)], ["read", "free"]), ([change("removal", "read")], []),
    ([change("addition", FREE), change("removal", "free"), change("removal", "none")], ["read"]),
    ([change("removal", "read"), change("addition", "read", cache_control=None)], ["read"]),
    ([change("addition", FREE), change("removal", "free"), change("addition", "free")], ["read", "free"]),
    ([{"type": "compaction", "content": "So far.", "tool_changes": [change("addition", FREE)]}], ["read", "free"]),
], ids=str)  # fmt: skip
def test_a_conversation_changes_its_tools(changes, names):
    """Their definitions are in the prompt, and a sentence where they change."""
    request = read(MESSAGES, messages=[QUESTION, {"role": "system", "content": changes or "So."}, THEN], tools=[READ])
    assert names_of(request.shown_tools) == names
    assert [tool["function"] for tool in request.tools or [] if tool["function"]["name"] == "free"] == [
        {"name": "free", "description": "Frees.", "parameters": {"type": "object"}}
    ] * ("free" in names)
    for kind in ("is available", "is not available"):
        n = sum(block["type"] == ("tool_removal" if "not" in kind else "tool_addition") for block in changes)
        assert request.messages[1]["content"].count(f"This tool {kind} from here on:\n") == n


def test_a_system_message_may_be_for_one_turn():
    clears = {"role": "system", "content": "Be short.", "clear_at": "next_user_message"}
    for later, is_shown in (([], True), ([ANSWER], True), ([ANSWER, THEN], False)):
        messages = read(MESSAGES, messages=[QUESTION, clears, *later]).messages
        assert ("Be short." in str(messages)) == is_shown
    assert "Be short." in str(
        read(MESSAGES, messages=[QUESTION, {**clears, "clear_at": "never"}, ANSWER, THEN]).messages
    )
    with pytest.raises(ApiError, match=r"^messages\[1\]\.output_config is not supported"):
        read(MESSAGES, messages=[QUESTION, {"role": "system", "output_config": {"effort": "low"}}])
    shown = read(MESSAGES, messages=[QUESTION], tools=[{**READ, "input_examples": [{"path": "a.txt"}]}]).tools
    assert shown[0]["function"]["parameters"] == {"type": "object", "examples": [{"path": "a.txt"}]}


@pytest.mark.parametrize(("block", "message"), [
    (change("addition", "other"), r"^messages\[1\].content\[0\]: the request defines no tool 'other'"),
    (change("addition", {"type": "bash_20250124", "name": "bash"}), r"content\[0\]: bash_20250124 is not supported"),
    (change("addition", {"name": 5}), r"content\[0\].tool.definition.name: Input should be a valid string"),
    *(({"type": kind, "tool": {"type": "mcp_tool_reference", "name": "read"}}, "mcp_tool_reference is not supported")
      for kind in ("tool_addition", "tool_removal")),
    ({"type": "tool_removal"}, r"content\[0\].tool: Input should be a valid dictionary"),
], ids=str)  # fmt: skip
def test_a_tool_that_cannot_be_added_is_refused(block, message):
    with pytest.raises(ApiError, match=message) as e:
        read(MESSAGES, messages=[QUESTION, {"role": "system", "content": [block]}])
    assert (e.value.status, e.value.param) == (400, "messages")


def test_calls_of_tools_that_are_added_later_are_calls(claude, client):
    options, function = dict(model="default_model", extra_body=said(ADD)), TOOLS_OF[MESSAGES][1]
    added = {"role": "system", "content": [change("addition", function)]}
    answer = claude.messages.create(**options, messages=[QUESTION, added], max_tokens=200)
    assert [(block.type, block.input) for block in answer.content] == [("tool_use", {"a": 1, "b": 2})]
    added = {"type": "additional_tools", "role": "developer", "tools": [TOOLS_OF[RESPONSES][1]]}
    (item,) = client.responses.create(**options, input=[QUESTION, added]).output
    assert (item.type, item.name) == ("function_call", "add")


def test_an_inner_tool_may_be_chosen_by_its_short_name():
    spaces = [
        {"type": "namespace", "name": s, "tools": [{"type": "function", "name": n} for n in "xy"[: 1 + i]]}
        for i, s in enumerate("ab")
    ]
    choice = {"type": "function", "name": "y"}
    chosen = read(RESPONSES, input="a", tools=spaces, tool_choice=choice).structured_output.calls
    assert [call["name"] for call in chosen] == ["b__y"]
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [choice]}
    assert names_of(read(RESPONSES, input="a", tools=spaces, tool_choice=allowed).tools) == ["b__y"]
    with pytest.raises(ApiError, match="there is no tool 'x'"):  # there are two
        read(RESPONSES, input="a", tools=spaces, tool_choice={"type": "function", "name": "x"})


RESPONSES_BODY = dict(
    instructions="You are a coder.",
    input=[
        {"type": "message", "role": "developer", "content": [part("Be short.", "input_text")]},
        {"role": "user", "content": "a"},
        {"type": "function_call", "name": "read", "call_id": "1", "arguments": '{"path": "x"}', "namespace": "fs"},
        {"type": "custom_tool_call", "name": "patch", "call_id": "2", "input": "+a"},
        {"type": "function_call_output", "call_id": "1", "output": "text"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": [part("done", "input_text")]},
        {"type": "web_search_call", "id": "3", "status": "completed"},
        {"role": "developer", "content": "Go on."},
    ],
    store=True, include=["reasoning.encrypted_content"], prompt_cache_key="k",
    reasoning={"effort": "none", "summary": "auto"},
)  # fmt: skip


def test_items_become_messages_of_a_chat_template():
    request = read(RESPONSES, **RESPONSES_BODY)
    calls = [("1", "fs__read", {"path": "x"}), ("2", "patch", {"input": "+a"})]
    calls = [{"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in calls]
    assert request.messages == [
        {"role": "system", "content": "You are a coder.\n\nBe short."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "text", "tool_call_id": "1"},
        {"role": "tool", "content": "done", "tool_call_id": "2"},
        {"role": "user", "content": "<system>\nGo on.\n</system>"},
    ]
    assert request.args.chat_template_kwargs == {"enable_thinking": False}


# The choice of tools


def request_with(path, choice, **fields):
    return read(path, **body_with(path, tools=TOOLS_OF[path], tool_choice=choice), **fields)


def names_of(tools) -> list[str]:
    return [tool["function"]["name"] for tool in tools or []]


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("is_nested", [True, False])
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_only_the_allowed_tools_are_called(path, is_nested, mode):
    """The prompt has all of them, and so remains in the cache."""
    listed = [
        *({"type": "function", **of} for of in ({"name": "add"}, {"function": {"name": "now"}})),
        {"type": "web_search"},
    ]
    allowed = {"mode": mode, "tools": listed}
    request = request_with(path, {"type": "allowed_tools", **({"allowed_tools": allowed} if is_nested else allowed)})
    assert (names_of(request.tools), names_of(request.shown_tools)) == (["add", "now"], [*SCHEMAS])
    output = request.structured_output
    assert ([tool["name"] for tool in output.calls], output.is_required) == (["add", "now"], mode == "required")
    everything = {"mode": "auto", "tools": [{"type": "function", "name": name} for name in SCHEMAS]}
    assert request_with(path, {"type": "allowed_tools", **everything}).structured_output is None


def test_allowed_tools_that_are_none():
    add = [{"type": "function", "name": "add"}]
    wrong = {}, {"mode": "any", "tools": add}, *({"tools": x} for x in ([{"name": "rm"}], "add", [5], []))
    for path, allowed, is_nested in product((CHAT, RESPONSES), wrong, (False, True)):
        choice = {"type": "allowed_tools", **({"allowed_tools": allowed} if is_nested else allowed)}
        with pytest.raises(ApiError, match="allowed_tools must") as e:
            request_with(path, choice)
        assert (e.value.status, e.value.param) == (400, "tool_choice"), choice


def test_a_tool_that_is_not_allowed_is_not_called(client):
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]}
    options = dict(model="default_model", input="a", tools=TOOLS_OF[RESPONSES])
    for call, is_called in ((ADD, True), (NOW, False)):
        answer = client.responses.create(**options, tool_choice=choice, extra_body=said(f"Hm.\n\n{call}"))
        assert [item.type for item in answer.output] == ["message", "function_call"] if is_called else ["message"]
    count = client.responses.input_tokens.count
    sizes = [count(**options, tool_choice=x).input_tokens for x in (choice, "auto", "none")]
    assert sizes[0] == sizes[1] > sizes[2]


# A model of another family


def test_a_session_with_glm():
    """Any of its tokens that begin a message ends an answer, and is none of its text."""
    add, write = (render(name, x, format=GLM) for name, x in (("add", {"a": 1, "b": 2}), ("write", {"content": "x\n"})))
    with Engine("--model", model_with(*GLM_MARKS, template=GLM_47), "--mtp", "--max-tokens", "99") as engine:
        clients = {"api_key": "none", "http_client": engine.client}
        claude = anthropic.Anthropic(base_url="http://localhost", **clients)
        thinking = {"type": "enabled", "budget_tokens": 1024}
        text = f"Hm.</think>I add.{add}{write}<|observation|>"
        answer = message(claude, text, thinking=thinking, max_tokens=2000, tools=TOOLS_OF[MESSAGES])
        thought, spoken, *calls = blocks(answer)
        assert (thought["thinking"], spoken["text"], answer["stop_reason"]) == ("Hm.", "I add.", "tool_use")
        assert [call["input"] for call in calls] == [{"a": 1, "b": 2}, {"content": "x\n"}]
        client = openai.OpenAI(base_url="http://localhost/v1", **clients)
        spoken, call = response(client, f"I write.{write}<|user|>", tools=TOOLS_OF[RESPONSES])["output"]
        assert (spoken["content"][0]["text"], json.loads(call["arguments"])) == ("I write.", {"content": "x\n"})
        # Of random weights, by the grammar
        options = {"model": "default_model", "messages": ASK, "tools": TOOLS_OF[CHAT], "parallel_tool_calls": False}
        pick = {"type": "function", "function": {"name": "now"}}
        for extra in ({"enable_thinking": False}, {"enable_thinking": True, "thinking_budget": 5}):
            (choice,) = client.chat.completions.create(**options, tool_choice=pick, extra_body=extra).choices
            assert (choice.finish_reason, choice.message.tool_calls[0].function.name) == ("tool_calls", "now")
            assert choice.message.tool_calls[0].function.arguments == "{}"


# Items of all kinds

WORD = re.compile(r"word\d+")
NOT_TEXT = re.compile("id$|^encrypted|signature|fingerprint|filename|media_type")  # names of fields
# Kinds without text, for a model that takes no images
SILENT = {"image", "container_upload", "computer_call_output", "image_generation_call", *MEANINGLESS}
COMMIT = {"id": "word0", "parent": "word1", "preexisting_untracked_files": ["word2"]}
GHOST = {"type": "ghost_snapshot", "ghost_commit": COMMIT}


def histories(path: str) -> Iterator[tuple[dict, dict]]:
    """Every kind of item that a client's package declares, and a body with it between other messages."""
    if path == MESSAGES:
        import anthropic.types as stable
        from anthropic.types import beta

        for first, blocks in enumerate((stable.ContentBlockParam, beta.BetaContentBlockParam)):
            for i, item in enumerate(values_of(blocks), first):
                role = ("user", "assistant")[i % 2]
                yield item, {"messages": [QUESTION, {"role": role, "content": [item]}, ANSWER, THEN]}
    else:
        types, is_chat = openai.types, path == CHAT
        of = types.chat.ChatCompletionMessageParam if is_chat else types.responses.ResponseInputItemParam
        for item in [*values_of(of), *([] if is_chat else [GHOST])]:
            yield item, {"messages" if is_chat else "input": [QUESTION, item, ANSWER, THEN]}


def words(value, is_text: bool = True) -> Iterator[tuple[str, bool]]:
    """The words in a value, and whether their fields are text."""
    if isinstance(value, str) and WORD.fullmatch(value):
        yield value, is_text
    for name, x in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from words(x, is_text and not NOT_TEXT.search(str(name)))


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_no_kind_of_item_ends_a_session(prompts, path):
    """It is rendered as text where it has text, and otherwise a mark stands for it."""
    kinds, said, refused = set(), set(), set()
    for item, body in histories(path):
        kind = item.get("type") or item["role"]
        try:
            text = prompts.text(path, **body)
        except ApiError as e:
            refused.add((kind, e.status, e.param))
            continue
        assert "\nso?<|im_end|>" in text, item
        shown = {*WORD.findall(text)}
        assert not shown & {word for word, is_text in words(item) if not is_text}, item
        kinds.add(kind)
        said |= {kind} if shown else set()
        is_seen = shown or "<tool_call>" in text or " left out]" in text
        assert is_seen or kind in (*REASONING, *MEANINGLESS) or not any(is_text for _, is_text in words(item)), item
    assert kinds - said <= {*SILENT, *REASONING}  # the template drops the thoughts of earlier turns
    assert len(kinds) >= {CHAT: 6, RESPONSES: 28, MESSAGES: 20}[path]
    # Without them the conversation is not whole; a tool is one that nothing defines,
    # one of a vendor's server, or one whose calls are of another type.
    unread = {MESSAGES: {"tool_addition", "tool_removal", "compaction"}, RESPONSES: {*REFUSED}}.get(path, set())
    assert refused <= {(kind, 400, APIS[path].NEEDED) for kind in unread}
