"""The form of answers: JSON of a schema, and calls that are required, in each API."""

import json
import pickle
import re
import threading
from types import SimpleNamespace

import jsonschema
import mlx.core as mx
import pytest
from mlx_lm.tool_parsers import json_tools

import mlx_mtp
from mlx_mtp.server import structured_output
from mlx_mtp.server.request import ApiError, Request, StructuredOutput
from mlx_mtp.text import grammar
from mlx_mtp.text.formats import format_of
from tests.support.decoding import mtp, plain
from tests.support.engine import Engine
from tests.support.requests import ASK, CHAT, MESSAGES, RESPONSES, TEXT, body_with, read, tools_of
from tests.support.server_process import server_of
from tests.support.tool_texts import FUNCTIONS, GLM_47, GLM_MARKS, TEMPLATE, THINKING, model_with, render

PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
COLOR, DIGIT = {"type": "string", "enum": ["red", "green"]}, {"type": "integer", "maximum": 9, "minimum": 0}
PICK = {"type": "object", "properties": {"color": COLOR, "n": DIGIT}, "required": ["color", "n"]}
TOOLS = [*FUNCTIONS, {"name": "pick", "parameters": PICK}]
AT_ONCE = {"chat_template_kwargs": {"enable_thinking": False}}


def json_schema(schema: dict) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


PICKS = tools_of(CHAT, TOOLS[-1])
server = server_of(lambda _: ["--model", model_with(), "--mtp", "--max-tokens", "80"])


def is_of(schema: dict, text: str) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))


# Served, by a model of random weights


def test_chat_completions(client):
    texts = set()
    for options in ({}, {"num_draft_tokens": 0}, {"num_draft_tokens": 3}, {"guided_json": PERSON}):
        form = {} if "guided_json" in options else {"response_format": json_schema(PERSON)}
        answer = client.chat.completions.create(model="m", messages=ASK, extra_body={**options, **AT_ONCE}, **form)
        texts.add(answer.choices[0].message.content)
        assert answer.choices[0].finish_reason == "stop"
    assert len(texts) == 1
    assert is_of(PERSON, texts.pop())


def test_completions(client):
    answer = client.completions.create(model="m", prompt="a", extra_body={"guided_regex": "(ab|cd){3}"})
    assert {answer.choices[0].text[i : i + 2] for i in (0, 2, 4)} <= {"ab", "cd"}


def test_required_calls(client):
    for choice in ("required", {"type": "function", "function": {"name": "pick"}}):
        body = {"tools": PICKS, "tool_choice": choice, "parallel_tool_calls": False, **AT_ONCE}
        (answer,) = client.chat.completions.create(model="m", messages=ASK, extra_body=body).choices
        (call,) = answer.message.tool_calls
        assert (call.function.name, answer.finish_reason) == ("pick", "tool_calls")
        assert is_of(PICK | {"additionalProperties": False}, call.function.arguments)


def test_reasoning_comes_first(client):
    """Up to its budget, where the form begins."""
    options = dict(response_format=json_schema(PERSON), extra_body={"thinking_budget": 5, "enable_thinking": True})
    message = client.chat.completions.create(model="m", messages=ASK, **options).choices[0].message
    assert message.reasoning
    assert is_of(PERSON, message.content)


# Read


@pytest.mark.parametrize("with_tools", [False, True])
def test_each_api_reads_its_own(with_tools):
    flat = {"type": "json_schema", "name": "a", "schema": PERSON}
    for path, body in (
        (CHAT, dict(messages=ASK, response_format=json_schema(PERSON))),
        (RESPONSES, dict(input="a", text={"format": flat})),
        (MESSAGES, dict(messages=ASK, output_format=flat)),
        (MESSAGES, dict(messages=ASK, output_config={"format": flat})),
        (TEXT, dict(prompt="a", response_format=json_schema(PERSON))),
    ):
        tools = {"tools": tools_of(path, TOOLS[-1])} if with_tools and path != TEXT else {}
        output = read(path, **body, **tools).structured_output
        assert (output.grammar, output.is_required) == ({"json_schema": PERSON}, True)
        assert [(c["name"], c["parameters"]) for c in output.calls or ()] == ([("pick", PICK)] if tools else [])
        if tools:  # a call that is required is made, whatever form texts have
            choice = {"type": "any"} if path == MESSAGES else "required"
            alone = read(path, **(body_with(path) | tools), tool_choice=choice).structured_output
            assert read(path, **body, **tools, tool_choice=choice).structured_output == alone


def test_what_is_no_form():
    any_object = StructuredOutput("response_format", {"json_schema": {"type": "object"}})
    assert read(CHAT, messages=ASK, response_format={"type": "json_object"}).structured_output == any_object
    for body in ({"response_format": {"type": "text"}}, {"tool_choice": "auto"}, {"tool_choice": "none"}, {}):
        assert read(CHAT, messages=ASK, **body).structured_output is None


def test_refuses_by_name():
    none = "must be auto, none, required or a tool by its name"
    for body, message in (
        (dict(response_format="json"), "response_format must be text, json_object or json_schema with a schema"),
        (dict(response_format={"type": "json_object"}, guided_regex="a"), "response_format cannot be combined with"),
        (dict(tools=[{"type": "custom", "custom": {}}]), r"tools\[0\]: custom without a function is not supported"),
        (dict(tool_choice="required"), "requires a call, but the request has no tools"),
        (dict(tool_choice={"type": "function", "function": {"name": "rm"}}, tools=PICKS), "there is no tool 'rm'"),
        *(
            (dict(tool_choice={"type": "function", "function": f}, tools=PICKS), none)
            for f in ("f", 5, {"name": []}, {})
        ),
    ):
        with pytest.raises(ApiError, match=message) as e:
            read(CHAT, messages=ASK, **body)
        assert e.value.status == 400
        assert e.value.param in body


def test_nothing_is_compiled_in_the_generation_thread(monkeypatch):
    compiled = []
    compile_here = grammar._compile.__wrapped__

    def note(*args):
        compiled.append(threading.current_thread())
        return compile_here(*args)

    monkeypatch.setattr(grammar, "_compile", note)
    with Engine("--model", model_with()) as engine:
        for options in ({"tools": PICKS, "tool_choice": "required"}, {"guided_regex": "a{3}"}):
            engine.ask(ASK, max_tokens=4, **options)
    assert len(compiled) == 2
    assert engine.engine.thread not in compiled


def test_other_ranks_are_not_sent_the_grammar(tagged):
    request = Request("chat", "", ASK, None, None, structured_output=StructuredOutput("guided_regex", {"regex": "a"}))
    first, second = (structured_output.make_output_grammar(tagged[1], request, False) for _ in range(2))
    assert first[0].matcher is not second[0].matcher
    sent = pickle.loads(pickle.dumps(request))
    assert (sent.structured_output, sent.grammar) == (request.structured_output, None)


# The grammar of calls


MODELS = {
    "text": (TEMPLATE, *THINKING), "tokens": (TEMPLATE, *THINKING, "<tool_call>", "</tool_call>"),
    "glm": (GLM_47, *GLM_MARKS),
}  # fmt: skip


@pytest.fixture(scope="module", params=MODELS.values(), ids=MODELS)
def tagged(request):
    """A model and its tokenizer. The tags of calls are text, or as with Qwen and GLM tokens of their own."""
    template, *marks = request.param
    return mlx_mtp.load(model_with(*marks, template=template), mtp=True)


@pytest.fixture
def tokenizer(tagged):
    return tagged[1]


def call_of(tokenizer, name: str, **arguments) -> str:
    return render(name, arguments, format=format_of(tokenizer))


@pytest.mark.parametrize("thought", ["", "Hm.\n<tool_call>\n</think>"], ids=["", "thinking"])
def test_an_answer_with_tools_is_a_call_or_a_text_of_the_form(tokenizer, thought):
    person, tools = json.dumps({"name": "Ann", "age": 3}), tools_of(CHAT, *TOOLS[1:])
    add, now = call_of(tokenizer, "add", a=1, b=2), call_of(tokenizer, "now")
    calls = [add, f"{add}\n{now}", f"\n\n{add}{now}"]
    body, form = {"messages": ASK, "tools": tools, "tool_choice": "auto"}, {"response_format": json_schema(PERSON)}
    bad = ["Yes.", "{}", f"{person}\n{add}", f"{add}\n{person}", call_of(tokenizer, "remove"), ""]
    for fields, good in (
        ({**body, **form}, [person, *calls]),
        ({**body, "guided_regex": re.escape(person)}, [person, *calls]),
        ({**body, **form, "tool_choice": "none"}, [person]),
        ({**body, **form, "tool_choice": "required"}, calls),
    ):
        (grammar,) = structured_output.make_output_grammar(tokenizer, read(CHAT, **fields), thought != "")
        texts = [person, *calls, *bad]
        assert [text for text in texts if is_left(tokenizer, grammar.copy(), thought + text)] == good


def test_calls_of_other_models_cannot_be_required(tokenizer):
    request = SimpleNamespace(structured_output=StructuredOutput("tool_choice", calls=TOOLS), grammar=None)
    other = SimpleNamespace(tool_parser=lambda text, tools: None)
    with pytest.raises(ApiError, match="tool_choice: no grammar describes the calls of this model"):
        structured_output.make_output_grammar(other, request, False)


# Strict tools, where the model may call


STRICT = [{**tool, "strict": tool["name"] == "pick"} for tool in TOOLS]


def grammar_for(tokenizer, tools=STRICT, choice="auto", in_reasoning: bool = False):
    output, _ = structured_output.from_fields([], choice, tools_of(CHAT, *tools))
    request = SimpleNamespace(structured_output=output, grammar=None)
    (grammar,) = structured_output.make_output_grammar(tokenizer, request, in_reasoning)
    return grammar


def is_left(tokenizer, grammar, text: str) -> bool:
    """Whether a logits processor leaves each token of a text, and then its end."""
    tokens, logits = tokenizer.encode(text, add_special_tokens=False), mx.zeros((1, len(tokenizer.get_vocab())))
    tokens.append(max(tokenizer.eos_token_ids))
    rows = [grammar(mx.array([5, 6, *tokens[:i]]), logits)[0, token] for i, token in enumerate(tokens)]
    return mx.all(mx.stack(rows) == 0).item()


@pytest.mark.parametrize("thinks", [False, True], ids=["", "thinking"])
def test_strict_calls(tokenizer, thinks):
    """The text is free where it does not call, and calls of other tools are free in their arguments."""
    red, blue = (call_of(tokenizer, "pick", color=color, n=3) for color in ("red", "blue"))
    fenced, free = f"So:\n```\n{blue}\n```\n", call_of(tokenizer, "add", a="x", z=[1])
    thought, prose = (
        f"Hm.\n{blue}\n```\n</think>\n```\n</think>\n\n" * thinks,
        "A `<tool_call>` and a <tool_call>\nin prose.",
    )
    left = ["", fenced, red, f"{fenced}\n{red}", f"Yes.\n\n{red}\n{free}\n"]
    refused = [blue, f"Yes.\n\n{red}\n{blue}", f"{fenced}\n{blue}", red[:-20], "Yes.\n<tool_call>\nis a tag."]
    if format_of(tokenizer).has_lines:  # behind words, a tag is a mention
        left.append(prose)
    else:
        left.append(f"Yes.{red}{free}")
        refused += [prose, f"Yes.{blue}"]
    for text in (*left, *refused, call_of(tokenizer, "remove")):
        grammar = grammar_for(tokenizer, in_reasoning=thinks)
        assert is_left(tokenizer, grammar, thought + text) == (text in left), text


@pytest.mark.parametrize(("tools", "choice"), [(STRICT, "auto"), (TOOLS, "required")])
def test_calls_in_json(monkeypatch, tokenizer, tools, choice):
    """As Qwen3-Next writes them."""
    monkeypatch.setattr(tokenizer, "_tool_parser", json_tools.parse_tool_call)
    for name, arguments, is_allowed in (
        ("pick", {"color": "red", "n": 3}, True), ("pick", {"color": "blue", "n": 3}, False), ("remove", {}, False),
        ("add", {"a": "x"}, choice == "auto"), ("add", 1, False),
    ):  # fmt: skip
        text = f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        assert is_left(tokenizer, grammar_for(tokenizer, tools, choice), text) == is_allowed, (name, arguments)


def test_drafts_change_nothing_of_strict_calls(tagged):
    model, tokenizer = tagged
    written = format_of(tokenizer).written
    prompt, begin = [5, 6], tokenizer.encode(f"Yes.\n{written.begin}", add_special_tokens=False)

    def call(tokens, logits):
        """A logits processor that begins one."""
        i = tokens.size - len(prompt)
        return mx.where(mx.arange(logits.shape[-1]) == begin[i], logits, -mx.inf) if i < len(begin) else logits

    def options():
        return dict(max_tokens=32, logits_processors=[call, grammar_for(tokenizer)])

    want = plain(prompt, model, **options())
    calls = tokenizer.decode(want).removeprefix(f"Yes.\n{written.begin}")
    assert calls.startswith(tuple(f"{written.function}{tool['name']}{written.named}" for tool in STRICT))
    for depth in (1, "auto"):
        assert mtp(prompt, model, num_draft_tokens=depth, **options()) == want


def test_tools_reach_the_template_as_they_were_sent():
    """With their keys in the client's order: the prompt is that of any server that renders the same template."""
    tools = [{"type": "function", "function": {"strict": None, "parameters": PICK, "name": "pick"}, "z": 1, "a": None}]
    assert json.dumps(read(CHAT, messages=ASK, tools=tools).tools) == json.dumps(tools)


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_each_api_reads_strict_tools_and_their_choice(path):
    tool = {"name": "pick", "strict": True, "parameters": PICK}
    tools = tools_of(path, tool)
    output = read(path, **body_with(path, tools=tools)).structured_output
    assert (output.param, output.is_required) == ("strict", False)
    (call,) = output.calls
    assert {name: call[name] for name in tool} == tool
    by_name = {"type": "tool" if path == MESSAGES else "function", "name": "pick"}
    for choice in ({"type": "any"} if path == MESSAGES else "required", by_name):
        output = read(path, **body_with(path, tools=tools, tool_choice=choice)).structured_output
        assert (output.param, output.is_required) == ("tool_choice", True)
    for none in ({"type": "none"}, *(["none"] if path != MESSAGES else [])):
        request = read(path, **body_with(path, tools=tools, tool_choice=none))
        assert (request.tools, request.shown_tools, request.structured_output) == (None, None, None)
