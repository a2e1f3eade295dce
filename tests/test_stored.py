"""Responses that the server stores: later requests refer to them and to their items, until there is no room for them."""

import json
import re

import openai
import pytest

from mlx_mtp.server.api import stored
from mlx_mtp.server.api.stored import StoredResponses
from mlx_mtp.server.request import STARTED, ApiError, Delta
from mlx_mtp.text.tool_calls import Text
from tests.support.prompts import STRICT
from tests.support.requests import RESPONSES, client_of, tools_of
from tests.support.scripted_server import said
from tests.support.server_process import server_of
from tests.support.tool_texts import FUNCTIONS, MARKS, model_with, render

TOOLS = tools_of(RESPONSES, *FUNCTIONS)
server = server_of(lambda _: ["--model", model_with(*MARKS, template=STRICT)])


def ask(client, given, say="Yes.", thinking=False, **options):
    return client.responses.create(model="m", input=given, extra_body=said(say, thinking), **options)


def counted(client, given, **options) -> int:
    return client.responses.input_tokens.count(model="m", input=given, **options).input_tokens


# Conversations


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_goes_on_with_the_one_before(client, stream):
    """As if the client had sent everything, but for the instructions."""
    whole, previous = [], openai.omit
    for turn in ("What is a tree?", "And a graph?", "Which is larger?"):
        options = dict(instructions=f"Answer {turn}", previous_response_id=previous)
        answer = ask(client, turn, f"It is {turn}", stream=stream, **options)
        if stream:
            *_, last = answer
            answer = last.response
        assert (answer.store, answer.previous_response_id or openai.omit) == (True, previous)
        whole.append({"role": "user", "content": turn})
        n = counted(client, whole, instructions=options["instructions"], extra_body=said(""))
        assert answer.usage.input_tokens == n
        whole += answer.output
        previous = answer.id


def test_calls_and_their_results_go_on(client):
    """Of the prompt, only what is new is read."""
    call = render("add", {"a": 1, "b": 2})
    first = ask(client, "Add.", f"Hm.\n</think>\n\n{call}", True, tools=TOOLS)
    thought, added = first.output
    result = {"type": "function_call_output", "call_id": added.call_id, "output": "3"}
    # The AI SDK's form, with a type and without.
    named = [{"type": "item_reference", "id": thought.id}, {"id": added.id}]
    asked = {"role": "user", "content": "Add."}
    sizes = [
        counted(client, [result], previous_response_id=first.id, tools=TOOLS),
        counted(client, [asked, *named, result], tools=TOOLS),
        counted(client, [asked, *first.output, result], tools=TOOLS),
    ]
    assert sizes == [sizes[0]] * 3
    third = ask(client, [result], previous_response_id=first.id, tools=TOOLS)
    assert third.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 2
    assert sizes[0] > counted(client, [asked, added, result], tools=TOOLS)
    # An item is found by its id in an answer, and in the input of one.
    second = ask(client, [result, {"role": "user", "content": "so?"}], previous_response_id=first.id, tools=TOOLS)
    latest, *_ = client.responses.input_items.list(second.id)
    assert counted(client, [{"id": latest.id}]) == counted(client, "so?")
    assert ask(client, [asked, *named, result], previous_response_id=second.id).output_text == "Yes."


def test_a_response_and_its_items_are_shown_and_deleted(client):
    first = ask(client, "q", metadata={"run": "7"})
    second = ask(
        client, [{"role": "user", "content": "r"}, {"role": "assistant", "content": "s"}], previous_response_id=first.id
    )
    assert client.responses.retrieve(first.id) == first
    items = [item.model_dump() for item in client.responses.input_items.list(second.id, order="asc")]
    assert [(item["type"], item["content"][0]["type"], item["content"][0]["text"]) for item in items] == [
        ("message", *part)
        for part in (("input_text", "q"), ("output_text", "Yes."), ("input_text", "r"), ("output_text", "s"))
    ]
    latest = client.responses.input_items.list(second.id)
    assert [item.model_dump() for item in latest] == items[::-1]
    assert (latest.has_more, latest.first_id, latest.last_id) == (False, items[-1]["id"], items[0]["id"])
    with pytest.raises(openai.BadRequestError, match="stream: a stored response"):
        client.responses.retrieve(first.id, stream=True)
    client.responses.delete(first.id)
    for gone in (
        lambda: client.responses.retrieve(first.id),
        lambda: client.responses.delete(first.id),
        lambda: client.responses.input_items.list(second.id),
        lambda: ask(client, "?", previous_response_id=second.id),
    ):
        with pytest.raises(openai.NotFoundError, match=f"esponse with id '{first.id}' not found."):
            gone()


def test_an_unknown_id_is_not_found(server, client):
    kept, other = ask(client, "q"), openai.OpenAI(base_url=server.url, api_key="other", max_retries=0)
    unkept = ask(client, "q", store=False)
    assert unkept.store is False
    for who, response in ((client, unkept), (other, kept)):  # another key's responses are not stored for this one
        for fields, code in (
            (dict(given="q", previous_response_id=response.id), "previous_response_not_found"),
            (dict(given=[{"type": "item_reference", "id": response.output[0].id}]), None),
        ):
            for f in (ask, counted):
                with pytest.raises(openai.NotFoundError, match=r"with id '.*' not found") as e:
                    f(who, **fields)
                assert (e.value.code, e.value.param in ("input", "previous_response_id")) == (code, True)
        with pytest.raises(openai.NotFoundError):
            who.responses.retrieve(response.id)
        with pytest.raises(openai.NotFoundError):
            who.responses.delete(response.id)
    assert client.responses.retrieve(kept.id) == kept
    other.close()
    for wrong in (5, ["resp_1"], {"id": "resp_1"}):
        status, content = server.request(RESPONSES, {"input": "a", "previous_response_id": wrong})
        assert (status, content["error"]["param"]) == (400, "previous_response_id")


def test_a_server_without_memory_says_so():
    answer = client_of(None, "--response-memory", "0").post(RESPONSES, json={"input": "a", "previous_response_id": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "previous_response_not_found")
    memory = StoredResponses(0)
    assert memory.recall("", {"input": "a"})["store"] is False
    memory.keep("", *turn("a"))
    assert (memory.stored, memory.nbytes) == ({}, 0)


def test_an_answer_whose_client_has_gone_is_stored_as_cancelled():
    """The client has its id, and what it has shown may be referred to."""

    async def stop(request):
        yield STARTED
        yield Delta([Text("a")], 1, None)

    client = client_of(stop)
    id = re.findall("resp_[0-9a-f]+", client.post(RESPONSES, json={"input": "q", "stream": True}).text)[0]
    response = client.get(f"{RESPONSES}/{id}").json()
    (item,) = response["output"]
    assert (response["status"], item["status"], item["content"][0]["text"]) == ("cancelled", "incomplete", "a")


# Room


@pytest.mark.parametrize("fields", [{"previous_response_id": "resp_2"}, {"input": [{"id": "in_1"}, {"id": "out_1"}]}])
def test_recalled_items_are_bounded_like_a_body(monkeypatch, fields):
    memory = StoredResponses(1 << 20)
    for id, previous in (("resp_1", None), ("resp_2", "resp_1")):
        memory.keep("k", *turn(id, previous, text="x" * 1000))
    memory.recall("k", fields)
    monkeypatch.setattr(stored, "MAX_RECALLED", 1000)
    with pytest.raises(ApiError, match="larger than 1000 bytes: begin a new conversation") as e:
        memory.recall("k", fields)
    assert e.value.status == 413


def turn(id: str, previous: str | None = None, text: str = "") -> tuple[list, dict]:
    """The items of an input, and a response."""
    name = id.removeprefix(stored.RESPONSE)
    output = [{"type": "message", "id": f"out_{name}"}]
    return [{"role": "user", "content": text, "id": f"in_{name}"}], {
        "id": id,
        "previous_response_id": previous,
        "output": output,
    }


def test_what_was_not_used_for_longest_makes_room(monkeypatch):
    """A conversation that goes on stays as a whole."""
    monkeypatch.setattr(stored, "MAX_RESPONSES", 4)
    memory, previous = StoredResponses(1 << 20), None
    for id in "abc":
        items = memory.recall("k", {"previous_response_id": previous})["earlier"]
        assert [item["id"] for item in items] == [
            f"{side}_{x}" for x in "abc"[: "abc".index(id)] for side in ("in", "out")
        ]
        memory.keep("k", *turn(id, previous))
        memory.keep("k", *turn(f"other {id}"))
        previous = id
    assert {id for _, id in memory.stored} == {"a", "b", "c", "other c"}


def test_stored_bytes_are_bounded():
    one = len(json.dumps(turn("a", text="x" * 1000)))
    memory = StoredResponses(5 * one)
    for i in range(9):
        memory.keep("k", *turn(f"r{i}", text="x" * 1000))
        assert memory.nbytes == sum(len(part) for content in memory.stored.values() for part in content) <= 5 * one
    assert [id for _, id in memory.stored][-1] == "r8"
    assert 3 <= len(memory.stored) <= 5
    kept = memory.stored.copy()
    memory.keep("k", *turn("larger", text="x" * 5 * one))
    assert memory.stored == kept
    with pytest.raises(ApiError, match="Response with id 'larger' not found"):
        memory.get(("k", "larger"))
