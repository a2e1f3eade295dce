"""The options of a text, for the library, the commands and the server."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, Literal

from mlx_lm.generate import StopSequences
from mlx_lm.sample_utils import LogitsProcessor, Sampler, greedy_sampler

from ...errors import MTPError
from ..pacing import MAX_COPY_TOKENS, MAX_DRAFT_TOKENS
from ..pacing.depth import Depth
from ..sampling.processors import keeps_state
from .settings import Settings

MAX_TOKENS = 256  # mlx-lm's default
NumDraftTokens = int | Literal["auto"] | Depth
CopyDrafts = int | Literal["auto", "off"]


@dataclass(frozen=True)
class TextOptions:
    """
    The options of one text. ``None`` is the default: of the batch generator, or of the model's tuned settings.

    Args:
        max_tokens (int, optional): The maximum number of tokens; below 0 for no limit. Default: ``256``, in batches ``128``.
        sampler (Sampler, optional): A sampler for sampling a token from a vector of log probabilities. Samplers of
          ``mlx_mtp.make_sampler`` define how drafts are accepted; with other samplers, a draft is accepted if the sampler
          chooses the same token. Default: ``None``, the most likely token.
        logits_processors (List[LogitsProcessor], optional): A list of functions that take tokens and logits and return the
          processed logits. A function is called at every position of a window, including positions that are then rejected, and
          for the drafts. With an object that may keep state (see ``mlx_mtp.core.sampling.processors``), there are no drafts,
          and all processors are called once per token, in order. Default: ``None``.
        stop_sequences (StopSequences, optional): In batches, mlx-lm's stop sequences. Default: ``None``, the generator's.
        num_draft_tokens (Union[int, str, Depth], optional): The number of tokens to draft in a step, 0 to 8. ``"auto"`` chooses
          the fastest number at each step, see ``mlx_mtp.Depth``. The model keeps the times of steps for later generations; pass
          a ``Depth`` to keep them separate, not in batches. Default: ``None``, the tuned settings that ``load`` found, or
          ``"auto"``.
        copy_drafts (Union[int, str], optional): If the text repeats itself, draft the tokens that followed: up to this many, 1
          to 16; ``"auto"``, if that is faster than the head's drafts; or ``"off"``. In batches, ``"auto"`` copies as many as
          fit in the window of the other drafts. A model without a head can only draft copies. Default: ``None``, ``"auto"``
          unless ``num_draft_tokens`` is given as a number.
        draft_p_min (float, optional): Stop drafting when the head's best token has a lower probability. Costs one more
          synchronization per step. Default: ``None``, the tuned settings, or ``0.0``.
    """

    max_tokens: int | None = None
    sampler: Sampler | None = None
    logits_processors: Sequence[LogitsProcessor] | None = None
    stop_sequences: StopSequences | None = None
    num_draft_tokens: NumDraftTokens | None = None
    copy_drafts: CopyDrafts | None = None
    draft_p_min: float | None = None

    @classmethod
    def given(cls, options: "TextOptions | None", keywords: Mapping[str, Any]) -> "TextOptions":
        """Options that are given whole, by keywords, or both: a keyword replaces the option of its name."""
        return replace(options or cls(), **keywords)

    def resolve(self, tuned: Settings, has_head: bool, batch: "TextOptions | None" = None) -> "TextOptions":
        """Complete the options by those of the batch, whose number of drafts is also the limit, and by the tuned settings."""
        options = self if batch is None else self.completed_by(batch)
        copies: CopyDrafts = "off" if isinstance(options.num_draft_tokens, int) else "auto"
        n: NumDraftTokens | None = tuned.num_draft_tokens if has_head else 0
        options = options.completed_by(TextOptions(MAX_TOKENS, None, None, None, n, copies, tuned.draft_p_min))
        options.check(in_batch=batch is not None)
        n = options.num_draft_tokens
        limit = None if batch is None else batch.num_draft_tokens
        if not has_head and n != 0:
            raise MTPError(f"num_draft_tokens must be 0 for a model without an MTP head, not {n}.")
        if options.keeps_state:
            return replace(options, num_draft_tokens=0, copy_drafts="off")
        if isinstance(limit, int) and not (isinstance(n, int) and n <= limit):
            return replace(options, num_draft_tokens=limit)
        return options

    def completed_by(self, defaults: "TextOptions") -> "TextOptions":
        return replace(defaults, **{name: value for name, value in vars(self).items() if value is not None})

    def check(self, in_batch: bool = False) -> None:
        """Raise an MTPError if an option of drafts is out of range, or the number of tokens is no integer."""
        n, copies, p_min = self.num_draft_tokens, self.copy_drafts, self.draft_p_min
        if self.max_tokens is not None and not isinstance(self.max_tokens, Integral):
            raise MTPError(f"max_tokens must be an integer, not {self.max_tokens}.")
        is_depth = isinstance(n, Depth) and not in_batch  # it has the times of one sequence
        if n not in (None, "auto") and not is_depth and not _is_number(n, 0, MAX_DRAFT_TOKENS):
            raise MTPError(f"num_draft_tokens must be auto or from 0 to {MAX_DRAFT_TOKENS}, not {n}.")
        if copies not in (None, "auto", "off") and not _is_number(copies, 1, MAX_COPY_TOKENS):
            raise MTPError(f"copy_drafts must be auto, off or from 1 to {MAX_COPY_TOKENS}, not {copies}.")
        if p_min is not None and not 0 <= p_min <= 1:
            raise MTPError(f"draft_p_min must be a probability, from 0 to 1, not {p_min}.")

    @property
    def keeps_state(self) -> bool:
        """Whether the sampler or a processor may keep state, so that the text has no drafts."""
        return any(map(keeps_state, (self.sampler or greedy_sampler, *(self.logits_processors or ()))))


def _is_number(value: Any, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high  # not bool


def asks_for_copies(copy_drafts: CopyDrafts | None) -> bool:
    return copy_drafts not in (None, "off")
