"""Text of a given form: the grammar's own rules, and that drafts change nothing."""

import json
import random
import re

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_mtp import BatchGenerator, DraftCounts, make_grammar, make_sampler
from mlx_mtp.text.grammar import ForcedTokens
from tests.support.batches import run
from tests.support.decoding import mtp, plain
from tests.support.grammars import grammar_of
from tests.support.models import model_of
from tests.support.profiles import examples
from tests.support.ways import every_way, generate

TOKENS = ["<eos>", *"abcdefghijklmnopqrstuvwxyz", "ab", "abc", "the", "ing", "qu"]  # 32
LARKS = [
    "start: /(abc|the|king|queen)+/",
    "start: word*\nword: /[a-f]{2,4}/ | /quz/",
    'start: "abcdefgh" "ing" /[k-m]+/ "thequick"',
]
PROMPT = [3, 1, 4, 1, 5]
PROPERTIES = {
    "name": {"type": "string", "maxLength": 12},
    "age": {"type": "integer", "minimum": 0, "maximum": 150},
    "likes": {"type": "array", "items": {"enum": ["tea", "coffee"]}, "minItems": 1, "maxItems": 3},
}
PERSON = {"type": "object", "properties": PROPERTIES, "required": [*PROPERTIES], "additionalProperties": False}


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
    family=st.sampled_from(["qwen3_5", "qwen3_next"]),
    prompt=st.lists(st.integers(0, 31), min_size=1, max_size=9),
    depth=st.one_of(st.just("auto"), st.integers(0, 4)),
    copies=st.sampled_from(["off", "auto", 3]),
    seed=st.sampled_from([None, 0, 1]),
    n=st.integers(1, 20),
)
def test_tokens_are_those_of_plain_decoding(way, lark, family, prompt, depth, copies, seed, n):
    """Also the sampled ones."""
    model, sampler = model_of(family), make_sampler(0.0 if seed is None else 1.0, seed=seed)
    options = [dict(max_tokens=n, sampler=sampler, logits_processors=[grammar_of(TOKENS, lark)]) for _ in range(2)]
    expected = until_end(plain(prompt, model, **options[0]))
    text = generate(way, prompt, model, num_draft_tokens=depth, copy_drafts=copies, **options[1])
    assert until_end(text.tokens) == expected
    assert follows(lark, expected)


@pytest.mark.parametrize("number", [0, 2])
def test_several_sequences_each_follow_their_own(number):
    model, prompts = model_of("qwen3_5"), [PROMPT, [9, 2], [6, 5, 3]]
    generator = BatchGenerator(model, num_draft_tokens=number, copy_drafts="auto", max_tokens=16, stop_tokens=[[0]])
    generator.insert([*prompts, PROMPT], logits_processors=[*([grammar_of(TOKENS, lark)] for lark in LARKS), []])
    texts = [text.tokens for text in run(generator).values()]
    for prompt, lark, text in zip(prompts, LARKS, texts):
        assert text == until_end(plain(prompt, model, max_tokens=16, logits_processors=[grammar_of(TOKENS, lark)]))
    assert texts[3] == until_end(plain(PROMPT, model, max_tokens=16))


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


def test_begins_behind_the_tag():
    model = model_of("qwen3_5")
    free = plain(PROMPT, model, max_tokens=40)
    begin = free.index(free[5]) + 1
    grammar = grammar_of(TOKENS, LARKS[0], after=TOKENS[free[5]])
    got = mtp(PROMPT, model, max_tokens=40, num_draft_tokens=3, logits_processors=[grammar])
    assert got[:begin] == free[:begin]
    rest = until_end(got[begin:])
    assert len(rest) > 3
    assert follows(LARKS[0], rest)


def test_a_draft_vocabulary_without_allowed_tokens_drafts_wrong_ones():
    grammar = grammar_of(TOKENS, 'start: "z"')
    logits = mx.where(mx.arange(32) < 5, mx.arange(32), -mx.inf)[None]
    assert mx.array_equal(grammar(mx.array(PROMPT), logits), logits)


def test_json_of_a_schema(trained):
    model, tokenizer = trained
    prompt, texts = tokenizer.encode("person = "), set()
    for depth in (0, 3):
        options = dict(num_draft_tokens=depth, logits_processors=[make_grammar(tokenizer, json_schema=PERSON)])
        tokens = mtp(prompt, model, max_tokens=60, **options)
        texts.add(tokenizer.decode(until_end(tokens, tokenizer.eos_token_id)[:-1]))
    (text,) = texts
    person = json.loads(text)
    assert list(person) == ["name", "age", "likes"]
    assert 0 <= person["age"] <= 150
    assert set(person["likes"]) <= {"tea", "coffee"}
    assert json.dumps(person, ensure_ascii=False) == text
    first, second = (make_grammar(tokenizer, json_schema=PERSON) for _ in range(2))
    begin = first.forced([])
    assert first.forced(begin) != begin
    assert second.forced([]) == first.copy().forced([]) == begin  # a copy is at the beginning


def test_a_format_that_llguidance_does_not_know_is_an_annotation(trained):
    """As in the standard. The date of the other one has the right form, and need not exist."""
    for name, text, is_allowed in (("password", "a", True), ("date", "2021-02-29", True), ("date", "2021", False)):
        schema = {"type": "array", "items": {"type": "string", "format": name}}
        tokens = trained[1].encode(json.dumps([text]), add_special_tokens=False)
        assert make_grammar(trained[1], json_schema=schema).advance_to(tokens) == is_allowed, (name, text)


def test_behind_the_tag_there_may_be_white_space(trained):
    tokenizer = trained[1]
    for space in ("", "\n", "\n\n", " ", "\n\n "):
        grammar = make_grammar(tokenizer, regex="a+", after="```")
        tokens = [tokenizer.encode(text, add_special_tokens=False) for text in ("b ", "```", space, "aa")]
        assert grammar.advance_to([t for part in tokens for t in part]), space
        assert len(grammar.taken) > 0, space


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


class CountedTokenizer:
    """Counts the tokens that are decoded."""

    n = 0

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def decode_bytes(self, tokens):
        self.n += len(tokens)
        return self.tokenizer.decode_bytes(tokens)

    def tokenize_bytes(self, text):
        return self.tokenizer.tokenize_bytes(text)


def test_positions_of_windows_give_what_they_give_a_new_grammar(demo):
    grammar, rng = make_grammar(demo[1], regex="a+", after="</think>"), random.Random(1)
    text = demo[1].encode("é and `</think>` </think>\naaaaa", add_special_tokens=False)
    for n in range(0, len(text), 2):
        for window in (text[n : n + 4], rng.choices(text, k=2)):
            for i in range(len(window) + 1):
                tokens, new = [*text[:n], *window[:i]], grammar.copy()
                assert (is_there := grammar.advance_to(tokens)) == new.advance_to(tokens)
                assert not is_there or [*grammar.taken] == [*new.taken]


def test_a_text_before_the_beginning_is_decoded_once(demo):
    grammar = make_grammar(demo[1], regex="a+", after="</think>")
    decoder = grammar.beginning.tokenizer = CountedTokenizer(grammar.beginning.tokenizer)
    text = demo[1].encode("a thought of many words, " * 10, add_special_tokens=False)
    for n in range(len(text)):
        grammar.advance_to(text[:n])
        grammar.advance_to([*text[:n], 7])  # a wrong draft
    assert decoder.n <= 4 * len(text)


def test_slashes_of_a_regular_expression_are_its_own(trained):
    tokenizer = trained[1]
    for regex, text in (
        (r"a\\/b", "a\\/b"), (r"a\/b", "a/b"), ("a/b", "a/b"), (r"[/\\]+", "/\\/"), ("a\nb", "a\nb"), (r"\\\\/", "\\\\/")
    ):  # fmt: skip
        matcher = make_grammar(tokenizer, regex=regex).matcher
        assert matcher.consume_tokens(tokenizer.encode(text, add_special_tokens=False)), regex
        assert matcher.is_accepting(), regex


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
    text = generate(way, PROMPT, model_of("qwen3_5"), fails=ValueError, **options)
    assert text.finish_reason == "error"
    assert re.match("llguidance aborted: Parser Error: Current row has 20.. items", str(text.last.error))
    assert re.match("[a-f]{0,3}$|[a-f]{3}x$", "".join(TOKENS[t] for t in text.tokens))
