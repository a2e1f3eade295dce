"""The memory of the Responses API: responses that later requests refer to, whole or by an item, within a limit of bytes."""

from functools import cache
from threading import Lock
from typing import Any

from pydantic_core import from_json, to_json

from ...text.schema import Json
from ..request import ApiError
from .common import new_id

MAX_RESPONSES = 10_000
NOT_STORED = "Items are not persisted when `store` is set to false: send the item itself."
Key = tuple[str, str]  # an id, after the API key of the request


class StoredResponses:
    """Responses and their items. Those that were not used for longest make room. Methods may be called in any thread."""

    def __init__(self, max_bytes: int):
        self.max_bytes, self.nbytes, self.lock = max_bytes, 0, Lock()
        self.stored: dict[Key, tuple[bytes, list[Key]]] = {}  # JSON and the keys of all items, in the order of use
        self.responses: dict[Key, Key] = {}  # of items

    def keep(self, owner: str, items: list[Json], response: Json) -> None:
        """Store a response and the items of its input, in the form in which OpenAI lists them."""
        items, key = [_listed(item) for item in items], (owner, response["id"])
        keys = [(owner, item["id"]) for item in (*items, *response["output"])]
        content = to_json({"items": items, "response": response})
        with self.lock:
            self.stored[key] = content, keys
            self.responses |= dict.fromkeys(keys, key)
            self.nbytes += len(content)
            while self.nbytes > self.max_bytes or len(self.stored) > MAX_RESPONSES:
                self._drop(next(iter(self.stored)))

    def _drop(self, key: Key) -> None:
        content, keys = self.stored.pop(key, (b"", []))
        self.nbytes -= len(content)
        for item in keys:
            if self.responses.get(item) == key:
                del self.responses[item]

    def get(self, key: Key, what: str = "Response", **names: str) -> Json:
        """A ``response`` and the ``items`` of its own input. If it is not stored, an ApiError with these names."""
        with self.lock:
            if key not in self.stored:
                raise ApiError(404, f"{what} with id '{key[1][:100]}' not found.", **names)
            self.stored[key] = self.stored.pop(key)
            content, _ = self.stored[key]
        read: Json = from_json(content)
        return read

    def delete(self, key: Key) -> None:
        self.get(key)
        with self.lock:
            self._drop(key)

    def before(self, owner: str, id: str | None) -> list[Json]:
        """The items of a conversation up to a response, with its output."""
        items, names = list[Json](), {"param": "previous_response_id", "code": "previous_response_not_found"}
        while id is not None:
            content = self.get((owner, id), "Previous response", **names)
            items = [*content["items"], *content["response"]["output"], *items]
            id = content["response"]["previous_response_id"]
        return items

    def list_items(self, key: Key, order: str) -> Json:
        """All items that a response was made of, as one page of a list."""
        content = self.get(key)
        items = [*self.before(key[0], content["response"]["previous_response_id"]), *content["items"]]
        items = items if order == "asc" else items[::-1]
        ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]}
        return {"object": "list", "data": items, "has_more": False, **ends}

    def recall(self, owner: str, body: Json) -> Json:
        """A body with items in place of references to them, and ``earlier``, the items of the conversation before it."""
        read = cache(self.get)  # once, however many items of a response are named

        def resolved(item: Any) -> Any:
            if not _is_reference(item):
                return item
            if (key := self.responses.get((owner, item["id"]))) is None:
                raise ApiError(404, f"Item with id '{item['id'][:100]}' not found. {NOT_STORED}", param="input")
            content = read(key)
            return next(x for x in (*content["items"], *content["response"]["output"]) if x["id"] == item["id"])

        previous, given = body.get("previous_response_id"), body.get("input")
        recalled: Json = {"earlier": self.before(owner, previous) if isinstance(previous, str) else []}
        recalled |= {"input": [resolved(item) for item in given]} if isinstance(given, list) else {}
        return body | recalled | ({} if self.max_bytes else {"store": False})


def _is_reference(item: Any) -> bool:
    """Whether an item only names another one, by its id; the type may be left out."""
    fields = {name: x for name, x in item.items() if x is not None} if isinstance(item, dict) else {}
    return isinstance(fields.get("id"), str) and (fields.get("type") == "item_reference" or fields.keys() == {"id"})


def _listed(item: Json) -> Json:
    """An item as it is listed: everything has an id, and a message parts."""
    id, kind, text = item.get("id"), item.get("type") or "message", item.get("content")
    item = item | {"type": kind, "id": id if isinstance(id, str) else new_id("msg")}
    if kind == "message" and isinstance(text, str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        item["content"] = [{"type": part, "text": text}]
    return item
