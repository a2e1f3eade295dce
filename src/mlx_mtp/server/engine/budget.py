"""A limit on the tokens of a model's reasoning, at which its end is forced."""

from functools import lru_cache
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import LogitsProcessor, make_logits_processors

from ..answers.answer import QwenReader
from ..answers.structured_output import make_output_grammar
from ..request import Prompt, Request

MOST_FORCED = 64  # tokens that may end reasoning: breaks, the end of a code block, and the tag


def make_processors(tokenizer: Any, request: Request, prompt: Prompt) -> list[LogitsProcessor]:
    """The logits processors of a request: mlx-lm's, the grammar's and the thinking budget's."""
    asked = request.args.logits
    processors: list[LogitsProcessor] = make_logits_processors(
        asked.logit_bias,
        asked.repetition_penalty,
        asked.repetition_context_size,
        asked.presence_penalty,
        asked.presence_context_size,
        asked.frequency_penalty,
        asked.frequency_context_size,
    )
    processors += make_output_grammar(tokenizer, request, prompt.in_reasoning)
    budget = request.thinking.limit(tokenizer)
    if budget is not None:
        processors.append(make_budget(tokenizer, len(prompt.tokens), prompt.in_reasoning, budget))
    return processors


def make_budget(tokenizer: Any, n_prompt: int, in_reasoning: bool, budget: int) -> LogitsProcessor:
    """A logits processor that ends reasoning after ``budget`` tokens, as the chat template would. It closes a code block first.

    It depends on its arguments alone, so that it can be asked at any position of a window of drafts.

    Args:
        n_prompt (int): The prompt's number of tokens.
        in_reasoning (bool): Whether the prompt has begun the reasoning.
    """

    @lru_cache(maxsize=1)  # of a few positions in a row
    def ending(thought: tuple[int, ...]) -> list[int]:
        """The tokens that end the reasoning behind these; none if there is none, or it has ended."""
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
