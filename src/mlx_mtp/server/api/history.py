"""One translation of the messages and items of all APIs to the messages of the chat template.

Items that a template has no form for, such as search results, are rendered as text. A mark stands for what has none, such as a
recording: it is refused in the question, the messages after the last answer.
"""

import base64
import json
import re
from collections import defaultdict
from contextlib import suppress
from itertools import groupby, pairwise
from typing import Any

from ...images.open import is_data_url
from ...images.prompt import LEFT_OUT, MARK
from ...text.reasoning import end_of_reasoning
from ...text.schema import Json
from ..request import ApiError

SYSTEM = ("system", "developer")
THINK = "<think>"
END_OF_THINK = "</think>"
# Types of parts and items, or their endings, in the APIs of OpenAI and Anthropic
OF_ANSWERS = ("output_text", "summary_text", "reasoning_text", "refusal")
TEXTS = ("text", "input_text", *OF_ANSWERS)
IMAGES = ("image_url", "input_image", "image", "computer_screenshot")
REASONING = ("reasoning", "thinking", "redacted_thinking")
CALLS = ("_call", "tool_use", "program")
RESULTS = ("_output", "tool_result")
OF_CLIENTS = ("function_call", "custom_tool_call", "tool_use")  # calls of the client's tools
ARGUMENTS = ("arguments", "input", "action", "operation")
FIELDS = ("actions", "code", "queries", "revised_prompt")  # further arguments of calls on a vendor's servers
# Types whose strings are not for the model. A document may have a text.
NO_TEXT = re.compile("image|video|audio|file|document|upload|snapshot|item_reference|configuration|trigger|fallback")
# Fields of unknown items that are not for the model, and those that are, though they are not strings
HIDDEN = re.compile(
    "type|(.*_)?id|encrypted_.*|tool_changes|status|role|index|caller|execution|signature|fingerprint|filename|media_type|cache_control|"
    "citations|annotations|logprobs|parameters|.*_schema"
)
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # of answers, and their clients
# The fields of a message that are read
READ = ("type", "content", "refusal", "audio", *THOUGHTS, "tool_calls", "function_call")
FACTS = ("exit_code", "return_code", "approve")
# Types without text: those that mean nothing to the model, and those without which the conversation is not whole
MEANINGLESS = "compaction", "fallback", "ghost_snapshot"  # the first where it has failed
REFUSED = {
    "compaction": "its summary is encrypted, so send the conversation itself",
    "compaction_trigger": "let the client summarize the conversation",
    "configuration_update": "send the settings with the request",
    "item_reference": "send the item itself",
}
# Changes of the tools within a conversation, and the sentences that tell the model
CHANGES = {
    "additional_tools": "These tools are available from here on",
    "tool_addition": "This tool is available from here on",
    "tool_removal": "This tool is not available from here on",
}
# Types of the parts of a result. An object of another type, or of none, is a tool's own.
OF_APIS = re.compile(
    "text|image|screenshot|file|document|audio|video|result|output|reference|refusal|call|use|thinking|function|namespace|custom|"
    "web_search|mcp|browser_state|shell|apply_patch|computer|code_interpreter|tool_search"
)
ENCODED = re.compile(r"data:\S*|[\w+/=-]{200,}", re.ASCII)
Parts = list[tuple[str, Any]]  # parts of a content, each after its place in the body


class History:
    """Messages and items, added in order: with ``between`` between two texts of a message, except of the assistant's, and with
    ``joins`` one message of consecutive items of the assistant.
    """

    def __init__(self, between: str = "", joins: bool = False):
        self.between = between
        self.joins = joins
        self.messages: list[Json] = []  # with their "images", as URLs, and "errors", of parts for which marks stand
        self.changes: Parts = []  # of the tools
        self._turn: Json | None = None  # the message that a next part of its role belongs to

    def add(self, item: Json, where: str, within: str = ".content") -> None:
        """Add a message, or an item of Responses; ``where`` is its place in the body, ``within`` its content's in it."""
        role = _role_of(item)
        content = item.get("content")
        n = len(self.messages)
        if content is None and role == "user":
            content = item.get("text")
        if item.get("type") not in (None, "message"):
            self._add_item(item, where)
        elif role is None:
            raise error_at(where, f"{where}: a message has a role and content, and any other item a type.")
        elif role in ("tool", "function"):
            self._add_result(_id_of(item), content, f"{where}.content")
        else:
            if not (self.joins and role == "assistant"):
                self._turn = None
            self._think(next((item[x] for x in THOUGHTS if isinstance(item.get(x), str)), ""))
            for is_item, parts in groupby(parts_of(content, where + within), key=_is_item):
                if is_item:
                    for place, part in parts:
                        self._add_item(part, place)
                else:
                    self._say(role, [*parts])
            for name in ("refusal", "audio"):
                if item.get(name):
                    self._say(role, [(where, {**item, "type": name})])
            for call in filter(None, [item.get("function_call"), *(item.get("tool_calls") or [])]):
                kind = "custom_tool_call" if call.get("custom") else "function_call"
                self._add_call({**call, **(call.get("custom") or call.get("function") or {})}, kind, where)
            others = {name: x for name, x in item.items() if name not in (*READ, "name")}
            if len(self.messages) == n and content is None and text_in(others):
                raise error_at(where, f"{where}: a message has content, not {', '.join(others)[:100]}.")
            if len(self.messages) == n:
                self._message(role)

    def finish(self) -> tuple[list[Json], list[str], list[str]]:
        """The messages for the chat template, the URLs of their images, and the role of each, or ``""`` before an answer."""
        _sort_results(self.messages)
        urls = list[str]()
        askers = list[str]()
        answered = max((i for i, m in enumerate(self.messages) if m["role"] == "assistant"), default=-1)
        for i, message in enumerate(self.messages):
            errors = message.pop("errors", [])
            images = message.pop("images", [])
            asker = message["role"] if i > answered else ""
            if asker and errors:
                raise errors[0]
            urls += images
            askers += [asker] * len(images)
        messages = fold_roles(self.messages)
        if not messages:
            raise ApiError(400, "The conversation is empty.")
        for message in self.messages:
            if message["role"] == "assistant":
                _split_thoughts(message, is_last=message is self.messages[-1])
        return messages, urls, askers

    def _message(self, role: str) -> Json:
        if self._turn is None or self._turn["role"] != role:
            self._turn = {"role": role, "content": ""}
            self.messages.append(self._turn)
        return self._turn

    def _add_item(self, item: Json, where: str) -> None:
        kind = item["type"]
        if kind in REASONING:
            self._think(_thought_of(item))
        elif kind.endswith(CALLS):
            self._add_call(item, kind, where)
        elif kind.endswith(RESULTS):
            name = next((x for x in ("content", "output", "result", "tools") if item.get(x) is not None), "status")
            self._add_result(_id_of(item), item.get(name), f"{where}.{name}", item.get("is_error") is True)
        elif text := self._shown(item, where):
            self._turn = None
            self._message("system")["content"] = text

    def _shown(self, part: Json, where: str) -> str:
        """The text of a part or an item of any other type, or a mark."""
        kind = part.get("type")
        text = _text_of_unknown(part)
        changes = part.get("tool_changes")
        inner = changes if isinstance(changes, list) else []
        self.changes += [(where, x) for x in (part, *inner) if isinstance(x, dict) and x.get("type") in CHANGES]
        if not text and kind in REFUSED and "content" not in part:
            raise error_at(where, f"{where}: {kind} is not supported: {REFUSED[kind]}.")
        return text or ("" if kind in MEANINGLESS else _mark(kind))

    def _say(self, role: str, parts: Parts) -> None:
        message = self._message(role)
        between = "" if role == "assistant" else self.between
        text = self._text_of(message, parts, between)
        message["content"] += between + text if message["content"] and text else text

    def _think(self, text: str) -> None:
        if text:
            message = self._message("assistant")
            message["reasoning_content"] = message.get("reasoning_content", "") + text

    def _add_call(self, item: Json, kind: str, where: str) -> None:
        """Add a call. One on a vendor's servers has its result in the same item."""
        name = item.get("name")
        space = item.get("namespace")
        is_own = kind in OF_CLIENTS
        arguments = next((item[x] for x in ARGUMENTS if item.get(x) is not None), None)
        if kind == "custom_tool_call":
            arguments = {"input": str(arguments or "")}
        elif more := {x: item[x] for x in FIELDS if item.get(x)}:
            arguments = arguments_of(arguments) | more
        result = text_in([item.get(x) for x in ("output", "outputs", "results", "error")])
        result = result or LEFT_OUT * bool(item.get("result"))  # of an image that was generated
        if not isinstance(name, str):
            if is_own:
                raise error_at(where, f"{where}: a call has the name of a tool.")
            if not (arguments or result):  # nothing is known of it
                return
            name = kind.removesuffix("_call")
        name = full_name(space, name) if isinstance(space, str) else name
        id = _id_of(item)
        call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments_of(arguments)}}
        self._message("assistant").setdefault("tool_calls", []).append(call)
        if kind.endswith("_call") and not is_own and "call_id" not in item:
            self._add_result(id, result, where)

    def _add_result(self, id: str, content: Any, where: str, is_error: bool = False) -> None:
        self._turn = None
        message = {"role": "tool", "content": "", "tool_call_id": id}
        parts = content if isinstance(content, list) else [content]
        if content not in (None, "", []) and not any(map(_is_part, parts)):
            content = json.dumps(content, ensure_ascii=False)
        text = self._text_of(message, parts_of(content, where), self.between)
        message["content"] = f"Error: {text}" if is_error else text
        self.messages.append(message)

    def _text_of(self, message: Json, parts: Parts, between: str) -> str:
        """The text of parts of a message. A mark stands for an image, and its URL is added to the message."""
        texts = []
        for where, part in parts:
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(part, str):
                texts.append(part)
            elif kind in TEXTS:
                name = "refusal" if kind == "refusal" else "text"
                if not isinstance(part.get(name), str):
                    raise error_at(where, f"{where}.{name}: Input should be a valid string.")
                texts.append(part[name])
            elif kind in IMAGES:
                url, form = _url_of(part)
                if is_data_url(url) and message["role"] != "assistant":
                    message.setdefault("images", []).append(url)
                    texts.append(MARK)
                else:
                    message.setdefault("errors", []).append(_unsupported(form, where, url))
                    texts.append(LEFT_OUT)
            elif inner := _parts_within(part, where):
                texts.append(self._text_of(message, inner, "\n"))
            elif message["role"] == "tool" and not _is_part(part):
                texts.append(json.dumps(part, ensure_ascii=False))
                between = between or "\n"
            elif text := self._shown(part if isinstance(part, dict) else {}, where):
                if text == _mark(kind) and message["role"] != "tool":
                    message.setdefault("errors", []).append(_unsupported(kind, where))
                texts.append(text)
                between = between or "\n"
        return between.join(texts)


def _role_of(item: Json) -> str | None:
    """The role of a message. An item without one that can only be a message of the user is one."""
    role = item.get("role")
    names = {name for name, x in item.items() if x is not None} - {"type"}
    parts = parts_of(item.get("content"), "")
    of_user = not any(_is_item(x) or (isinstance(x[1], dict) and x[1].get("type") in OF_ANSWERS) for x in parts)
    return role if isinstance(role, str) else "user" if of_user and names in ({"content"}, {"text"}) else None


def _id_of(item: Json) -> str:
    ids = (item.get(name) for name in ("tool_call_id", "tool_use_id", "call_id", "id"))
    return next((id for id in ids if isinstance(id, str)), "")


def parts_of(content: Any, where: str) -> Parts:
    """The parts of a content at this place of a body, each after its own place."""
    if isinstance(content, list):
        return [(f"{where}[{i}]", part) for i, part in enumerate(content)]
    return [] if content is None else [(where, content)]


def _parts_within(part: Any, where: str) -> Parts:
    """The parts of a document that is texts and images, after its title; none of another part."""
    source = part.get("source") if isinstance(part, dict) and part.get("type") == "document" else None
    kind = str(source.get("type")) if isinstance(source, dict) else ""
    name = {"text": "data", "content": "content"}.get(kind)
    if source is None or name is None:
        return []
    heads = [x for x in (part.get("title"), part.get("context")) if isinstance(x, str) and x]
    return [(where, x) for x in heads] + parts_of(source.get(name), f"{where}.source.{name}")


def _is_part(value: Any) -> bool:
    """Whether a value in a tool's result has a form of the APIs: text, or an object of one of their types."""
    kind = value.get("type") if isinstance(value, dict) else ""
    return isinstance(value, str) or (isinstance(kind, str) and OF_APIS.search(kind) is not None)


def _is_item(part: tuple[str, Any]) -> bool:
    """Whether a part of a message is more than text: reasoning, a call or a result."""
    kind = part[1].get("type") if isinstance(part[1], dict) else None
    return isinstance(kind, str) and (kind in REASONING or kind.endswith(CALLS + RESULTS))


def _url_of(image: Json) -> tuple[str, str]:
    """The URL of an image in any API's form, ``""`` if it has none, and the name of the form."""
    source = image.get("source") or image.get("image_url") or image  # the latter as in MCP
    source = source if isinstance(source, dict) else {"url": source}
    url = source.get("url")
    data = source.get("data")
    if isinstance(data, str):
        url = f"data:;base64,{data}"
    form = f"image of source {source.get('type')}" if image["type"] == "image" else image["type"]
    return (url if isinstance(url, str) else ""), form


def _unsupported(kind: Any, where: str, url: str = "") -> ApiError:
    message = f"{where}: {str(kind or 'no type')[:50]} is not supported: send text, or images as data URLs or base64."
    if url and not is_data_url(url):
        message = f"{where}: the image is not a data URL (data:image/png;base64,...): it begins with {url[:20]!r}."
    return error_at(where, message)


def _mark(kind: Any) -> str:
    return f"[{str(kind or 'part')[:50]} left out]"


def error_at(where: str, message: str) -> ApiError:
    """The error 400 of what is at this place of a body."""
    return ApiError(400, message, param=re.split(r"[\[.]", where)[0])


def _text_of_unknown(part: Json) -> str:
    kind = str(part.get("type"))
    if kind in CHANGES:
        return f"{CHANGES[kind]}:\n{text_in(part)}"
    return "" if NO_TEXT.search(kind) else text_in(part)


def text_in(value: Any) -> str:
    """The text of a value of any form: its strings, but for identifiers and encoded data, in lines."""
    if isinstance(value, str):
        return value if value.strip() and not ENCODED.fullmatch(value) else ""
    if isinstance(value, dict):
        if value.get("type") in TEXTS and isinstance(value.get("text"), str):
            return str(value["text"])
        facts = {name: f"{name}: {json.dumps(x)}" for name in FACTS if isinstance(x := value.get(name), int)}
        value = [x for name, x in (value | facts).items() if not HIDDEN.fullmatch(name)]
    return "\n".join(filter(None, map(text_in, value))) if isinstance(value, list) else ""


def _thought_of(item: Json) -> str:
    """The text of reasoning: its own, the one that this server has encoded, or its summary."""
    given = item.get("thinking") or item.get("content") or ""
    if isinstance(given, list):
        given = "".join(str(part.get("text") or "") for part in given if isinstance(part, dict))
    with suppress(ValueError):
        given = given or base64.b64decode(str(item.get("encrypted_content") or ""), validate=True).decode()
    return given if isinstance(given, str) and given else text_in(item.get("summary"))


def _split_thoughts(message: Json, is_last: bool) -> None:
    """Tell the reasoning at the beginning of the assistant's text apart, as Qwen's templates do."""
    text = message["content"].lstrip()
    if END_OF_THINK not in text or "reasoning_content" in message:
        return
    message["reasoning_content"] = ""  # without it, templates take any text before ``</think>`` for reasoning
    if text.startswith(THINK):
        thought = text.removeprefix(THINK)
        end = end_of_reasoning(thought, END_OF_THINK)
        rest = "" if end is None else thought[end:].lstrip("\n")
        if end is not None and (rest or not is_last):
            message |= {"content": rest, "reasoning_content": thought[:end].removesuffix(END_OF_THINK)}


def _sort_results(messages: list[Json]) -> None:
    """Put the results of a turn's tools in the order of its calls: of calls with equal ids, in the order given. Results with
    other ids keep their places.
    """
    is_answer = [message["role"] == "assistant" for message in messages]
    turns = [i for i, (before, here) in enumerate(pairwise([False, *is_answer])) if here and not before]
    for start, end in pairwise([*turns, len(messages)]):
        order = defaultdict[str, list[int]](list)  # the numbers of the calls by their ids
        for n, call in enumerate(call for m in messages[start:end] for call in m.get("tool_calls", ())):
            order[call["id"]].append(n)
        order.pop("", None)
        results = [i for i in range(start, end) if messages[i]["role"] == "tool"]
        calls = {i: found for i in results if (found := order.get(messages[i]["tool_call_id"]))}
        places = {i: found.pop(0) if len(found) > 1 else found[0] for i, found in calls.items()}
        for i, result in zip(places, [messages[i] for i in sorted(places, key=places.__getitem__)]):
            messages[i] = result


def fold_roles(messages: list[Json]) -> list[Json]:
    """Make one system message of system and developer messages at the beginning, and marked user messages of later ones, where
    they stand: the prompt of a conversation remains a prefix of its continuations.
    """
    n = next((i for i, m in enumerate(messages) if m["role"] not in SYSTEM), len(messages))
    texts = [text for m in messages[:n] if (text := m.get("content"))]
    folded = [{"role": "system", "content": "\n\n".join(texts)}] if texts else []
    for m in messages[n:]:
        if m["role"] not in SYSTEM:
            folded.append(m)
        elif text := m.get("content"):
            folded.append({"role": "user", "content": f"<system>\n{text}\n</system>"})
    return folded


def full_name(space: str | None, name: str) -> str:
    return name if space is None else f"{space}__{name}"


def arguments_of(value: Any) -> Json:
    """The arguments of a call in a message, as an object. Invalid JSON, such as cut arguments, is kept as text."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            read = json.loads(value) if value.strip() else None
            json.dumps(read, ensure_ascii=False, allow_nan=False).encode()  # raises if a template could not write it
            value = read
    return value if isinstance(value, dict) else {} if value is None else {"arguments": value}
