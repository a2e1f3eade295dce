"""``mlx_mtp server`` with a model that does what the last message of the user says.

- ``SAY TEXT``: It says the text.
- ``FILL JSON``: It calls the first tool with these arguments. Without tools, it says them.
- ``ADD``: It adds to 1 with the tool ``add`` three times, each time to the last sum, and says the sum.
- ``REPEAT``: It says its last answer again.

Before that it thinks "Hm.". A token that the grammar of the request forbids fails the request.
"""

import json
import math
from typing import Any

import mlx.core as mx

from tests.support.scripted_server import Say, serve_script
from tests.support.tool_texts import render


class Obedient(Say):
    """Says only what is allowed."""

    def __call__(self, logprobs: mx.array) -> mx.array:
        token = super().__call__(logprobs)
        if logprobs[0, token].item() == -math.inf:
            raise ValueError(f"The grammar forbids the token {token.item()}.")
        return token


def text_of(request: Any) -> str:
    """What the model says."""
    n = max(i for i, message in enumerate(request.messages) if message["role"] == "user")
    word, _, rest = request.messages[n]["content"].partition(" ")
    results = [message["content"] for message in request.messages[n:] if message["role"] == "tool"]
    tools = [tool["function"]["name"] for tool in request.tools or []]
    if word == "FILL" and tools:
        return render(tools[0], json.loads(rest), json_scalars=True)
    if word == "ADD" and len(results) < 3:
        return render("add", {"a": int([1, *results][-1]), "b": 1})
    if word == "ADD":
        return f"The sum is {results[-1]}."
    if word == "REPEAT":
        return next((m["content"] for m in reversed(request.messages) if m["role"] == "assistant"), "Nothing.")
    return json.dumps(json.loads(rest)) if word == "FILL" else rest  # as Python writes it


if __name__ == "__main__":
    serve_script(lambda request: (f"Hm.\n</think>\n\n{text_of(request)}", True), Obedient)
