"""How long a model may think before it answers, as a request asks for it."""

from dataclasses import dataclass
from typing import Any, Literal

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
NO_THINKING = ("none", "minimal")
BUDGETS = {"low": 1024, "medium": 8192}  # tokens; the others have no limit
VARIABLE = "reasoning_effort"  # of a chat template that knows of it


@dataclass(frozen=True)
class Thinking:
    """A request's fields for thinking; ``None`` where they are absent.

    Args:
        enabled (bool, optional): Whether to think.
        effort (str, optional): How much, by OpenAI's names.
        budget (int, optional): After how many tokens of reasoning its end is forced.
    """

    enabled: bool | None = None
    effort: Effort | None = None
    budget: int | None = None

    def variables(self) -> dict[str, Any]:
        """Of the chat template."""
        enabled = self.enabled
        if enabled is None and self.effort is not None:
            enabled = self.effort not in NO_THINKING
        if enabled is None and self.budget is not None:
            enabled = self.budget > 0
        effort = {VARIABLE: self.effort} if self.effort is not None and enabled else {}
        return effort | ({} if enabled is None else {"enable_thinking": enabled})

    def limit(self, tokenizer: Any) -> int | None:
        """The tokens of reasoning after which its end is forced; those of an effort only where no template knows of it."""
        if not tokenizer.has_thinking:
            return None
        if self.budget is None and VARIABLE not in str(tokenizer.chat_template):
            return BUDGETS.get(self.effort or "")
        return self.budget
