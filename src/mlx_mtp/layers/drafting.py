"""The configuration of a model's drafts and passes, ``model.drafting``, which ``mlx_mtp.load`` sets."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .draft_lm_head import DraftLMHead


@dataclass(frozen=True)
class Settings:
    """Tuned settings: arguments of ``mlx_mtp.load``, and the defaults of ``num_draft_tokens`` and ``draft_p_min``."""

    num_draft_tokens: int | Literal["auto"] = "auto"  # 0 is plain decoding
    mtp_bits: int | None = None
    draft_head_bits: int | None = None
    draft_vocab: int | None = None
    draft_p_min: float = 0.0
    seconds: Mapping[int, float] = field(default_factory=dict)  # times of steps by depth, with which "auto" begins
    attention_rows: int | None = None  # this and the following fields as in DraftConfig
    compiled: bool = True
    pieces: int | None = None

    def __str__(self) -> str:
        n = self.num_draft_tokens
        words = [n if n == "auto" else "off" if n == 0 else f"--num-draft-tokens {n}"]
        for name in ("mtp_bits", "draft_head_bits", "draft_vocab"):
            if (value := getattr(self, name)) is not None:
                words.append(f"--{name.replace('_', '-')} {value}")
        if self.draft_p_min > 0:
            words.append(f"--draft-p-min {self.draft_p_min}")
        if self.attention_rows is not None:
            words.append(f"attention_rows={self.attention_rows}")
        if not self.compiled:
            words.append("compiled=False")
        if self.pieces is not None:
            words.append(f"pieces={self.pieces}")
        return " ".join(words)


@dataclass
class DraftConfig:
    """
    Args:
        lm_head (DraftLMHead, optional): The output layer of the drafts. Default: ``None``, the model's own.
        tuned (Settings, optional): The settings of ``--tune``. Default: ``None``, not tuned.
        attention_rows (int, optional): The most tokens of a verify pass that attention takes at a time, see ``attention.py``.
          Default: ``None``, all.
        compiled (bool): Whether passes over a few tokens are compiled, see ``compiled.py``. Default: ``True``.
        pieces (int, optional): As in ``Pass``.
        timing (pacing.timing.Timing, optional): The times of steps on this machine, made by ``pacing`` and updated by
          ``decoding``. It is an attribute of the model so that all generations share it.
    """

    lm_head: DraftLMHead | None = None
    tuned: Settings | None = None
    attention_rows: int | None = None
    compiled: bool = True
    pieces: int | None = None
    timing: Any = None
