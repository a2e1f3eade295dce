"""A request's fields for thinking, and the limit of reasoning tokens, after which its end is forced."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.sample_utils import LogitsProcessor

from ..text.answer import QwenReader

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
NO_THINKING = ("none", "minimal")
BUDGETS = {"low": 1024, "medium": 8192}  # tokens; other efforts have no limit
VARIABLE = "reasoning_effort"  # the variable of chat templates that support efforts
MOST_FORCED = 64  # tokens to end the reasoning: line breaks, the end of a code block, and the tag


@dataclass(frozen=True)
class Thinking:
    """A request's fields for thinking; ``None`` for absent fields."""

    enabled: bool | None = None
    effort: Effort | None = None
    budget: int | None = None  # reasoning tokens, after which the end is forced

    def variables(self) -> dict[str, Any]:
        """The variables of the chat template."""
        enabled = self.enabled
        if enabled is None and self.effort is not None:
            enabled = self.effort not in NO_THINKING
        if enabled is None and self.budget is not None:
            enabled = self.budget > 0
        effort = {VARIABLE: self.effort} if self.effort is not None and enabled else {}
        return effort | ({} if enabled is None else {"enable_thinking": enabled})

    def limit(self, tokenizer: Any) -> int | None:
        """The reasoning tokens after which the end is forced; those of an effort only if the template does not support it."""
        if not tokenizer.has_thinking:
            return None
        if self.budget is None and VARIABLE not in str(tokenizer.chat_template):
            return BUDGETS.get(self.effort or "")
        return self.budget


def make_budget(tokenizer: Any, n_prompt: int, in_reasoning: bool, budget: int) -> LogitsProcessor:
    """A logits processor that ends reasoning after ``budget`` tokens, as in the chat template. It closes a code block first.

    It has no state, so it may be called for any position of a window.

    Args:
        n_prompt (int): The prompt's number of tokens.
        in_reasoning (bool): Whether the prompt ends within the reasoning.
    """

    @lru_cache(maxsize=1)  # consecutive positions have the same reasoning
    def ending(thought: tuple[int, ...]) -> list[int]:
        """The tokens that end the reasoning after these; none if it has ended."""
        marks = tokenizer.think_start, tokenizer.think_end
        reader = QwenReader(marks, in_reasoning, None)
        reader.add(tokenizer.decode([*thought]))
        text = reader.reasoning.closing if reader.in_reasoning else ""
        return list(tokenizer.encode(text, add_special_tokens=False))[:MOST_FORCED]

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        """tokens [N], logits [1, V]"""
        i = tokens.size - n_prompt - budget  # index of the ending's token
        if not 0 <= i < MOST_FORCED:
            return logits
        thought: Any = tokens[n_prompt : n_prompt + budget].tolist()
        end = ending(tuple(thought))
        if i >= len(end):
            return logits
        return mx.where(mx.arange(logits.shape[-1]) == end[i], mx.zeros_like(logits), -mx.inf)

    return process
