"""The memory of the Responses API: responses that later requests refer to, whole or by an item, within a limit of bytes."""

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from threading import Lock
from typing import Any

from pydantic_core import from_json, to_json

from ...text.schema import Json
from ..request import ApiError

MAX_RESPONSES = 10_000
MAX_RECALLED = 64 << 20  # bytes of the items that a request refers to, as of a body
RESPONSE = "resp_"  # the prefix of a response's id
HEX = 32  # the digits behind it, which the ids of its items have as well
Key = tuple[str, str]  # an id, after the API key of the request


class StoredResponses:
    """Responses and their items. Those that were not used for longest make room. Methods may be called in any thread."""

    def __init__(self, max_bytes: int):
        self.max_bytes, self.nbytes, self.lock = max_bytes, 0, Lock()
        # JSON of the input's items and the response, in the order of use
        self.stored: dict[Key, tuple[bytes, bytes]] = {}

    def keep(self, owner: str, items: list[Json], response: Json) -> None:
        """Store a response that there is room for, and the items of its input in the form in which OpenAI lists them."""
        id = response["id"]
        listed = [_listed(item, f"msg_{id.removeprefix(RESPONSE)}i{i}") for i, item in enumerate(items)]
        content = to_json(listed), to_json(response)
        n_bytes = sum(map(len, content))
        if n_bytes > self.max_bytes:
            return
        with self.lock:
            self.stored[owner, id] = content
            self.nbytes += n_bytes
            while self.nbytes > self.max_bytes or len(self.stored) > MAX_RESPONSES:
                self._drop(next(iter(self.stored)))

    def _drop(self, key: Key) -> None:
        self.nbytes -= sum(map(len, self.stored.pop(key, ())))

    def get(self, key: Key, what: str = "Response", **names: str) -> tuple[bytes, bytes]:
        """JSON of the items of a response's input, and of the response; an ApiError with these names if it is not stored."""
        with self.lock:
            if key not in self.stored:
                raise ApiError(404, f"{what} with id '{key[1][:100]}' not found.", **names)
            content = self.stored[key] = self.stored.pop(key)
        return content

    def delete(self, key: Key) -> None:
        self.get(key)
        with self.lock:
            self._drop(key)

    def before(self, owner: str, id: str | None) -> list[Json]:
        """The items of a conversation up to a response, with its output."""
        return _bounded(self._backwards(owner, id))[::-1]

    def _backwards(self, owner: str, id: str | None) -> Iterator[Json]:
        names = {"param": "previous_response_id", "code": "previous_response_not_found"}
        while id is not None:
            own, response = map(from_json, self.get((owner, id), "Previous response", **names))
            yield from reversed([*own, *response["output"]])
            id = response["previous_response_id"]

    def list_items(self, key: Key, order: str) -> Json:
        """All items that a response was made of, as one page of a list."""
        own, response = map(from_json, self.get(key))
        items = [*self.before(key[0], response["previous_response_id"]), *own]
        items = items if order == "asc" else items[::-1]
        ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]}
        return {"object": "list", "data": items, "has_more": False, **ends}

    def item(self, owner: str, id: str, read: Callable[[bytes], Any]) -> Json:
        """An item of a response or of its input."""
        key = owner, RESPONSE + id.partition("_")[2][:HEX]
        own, response = self.get(key) if key in self.stored else (b"[]", b'{"output": []}')
        found = [x for x in read(response)["output"] if x["id"] == id] or [x for x in read(own) if x["id"] == id]
        if not found:
            message = f"Item with id '{id[:100]}' not found. Items are not persisted when `store` is set to false."
            raise ApiError(404, message, param="input")
        return dict(found[0])

    def recall(self, owner: str, body: Json) -> Json:
        """A body with items in place of references to them, and ``earlier``, the items of the conversation before it."""
        previous = body.get("previous_response_id")
        given = body.get("input")
        recalled: Json = {"earlier": self.before(owner, previous) if isinstance(previous, str) else []}
        if isinstance(given, list):
            read = cache(from_json)  # each response once, of whose items many may be named
            found = iter(_bounded(self.item(owner, item["id"], read) for item in given if _is_reference(item)))
            recalled["input"] = [next(found) if _is_reference(item) else item for item in given]
        return body | recalled | ({} if self.max_bytes else {"store": False})


def _bounded(items: Iterable[Json]) -> list[Json]:
    """Items that are together no larger than a body may be."""
    found = list[Json]()
    n_bytes = 0
    for item in items:
        n_bytes += len(to_json(item))
        if n_bytes > MAX_RECALLED:
            message = f"The stored items that the request refers to are larger than {MAX_RECALLED} bytes"
            raise ApiError(413, f"{message}: begin a new conversation.")
        found.append(item)
    return found


def _is_reference(item: Any) -> bool:
    """Whether an item only names another one, by its id; the type may be left out."""
    fields = {name: x for name, x in item.items() if x is not None} if isinstance(item, dict) else {}
    return isinstance(fields.get("id"), str) and (fields.get("type") == "item_reference" or fields.keys() == {"id"})


def _listed(item: Json, new_id: str) -> Json:
    """An item as it is listed: everything has an id, and a message parts."""
    id = item.get("id")
    kind = item.get("type") or "message"
    text = item.get("content")
    if kind == "message" and isinstance(text, str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        item = item | {"content": [{"type": part, "text": text}]}
    return item | {"type": kind, "id": id if isinstance(id, str) else new_id}
