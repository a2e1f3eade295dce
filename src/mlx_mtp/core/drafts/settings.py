"""The settings of a model's drafts, which ``mlx_mtp.load`` sets."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from .lm_head import DraftLMHead


@dataclass(frozen=True)
class Settings:
    """Tuned settings: arguments of ``mlx_mtp.load``, and the defaults of ``num_draft_tokens`` and ``draft_p_min``."""

    num_draft_tokens: int | Literal["auto"] = "auto"  # 0 is plain decoding
    mtp_bits: int | None = None
    draft_head_bits: int | None = None
    draft_vocab: int | None = None
    draft_p_min: float = 0.0
    seconds: Mapping[int, float] = field(default_factory=dict, hash=False)  # of steps by draft length, for "auto"
    compiled: bool = True  # whether passes over a few tokens are

    def __str__(self) -> str:
        n = self.num_draft_tokens
        words = [n if n == "auto" else "off" if n == 0 else f"--num-draft-tokens {n}"]
        for name, value in vars(self).items():
            if name not in ("num_draft_tokens", "seconds") and value != getattr(Settings, name):
                is_flag = name.startswith(("mtp", "draft"))
                words.append(f"--{name.replace('_', '-')} {value}" if is_flag else f"{name}={value}")
        return " ".join(words)


@dataclass(frozen=True)
class DraftSettings:
    """``model.draft_settings``, by flags and ``--tune``."""

    tuned: Settings = Settings()  # of ``--tune``
    lm_head: DraftLMHead | None = None  # the output layer of the drafts; ``None``: the model's own

    @property
    def are_tuned(self) -> bool:
        return self.tuned != Settings()
