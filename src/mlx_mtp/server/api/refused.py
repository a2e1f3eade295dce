"""Unsupported fields that would change the answer, by API.

For each field: the values that change nothing, and the alternative. All other unknown fields are ignored.
"""

from collections.abc import Mapping, Sequence
from typing import Any

Refused = Mapping[str, tuple[Sequence[Any], str]]

OUTPUTS = "docs/server.md#structured-output lists those that are supported"
ALL: Refused = {
    "modalities": ([["text"]], "answers are texts"),
    "audio": ([], "answers are texts"),
    "web_search_options": ([], "let the client search"),
    "structured_outputs": ([{}], OUTPUTS),
    "guided_choice": ([[]], OUTPUTS),
    "grammar": ([""], OUTPUTS),
    "allowed_token_ids": ([[]], "send logit_bias"),
    "bad_words": ([[]], "send logit_bias"),
    "prompt_logprobs": ([], "only the tokens of an answer have log probabilities"),
}
# /v1/chat/completions and /v1/completions.
OPENAI: Refused = {
    **ALL,
    "functions": ([[]], "send tools"),
    "function_call": (["auto", "none"], "send tools"),
}
COMPLETIONS: Refused = {
    **OPENAI,
    "tool_choice": (["auto", "none"], "send tools to /v1/chat/completions"),
    "echo": ([False], "put the prompt before the text yourself"),
    "continue_final_message": ([False], "a text is continued without it"),
    "suffix": ([""], "write the model's own fill-in-the-middle tokens into the prompt"),
    "best_of": ([1], "send n, and choose"),
    "top_logprobs": ([], "send logprobs, a number"),
    **dict.fromkeys(
        ("enable_thinking", "thinking_budget", "reasoning_effort"),
        ([], "a text without a chat template has no thinking: leave it out"),
    ),
}
# Fields of OPENAI that the other APIs refuse.
OF_OPENAI: Refused = {
    "n": ([1], "send one request for each answer"),
    "response_format": ([{"type": "text"}], OUTPUTS),
    **dict.fromkeys(("json_schema", "guided_json", "guided_regex", "guided_grammar"), ([], OUTPUTS)),
    "n_predict": ([-1], "send the API's own limit of tokens"),
}
RESPONSES: Refused = {
    **ALL,
    **OF_OPENAI,
    "previous_response_id": ([], "send the whole conversation as input"),
    "conversation": ([], "send the whole conversation as input"),
    "prompt": ([], "send instructions and input"),
    "background": ([False], "leave it out"),
}
MESSAGES: Refused = {
    **ALL,
    **OF_OPENAI,
    "mcp_servers": ([[]], "let the client call the tools"),
}
