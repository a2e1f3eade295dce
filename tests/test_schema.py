"""JSON schemas of clients: what they say of a call's arguments, whatever their shape, and the grammar that follows them."""

import json
from types import SimpleNamespace

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tool_parsers import json_tools

import mlx_mtp
from mlx_mtp.server.request import ApiError, StructuredOutput
from mlx_mtp.server.structured_output import make_output_grammar
from mlx_mtp.text.schema import ANY, Schema, standard
from mlx_mtp.text.tool_calls import CallArguments, ToolCallParser
from tests.support.profiles import examples
from tests.support.tool_texts import THINKING, make_model, render

INTEGER, STRING, BOOLEAN = {"type": "integer"}, {"type": "string"}, {"type": "boolean"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = make_model(tmp_path_factory.mktemp("model") / "model", (*THINKING, "<tool_call>", "</tool_call>"))
    return mlx_mtp.load(str(folder), mtp=True)[1]


def grammar_of(tokenizer, parameters, strict=False):
    tool = {"name": "f", "parameters": parameters, "strict": strict}
    request = SimpleNamespace(structured_output=StructuredOutput("tool_choice", calls=[tool]), grammar=None)
    (grammar,) = make_output_grammar(tokenizer, request, in_reasoning=False)
    return grammar


def allows(tokenizer, grammar, text: str) -> bool:
    tokens = [*tokenizer.encode(text, add_special_tokens=False), *tokenizer.eos_token_ids]
    return grammar.copy().matcher.try_consume_tokens(tokens) == len(tokens)


def call(arguments: dict) -> str:
    return render("f", arguments, json_scalars=True)


def read(parameters, text: str) -> dict:
    """What a client gets of a call."""
    parser = ToolCallParser({"f": parameters})
    events = parser.add(text) + parser.finish(cut=False)
    return json.loads("".join(event.text for event in events if isinstance(event, CallArguments)))


# Where a schema says what it says


A, B = {"properties": {"a": INTEGER}, "required": ["a"]}, {"properties": {"b": BOOLEAN}, "required": ["b"]}
TREE = {"type": "object", "properties": {"n": INTEGER, "next": {"$ref": "#/$defs/tree"}}, "required": ["n"]}
# 4 ** 14 ways to one schema.
MANY = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 4} for i in range(14)}
PLACES = [  # schema, arguments that it allows, and others
    ({"$ref": "#/definitions/f", "definitions": {"f": A}}, [{"a": 1}], [{}, {"a": "x"}, {"b": True}]),
    ({"allOf": [A, {"$ref": "#/$defs/b"}], "$defs": {"b": B}}, [{"a": 1, "b": True}], [{"a": 1}, {"b": True}]),
    ({"anyOf": [A, B]}, [{"a": 1}, {"b": True}], [{"a": True}, {"c": 1}]),
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
    ({"properties": None, "required": None, "$defs": None}, [{}], [{"x": 1}]),
    (None, [{}], [{"x": 1}]),
    ({"properties": {"c": {"$ref": "#/$defs/d0"}}, "$defs": MANY | {"d14": {"enum": ["r", "g"]}}}, [{"c": "r"}], [{"c": "x"}]),
    ({"$ref": "#/$defs/d0", "$defs": MANY | {"d14": {"properties": {"c": STRING}}}}, [{"c": "r"}], [{"d": "x"}]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), PLACES, ids=lambda x: json.dumps(x)[:50])
def test_grammar_and_types_come_from_the_same_places(monkeypatch, tokenizer, schema, good, bad):
    grammar = grammar_of(tokenizer, schema)
    for arguments in good:
        assert allows(tokenizer, grammar, call(arguments)), arguments
        assert read(schema, call(arguments)) == arguments
    for arguments in bad:
        assert not allows(tokenizer, grammar, call(arguments)), arguments
    if "Properties" in str(schema):
        return
    monkeypatch.setattr(tokenizer, "_tool_parser", json_tools.parse_tool_call)  # as Qwen3-Next writes them
    grammar = grammar_of(tokenizer, schema)
    for arguments in good:
        text = json.dumps({"name": "f", "arguments": arguments})
        assert allows(tokenizer, grammar, f"<tool_call>\n{text}\n</tool_call>"), arguments


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
            grammar_of(tokenizer, parameters, strict=True)
        assert e.value.status == 400, parameters
        if isinstance(parameters, dict) and "type" not in parameters:
            arguments = {"x": True} if "'x': {" in str(parameters) else {}
            assert allows(tokenizer, grammar_of(tokenizer, parameters), call(arguments)), parameters
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
    grammar = grammar_of(tokenizer, parameters)
    assert allows(tokenizer, grammar, render("f", {"a": "5" if is_whole else text}))
    assert wrong is None or not allows(tokenizer, grammar, render("f", {"a": wrong}))
    where = "" if is_whole else r"tool_choice: f\.parameters\.properties\.a cannot be enforced: .*"
    with pytest.raises(ApiError, match=where + reason) as e:
        grammar_of(tokenizer, parameters, strict=True)
    assert e.value.status == 400


NULLS = ["properties", "required", "enum", "type", "anyOf", "$ref", "additionalProperties", "pattern", "minimum"]


def test_null_means_absent(tokenizer):
    for key in NULLS:
        assert standard({key: None, "properties": {"x": {key: None, "title": None}}}) == {"properties": {"x": {}}}, key
    grammar = grammar_of(tokenizer, {"properties": {"x": {"const": None}}, "required": ["x"]}, strict=True)
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
        grammar_of(tokenizer, parameters, strict)
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
    {"$ref": "#/$defs/one"}, {"$ref": "#/$defs/two"},
])  # fmt: skip
schemas = st.recursive(
    simple,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options}),
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
    way, one = draw(st.sampled_from(["plain", "ref", "allOf", "anyOf"])), draw(objects())
    schema = {
        "plain": lambda: one,
        "ref": lambda: {"$ref": "#/$defs/all"},
        "allOf": lambda: {"allOf": [one, {"$ref": "#/$defs/all"}]},
        "anyOf": lambda: {"anyOf": [{**one, "additionalProperties": False}, {**draw(objects()), "additionalProperties": False}]},  # noqa: E501
    }[way]()  # fmt: skip
    return {
        **schema,
        "$defs": {
            "all": one,
            "one": draw(simple.filter(lambda one: "$ref" not in one)),
            "two": {"anyOf": [INTEGER, {"$ref": "#/$defs/one"}]},
        },
    }


@given(
    parameters(),
    st.lists(st.dictionaries(st.sampled_from("abc"), st.sampled_from(VALUES), max_size=3), min_size=4, max_size=10),
    st.booleans(),
)
@examples(100)
def test_a_call_is_allowed_where_what_the_client_gets_is_valid(tokenizer, schema, calls, strict):
    try:
        grammar = grammar_of(tokenizer, schema, strict)
    except ApiError as e:
        reasons = ("allows no ", "cannot be enforced") if strict else ("allows no ",)
        if not any(reason in e.message for reason in reasons):
            raise
        return
    valid = jsonschema.Draft202012Validator(schema).is_valid
    for arguments in calls:
        arguments = {name: arguments[name] for name in Schema(schema).properties() if name in arguments}
        text = call(arguments)
        got = read(schema, text)
        is_allowed = allows(tokenizer, grammar, text)
        # Beside objects and arrays, a strict tool's string does not begin as they do.
        is_narrowed = strict and any(isinstance(value, str) and value.startswith(("{", "[")) for value in got.values())
        assert is_allowed or is_narrowed or not valid(got), got
        assert valid(got) or not (strict and is_allowed), got


# Texts that quote the format's own tags

CLOSING = ["</parameter>", "</function>", "</tool_call>"]
PARTS = [
    *CLOSING,
    *(f"\n{tag}\n" for tag in CLOSING),
    "</par",
    "</",
    "<",
    ">",
    "<parameter",
    "<tool_call>",
    "\n",
    "\r\n",
    " ",
    "a",
    "é",
]
QUOTED = "\n".join(
    [render("g", {"x": "1", "y": "2"}), "<tool_call><function=g><parameter=x>1</parameter></function></tool_call>"]
)
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


@pytest.mark.parametrize("kind", OF_TEXTS)
@examples(6)
@given(
    st.lists(st.sampled_from(PARTS), max_size=6).map("".join),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["", "", QUOTED]),
)
def test_a_text_under_a_grammar_is_what_the_parser_takes(tokenizer, kind, text, is_last, strict, quoted):
    """The grammar allows each text that is read as it was written, and its drafts are the text's."""
    text += quoted if kind in ("free", "any") else ""
    parameters = {"properties": {"a": OF_TEXTS[kind](text), "b": INTEGER}, "required": ["a", "b"][: 2 - is_last]}
    arguments = {"a": text} if is_last else {"a": text, "b": 5}
    if read(parameters, call(arguments)) != arguments:
        return  # it has what ends a value
    grammar = grammar_of(tokenizer, parameters, strict)
    assert allows(tokenizer, grammar, call(arguments)), call(arguments)
    written = tokenizer.encode(call(arguments), add_special_tokens=False)
    for n in range(0, len(written), 3):
        drafts, rest = tokenizer.decode(grammar.forced(written[:n])), tokenizer.decode(written[n:])
        assert rest.startswith(drafts) or drafts.startswith(rest), (drafts, rest)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (STRING, "a</parameter>\n<parameter=z>\nb"),  # a parameter that the function does not have
        ({**STRING, "pattern": "^a.*"}, "b\n</parameter>\nc"),
        ({"enum": ["a\n</parameter>\nb"]}, "a"),
        ({"enum": ["a\n</parameter>\n<parameter=b>\n5", "c"]}, "a\n</parameter>\n<parameter=b>\n5"),
    ],
)
def test_what_the_parser_would_take_for_another_value_is_not_written(tokenizer, schema, text):
    grammar = grammar_of(tokenizer, {"properties": {"a": schema}, "required": ["a"]})
    assert not allows(tokenizer, grammar, call({"a": text}))
