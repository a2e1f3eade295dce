"""A model with a head: what the loop calls of it, and the common part of the families' construction and loading."""

from collections.abc import Iterable, Mapping
from copy import copy
from typing import Any, TypeVar, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import gather_last_axis

from ...errors import MTPError
from ..caches.fingerprint import Fingerprinted
from ..caches.prompt_cache import PromptCache
from ..distributed import Ranks
from ..drafts.options import TextOptions, asks_for_copies
from ..drafts.settings import DraftLMHead, DraftSettings
from ..layers.attention import AttentionLayer
from ..layers.compiled import Compiler
from ..layers.mtp import has_head
from ..layers.passes import DevicePasses, in_pass, pass_over
from ..layers.recurrence import RecurrentLayer
from ..pacing.step_times import Pace
from .family import COPIES, Family, shapes_of
from .head_weights import head_names, sanitize_head
from .rope import MRoPE

T = TypeVar("T")


class MTPModel(Fingerprinted):
    """A model with its MTP head. List it, or ``MTPTextModel``, before mlx-lm's model among the bases."""

    family: Family
    args: Any
    mtp: Any
    model: Any  # the backbone, with ``embed_tokens``
    layers: Any
    parameters: Any
    ngrams: Any = None  # the hashes and tables of n-gram embeddings, if the model has any
    ranks: Ranks | None = None  # the ranks that run the model, set by ``mlx_mtp.load``
    vision: Any = None  # the checkpoint's ``images.tower.Vision``, set by ``mlx_mtp.load``
    sharding_group: mx.distributed.Group | None = None  # of the ranks that have a part of the output layer each
    head_acceptance_rate: float | None = None  # of first drafts on built-in text, set by ``mlx_mtp.load``
    fetched_head: Any = None  # the ``heads.originals.FetchedHead`` that it drafts with, set by ``mlx_mtp.load``

    def __init__(self, args: Any):
        super().__init__(args)  # type: ignore[call-arg]
        self.device = DevicePasses()
        self.draft_settings = DraftSettings()
        self.pace = Pace()

    def __call__(
        self,
        inputs: mx.array,
        cache: list[Any] | None = None,
        input_embeddings: mx.array | None = None,
        *,
        return_hidden: bool = False,
        n_confirmed: int = 0,
        compiler: Compiler | None = None,
    ) -> Any:
        """mlx-lm's call: token ids [B, T] or embeddings [B, T, H] -> logits [B, T, V].

        Args:
            return_hidden: Also return the output of the final norm, [B, T, H].
            n_confirmed: The number of tokens that are committed. The others are drafts: the caches of recurrent layers can roll
                back to any of them. 0 or T: a plain pass.
            compiler: Compiles the pass; ``None``: it runs as in mlx-lm.
        """
        n = len(self.layers)
        embeddings = {} if input_embeddings is None else {"input_embeddings": input_embeddings}
        positions = PromptCache(cache, n).positions() if cache is not None and len(cache) == n + 2 else None
        T = inputs.shape[1]
        pass_ = pass_over(T, self.device, n_confirmed if n_confirmed < T else 0, compiler, positions)
        with in_pass(pass_):
            # Only the layers' entries: in a pipeline, mlx-lm's backbone writes to the last one.
            hidden = self.model(inputs, None if cache is None else cache[:n], **embeddings)
            logits = self.logits(hidden)
        return (logits, hidden) if return_hidden else logits

    def logits(self, hidden: mx.array) -> mx.array:
        """The backbone's hidden states [B, T, H] -> logits [B, T, V]."""
        return self.project(hidden)

    def draft_logits(self, out: mx.array, lm_head: DraftLMHead | None = None) -> mx.array:
        """The head's output [B, T, H] -> logits [B, T, V], by the model's own output layer or that of cheaper drafts."""
        hidden = self.mtp.output(out)
        return self.project(hidden) if lm_head is None else lm_head(hidden, self.vocab_size)

    def project(self, hidden: mx.array) -> mx.array:
        text = language_model(self)
        if text.args.tie_word_embeddings:
            return self.model.embed_tokens.as_linear(hidden)
        out = text.lm_head(hidden)
        return out if text.sharding_group is None else gather_last_axis(out, text.sharding_group)

    def make_cache(self) -> list[Any]:
        return [layer.make_cache() for layer in self.layers]

    @property
    def text_args(self) -> Any:
        """Those of the whole language model, also on a rank with a part of it."""
        return language_model(self).args

    @property
    def vocab_size(self) -> int:
        """The number of token ids: the rows of the embedding and of the output layer, of which a rank may have only some."""
        return self.text_args.vocab_size

    @property
    def output_layer(self) -> nn.Module:
        return self.model.embed_tokens if self.text_args.tie_word_embeddings else language_model(self).lm_head

    @property
    def hidden_size(self) -> int:
        """The size of a hidden state, which the head takes."""
        return self.text_args.hidden_size

    @property
    def head_layer(self) -> Any:
        """The decoder layer of the head; ``None`` without a head."""
        return self.mtp.layers[0] if has_head(self) else None

    @property
    def attention_layers(self) -> list[AttentionLayer]:
        return [layer for layer in self.layers if isinstance(layer, AttentionLayer)]

    @property
    def recurrent_layers(self) -> list[RecurrentLayer]:
        return [layer for layer in self.layers if isinstance(layer, RecurrentLayer)]

    @property
    def no_images(self) -> str | None:
        """Why it takes no images; ``None`` if it takes them, whose positions have three axes."""
        if self.family.no_images is not None:
            return self.family.no_images
        if all(isinstance(layer.self_attn.rope, MRoPE) for layer in self.attention_layers):
            return None
        return "The model takes no images: its positions have one axis, or are scaled (YaRN)."

    def sanitize(
        self, weights: dict[str, mx.array], head: Mapping[str, mx.array] | None = None, raw: bool = False
    ) -> dict[str, mx.array]:
        """mlx-lm's ``sanitize``, which drops the head, and then that of ``head``, by default the one in ``weights``."""
        weights, inside = head_names(self).split(weights)
        if head is None:
            head = {name: w for name, w in inside.items() if name not in COPIES}
            raw = self.family.is_raw(shapes_of(weights))
        weights = super().sanitize(weights)  # type: ignore[misc]
        if has_head(self):
            sanitized = sanitize_head(self, head, raw and self.family.shifts_norms)
            weights.update({self.head_prefix + name: w for name, w in sanitized.items()})
        return weights


def language_model(model: Any) -> Any:
    return getattr(model, "language_model", model)


def check_model(model: nn.Module, options: TextOptions) -> MTPModel:
    """Return the model, or raise an MTPError if it cannot make such drafts."""
    if not has_head(model):
        if not asks_for_copies(options.copy_drafts) and options.num_draft_tokens != 0:
            raise MTPError("The model has no MTP head: load it with mlx_mtp.load, or generate without MTP.")
        if not isinstance(model, MTPModel):
            raise MTPError(
                "Copy drafts require a model that can roll back: load it with mlx_mtp.load(..., copy_drafts=True)."
            )
    return cast(MTPModel, model)


def n_ids(model: nn.Module) -> int:
    """The number of token ids of a model, also of mlx-lm's own: the rows of its embedding."""
    embeddings = (m for m in model.modules() if hasattr(m, "as_linear") and "weight" in m)
    return model.vocab_size if isinstance(model, MTPModel) else max(m.weight.shape[0] for m in embeddings)


def check_ids(ids: Iterable[int], n: int, name: str) -> None:
    """Raise an MTPError if an id is not one of a model's ``n``: an array would be read or written beyond its end."""
    if (wrong := next((i for i in ids if not 0 <= i < n), None)) is not None:
        raise MTPError(f"{name} has the token {wrong}, and the model's are 0 to {n - 1}.")


class MTPTextModel(MTPModel):
    """A model whose language model is all of it, with the arguments of its config.json."""

    def __init__(self, args: Any):
        super().__init__(without_layers(args))
        self.args = args
        add_layers(self, args, self.family)


class TokensOnly(MTPTextModel):
    """One without input embeddings, which mlx-lm's model does not support."""

    def __call__(self, inputs: mx.array, cache: list[Any] | None = None, **options: Any) -> Any:  # type: ignore[override]
        return super().__call__(inputs, cache, **options)


def drop_head(model: Any) -> None:
    """Let a model generate without drafts of its head from now on."""
    language_model(model).pop("mtp")


def without_layers(args: Any) -> Any:
    """Arguments for mlx-lm's constructors, whose layers would only be replaced."""
    args = copy(args)
    args.num_hidden_layers = 0
    return args


def add_layers(model: Any, args: Any, family: Family) -> None:
    """Give a language model layers that can roll back, and the head if its arguments have one."""
    model.model.layers = [family.layer(args, i) for i in range(args.num_hidden_layers)]
    if args.mtp_num_hidden_layers > 0:
        model.mtp = family.make_head(args)
