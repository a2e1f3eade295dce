"""Load a checkpoint with its MTP head, or raise an error that explains the problem."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import _transform_awq_weights, load_model, load_tokenizer

from ..core.distributed import from_rank_0, raise_on_all
from ..core.drafts.settings import DraftSettings
from ..core.models import MODULES, model_module
from ..core.models.head_weights import is_head
from ..core.models.mixin import MTPModel, drop_head, n_ids
from ..core.pacing.step_times import Pace, StepTimes
from ..errors import MTPError
from ..images.tower import Vision, split_tower
from ..memory import CONTEXT, limit_restored_on_error
from . import AUTO
from .adapters import with_adapter
from .checks import dtype as dtypes
from .checks.self_test import ensure_tested
from .config import Config, check_config, ends_of_text, loading_errors
from .heads.acceptance import FLOOR, key_of, settle
from .heads.formats import Head, quantization_beside, read_head
from .heads.originals import awq_of, fetch_tower, forget
from .hub import WEIGHTS
from .ngram_files import open_tables
from .output import naming
from .part import evaluate, own_weights, shard
from .reader import CheckpointReader, model_tensors
from .resolve import Asked, Drafting, Found, resolve
from .settings import cheapen_drafts, find

log = logging.getLogger(__name__)


@limit_restored_on_error()
@dtypes.bfloat16_if_needed
def load(
    path_or_hf_repo: str,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | None = None,
    lazy: bool = False,
    return_config: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    *,
    mtp: bool | str = "auto",
    copy_drafts: bool = False,
    draft_vocab: int | None = None,
    mtp_bits: int | None = None,
    draft_head_bits: int | None = None,
    vision: bool | str = True,
    ngram_memory: bool | None = None,
    dtype: str = AUTO,
    settings: bool | str | Path = True,
    tensor_group: mx.distributed.Group | None = None,
    pipeline_group: mx.distributed.Group | None = None,
    max_memory: int | None = None,
    context: int = CONTEXT,
) -> Any:
    """Load a model, its MTP head and the tokenizer from a path or a Hugging Face repository.

    Other arguments are those of ``mlx_lm.load``; ``adapter_path`` may also have a LoRA adapter of ``peft``. Returns
    ``(model, tokenizer)``, with ``return_config`` also the config.

    Args:
        mtp (Union[bool, str]): ``"auto"`` for the model's own head or, if it has none, its base model's, which is found and
          downloaded once; ``"cached"`` for its own, or its base model's if that was downloaded before, or none; ``True`` for
          its own; ``False`` for none, as ``mlx_lm.load``; or the path or repository of a drafter in mlx-vlm's layout. With
          ``"auto"`` and ``"cached"``, a model of a family that only mlx-lm supports is loaded as by ``mlx_lm.load``, and
          generates without drafts. Default: ``"auto"``.
        copy_drafts (bool): Load a supported model for copies if it gets no head: ``mtp_generate_step(...,
          copy_drafts="auto")``. Default: ``False``.
        draft_vocab (int, optional): Draft from the first ``draft_vocab`` token ids, the special and stop tokens, and the tokens
          of the text; ``0`` uses all. Default: ``None``, the tuned settings, or all.
        mtp_bits (int, optional): Quantize the head's decoder layer in memory to this many bits. Default: ``None``.
        draft_head_bits (int, optional): Quantize a copy of ``lm_head`` for the drafts. Default: ``None``.
        vision (Union[bool, str]): ``"auto"`` to download the base model's vision encoder if the checkpoint of a supported model
          has none. Default: ``True``, the checkpoint's own, if it has one.
        ngram_memory (bool, optional): Load tables of n-gram embeddings into memory, or read rows from the files (``False``).
          Default: ``None``, load them if the model with them takes at most 60 % of the memory.
        dtype (str): The type of all weights that are not quantized, of scales, and so of activations and caches: ``"float16"``,
          ``"bfloat16"``, or ``"auto"`` for the backbone's own. On M1 and M2, which have no bfloat16 arithmetic, ``"auto"`` is
          float16 for checkpoints in bfloat16 unless ``lazy``. Default: ``"auto"``.
        settings (Union[bool, str, Path]): A file of ``mlx_mtp benchmark --tune``, ``True`` for the file in the cache folder, if
          any, or ``False`` for none. The arguments above override it. Default: ``True``.
        tensor_group (mx.distributed.Group, optional): The processes that run the model together, each with a part of every
          layer. All of them call this at the same point. Rank 0 reads the files of settings for all. Default: ``None``.
        pipeline_group (mx.distributed.Group, optional): The same, each with some of the layers. Default: ``None``.
        max_memory (int, optional): The maximum memory of this process, in bytes. In one process, a model that needs more is
          refused before it is read, unless it is lazy. Default: ``None``, MLX's limit on this machine.
        context (int): The number of tokens of a text that must also fit. Default: ``2048``.

    Raises:
        FileNotFoundError: The model or one of its files is missing, or with ``mtp="auto"`` the original of a model without a
          head.
        MTPError: The model type is not supported, the head is missing or incomplete, the model rejects the drafts of its
          original's head, a file is damaged, the model does not fit in the memory, it has no finite values in the ``dtype``
          asked for, or it cannot be divided among the processes.
    """
    asked = Asked(
        name=path_or_hf_repo, revision=revision, trust_remote_code=trust_remote_code, tokenizer_config=tokenizer_config,
        model_config=model_config or {}, adapter_path=adapter_path, lazy=lazy, mtp=mtp, copy_drafts=copy_drafts,
        drafting=(draft_vocab, mtp_bits, draft_head_bits), vision=vision, ngram_memory=ngram_memory, dtype=dtype,
        settings=settings, tensor_group=tensor_group, pipeline_group=pipeline_group, max_memory=max_memory, context=context,
    )  # fmt: skip
    found = resolve(asked)
    with raise_on_all(found.ranks):
        loaded = _read(asked, found)
    _adapt(asked, found, loaded)
    return (loaded.model, loaded.tokenizer, loaded.config) if return_config else (loaded.model, loaded.tokenizer)


@dataclass
class Loaded:
    """A model as its files have it, before it is adapted to what was asked for. Weights are not evaluated yet."""

    model: Any  # an ``MTPModel``, or mlx-lm's own
    tokenizer: TokenizerWrapper
    config: Config
    head: Head | None
    is_cast: bool  # whether a backbone of another type is in float16


def _read(asked: Asked, found: Found) -> Loaded:
    checkpoint = found.checkpoint
    source = found.head
    in_memory = found.check_memory(checkpoint, source, is_plain=found.is_plain) and not asked.lazy
    head = None if source is None else read_head(source)
    changes = _own_config(checkpoint, asked.model_config)
    if found.is_plain:
        with _for_mlx_lm(checkpoint) as folder, loading_errors(checkpoint.name):
            options: Config = {"model_config": changes, "trust_remote_code": asked.trust_remote_code}
            model, config = load_model(folder, lazy=True, **options)
    else:
        model, config = _load_model(checkpoint, head, changes, asked.trust_remote_code, found.stage)
        open_tables(model, checkpoint, in_memory)
    tokenizer = _load_tokenizer(checkpoint, asked.tokenizer_config, config)
    if (last := max(tokenizer.get_vocab().values())) >= (n := n_ids(model)):
        log.warning(
            f"[WARNING] {asked.name} has no weights for the tokens {n} to {last} of its tokenizer: prompts with them are "
            "refused."
        )
    if asked.adapter_path is not None:
        model = with_adapter(model, asked.adapter_path)
    is_cast = dtypes.set_dtype(model, asked.dtype, found.prefers_float16) and not asked.lazy
    if not found.is_plain:
        model.ranks = found.ranks
        model.fetched_head = found.fetched
        model.vision = _vision_of(model, checkpoint, config, may_fetch=asked.vision == "auto")
    return Loaded(model, tokenizer, config, head, is_cast)


def _adapt(asked: Asked, found: Found, loaded: Loaded) -> None:
    """Apply settings, divide and read the model, and test it and its head on this device."""
    model = loaded.model
    head = loaded.head
    ranks = found.ranks
    drafting = asked.drafting
    if head is not None:
        if drafting == (None, None, None):
            adapters = [] if asked.adapter_path is None else [Path(asked.adapter_path)]
            drafting = _apply_settings(model, asked.settings, [found.checkpoint.path, head.source.path, *adapters])
        cheapen_drafts(model, loaded.tokenizer, *drafting)
    with raise_on_all(ranks), loading_errors(asked.name):
        if asked.tensor_group is not None and ranks is not None:
            shard(model, ranks)
        if not asked.lazy:
            evaluate(model)
    with dtypes.once_in_float16(found.float16_key):
        if loaded.is_cast:
            dtypes.check_float16(model, loaded.tokenizer, asked.name)
        is_tested_here = not (found.is_plain or asked.lazy or ranks)
        must_pass = loaded.is_cast and asked.dtype == AUTO
        tested = ensure_tested(model, asked.name, must_pass) if is_tested_here else None
    if head is not None:
        may_measure = tested is not None or ranks is not None or (found.fetched is not None and not asked.lazy)
        key = key_of(found.checkpoint, head.source, asked.adapter_path, drafting[1])
        settle(model, loaded.tokenizer, found.checkpoint.name, head, key, may_measure)
        _check_accepted(model, found.checkpoint, is_asked=asked.mtp != "cached")


def _own_config(checkpoint: CheckpointReader, given: Config) -> Config:
    """The config values to change: those given, its type, and whether an output layer is stored, whatever the config says."""
    config = checkpoint.config or {}
    own = {key: config[key] for key in ("model_type",) if key in config}
    if config.get("model_type") not in MODULES:
        return given | own
    stored = (name.removeprefix("language_model.") for name in model_tensors(checkpoint))
    tie: Config = {"tie_word_embeddings": not any(name.startswith("lm_head.") for name in stored)}
    if "text_config" in check_config(config, checkpoint.name):
        tie["text_config"] = config["text_config"] | tie
    return tie | given | own


def _check_accepted(model: MTPModel, checkpoint: CheckpointReader, is_asked: bool) -> None:
    """Warn of a head that the model rejects. Another checkpoint's is an MTPError or, where nobody has asked for it, dropped."""
    accepted = model.head_acceptance_rate
    name = checkpoint.name
    fetched = model.fetched_head
    if accepted is None or accepted >= FLOOR:
        return
    whose = "its MTP head" if fetched is None else f"the head of {fetched.source}"
    message = (
        f"{name} accepts {accepted:.0%} of the drafts from {whose} on built-in text, and a matching head reaches {FLOOR:.0%} "
        f"or more: use another head with --mtp HEAD, fit this one with `mlx_mtp fit --model {name} --mlx-path NEW`, or "
        "generate without a head (--no-mtp)."
    )
    if fetched is not None:
        with suppress(OSError):  # a read-only folder
            forget(checkpoint)  # so that mtp="cached" loads without it
        if is_asked:
            raise MTPError(message)
        model.fetched_head = None
        drop_head(model)
    log.warning(f"[WARNING] {message}")


def _load_model(
    checkpoint: CheckpointReader, head: Head | None, changes: Config, trust_remote_code: bool, stage: range | None
) -> tuple[Any, Config]:
    config = check_config(checkpoint.config, checkpoint.name)
    awq = awq_of(checkpoint)
    names = set[str]()
    module = model_module(config["model_type"])

    def make(args: Any) -> Any:
        model = module.Model(args)
        # mlx-lm hands over the tensors of the checkpoint alone, and calls this once.
        vars(model)["sanitize"] = partial(_sanitized, model, head, stage, awq, names)
        return model

    changes = changes | {"mtp_num_hidden_layers": int(head is not None)}
    if awq is not None:
        changes |= dict.fromkeys(("quantization", "quantization_config"), _transform_awq_weights({}, awq)[1])
    if head is not None:
        changes |= quantization_beside(config | changes, head.weights)
    with _for_mlx_lm(checkpoint) as folder, loading_errors(checkpoint.name):
        model, config = load_model(
            folder,
            lazy=True,  # see ``evaluate``
            strict=stage is None,
            model_config=changes,
            get_model_classes=lambda config: (make, module.ModelArgs),
            trust_remote_code=trust_remote_code,
        )
    del vars(model)["sanitize"]
    if stage is not None:
        model.model.pipeline(mx.distributed.init())
        if missing := sorted(dict(tree_flatten(model.parameters())).keys() - names):
            raise MTPError(f"{checkpoint.name} lacks the tensor {missing[0]}: download it again.")
        if (n := min(len(own.weight) for own in (model.model.embed_tokens, model.output_layer))) < model.vocab_size:
            raise MTPError(
                f"{checkpoint.name} has rows of {n} tokens, and its config says {model.vocab_size}: correct it."
            )
    return model, config


def _sanitized(
    model: Any,
    head: Head | None,
    stage: range | None,
    awq: Config | None,
    names: set[str],
    weights: dict[str, mx.array],
) -> dict[str, mx.array]:
    """A model's own ``sanitize`` with the tensors of a head elsewhere, or those of a stage alone. Adds to ``names``."""
    own = weights if stage is None else own_weights(weights, stage, model)
    separate = () if head is None else (dict(head.weights), head.raw)
    if head is not None:
        head.weights.clear()  # so that tensors of which others are made are freed
    sanitized: dict[str, mx.array] = type(model).sanitize(model, own, *separate)
    if awq is not None:  # as mlx-lm, which would take a quantized head for AWQ as well
        own_head = {name: w for name, w in sanitized.items() if is_head(name)}
        backbone = {name: w for name, w in sanitized.items() if name not in own_head}
        sanitized = _transform_awq_weights(backbone, awq)[0] | own_head
    names.update(sanitized)
    return sanitized


@contextmanager
def _for_mlx_lm(checkpoint: CheckpointReader) -> Iterator[Path]:
    """A checkpoint's folder for mlx-lm, which reads every ``model*.safetensors``: one of links where others lie beside."""
    files = sorted({file for file in checkpoint.names.split(checkpoint.model_map)[0].values() if checkpoint.has(file)})
    if files == sorted(file.name for file in checkpoint.path.glob(WEIGHTS)):
        yield checkpoint.path
        return
    links = {file.name: file for file in checkpoint.path.iterdir() if not file.match(WEIGHTS)}
    links |= {f"model-{i}.safetensors": checkpoint.path / file for i, file in enumerate(files)}
    with TemporaryDirectory() as name, naming(folder := Path(name), str(checkpoint.path)):
        for link, file in links.items():
            (folder / link).symlink_to(file.absolute())
        yield folder


def _vision_of(model: MTPModel, checkpoint: CheckpointReader, config: Config, may_fetch: bool) -> Vision | None:
    """The vision of a loaded model: its checkpoint's, or its base model's if that may be fetched."""
    if model.no_images is not None:
        if may_fetch:
            raise MTPError(model.no_images)
        return None
    vision = find_vision(checkpoint, config) or (fetch_tower(checkpoint, config) if may_fetch else None)
    if vision is not None and (dtype := dtypes.dtype_of(model)).size == 2:
        vision.dtype = dtype
    return vision


def find_vision(checkpoint: CheckpointReader, config: Config) -> Vision | None:
    """The vision of a model with a head, if its checkpoint has a vision encoder. Only names of tensors are read here."""
    if config.get("model_type") not in MODULES or not isinstance(config.get("vision_config"), dict):
        return None
    files = sorted({t.file for t in split_tower(model_tensors(checkpoint))[1].values()})
    return Vision(checkpoint.path, config, files) if files else None


def _load_tokenizer(checkpoint: CheckpointReader, tokenizer_config: Config | None, config: Config) -> TokenizerWrapper:
    try:
        ends = ends_of_text(checkpoint.path, config)
        tokenizer = load_tokenizer(checkpoint.path, tokenizer_config, eos_token_ids=sorted(ends) or None)
        if not tokenizer.encode("a", add_special_tokens=False):
            raise MTPError("it encodes no text")
    except Exception as e:  # tokenizers has no more specific exception
        raise MTPError(
            f"The tokenizer of {checkpoint.name} is missing or damaged ({e}): download its files again."
        ) from e
    if isinstance(tokenizer.chat_template, str):
        tokenizer.chat_template = tokenizer.chat_template.removeprefix("\ufeff")
    return tokenizer


def _apply_settings(model: MTPModel, settings: bool | str | Path, folders: list[Path]) -> Drafting:
    """The draft_vocab, mtp_bits and draft_head_bits of ``--tune``, whose other settings the model gets."""
    n_ranks = 1 if model.ranks is None else model.ranks.size
    if (tuned := from_rank_0(model.ranks, lambda: find(settings, folders, n_ranks))) is None:
        return None, None, None
    model.draft_settings = DraftSettings(tuned)
    model.device = replace(model.device, compiled=tuned.compiled)
    model.pace = Pace(StepTimes(tuned.seconds))
    return tuned.draft_vocab, tuned.mtp_bits, tuned.draft_head_bits
