"""The options ``num_draft_tokens``, ``copy_drafts`` and ``draft_p_min``, for the library, the commands and the server."""

from dataclasses import dataclass
from typing import Any, Literal, cast

import mlx.nn as nn

from ..caches.prompt_cache import has_head
from ..layers.drafting import Settings
from ..models.mixin import MTPMixin
from ..models.protocol import MTPModel
from ..pacing.depth import MAX_COPY_TOKENS, MAX_DRAFT_TOKENS, Depth

NumDraftTokens = int | Literal["auto"] | Depth
CopyDrafts = int | Literal["auto", "off"]


@dataclass(frozen=True)
class DraftOptions:
    """The options of a text's drafts. Made by ``resolve``.

    Args:
        num_draft_tokens (Union[int, str, Depth]): The number of the head's drafts in a step.
        copy_drafts (Union[int, str]): The most tokens to copy in a step.
        p_min (float): The least probability of a draft.
    """

    num_draft_tokens: NumDraftTokens
    copy_drafts: CopyDrafts
    p_min: float

    @property
    def most(self) -> int:
        """The most drafts that a step may have."""
        n = self.num_draft_tokens if isinstance(self.num_draft_tokens, int) else MAX_DRAFT_TOKENS
        return max(n, {"auto": MAX_COPY_TOKENS, "off": 0}.get(self.copy_drafts, self.copy_drafts))  # type: ignore


def resolve(
    model: MTPModel,
    num_draft_tokens: NumDraftTokens | None = None,
    copy_drafts: CopyDrafts | None = None,
    draft_p_min: float | None = None,
) -> DraftOptions:
    """Complete the given options by the tuned settings. A given number of drafts turns copies off by default.

    Raises:
        ValueError: An option is out of range, or requires a head.
    """
    tuned = model.drafting.tuned or Settings()
    if copy_drafts is None:
        copy_drafts = "off" if isinstance(num_draft_tokens, int) else "auto"
    if num_draft_tokens is None:
        num_draft_tokens = tuned.num_draft_tokens if has_head(model) else 0
    if draft_p_min is None:
        draft_p_min = tuned.draft_p_min
    check_num_draft_tokens(num_draft_tokens)
    check_copy_drafts(copy_drafts)
    if not has_head(model) and num_draft_tokens != 0:
        raise ValueError(f"num_draft_tokens must be 0 for a model without an MTP head, not {num_draft_tokens}.")
    if not 0 <= draft_p_min <= 1:
        raise ValueError(f"draft_p_min must be a probability, from 0 to 1, not {draft_p_min}.")
    return DraftOptions(num_draft_tokens, copy_drafts, draft_p_min)


def check_num_draft_tokens(value: Any, name: str = "num_draft_tokens") -> None:
    """Raise a ValueError if the option of this name is out of range."""
    is_number = isinstance(value, int) and 0 <= value <= MAX_DRAFT_TOKENS
    if value != "auto" and not isinstance(value, Depth) and not is_number:
        raise ValueError(f"{name} must be auto or from 0 to {MAX_DRAFT_TOKENS}, not {value}.")


def check_copy_drafts(value: Any, name: str = "copy_drafts") -> None:
    """Raise a ValueError if the option of this name is out of range."""
    if value not in ("auto", "off") and not (isinstance(value, int) and 1 <= value <= MAX_COPY_TOKENS):
        raise ValueError(f"{name} must be auto, off or from 1 to {MAX_COPY_TOKENS}, not {value}.")


def asks_for_copies(copy_drafts: CopyDrafts | None) -> bool:
    return copy_drafts not in (None, "off")


def check_model(
    model: nn.Module, num_draft_tokens: NumDraftTokens | None = None, copy_drafts: CopyDrafts | None = None
) -> MTPModel:
    """
    Raises:
        ValueError: The model cannot make such drafts.
    """
    if not has_head(model):
        if not asks_for_copies(copy_drafts) and num_draft_tokens != 0:
            raise ValueError("The model has no MTP head: load it with mlx_mtp.load, or generate without MTP.")
        if not isinstance(model, MTPMixin):
            raise ValueError(
                "Copy drafts require a model that can roll back: load it with mlx_mtp.load(..., copy_drafts=True)."
            )
    return cast(MTPModel, model)
