"""What the clients' own packages can send and receive is read, ignored or refused, as docs/develop/api-fields.md lists it."""

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import openai.types as of_openai
import pytest
from typing_extensions import get_type_hints

from mlx_mtp.server.api import common
from mlx_mtp.server.api.common import Usage
from mlx_mtp.server.app import APIS
from mlx_mtp.server.request import ApiError, Delta
from mlx_mtp.text.answer import Reasoning
from mlx_mtp.text.tool_calls import CallArguments, CallBegins, CallEnds, Text
from tests.support.requests import ASK, CHAT, MESSAGES, RESPONSES, TEXT, body_with, read
from tests.support.sdk_types import kinds_of, literals, names_of, values_of

PAGE = Path(__file__).parents[1] / "docs" / "develop" / "api-fields.md"
TITLES = {CHAT: "Chat completions", TEXT: "Completions", RESPONSES: "Responses", MESSAGES: "Messages"}
TOOLS = [{"type": "function", "name": "f"}, {"type": "custom", "name": "c"}]
BODY = {RESPONSES: {"input": "a", "tools": TOOLS, "reasoning": {"summary": "auto"}}, MESSAGES: {"messages": ASK}}
DATE = re.compile(r"[-_]20\d\d[-_]?\d\d[-_]?\d\d$")  # the version of a tool or a beta
HINT = f"A package names what {PAGE.name} does not list once: look up what it is, and support, ignore or refuse it."


def lists(path: str) -> dict[str, list[str]]:
    """The names in each list of an API."""
    section = PAGE.read_text(encoding="utf-8").partition(f"\n## {TITLES[path]}\n")[2].partition("\n## ")[0]
    found = re.findall(r"^\*\*(.*?)\*\*: ([^*]*)", section, re.MULTILINE)
    return {head: re.findall("`(.*?)`", names) for head, names in found}


def not_once(names: Iterable[str], *lists: list[str]) -> set[str]:
    """The names that are not in exactly one of the lists."""
    counts = Counter(name for names in lists for name in names)
    return {name for name in (DATE.sub("", name) for name in names) if counts[name] != 1}


def bodies(path: str) -> list[Any]:
    """The types of bodies in the packages."""
    if path == RESPONSES:
        return [of_openai.responses.response_create_params.ResponseCreateParamsNonStreaming]
    if path in (CHAT, TEXT):
        of = of_openai.chat if path == CHAT else of_openai
        return [of.completion_create_params.CompletionCreateParamsNonStreaming]
    import anthropic.types  # takes seconds, and other workers do without
    from anthropic.types import beta

    return [of.message_create_params.MessageCreateParamsNonStreaming for of in (anthropic.types, beta)]


def events(path: str) -> set[str]:
    """The first words of the names of events in the packages."""
    if path == RESPONSES:
        unions = [of_openai.responses.ResponseStreamEvent]
    else:
        from anthropic.types import beta

        unions = [beta.BetaRawMessageStreamEvent, beta.BetaRawContentBlockDelta]
    return {kind.removeprefix("response.").partition(".")[0] for union in unions for kind in kinds_of(union)}


@pytest.mark.parametrize("path", TITLES)
def test_every_field_and_type_is_in_one_list(path):
    listed = {head: names for head, names in lists(path).items() if head.startswith(("Read", "Ignored", "Refused"))}
    found = {
        name for body in bodies(path) for name in names_of(body, lambda name: DATE.sub("", name) in listed["Read"])
    }
    assert len(found) > 15
    assert not not_once(found, *listed.values()), HINT


@pytest.mark.parametrize("path", TITLES)
def test_a_field_does_what_its_list_says(path):
    listed, body = lists(path), body_with(path, "a" if path in (TEXT, RESPONSES) else ASK)
    known = {field.alias or name for name, field in APIS[path].model_fields.items() if name not in APIS[path].UNUSED}

    def read_with(**more):
        request = vars(read(path, **body, **more))
        return {name: x for name, x in request.items() if name not in ("number", "arrived", "encoded")}

    for name, hint in (pair for of in bodies(path) for pair in get_type_hints(of).items()):
        assert (name in listed["Read"]) == (name in known), name
        for value in values_of(hint):
            if name in listed["Ignored"]:
                assert read_with(**{name: value}) == read_with(), (name, value)
            elif name in listed["Refused"] and value not in common.REFUSED[name][0]:
                with pytest.raises(ApiError, match=rf"^{name}: .* is not supported: "):
                    read(path, **{**body, name: value})


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_every_event_is_in_one_list(path):
    listed = lists(path)
    assert not not_once(events(path), listed["Events"], listed["Events that are not sent"]), HINT
    calls = [part for i, name in enumerate("fc") for part in (CallBegins(i, name), CallArguments(i, "{}"), CallEnds(i))]
    sent = b""
    for reason in ("stop", "length"):
        body = APIS[path].model_validate(BODY[path])
        usage, writer = Usage([body.to_request(BODY[path])], False), APIS[path].writer(body)
        sent += writer.loading() + writer.begin(usage)
        sent += writer.add(Delta([Reasoning("a"), Text("b"), *calls], 1, reason)) + writer.end(usage)
        sent += writer.failed(ApiError(500, "It fails."))
    kinds = {kind.partition(".")[0] for kind in re.findall(r'"type": "(?:response\.)?([\w.]+)"', sent.decode())}
    assert kinds >= {*listed["Events"]}
    assert kinds & {*listed["Events that are not sent"]} <= {"error"}  # Anthropic's, of a failure


def test_every_beta_is_listed():
    from anthropic.types.anthropic_beta_param import AnthropicBetaParam

    assert not not_once(literals(AnthropicBetaParam), lists(MESSAGES)["Betas"]), HINT
