"""Which tokens the text of an answer is made of."""

from types import SimpleNamespace

import pytest

from mlx_mtp.text.answer import Answer, QwenReader
from mlx_mtp.text.tokens import Pieces
from mlx_mtp.text.tool_calls import Text
from tests.support.tool_texts import SCHEMAS, render

THINK = "<think>", "</think>"
ADD = render("add", {"a": 1, "b": 2})


def told(pieces: list[str], in_reasoning: bool = False, stop=(), reason: str = "stop") -> tuple[str, list[str]]:
    """Pieces of an answer, a token each -> its text, and the pieces that this is said to be made of."""
    answer, text, tokens = Answer(QwenReader(THINK, in_reasoning, SCHEMAS), list(stop)), "", []
    pieces = [*pieces, ""] if reason == "stop" else pieces
    for i, piece in enumerate(pieces, 1):
        events, finish_reason = answer.step(piece, reason if i == len(pieces) else None)
        for event in events:
            if isinstance(event, Text):
                text += event.text
                tokens += event.tokens
        if finish_reason is not None:
            break
    assert tokens == sorted(set(tokens))
    return text, [pieces[i] for i in tokens]


@pytest.mark.parametrize(
    ("pieces", "options", "want"),
    [
        (["A", " b", " c"], {}, ["A", " b", " c"]),
        # The reasoning, its tag and the line breaks of the template are none of the text's; a "t" is in the tag as well.
        (["Hm", "t", "\n", "</think>", "\n\n", "t", "h", "in"], {"in_reasoning": True}, ["t", "h", "in"]),
        (["Hm", "</", "think", ">\n", "\n>", "k"], {"in_reasoning": True}, ["\n>", "k"]),
        (["Hm", "</think>", "</", "b>"], {"in_reasoning": True}, ["</", "b>"]),
        (["<think>", "Hm", "</think>", "Hm"], {}, ["Hm"]),
        # A stop word, and what only began like one.
        (["e", "e", "e", "e", "!", "x"], {"stop": ["ee!"]}, ["e", "e"]),
        (["a", "bc", "b", "d", "e"], {"stop": ["bcd"]}, ["a", "bc", "b", "d", "e"]),
        (["a", "xb", "c"], {"stop": ["bc"]}, ["a", "xb"]),
        # Characters of several tokens.
        (["a", "", "", "é", "b"], {}, ["a", "", "", "é", "b"]),
        (["a", "", "\ufffd"], {"reason": "length"}, ["a", "", "\ufffd"]),
        # Calls. Line breaks before one are the text's if text follows.
        (["I", " add", ".", "\n\n", *ADD, "\n", "Done"], {}, ["I", " add", ".", "\n\n", "Done"]),
        (["\n", *ADD, "\n", "function"], {}, ["function"]),
        (["<tool_", "call>\n", "no", "</tool_call>"], {}, ["<tool_", "call>\n", "no", "</tool_call>"]),
    ],
    ids=lambda x: "".join(x)[:30] if isinstance(x, list) else "",
)
def test_a_text_is_made_of_its_tokens(pieces, options, want):
    assert told(pieces, **options)[1] == want


def test_pieces_are_bytes(demo):
    _, tokenizer = demo
    text = "def é(x): # 日本\n"
    tokens = tokenizer.encode(text)
    assert b"".join(Pieces(tokenizer).of(tokens)) == text.encode()
    assert Pieces(tokenizer).of([tokenizer.eos_token_id]) == [tokenizer.eos_token.encode()]


def test_pieces_of_sentencepiece():
    names = {1: "▁Hi", 2: "<0xE2>", 3: "é", 4: "<s>", 5: None}
    tokenizer = SimpleNamespace(
        added_tokens_decoder={4: "<s>"},
        detokenizer=None,
        convert_ids_to_tokens=lambda tokens: [names[i] for i in tokens],
    )
    assert Pieces(tokenizer).of([1, 2, 3, 4, 5]) == [b" Hi", b"\xe2", "é".encode(), b"<s>", b""]
