"""Which lines of a Markdown text are code."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_mtp.text.reasoning import Lines
from tests.support.profiles import examples


def code_of(text: str) -> list[str]:
    """The lines in code blocks, without the fences."""
    lines, found = Lines(), []
    for line in text.split("\n"):
        after = lines.add(line)
        found += [line] if lines.marks and after.marks and not after.is_first else []
        lines = after
    return found


def ends_in_code(text: str) -> bool:
    """Whether text at the beginning of a further line is code."""
    lines = Lines()
    for line in text.split("\n"):
        lines = lines.add(line)
    return lines.is_code("")


# What begins a line, and what continues it.
CONTAINERS = [
    ("", ""), ("- ", "  "), ("* ", "  "), ("+   ", "    "), ("1. ", "   "), ("10) ", "    "), ("- [ ] ", "  "),
    ("- [x] ", "  "), ("1. [X] ", "   "), ("> ", "> "), ("- - ", "    "), ("> 1) ", ">    "), ("- > ", "  > "),
    ("  - ", "    "), ("-\t", "    "),
]  # fmt: skip


@pytest.mark.parametrize("fence", ["```", "~~~", "````", "```py", "~~~ a `b`"])
def test_a_fence_opens_in_each_container_and_closes_at_its_own_mark(fence):
    marks = fence[: len(fence) - len(fence.lstrip("`~"))]
    other = "~~~" if marks[0] == "`" else "```"
    for first, next_ in CONTAINERS:
        code = [f"{next_}{line}" for line in ("a = 1", "", "    b", marks[:-1], other, f"{marks} c", f"    {marks}")]
        text = "\n".join(["See:", "", f"{first}{fence}", *code, f"{next_}{marks}{marks[0]} ", "text"])
        assert (code_of(text), ends_in_code(text)) == (code, False)


@pytest.mark.parametrize("end", ["text", "\ntext", "- item", "> quote", "```"])
def test_a_code_block_ends_where_its_container_ends(end):
    for first, next_ in CONTAINERS[1:]:
        if end != "> quote" or first[0] != ">":
            text = f"{first}```\n{next_}a\n{end}"
            assert code_of(text)[:1] == [f"{next_}a"]
            is_new = end == "```" and ">" in first  # outside of its block quote, it begins another
            assert ends_in_code(text) == is_new, text


def test_no_code_is_open():
    for text in (
        "    ```", "a ```", "- a ```", "```a```", "-```", "1986 ```", "- ```\n  a\n  ```", "```\n```", "- ```\n```",
        # Lines without their indentation, and a fence that has it.
        "- ```\na\n\nb\n```", "1. ```\na\n   ```", "1. Do:\n   ```\n   cat <<X\na\nX\n   ```",
        "- a\n  1. ```\n     a\n     ```\n- b", "- a\n\n    ```\n    a\n    ```", "- - - -\n***", "-\n  ```\n  a\n  ```",
    ):  # fmt: skip
        assert not ends_in_code(text), text


def test_a_fence_with_less_marks_or_an_info_string_closes_nothing():
    for text in ("````\n```", "```\n~~~", "~~~\n```", "```\n``` a", "- ```\n  a\n  ``` a", "```\n    ```"):
        first = "  " if text[0] == "-" else ""
        lines = Lines()
        for line in text.split("\n"):
            lines = lines.add(line)
        assert lines.is_code(first), text


blocks = st.recursive(
    st.lists(st.sampled_from(["a", "*b* `c`", ""]), min_size=1, max_size=2).map(lambda lines: [(x, False) for x in lines])
    | st.tuples(st.sampled_from(["```", "~~~~", "```py"]), st.lists(st.sampled_from(["a", "", "  b", "# c"]), max_size=3)),
    lambda inner: st.tuples(st.sampled_from(CONTAINERS[1:]), st.lists(inner, min_size=1, max_size=3)),
    max_leaves=6,
)  # fmt: skip


def written(block) -> list[tuple[str, bool]]:
    """The lines of a block, and whether each is code."""
    if isinstance(block, list):
        return block
    opening, inner = block
    if isinstance(opening, str):
        marks = opening.rstrip("py")
        return [(opening, False), *((line, True) for line in inner), (marks, False)]
    lines = [line for part in inner for line in written(part)]
    return [((opening[1] if i else opening[0]) + line, is_code) for i, (line, is_code) in enumerate(lines)]


@examples(100)
@given(st.lists(blocks, min_size=1, max_size=4))
def test_blocks_in_containers(blocks):
    lines = [line for block in blocks for line in [*written(block), ("", False), ("end", False)]]
    assert code_of("\n".join(line for line, _ in lines)) == [line for line, is_code in lines if is_code]
