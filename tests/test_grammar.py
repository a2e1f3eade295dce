"""Text of a given form: the grammar's own rules, JSON schemas, and that drafts change nothing."""

import json
import re
from copy import deepcopy
from enum import StrEnum
from types import SimpleNamespace
from typing import Annotated, Literal
from unittest.mock import Mock

import jsonschema
import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tool_parsers import json_tools
from pydantic import BaseModel, Field, TypeAdapter

import mlx_mtp
from mlx_mtp import DraftCounts, make_grammar, make_sampler
from mlx_mtp.core.drafts.settings import DraftLMHead, DraftSettings
from mlx_mtp.errors import MTPError
from mlx_mtp.server.request import ApiError, StructuredOutput
from mlx_mtp.server.structured_output import make_output_grammar
from mlx_mtp.text.formats import GLM, QWEN
from mlx_mtp.text.grammar import ForcedTokens
from mlx_mtp.text.schema import ANY, Schema, standard
from mlx_mtp.text.tool_calls import CallArguments, ToolCallParser
from tests.support.decoding import mtp, plain
from tests.support.grammars import Letters, grammar_of
from tests.support.models import model_of
from tests.support.profiles import examples
from tests.support.tool_texts import GLM_MARKS, TEMPLATES, THINKING, every_format, every_template, model_with, render
from tests.support.ways import every_way, generate

TOKENS = ["<eos>", *"abcdefghijklmnopqrstuvwxyz", "ab", "abc", "the", "ing", "qu"]  # 32
LARKS = [
    "start: /(abc|the|king|queen)+/",
    "start: word*\nword: /[a-f]{2,4}/ | /quz/",
    'start: "abcdefgh" "ing" /[k-m]+/ "thequick"',
]
PROMPT = [3, 1, 4, 1, 5]


def until_end(tokens, end=0):
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


def follows(lark, tokens):
    """Whether a grammar allows tokens, up to the end."""
    text = [token for token in tokens if token != 0]
    return grammar_of(TOKENS, lark).matcher.try_consume_tokens(text) == len(text)


@every_way
@examples(6)
@given(
    lark=st.sampled_from(LARKS),
    after=st.sampled_from(["", "e"]),
    family=st.sampled_from(["qwen3_5", "qwen3_next"]),
    prompt=st.lists(st.integers(0, 31), min_size=1, max_size=9),
    depth=st.one_of(st.just("auto"), st.integers(0, 4)),
    copies=st.sampled_from(["off", "auto", 3]),
    seed=st.sampled_from([None, 0, 1]),
    n=st.integers(1, 20),
)
def test_tokens_are_those_of_plain_decoding(way, lark, after, family, prompt, depth, copies, seed, n):
    """Also the sampled ones, and where the grammar begins behind a tag."""
    model, sampler = model_of(family), make_sampler(0.0 if seed is None else 1.0, seed=seed)
    grammars = [[grammar_of(TOKENS, lark, after)] for _ in range(2)]
    options = [dict(max_tokens=n, sampler=sampler, logits_processors=grammar) for grammar in grammars]
    expected = until_end(plain(prompt, model, **options[0]))
    drafted = generate(way, prompt, model, num_draft_tokens=depth, copy_drafts=copies, **options[1])
    assert until_end(drafted.tokens) == expected
    text = "".join(TOKENS[token] for token in expected if token != 0)
    assert follows(lark, Letters(TOKENS)(text.partition(after)[2].encode()) if after else expected)


def test_what_is_forced_is_drafted(monkeypatch):
    """And accepted: one letter at a time is likelier where the model prefers that, so of whole words."""
    monkeypatch.setattr(ForcedTokens, "fixed", 8)
    words = ["<eos>", *(f"w{i}." for i in range(31))]
    text = [7, 3, 9, 4, 22, 8, 30, 2, 5, 6, 11, 0]
    counts, lark = DraftCounts(), "start: " + " ".join(f'"w{i - 1}."' for i in text[:-1])
    options = dict(max_tokens=12, num_draft_tokens=0, logits_processors=[grammar_of(words, lark)], counts=counts)
    assert mtp(PROMPT, model_of("qwen3_5"), copy_drafts="auto", **options) == text
    assert counts.of("grammar").drafted == counts.of("grammar").accepted
    assert sum(counts.of("grammar").drafted) >= 8
    assert counts.n_drafted == sum(counts.of("grammar").drafted)


@pytest.mark.parametrize("sampler", [None, make_sampler(1.0, seed=3), make_sampler(1.0, top_p=0.9)])
def test_a_draft_vocabulary_without_allowed_tokens_drafts_wrong_ones(monkeypatch, sampler):
    model, lark = model_of("qwen3_5"), "start: /[k-z]+/"
    monkeypatch.setattr(model, "draft_settings", DraftSettings(lm_head=DraftLMHead(model.output_layer, [1, 2, 3])))
    options = dict(max_tokens=9, sampler=sampler, num_draft_tokens=2, counts=(counts := DraftCounts()))
    text = mtp([1, 2], model, logits_processors=[grammar_of(TOKENS, lark)], **options)
    assert follows(lark, text)
    assert len(text) == 9
    assert counts.accepted[0] < counts.drafted[0]


def test_a_grammar_that_no_token_of_the_model_continues_ends_its_text():
    """Of a tokenizer with more tokens than the model, which would otherwise write any text."""
    grammar = grammar_of([*TOKENS, "!"], 'start: "ab!"')
    text = generate(
        "batch of three", PROMPT, model_of("qwen3_5"), max_tokens=9, logits_processors=[grammar], fails=MTPError
    )
    assert text.tokens == [TOKENS.index("ab")]
    assert str(text.last.error) == "The grammar allows only tokens from 32 on here, and the model's are 0 to 31."


def dates(name):
    return {"type": "array", "items": {"type": "string", "format": name}}


ONE = {"properties": {"n": {"const": [1, 2]}}, "required": ["n"], "additionalProperties": False, "type": "object"}


@pytest.mark.parametrize(
    ("options", "text", "is_allowed"),
    [
        # White space behind the tag, and that of JSON.
        *((dict(regex="a+", after="```"), f"b ```{space}aa", True) for space in ("", "\n", "\n\n", " ", "\n\n ")),
        (dict(json_schema=ONE), '{"n": [1, 2]}', True),
        (dict(json_schema=ONE), '{"n":[1,2]}', False),
        (dict(json_schema={"type": "array", "maxItems": 1.0}), "[1]", True),
        (dict(json_schema={"type": "array", "maxItems": 1.0}), "[1, 2]", False),
        # A format that llguidance does not know is an annotation. The date of the other one need not exist.
        (dict(json_schema=dates("password")), '["a"]', True),
        (dict(json_schema=dates("date")), '["2021-02-29"]', True),
        (dict(json_schema=dates("date")), '["2021"]', False),
        # Slashes of a regular expression are its own.
        *((dict(regex=regex), text, True) for regex, text in (
            (r"a\\/b", "a\\/b"), (r"a\/b", "a/b"), ("a/b", "a/b"), (r"[/\\]+", "/\\/"), ("a\nb", "a\nb"), (r"\\\\/", "\\\\/"),
        )),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_grammar_allows(trained, options, text, is_allowed):
    grammar = make_grammar(trained[1], **options)
    assert grammar.advance_to(trained[1].encode(text, add_special_tokens=False)) == is_allowed
    assert not is_allowed or (len(grammar.taken) > 0 and grammar.matcher.is_accepting())


def test_a_quoted_tag_is_not_where_it_begins(demo):
    tokenizer = demo[1]
    grammar = make_grammar(tokenizer, regex="a+", after="</think>")
    thought = tokenizer.encode("é `</think>` and\n```\n</think>\nx\n```\n", add_special_tokens=False)
    end, answer = (tokenizer.encode(text, add_special_tokens=False) for text in ("</think>\n", "aa"))
    tokens, logits = [*thought, *end, *answer], mx.zeros((1, 4096))
    assert tokenizer.decode(end[-1:]) == ">\n"  # the tag ends within a token
    skips_head = [mx.all(grammar(mx.array([5, *tokens[:i]]), logits) == 0).item() for i in range(len(tokens) + 1)]
    n = len(thought) + len(end)
    assert skips_head == [i < n for i in range(len(tokens) + 1)]
    assert grammar.forced(tokens[: n - 1]) == []  # a draft is rejected


def test_a_text_before_the_beginning_is_decoded_once(demo):
    grammar = make_grammar(demo[1], regex="a+", after="</think>")
    decoder = grammar.beginning.tokenizer = Mock(wraps=grammar.beginning.tokenizer)
    text = demo[1].encode("a thought of many words, " * 10, add_special_tokens=False)
    for n in range(len(text)):
        grammar.advance_to(text[:n])
        grammar.advance_to([*text[:n], 7])  # a wrong draft
    assert sum(len(call.args[0]) for call in decoder.decode_bytes.call_args_list) <= 4 * len(text)


def test_rules_within_rules_do_not_end_the_process(trained):
    """llguidance calls itself for each, and a thread's stack is not endless."""
    rules = [f'r{i}: "a" r{i + 1}' for i in range(5000)]
    grammar = make_grammar(trained[1], lark="\n".join(["start: r0", *rules, 'r5000: "b"']))
    assert trained[1].decode(grammar.forced([])) == "a" * 5000 + "b"


def alternatives(n):
    """4 ** n of them, once they are written out."""
    has = [{"properties": {f"p{i}": {"type": "integer"}}, "required": [f"p{i}"]} for i in range(4 * n)]
    return {"allOf": [{"anyOf": has[i : i + 4]} for i in range(0, 4 * n, 4)]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "Give one of json_schema, regex and lark"),
        ({"regex": "(a"}, "cannot read the grammar"),
        ({"lark": "start: other"}, "cannot read the grammar"),
        ({"json_schema": {"type": "person"}}, "cannot read the grammar"),
        ({"json_schema": "[1]"}, "A JSON schema is an object"),
        ({"json_schema": {"x-guidance": 5}}, "x-guidance is an object, not 5"),
        ({"regex": "a\\"}, "ends with a backslash"),
        ({"regex": "a" * (1 << 20)}, "The grammar has 1048576 characters, and at most 524288 are supported"),
        ({"json_schema": {"type": "integer", "multipleOf": 1_000_003}}, "multipleOf: .* at most 100000"),
        ({"json_schema": {"allOf": [{"multipleOf": n} for n in (0.7, 1.3, 1.9, 2.3, 2.9)]}}, "multipleOf: .* at most"),
        ({"lark": 'start: %json {"m\\u0075ltipleOf": 1000003}'}, "multipleOf: .* at most 100000"),
        ({"json_schema": alternatives(14)}, "too large"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_rejects_what_is_no_grammar(trained, options, message):
    with pytest.raises(ValueError, match=message):
        make_grammar(trained[1], **options)


@every_way
@pytest.mark.parametrize("depth", [0, 3])
def test_a_grammar_that_is_given_up_ends_its_text_alone(way, depth):
    """llguidance compiles it, and gives it up behind the beginning: more than 2,000 rules go on there."""
    names = [f"r{i}" for i in range(2001)]
    rules = "\n".join(f"{name}: /[c-g]{{1,{i + 1}}}/" for i, name in enumerate(names))
    lark = f'start: /[a-f]{{3}}/ "x" ({" | ".join(names)})\n{rules}'
    options = dict(num_draft_tokens=depth, max_tokens=12, logits_processors=[grammar_of(TOKENS, lark)])
    text = generate(way, PROMPT, model_of("qwen3_5"), fails=MTPError, **options)
    assert text.finish_reason == "error"
    assert re.match("llguidance aborted: Parser Error: Current row has 20.. items", str(text.last.error))
    assert re.match("[a-f]{0,3}$|[a-f]{3}x$", "".join(TOKENS[t] for t in text.tokens))


# JSON schemas of clients: what they say of a call's arguments, whatever their shape, and the grammar that follows them

INTEGER, STRING, BOOLEAN = {"type": "integer"}, {"type": "string"}, {"type": "boolean"}


@pytest.fixture(scope="module")
def tokenizer():
    return mlx_mtp.load(model_with(*THINKING, "<tool_call>", "</tool_call>"), mtp=True)[1]


@pytest.fixture(scope="module")
def tokenizers(tokenizer):
    """By their formats."""
    of_glm = {format: model_with(*GLM_MARKS, template=TEMPLATES[format]) for format in TEMPLATES if format != QWEN}
    return {QWEN: tokenizer, **{format: mlx_mtp.load(model, mtp=True)[1] for format, model in of_glm.items()}}


def grammar_for(tokenizer, parameters, strict=False):
    tool = {"name": "f", "parameters": parameters, "strict": strict}
    request = SimpleNamespace(structured_output=StructuredOutput("tool_choice", calls=[tool]), grammar=None)
    (grammar,) = make_output_grammar(tokenizer, request, in_reasoning=False)
    return grammar


def allows(tokenizer, grammar, text: str) -> bool:
    """Whether it may end after this text, with each token that ends one."""
    tokens = tokenizer.encode(text, add_special_tokens=False)
    texts = [[*tokens, end] for end in tokenizer.eos_token_ids]
    (is_allowed,) = {grammar.copy().matcher.try_consume_tokens(ids) == len(ids) for ids in texts}
    return is_allowed


def call(arguments: dict, format=QWEN) -> str:
    return render("f", arguments, json_scalars=True, format=format)


def read(parameters, text: str, format=QWEN) -> dict | None:
    """What a client gets of a call, if it is one."""
    parser = ToolCallParser({"f": parameters}, format)
    events = parser.add(text) + parser.finish(cut=False)
    arguments = "".join(event.text for event in events if isinstance(event, CallArguments))
    return json.loads(arguments) if parser.n_calls == 1 else None


# Where a schema says what it says

A, B = {"properties": {"a": INTEGER}, "required": ["a"]}, {"properties": {"b": BOOLEAN}, "required": ["b"]}
TREE = {"type": "object", "properties": {"n": INTEGER, "next": {"$ref": "#/$defs/tree"}}, "required": ["n"]}
# 4 ** 14 ways to one schema.
MANY = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 4} for i in range(14)}
PLACES = [  # schema, arguments that it allows, and others
    ({"$ref": "#/definitions/f", "definitions": {"f": A}}, [{"a": 1}], [{}, {"a": "x"}, {"b": True}]),
    ({"allOf": [A, {"$ref": "#/$defs/b"}], "$defs": {"b": B}}, [{"a": 1, "b": True}], [{"a": 1}, {"b": True}]),
    ({"properties": {"c": STRING}, "oneOf": [A, B]}, [{"c": "x", "a": 1}, {"b": True}], [{"c": "x", "a": "x"}]),
    ({"patternProperties": {"^n_": INTEGER, "^s_": STRING}}, [{}, {"n_a": 1, "s_b": "x"}], []),
    ({"additionalProperties": INTEGER}, [{}, {"x": 1, "y": 2}], [{"x": "a"}]),
    ({"additionalProperties": INTEGER, "properties": {"c": STRING}}, [{"c": "1", "y": 2}], [{"y": "a"}]),
    ({"required": ["z"]}, [{"z": "any text"}], [{}, {"y": "z"}]),
    ({"required": ["z"], "additionalProperties": INTEGER}, [{"z": 1}], [{}, {"z": "x"}]),
    ({"properties": {"t": {"$ref": "#/$defs/tree"}}, "$defs": {"tree": TREE}}, [{"t": {"n": 1, "next": {"n": 2}}}], [{"t": {"next": {"n": 2}}}]),  # noqa: E501
    ({"type": "object", "properties": {"t": {"$ref": "#"}, "n": INTEGER}}, [{"t": {"t": {"n": 1}}}, {}], [{"t": {"n": "x"}}]),
    ({"properties": {"s": {**STRING, "maxLength": 3, "pattern": "^a|^b"}}}, [{"s": "acc"}, {"s": "b"}], [{"s": "abbb"}, {"s": "c"}]),  # noqa: E501
    ({"anyOf": [{"properties": {"k": {"const": k}, "v": v}, "required": ["k", "v"]} for k, v in (("n", INTEGER), ("l", {"type": "array"}))]}, [{"k": "n", "v": 1}, {"k": "l", "v": [1]}], [{"k": "m", "v": [1]}]),  # noqa: E501
    ({"properties": {"s": {"type": ["string", "null"], "maxLength": 3.0}}}, [{"s": "abc"}, {"s": None}], [{"s": "abcd"}]),
    ({"properties": {"s": {"anyOf": [{**STRING, "maxLength": 1}, {**INTEGER, "maximum": 4}]}}}, [{"s": "x"}, {"s": 3}], []),
    ({"properties": None, "required": None, "$defs": None}, [{}], [{"x": 1}]),
    (None, [{}], [{"x": 1}]),
    ({"properties": {"c": {"$ref": "#/$defs/d0"}}, "$defs": MANY | {"d14": {"enum": ["r", "g"]}}}, [{"c": "r"}], [{"c": "x"}]),
    ({"$ref": "#/$defs/d0", "$defs": MANY | {"d14": {"properties": {"c": STRING}}}}, [{"c": "r"}], [{"d": "x"}]),
]  # fmt: skip


@every_template
@pytest.mark.parametrize(("schema", "good", "bad"), PLACES, ids=lambda x: json.dumps(x)[:50])
def test_grammar_and_types_come_from_the_same_places(monkeypatch, tokenizers, format, schema, good, bad):
    tokenizer = tokenizers[format]
    grammar = grammar_for(tokenizer, schema)
    for arguments in good:
        assert allows(tokenizer, grammar, call(arguments, format)), arguments
        assert read(schema, call(arguments, format), format) == arguments
    for arguments in bad:
        assert not allows(tokenizer, grammar, call(arguments, format)), arguments
    if "Properties" in str(schema) or format != QWEN:
        return
    monkeypatch.setattr(tokenizer, "_tool_parser", json_tools.parse_tool_call)  # as Qwen3-Next writes them
    grammar = grammar_for(tokenizer, schema)
    for arguments in good:
        text = json.dumps({"name": "f", "arguments": arguments})
        assert allows(tokenizer, grammar, f"<tool_call>\n{text}\n</tool_call>"), arguments


PATTERNS = [
    "^a|b$", "a|^b", "foo$|x", r"a\\$", "(^a|b)c", "^(a|b$)", "x(?:$|y)", "^$|^foo$", r"^[$^\]x]$", r"\^a\$", "(?i)^a", "[^x]$",
    "a", "^", "$", "",
]  # fmt: skip
TEXTS = ["", *"abxy^$]A", "ab", "bax", "foo", "fooz", "xfoo", "a\\", "a\\b", "ac", "xac", "xbc", "xy", "^a$", "xA"]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_may_match_anywhere(tokenizer, pattern):
    for strict in (False, True):
        grammar = grammar_for(tokenizer, {"properties": {"s": {**STRING, "pattern": pattern}}}, strict)
        found = [text for text in TEXTS if allows(tokenizer, grammar, call({"s": text}))]
        assert found == [text for text in TEXTS if re.search(pattern, text)]


def test_white_space_of_json_is_bounded(tokenizer, monkeypatch):
    """As in llama.cpp. Also of a schema that the grammar leaves free, and in calls that are JSON."""
    allowed, refused = ["", " ", "\n\t", "\n\n" + " " * 20], ["  ", "\n\n\n", "\n" + " " * 21]
    spaces = dict.fromkeys(allowed, True) | dict.fromkeys(refused, False)
    schemas = [{"type": "array", "items": INTEGER}, {"type": "array", "contains": INTEGER}]
    grammars = [grammar_for(tokenizer, {"properties": {"a": schema}}) for schema in schemas]
    for space, is_allowed in spaces.items():
        for grammar in grammars:
            text = f"[{space}1{space},{space}2{space}]"
            assert allows(tokenizer, grammar, render("f", {"a": text})) == is_allowed, space
    monkeypatch.setattr(tokenizer, "_tool_parser", json_tools.parse_tool_call)
    for space, is_allowed in spaces.items():
        text = f'<tool_call>\n{{"name": "f", "arguments": {{{space}}}}}\n</tool_call>'
        assert allows(tokenizer, grammar_for(tokenizer, {}), text) == is_allowed, space


# Shapes that are none

MALFORMED = [
    5, "object", [], False, {"type": "string"}, {"properties": 5}, {"properties": {"x": 5}}, {"required": "x"},
    {"required": [1]}, {"type": 5}, {"type": []}, {"additionalProperties": 5}, {"patternProperties": 5}, {"minProperties": "a"},
    *({"properties": {"x": x}} for x in (
        [INTEGER], {"required": True}, {"type": [{}]}, {"enum": 5}, {"anyOf": {}}, {"anyOf": []}, {"oneOf": [5]}, {"$ref": 5},
        {"pattern": 5}, {"format": {}}, {"minimum": "a"}, {"multipleOf": 0}, {"maxLength": -1}, {"items": 5},
    )),
]  # fmt: skip


def test_malformed_schemas_are_refused_in_a_sentence(tokenizer):
    """Those of strict tools. In others, what is malformed says nothing."""
    for parameters in MALFORMED:
        with pytest.raises(ApiError, match=r"tool_choice: f\.parameters.* (cannot be enforced: .*|allows no )") as e:
            grammar_for(tokenizer, parameters, strict=True)
        assert e.value.status == 400, parameters
        if isinstance(parameters, dict) and "type" not in parameters:
            arguments = {"x": True} if "'x': {" in str(parameters) else {}
            assert allows(tokenizer, grammar_for(tokenizer, parameters), call(arguments)), parameters
        assert Schema(parameters).types_of_property("x") in (ANY, {"string"}), parameters


A_INTEGER, A_STRING = {"properties": {"a": INTEGER}}, {"properties": {"a": STRING}}
FREE = [  # a schema of parameters or of one, what is not enforced of it, a text that it allows, and one that is wrong anyhow
    ({**INTEGER, "not": {"const": 5}}, "not", "5", "a"),
    ({"type": "array", "items": INTEGER, "uniqueItems": True}, "uniqueItems", "[1, 1]", "[true]"),
    ({"type": "object", "propertyNames": {"pattern": "a"}}, "propertyNames", '{"b": 1}', "[]"),
    ({"type": "array", "contains": INTEGER}, "contains", "[]", "{}"),
    ({**INTEGER, "if": {"minimum": 5}, "then": {"multipleOf": 5}}, "if", "6", "a"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired", '{"a": 1}', "1"),
    ({"oneOf": [{**INTEGER, "minimum": 2}, {**INTEGER, "maximum": 5}]}, "oneOf", "3", "a"),
    ({"type": "object", "patternProperties": {"a": INTEGER, "b": STRING}}, "patternProperty", '{"ab": 1}', "1"),
    ({"anyOf": [STRING, {**INTEGER, "maximum": 4}]}, "a string or some values of another type", "5", None),
    ({"oneOf": [STRING, {"minLength": 2}]}, "oneOf", "5", None),
    ({"$ref": "http://example.com"}, r"http://example\.com", "5", None),
    ({"type": "file"}, "Invalid type: file", "5", None),
    ({**STRING, "pattern": "(?=a)b"}, "", "5", None),
    ({"not": {"required": ["a"]}, **A_INTEGER}, r"parameters\.not", None, None),
    ({"propertyNames": {"pattern": "a"}, **A_INTEGER}, r"parameters\.propertyNames", None, None),
    ({"additionalProperties": INTEGER}, r"parameters\.additionalProperties", None, None),
    ({"anyOf": [A_INTEGER, A_STRING]}, r"parameters\.anyOf", None, None),
    ({**A_INTEGER, "minProperties": 1}, r"parameters\.minProperties", None, None),
    ({"patternProperties": {"a": INTEGER}}, r"parameters\.patternProperties", None, None),
    ({"oneOf": [A_INTEGER, {"properties": {"b": INTEGER}}]}, r"parameters\.oneOf", None, None),
]


@pytest.mark.parametrize(("schema", "reason", "text", "wrong"), FREE, ids=str)
def test_strict_tools_are_refused_by_name_and_others_are_free(tokenizer, schema, reason, text, wrong):
    is_whole = text is None
    parameters = schema if is_whole else {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    grammar = grammar_for(tokenizer, parameters)
    assert allows(tokenizer, grammar, render("f", {"a": "5" if is_whole else text}))
    assert wrong is None or not allows(tokenizer, grammar, render("f", {"a": wrong}))
    where = "" if is_whole else r"tool_choice: f\.parameters\.properties\.a cannot be enforced: .*"
    with pytest.raises(ApiError, match=where + reason) as e:
        grammar_for(tokenizer, parameters, strict=True)
    assert e.value.status == 400


# As libraries write schemas


class Leaf(BaseModel):
    kind: Literal["leaf"] = "leaf"
    n: int = Field(deprecated=True)


class Pair(BaseModel):
    kind: Literal["pair"] = "pair"
    left: "Leaf | Pair" = Field(discriminator="kind")
    right: "Pair | None" = Field(None, deprecated=True)


class Size(StrEnum):
    SMALL = "s"


REFS = {"oneOf": [{"$ref": "#/$defs/a"}, {"title": "B", "allOf": [{"$ref": "#/$defs/b"}]}]}
NUMBERED = [{"type": "object", "properties": {"v": {"const": i}}, "required": ["v"]} for i in (1, 2)]
LEAF = {"kind": "leaf", "n": 1}
OF_LIBRARIES = [  # a schema, values that it allows, and others
    (
        TypeAdapter(Annotated[Leaf | Pair, Field(discriminator="kind")]).json_schema(),
        [LEAF, {"kind": "pair", "left": {"kind": "pair", "left": LEAF, "right": None}}],
        [{"n": 1}, {"kind": "pair", "left": {"n": 1}}, {"kind": "leaf", "left": LEAF}],
    ),
    *(
        (REFS | {"$defs": dict(zip("ab", options))}, good, bad)
        for options, good, bad in (
            ((INTEGER, {"enum": ["x", None]}), [1, "x", None], ["y", 1.5]),
            (({"enum": ["x", "y"]}, {"enum": ["z", 1]}), ["y", "z", 1], ["a", 2]),
            (NUMBERED, [{"v": 1}, {"v": 2}], [{"v": 3}, {}]),
            (({"anyOf": [{**A, "type": "object"}, NUMBERED[0]]}, {"type": ["array", "null"]}), [{"a": 1}, None], [5]),
        )
    ),
    (TypeAdapter(dict[Literal["a", "b"], int]).json_schema(), [{}, {"b": 1}, {"a": 1, "b": 2}], [{"c": 1}, {"a": "x"}]),
    (TypeAdapter(dict[Size, int]).json_schema(), [{}, {"s": 1}], [{"c": 1}]),
    ({"type": "object", "propertyNames": {"type": "string", "title": "a"}, "additionalProperties": INTEGER}, [{"c": 1}], [5]),
    ({"type": "array", "items": {**INTEGER, "x-order": 1}, "unevaluatedItems": {"description": "a"}}, [[1]], ["a"]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), OF_LIBRARIES, ids=lambda x: json.dumps(x)[:50])
def test_schemas_as_libraries_write_them(tokenizer, schema, good, bad):
    """In an answer, and of a strict tool's parameter; the client's schema stays as it is."""
    before, valid = deepcopy(schema), jsonschema.Draft202012Validator(schema).is_valid
    parameters = {"properties": {"a": {"title": "A", **schema}}, "required": ["a"], "$defs": schema.get("$defs", {})}
    of_answer, of_call = make_grammar(tokenizer, json_schema=schema), grammar_for(tokenizer, parameters, strict=True)
    for value in (*good, *bad):
        answer = of_answer.copy()
        tokens = tokenizer.encode(json.dumps(value), add_special_tokens=False)
        assert (answer.advance_to(tokens) and answer.matcher.is_accepting()) == (value in good), value
        assert allows(tokenizer, of_call, call({"a": value})) == (value in good), value
        assert valid(value) or value in bad
    assert schema == before


NULLS = ["properties", "required", "enum", "type", "anyOf", "$ref", "additionalProperties", "pattern", "minimum"]


def test_null_means_absent(tokenizer):
    for key in NULLS:
        assert standard({key: None, "properties": {"x": {key: None, "title": None}}}) == {"properties": {"x": {}}}, key
    grammar = grammar_for(tokenizer, {"properties": {"x": {"const": None}}, "required": ["x"]}, strict=True)
    assert allows(tokenizer, grammar, call({"x": None}))  # a value of null is a value
    assert not allows(tokenizer, grammar, call({"x": 1}))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(["a", "string", "object", "#", "#/properties/x", "^a|(", "\\"]),  # noqa: E501
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["x", "type", "properties", "required", "enum", "const", "$ref", "anyOf", "allOf", "oneOf", "items", "prefixItems", "additionalProperties", "patternProperties", "minProperties", "maxProperties", "minLength", "maxLength", "pattern", "minimum", "multipleOf", "not", "nullable", "format", "x-guidance"]), inner, max_size=4),  # noqa: E501
    max_leaves=12,
)  # fmt: skip


@given(json_values, st.booleans(), st.booleans())
@examples(100)
def test_any_json_is_a_schema_or_refused(tokenizer, schema, strict, in_properties):
    parameters = {"properties": {"x": schema}} if in_properties else schema
    try:
        grammar_for(tokenizer, parameters, strict)
    except ApiError as e:
        if (e.status, e.param) != (400, "tool_choice"):
            raise


# Random schemas

VALUES = [0, 1, 5, -1, 2.5, True, False, None, "a", "b", "ab", "x y", "5", "null", "", [], [1], ["a"], [1, "a"], {}, {"k": 1}, {"k": "a"}]  # fmt: skip  # noqa: E501
simple = st.sampled_from([
    {}, INTEGER, STRING, BOOLEAN, {"type": "null"}, {"type": "number", "minimum": 1}, {**INTEGER, "maximum": 4},
    {**STRING, "maxLength": 1}, {**STRING, "minLength": 1, "pattern": "^a"}, {"type": ["string", "null"]}, {"type": ["integer", "string"]},  # noqa: E501
    {"enum": ["a", "b"]}, {"enum": ["a", 1, None]}, {"const": "ab"}, {"enum": [1, 5]}, {"type": "array", "items": INTEGER},
    {"type": "array", "items": STRING, "minItems": 1}, {"type": "object", "properties": {"k": INTEGER}, "required": ["k"]},
    {"$ref": "#/$defs/one"}, {"$ref": "#/$defs/two"}, *NUMBERED,
])  # fmt: skip
schemas = st.recursive(
    simple,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options}),
        st.lists(inner, min_size=2, max_size=3).map(lambda options: {"oneOf": options}),
        st.lists(inner, min_size=1, max_size=2).map(lambda parts: {"allOf": parts}),
        st.tuples(inner, st.sampled_from([["string"], ["integer", "null"], ["string", "object"]])).map(
            lambda of: {"type": of[1], "anyOf": [of[0], STRING]}
        ),
    ),
    max_leaves=4,
)


@st.composite
def objects(draw):
    """Parameters, with names in one order, and closed where alternatives have others."""
    names = draw(st.lists(st.sampled_from("abc"), unique=True, max_size=3).map(sorted))
    properties = {name: draw(schemas) for name in names}
    schema = {"properties": properties, "required": [name for name in names if draw(st.booleans())]}
    return schema | draw(st.sampled_from([{}, {}, {"minProperties": 1}, {"minProperties": 2}, {"maxProperties": 1}]))


@st.composite
def parameters(draw):
    of_all, ref = draw(objects()), {"$ref": "#/$defs/all"}
    closed = [{**schema, "additionalProperties": False} for schema in (of_all, draw(objects()))]
    schema = draw(st.sampled_from([of_all, ref, {"allOf": [of_all, ref]}, {"anyOf": closed}]))
    one, two = draw(simple.filter(lambda one: "$ref" not in one)), {"anyOf": [INTEGER, {"$ref": "#/$defs/one"}]}
    return {**schema, "$defs": {"all": of_all, "one": one, "two": two}}


@every_format
@given(
    parameters(),
    st.lists(st.dictionaries(st.sampled_from("abc"), st.sampled_from(VALUES), max_size=3), min_size=4, max_size=10),
    st.booleans(),
)
@examples(60)
def test_a_call_is_allowed_where_what_the_client_gets_is_valid(tokenizers, format, schema, calls, strict):
    tokenizer = tokenizers[format]
    try:
        grammar = grammar_for(tokenizer, schema, strict)
    except ApiError as e:
        reasons = ("allows no ", "cannot be enforced") if strict else ("allows no ",)
        if not any(reason in e.message for reason in reasons):
            raise
        return
    valid = jsonschema.Draft202012Validator(schema).is_valid
    for arguments in calls:
        arguments = {name: arguments[name] for name in Schema(schema).properties() if name in arguments}
        text = call(arguments, format)
        got = read(schema, text, format)
        is_allowed = allows(tokenizer, grammar, text)
        # Beside objects and arrays, a strict tool's string does not begin as they do.
        is_narrowed = strict and any(isinstance(value, str) and value.startswith(("{", "[")) for value in got.values())
        assert is_allowed or is_narrowed or not valid(got), got
        assert valid(got) or not (strict and is_allowed), got


# Texts that quote the format's own tags

CLOSING = {QWEN: ["</parameter>", "</function>", "</tool_call>"], GLM: ["</arg_value>", "</tool_call>"]}
OPENING = {QWEN: ["</par", "<parameter"], GLM: ["</arg", "<arg", "</arg_key>", "<arg_value>", "<tool_call>f"]}
BETWEEN = ["</", "<", ">", "<tool_call>", "\n", "\r\n", " ", "a", "é"]
PARTS = {f: [*tags, *(f"\n{tag}\n" for tag in tags), *OPENING[f], *BETWEEN] for f, tags in CLOSING.items()}
ON_ONE_LINE = "<tool_call><function=g><parameter=x>1</parameter></function></tool_call>"
QUOTED = {
    QWEN: "\n".join([render("g", {"x": "1", "y": "2"}), ON_ONE_LINE]),
    GLM: render("g", {"x": "1", "y": "2"}, format=GLM) + ", " + render("g", {"x": "1"}, format=GLM),
}
OF_TEXTS = {
    "free": lambda text: STRING,
    "any": lambda text: {},
    "null": lambda text: {"type": ["string", "null"]},
    "object": lambda text: {"type": ["string", "object"]},
    "length": lambda text: {**STRING, "minLength": 0, "maxLength": 900},
    "pattern": lambda text: {**STRING, "pattern": "^[^q]*$"},
    "enum": lambda text: {"enum": ["a", f"{text}a", text]},
    "const": lambda text: {"const": text},
}


@every_format
@pytest.mark.parametrize("kind", OF_TEXTS)
@examples(6)
@given(st.data(), *[st.booleans()] * 2, st.integers(0, 2))
def test_a_text_under_a_grammar_is_what_the_parser_takes(tokenizers, format, kind, data, is_last, strict, quotes):
    """The grammar allows each text that is read as it was written, and its drafts are the text's."""
    tokenizer, text = tokenizers[format], "".join(data.draw(st.lists(st.sampled_from(PARTS[format]), max_size=6)))
    text += QUOTED[format] if quotes == 2 and kind in ("free", "any") else ""
    parameters = {"properties": {"a": OF_TEXTS[kind](text), "b": INTEGER}, "required": ["a", "b"][: 2 - is_last]}
    arguments = {"a": text} if is_last else {"a": text, "b": 5}
    written = call(arguments, format)
    if read(parameters, written, format) != arguments:
        return  # it has what ends a value
    grammar = grammar_for(tokenizer, parameters, strict)
    assert allows(tokenizer, grammar, written), written
    written = tokenizer.encode(written, add_special_tokens=False)
    for n in range(0, len(written), 3):
        drafts, rest = tokenizer.decode(grammar.forced(written[:n])), tokenizer.decode(written[n:])
        assert rest.startswith(drafts) or drafts.startswith(rest), (drafts, rest)


Z = {QWEN: "</parameter>\n<parameter=z>\n", GLM: "</arg_value><arg_key>z</arg_key><arg_value>"}


@every_format
def test_what_the_parser_would_take_for_another_value_is_not_written(tokenizers, format):
    end = {QWEN: "\n</parameter>\n", GLM: "</arg_value>"}[format]
    for schema, text in (
        (STRING, f"a{Z[format]}b"),  # a parameter that the function does not have
        ({**STRING, "pattern": "^a.*"}, f"b{end}c"),
        ({"enum": [f"a{end}b"]}, "a"),
        ({"enum": [f"a{Z[format]}5", "c"]}, f"a{Z[format]}5"),
    ):
        grammar = grammar_for(tokenizers[format], {"properties": {"a": schema}, "required": ["a"]})
        assert not allows(tokenizers[format], grammar, call({"a": text}, format)), text
