"""What differs between families of models. Each module of this folder has the ``FAMILY`` of its model type."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import mlx.core as mx

from ..layers.attention import AttentionLayer
from ..layers.layer import Layer
from ..layers.mtp import MTPModule
from ..layers.recurrence import RecurrentLayer

T = TypeVar("T")
Weights = dict[str, mx.array]

# Copies of the embedding and of the output layer that a head may have, by the names of parameters
COPIES = tuple(f"{module}.{part}" for module in ("embed_tokens", "lm_head") for part in ("weight", "scales", "biases"))
BACKBONE = ("model.", "language_model.", "lm_head.", "vision_tower.", "visual.")  # beside a head without a prefix


@dataclass(frozen=True, kw_only=True)
class HeadNames:
    """The names of a head's tensors in checkpoints.

    Args:
        prefix (str): An expression for the beginning of their names, beside tensors of the backbone. ``<N>`` stands for the
          number of the backbone's layers.
        marker (str): The name, without the prefix, of a tensor that only heads have.
        renamed (tuple): The beginnings of names without the prefix, each with that of ``MTPModule``'s parameters.
        written (str, optional): The prefix of the names in files that are written. Default: ``None``, that of the parameters of
          the model.
        expert (re.Pattern): Those of experts, as parameters, with groups for their number, projection and part: experts in one
          array or numbered, with or without gate and up in one, and named as in a dense layer.
    """

    prefix: str = r"(?:.*?\.)?mtp\."  # such as model.language_model.mtp.fc.weight
    marker: str = "pre_fc_norm_hidden.weight"
    renamed: tuple[tuple[str, str], ...] = (("", ""),)
    written: str | None = None
    expert: re.Pattern[str] = re.compile(
        r"layers\.0\.mlp\.(?:switch_mlp\.|experts\.)?(?:(\d+)\.)?((?:gate|up|down|gate_up)_proj)(?:\.(\d+))?"
        r"(?:\.(weight|scales|biases))?"
    )

    def of_layers(self, n: int | None) -> "HeadNames":
        """The names in a checkpoint with n layers."""
        written = None if self.written is None else self.written.replace("<N>", str(n))
        return replace(self, prefix=self.prefix.replace("<N>", str(n)), written=written)

    def parameter(self, name: str) -> str:
        """The parameter of a tensor, whose name has no prefix."""
        stored, renamed = next(pair for pair in self.renamed if name.startswith(pair[0]))
        return renamed + name.removeprefix(stored)

    def in_files(self, parameter: str, prefix: str) -> str:
        """The name with which a parameter is written, given the prefix of the parameters of the model."""
        stored, renamed = next(pair for pair in self.renamed if parameter.startswith(pair[1]))
        return (prefix if self.written is None else self.written) + stored + parameter.removeprefix(renamed)

    def split(self, weights: Mapping[str, T], is_bare: bool = False) -> tuple[dict[str, T], dict[str, T]]:
        """Split a checkpoint's tensors into (backbone, head). The head's have the names of ``MTPModule``'s parameters.

        In files of its own a head may have no prefix (``is_bare``), which its marker tells, also in another of these files.
        """
        backbone, head = dict[str, T](), dict[str, T]()
        of_head = re.compile(self.prefix + "(.+)")
        is_bare = is_bare or self.marker in weights
        for name, w in weights.items():
            if (found := of_head.fullmatch(name)) is not None:
                head[self.parameter(found[1])] = w
            elif is_bare and not name.startswith(BACKBONE):
                head[self.parameter(name)] = w
            else:
                backbone[name] = w
        return backbone, head


@dataclass(frozen=True, kw_only=True)
class Family:
    """What a model type tells of its models, of their checkpoints, and of what they cannot do.

    Args:
        text_args (type): The arguments of its language model, with ``mtp_num_hidden_layers``.
        attention (type): Its layer with attention, which takes the arguments and an index; also that of the head.
        recurrence (type, optional): Its recurrent layer. Default: ``None``, it has none.
        is_recurrent (Callable): Whether the layer of an index is recurrent, given the arguments.
        head_index (Callable): The index that the head's layer takes, given the arguments.
        head (type): Its head, which takes the arguments and the layer.
        names (HeadNames): The names of a head's tensors in its checkpoints.
        prepared (Callable): Gives a head's layer the parameters of mlx-lm's layer, which checkpoints have otherwise: of the
          arguments and the tensors.
        shifts_norms (bool): Whether Hugging Face's layout stores norms without the 1 that MLX's has.
        convolution (str, optional): The end of the name of a tensor that tells the layout: [C, 1, K] in Hugging Face's,
          [C, K, 1] in MLX's. Default: ``None``, both are the same.
        separates_head (bool): Whether conversions have the head in a file of its own, since mlx-lm's model keeps tensors that
          it does not know, and then fails.
        drafter (str, optional): The model type of a drafter, a folder with only a head, in mlx-vlm's layout.
        pack_of (str, optional): The model type whose packed weights, in float16, its models are. Heads and vision encoders of
          that type fit.
        tries_outputs (bool): Whether the first use of a head tries both inputs of a further draft, the head's output after its
          norm and before, and keeps the one with which more drafts are accepted. Default: ``False``, it is the former.
        repeats_heads (bool): Whether ranks can have fewer key-value heads than ranks, repeated.
        no_kv_bits (str, optional): Why keys and values cannot be quantized.
        needs_head (bool): Whether a checkpoint is expected to have a head. If not, one without a head, whose base model's is
          not found, is loaded as by mlx-lm.
        no_shard (str, optional): Why ranks cannot have a part of each layer.
        no_images (str, optional): Why its models take no images, even if checkpoints have a vision encoder.
    """

    text_args: Any
    attention: type[AttentionLayer]
    recurrence: type[RecurrentLayer] | None = None
    is_recurrent: Callable[[Any, int], bool] = lambda args, i: False
    head_index: Callable[[Any], int] = lambda args: args.num_hidden_layers
    head: type[MTPModule] = MTPModule
    names: HeadNames = HeadNames()
    prepared: Callable[[Any, Weights], Weights] = lambda args, head: head
    shifts_norms: bool = False
    convolution: str | None = None
    separates_head: bool = False
    drafter: str | None = None
    pack_of: str | None = None
    needs_head: bool = False
    tries_outputs: bool = False
    repeats_heads: bool = False
    no_kv_bits: str | None = None
    no_shard: str | None = None
    no_images: str | None = None

    def layer(self, args: Any, i: int) -> Layer:
        """The layer of an index, as mlx-lm makes it."""
        make: Any = self.recurrence if self.is_recurrent(args, i) else self.attention
        return make(args, i)

    def make_head(self, args: Any) -> MTPModule:
        make: Any = self.attention
        return self.head(args, make(args, self.head_index(args)))

    def is_raw(self, shapes: Mapping[str, Sequence[int]]) -> bool:
        """Whether tensors of these shapes are in Hugging Face's layout."""
        return any(self.tells_layout(name) and shape[-1] != 1 for name, shape in shapes.items())

    def tells_layout(self, name: str) -> bool:
        return self.convolution is not None and name.endswith(self.convolution)


def shapes_of(weights: Mapping[str, mx.array]) -> dict[str, tuple[int, ...]]:
    return {name: w.shape for name, w in weights.items()}
