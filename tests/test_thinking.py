"""How long a model thinks: quoted tags do not end it, a budget does, and drafts change nothing of either."""

from types import SimpleNamespace

import mlx.core as mx
import pytest

from mlx_mtp import load, mtp_generate_step
from mlx_mtp.server.engine.admission import make_budget
from mlx_mtp.server.request import ApiError
from mlx_mtp.text.answer import QwenReader, Reasoning, ends_in_reasoning
from mlx_mtp.text.reasoning import end_of_reasoning
from mlx_mtp.text.tool_calls import Text
from tests.support.decoding import plain
from tests.support.requests import ASK, CHAT, MESSAGES, RESPONSES, TEXT, read
from tests.support.tool_texts import make_model

# What ends it


def parts_of(text: str, size: int, cut: bool = False) -> tuple[str, str]:
    """(reasoning, answer) of a text in pieces of this size."""
    reader = QwenReader(("<think>", "</think>"), True, {})
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    events = [event for piece in pieces for event in reader.add(piece)] + reader.finish(cut)
    return tuple("".join(e.text for e in events if isinstance(e, kind)) for kind in (Reasoning, Text))


THOUGHTS = [
    ("Hm.\n", "\n\nYes."),
    ("The tag `</think>` ends it.\n", "Yes, `</think>`."),
    ("A tick `", "\n\nYes."),
    ("Like\n```html\n<think>\n</think>\n\nx\n```\nso.", "\n\nYes."),
    ("~~~\n```\n</think>\n~~~\n", "Yes."),
    ("```\na\n```", "\nYes.\n```\nb\n```\n"),
    *((f"So:\n{mark}\n  </think>\n  {mark[-3:]}\n", "Yes.") for mark in ("- ```", "* ~~~", "- [ ] ```")),
]


@pytest.mark.parametrize(("thought", "answer"), THOUGHTS)
def test_a_quoted_tag_does_not_end_reasoning_and_a_grammar_begins_where_it_ends(thought, answer):
    text, end = f"{thought}</think>{answer}", len(thought) + len("</think>")
    for size in (1, 2, 3, 7, 1000):
        assert parts_of(text, size) == (thought, answer), size
    found = [end_of_reasoning(text[:n], "</think>") for n in range(len(text) + 1)]
    n = end + thought.endswith("`")  # then the next character tells
    assert found == [None] * n + [end] * (len(text) + 1 - n)


def test_a_tag_in_a_code_block_that_nothing_closes_was_the_end():
    text = "So:\n```c\nint x;\n</think>\n\nYes."
    for size in (1, 3, 1000):
        assert parts_of(text, size) == (text, "\n\nYes.")
        assert parts_of(text, size, cut=True) == (text, "")
        assert parts_of("So:\n```c\nint x = </think>;", size)[1] == ""


MARKS = "<think>", "</think>"


@pytest.mark.parametrize(
    ("end", "prefill", "want"),
    [
        ("", "", None), ("<think>\n", "", True), ("<think>", "", True), ("<think>\n\n</think>\n\n", "", False),
        # The beginning of the answer, which may go on with its reasoning.
        ("<think>\n", "Hm. ", True), ("<think>\n", "Hm.\n</think>\n\nYes", False), ("<think>\n", "The `</think>` tag", True),
        ("<think>\n\n</think>\n\n", "The <think> tag", False), ("", "The <think> tag", None), ("", "<think> opens it", None),
        ("", "<think>\nHm.", True), ("", "<think>\nHm.\n</think>\n\nYes", False), ("", "Say </think>", None),
    ],
)  # fmt: skip
def test_the_end_of_the_prompt_alone_tells_whether_it_is_in_reasoning(end, prefill, want):
    for said in ("Hi.", "Say <think>", "<think>\n", "<think>\nHm.\n</think>\n", "```\n<think>\n", "</think>"):
        prompt = f"<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n{end}{prefill}"
        assert ends_in_reasoning(prompt, MARKS, prefill) == want, said


# What a request asks for


OFF = {"enable_thinking": False}
LOW, MEDIUM, MAX = ({"enable_thinking": True, "reasoning_effort": effort} for effort in ("low", "medium", "max"))


@pytest.mark.parametrize(
    ("path", "fields", "variables", "budget"),
    [
        (CHAT, {}, {}, None),
        (CHAT, OFF, OFF, None),
        (CHAT, {"reasoning_effort": "minimal"}, OFF, None),
        (CHAT, {"reasoning_effort": "low"}, LOW, 1024),
        (CHAT, {"reasoning_effort": "max"}, MAX, None),
        (CHAT, {"thinking_budget": 7}, {"enable_thinking": True}, 7),
        (CHAT, {"thinking_budget": 0}, OFF, 0),
        (CHAT, {"reasoning_effort": "max", "chat_template_kwargs": OFF}, MAX | OFF, None),
        (MESSAGES, {"thinking": {"type": "disabled"}}, OFF, None),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 9}}, {"enable_thinking": True}, 9),
        (MESSAGES, {"thinking": {"type": "adaptive"}, "output_config": {"effort": "medium"}}, MEDIUM, 8192),
        (RESPONSES, {"reasoning": {"effort": "none"}}, OFF, None),
        (RESPONSES, {"reasoning": {"effort": "low", "summary": "auto"}}, LOW, 1024),
    ],
    ids=str,
)  # fmt: skip
def test_what_each_api_asks_for(path, fields, variables, budget):
    request = asked(path, **fields)
    assert request.args.chat_template_kwargs == variables
    tokenizer = SimpleNamespace(chat_template="{{ enable_thinking }}", has_thinking=True)
    assert request.thinking.limit(tokenizer) == budget
    tokenizer.chat_template = "{{ reasoning_effort }}"  # one that knows of efforts needs no budget for them
    assert request.thinking.limit(tokenizer) == (None if {"low", "medium"} & {*variables.values()} else budget)


CHATS = [CHAT, MESSAGES, RESPONSES]


def asked(path, **fields):
    return read(path, **{"input" if path == RESPONSES else "messages": ASK, **fields})


ON = {"enable_thinking": True}


@pytest.mark.parametrize(
    ("fields", "variables", "budget"),
    [
        *((off, OFF, None) for off in (
            {"reasoning_effort": "none"}, {"reasoning": {"effort": "none"}}, {"reasoning": {"enabled": False}},
            {"reasoning": False}, {"reasoning": "none"}, {"thinking": {"type": "disabled"}}, {"thinking": False},
            {"think": False}, {"think": "none"}, {"output_config": {"effort": "none"}}, {"enable_thinking": False},
            {"reasoning": {"effort": "minimal", "exclude": False}},
        )),
        *((off, OFF, 0) for off in (
            {"reasoning": {"max_tokens": 0}}, {"reasoning_budget": 0}, {"thinking_token_budget": 0}, {"thinking_budget": 0},
        )),
        *((on, ON, None) for on in (
            {"thinking": {"type": "adaptive"}}, {"thinking": True}, {"think": True}, {"reasoning": {"enabled": True}},
        )),
        *((seven, ON, 7) for seven in (
            {"reasoning": {"max_tokens": 7}}, {"reasoning_budget": 7}, {"thinking": {"type": "enabled", "budget_tokens": 7}},
            {"thinking_token_budget": 7}, {"enable_thinking": True, "reasoning_budget": 7},
        )),
        *((low, LOW, 1024) for low in (
            {"think": "low"}, {"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"},
            {"output_config": {"effort": "low"}},
        )),
        ({"reasoning_budget": -1}, {}, None),
        ({"include_reasoning": True}, {}, None),
        ({"thinking": {"type": "disabled"}, "reasoning": {"effort": "low"}}, OFF, 1024),
    ],
    ids=str,
)  # fmt: skip
def test_a_switch_means_the_same_in_each_api(fields, variables, budget):
    """Whoever named it, also among the variables of the template."""
    tokenizer = SimpleNamespace(chat_template="{{ enable_thinking }}", has_thinking=True)
    plain = {name: x for name, x in fields.items() if not isinstance(x, dict)}
    others = {name: x for name, x in fields.items() if isinstance(x, dict)}
    for path in CHATS:
        request = asked(path, **fields)
        assert (request.args.chat_template_kwargs, request.thinking.limit(tokenizer)) == (variables, budget), path
        if not {"include_reasoning", "output_config"} & {*fields}:
            request = asked(path, chat_template_kwargs=plain, **others)
            given = {name: request.args.chat_template_kwargs[name] for name in variables}
            assert (given, request.thinking.limit(tokenizer)) == (variables, budget), path


@pytest.mark.parametrize(
    "fields",
    [
        {"include_reasoning": False}, {"reasoning": {"exclude": True}}, {"reasoning": {"effort": "deep"}}, {"reasoning": 5},
        {"reasoning": {"max_tokens": -2}}, {"thinking": {"type": "deep"}}, {"thinking": "loud"}, {"think": 1},
        {"think": [True]}, {"reasoning_budget": -2}, {"reasoning_budget": True},
        {"thinking_token_budget": "a"}, {"reasoning_effort": "deep"},
        {"chat_template_kwargs": {"think": "loud"}},
    ],
    ids=str,
)  # fmt: skip
def test_a_switch_that_is_not_honoured_is_refused_by_its_name(fields):
    ((name, value),) = fields.items()
    name = name if name != "chat_template_kwargs" else next(iter(value))
    for path in CHATS:
        with pytest.raises(ApiError) as e:
            asked(path, **fields)
        assert (e.value.status, e.value.param) == (400, name), path
        assert e.value.message.startswith(name), path


def test_texts_have_no_switches():
    for fields in ({"thinking": False}, {"reasoning": {"effort": "none"}}, {"think": False}, {"reasoning_budget": 0}):
        with pytest.raises(ApiError) as e:
            read(TEXT, prompt="a", **fields)
        assert e.value.param in fields


# The budget


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load(str(make_model(tmp_path_factory.mktemp("model") / "model")), mtp=True)


def forced(tokenizer, thought: str, in_reasoning: bool = True) -> str:
    """What the processor forces behind a thought that takes all of its budget."""
    prompt, text = [5, 6], tokenizer.encode(thought, add_special_tokens=False)
    process = make_budget(tokenizer, len(prompt), in_reasoning, len(text))
    logits, tokens = mx.zeros((1, tokenizer.vocab_size + 2)), [*prompt, *text]
    assert process(mx.array(tokens[:-1]), logits) is logits
    while (row := process(mx.array(tokens), logits)) is not logits:
        assert (row > -mx.inf).sum().item() == 1
        tokens.append(mx.argmax(row).item())
    return tokenizer.decode(tokens)[len(tokenizer.decode([*prompt, *text])) :]


def test_what_ends_reasoning(loaded):
    _, tokenizer = loaded
    for thought, end in (
        ("Hm", "\n</think>\n\n"),
        ("Hm.\n", "</think>\n\n"),
        ("So:\n```c\nint x", "\n```\n</think>\n\n"),
        ("So:\n~~~~\n</think>\n", "~~~~\n</think>\n\n"),
        ("The `</think>` tag", "\n</think>\n\n"),
        ("The `</think>", "\n\n"),
        ("Hm.\n</think>\n\nYes", ""),
    ):
        assert forced(tokenizer, thought) == end, thought
        assert not end or parts_of(f"{thought}{end}Yes.", 1)[1].strip() == "Yes.", thought
    # A model that does not think is let alone.
    assert forced(tokenizer, "Yes, and", in_reasoning=False) == ""
    assert forced(tokenizer, "<think>\nHm", in_reasoning=False) == "\n</think>\n\n"


@pytest.mark.parametrize("budget", [0, 1, 6, 11])
def test_drafts_change_nothing(loaded, budget):
    model, tokenizer = loaded
    prompt = tokenizer.apply_chat_template(ASK, add_generation_prompt=True, enable_thinking=True)
    options = {"max_tokens": budget + 8, "logits_processors": [make_budget(tokenizer, len(prompt), True, budget)]}
    want = plain(prompt, model, **options)
    assert tokenizer.think_end_id in want[budget : budget + 2]
    for depth in (0, 3, "auto"):
        steps = mtp_generate_step(mx.array(prompt), model, num_draft_tokens=depth, **options)
        assert [token for token, _, _ in steps] == want
