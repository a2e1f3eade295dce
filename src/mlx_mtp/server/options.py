"""The options of a server: its validated flags."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..caches.single import KVOptions
from ..drafts.options import CopyDrafts
from ..sampling.sampler import AcceptanceName

NO_LIMIT = 2**31 + 1  # max_tokens of an answer that may use the rest of the context


@dataclass(frozen=True)
class Options:
    """The flags of ``mlx_mtp server`` by their names, as ``arguments.check`` returns them.

    Args:
        load (Mapping[str, Any]): The arguments of ``mlx_mtp.load`` for each served model.
        sampling (Mapping[str, float]): The given sampling flags, by the names of ``Sampling``.
    """

    model: str
    served_model_name: str | None
    adapter_path: str | None
    serve_model: list[str]
    allow_any_model: bool
    use_default_chat_template: bool
    chat_template_args: dict[str, Any]
    load: Mapping[str, Any]
    # HTTP
    host: str
    port: int
    allowed_origins: Sequence[str] | None
    allowed_hosts: Sequence[str]
    allowed_local_media_path: str | None
    allowed_media_domains: list[str]
    no_ui: bool
    log_level: str
    max_queue: int | None
    api_key: str | None
    # Generation
    sampling: Mapping[str, float]
    max_tokens: int  # of an answer whose request sets no limit
    decode_concurrency: int
    prefill_step_size: int
    max_token_gap: float
    min_decode_share: float
    # Drafts
    mtp: bool | str | None
    num_draft_tokens: int | Literal["auto"] | None
    copy_drafts: CopyDrafts | None
    acceptance: AcceptanceName | None
    # Memory
    max_memory: int | None
    prompt_cache_size: int | None
    prompt_cache_bytes: int | None
    prompt_cache_dir: str | None
    prompt_cache_disk_bytes: int | None
    kv_bits: int | None
    kv_group_size: int
    quantized_kv_start: int

    @property
    def kv(self) -> KVOptions:
        """The quantization of keys and values."""
        return KVOptions(
            kv_bits=self.kv_bits, kv_group_size=self.kv_group_size, quantized_kv_start=self.quantized_kv_start
        )
