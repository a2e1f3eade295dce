"""Load a checkpoint with its MTP head, or raise an error that explains the problem."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import _transform_awq_weights, load_model, load_tokenizer

from ..core.distributed import any_rank, from_rank_0, raise_on_all
from ..core.drafts.settings import DraftSettings
from ..core.models import MODULES, model_module
from ..core.models.head_weights import is_head
from ..core.models.mixin import MTPModel, drop_head, n_ids
from ..core.pacing.step_times import Pace, StepTimes
from ..errors import MTPError
from ..images.tower import Vision, split_tower
from ..memory import CONTEXT, Account, gpu_generation, limit_restored_on_error
from . import AUTO, DTYPES
from .adapters import check_adapter, with_adapter
from .checks import dtype as dtypes
from .checks.memory import check_memory
from .checks.self_test import ensure_tested
from .config import Config, check_config, ends_of_text, family_in, loading_errors, mlx_lm_has, read_config, skeleton
from .heads.acceptance import FLOOR, key_of, settle
from .heads.formats import Head, check_head, fetch_drafter, quantization_beside, read_head
from .heads.originals import FetchedHead, awq_of, check_method, fetch_missing_head, fetch_tower, fetched_before, forget
from .hub import WEIGHTS, fetch
from .ngram_files import find_tables, open_tables
from .output import naming
from .part import divide, evaluate, files_of, make_ranks, own_weights, shard
from .reader import CheckpointReader, files_to_fetch, model_tensors
from .settings import cheapen_drafts, check_bits, find, machine
from .settings import read as read_settings

Drafting = tuple[int | None, int | None, int | None]  # draft_vocab, mtp_bits, draft_head_bits

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
    name, is_asked, drafting = path_or_hf_repo, mtp != "cached", (draft_vocab, mtp_bits, draft_head_bits)
    ranks = make_ranks(tensor_group, pipeline_group, adapter_path)
    held: Config = {"dtype": dtype, "has_tower": vision == "auto", "ngram_memory": ngram_memory, "context": context}
    check: Any = partial(check_memory, account=None if lazy or ranks else Account(max_memory), **held)
    prefers_float16 = not lazy and any_rank(ranks, gpu_generation()[0] in dtypes.WITHOUT_BFLOAT16)
    with raise_on_all(ranks):  # before the weights are downloaded
        _check_arguments(mtp, drafting, settings, adapter_path, dtype)
        checkpoint = CheckpointReader(name, revision)
        mtp, may_be_plain = _ways(checkpoint, mtp, copy_drafts, ranks is None)
        check_method(checkpoint)
        stage = None if ranks is None else divide(checkpoint, ranks, pipeline_group is not None)
        checkpoint = _download(checkpoint, revision, mtp, may_be_plain and not mtp, stage, check)
    if mtp == "cached":
        mtp = from_rank_0(ranks, lambda: _cached_head(checkpoint))
    elif mtp == "auto" and may_be_plain:
        mtp = _head_if_any(checkpoint)
    is_plain = may_be_plain and not mtp
    _check_drafting(mtp, drafting, settings)
    key = _float16_key(checkpoint, adapter_path, mtp) if prefers_float16 and dtype == AUTO else None
    dtypes.check_untried(name, key, ranks)
    with raise_on_all(ranks):
        source, fetched = _head_of(checkpoint, mtp)
        in_memory = check(checkpoint, source, is_plain=is_plain) and not lazy
        head = None if source is None else read_head(source)
        own = _own_config(checkpoint, model_config or {})
        if is_plain:
            with _for_mlx_lm(checkpoint) as folder, loading_errors(checkpoint.name):
                model, config = load_model(folder, lazy=True, model_config=own, trust_remote_code=trust_remote_code)
        else:
            model, config = _load_model(checkpoint, head, own, trust_remote_code, stage)
            open_tables(model, checkpoint, in_memory)
        tokenizer = _load_tokenizer(checkpoint, tokenizer_config, config)
        if (last := max(tokenizer.get_vocab().values())) >= (n := n_ids(model)):
            log.warning(
                f"[WARNING] {name} has no weights for the tokens {n} to {last} of its tokenizer: prompts with them are refused."
            )
        model = model if adapter_path is None else with_adapter(model, adapter_path)
        is_cast = dtypes.set_dtype(model, dtype, prefers_float16) and not lazy
    if not is_plain:
        model.ranks, model.fetched_head = ranks, fetched
        model.vision = _vision_of(model, checkpoint, config, may_fetch=vision == "auto")
    if head is not None:
        if drafting == (None, None, None):
            adapters = [] if adapter_path is None else [Path(adapter_path)]
            drafting = _apply_settings(model, settings, [checkpoint.path, head.source.path, *adapters])
        cheapen_drafts(model, tokenizer, *drafting)
    with raise_on_all(ranks), loading_errors(name):
        if tensor_group is not None and ranks is not None:
            shard(model, ranks)
        if not lazy:
            evaluate(model)
    with dtypes.once_in_float16(key):
        if is_cast:
            dtypes.check_float16(model, tokenizer, name)
        tested = None if is_plain or lazy or ranks else ensure_tested(model, name, is_cast and dtype == AUTO)
    if head is not None:
        may_measure = tested is not None or ranks is not None or (fetched is not None and not lazy)
        acceptance_key = key_of(checkpoint, head.source, adapter_path, drafting[1])
        settle(model, tokenizer, checkpoint.name, head, acceptance_key, may_measure)
        _check_accepted(model, checkpoint, is_asked)
    return (model, tokenizer, config) if return_config else (model, tokenizer)


def _ways(checkpoint: CheckpointReader, mtp: bool | str, copy_drafts: bool, is_alone: bool) -> tuple[bool | str, bool]:
    """``mtp``, which is false for a family that only mlx-lm supports, and whether mlx-lm loads the model without a head."""
    model_type = (checkpoint.config or {}).get("model_type")
    runs_here, in_mlx_lm = model_type in MODULES, mlx_lm_has(model_type)
    if mtp in ("auto", "cached") and not copy_drafts and in_mlx_lm and not runs_here:
        mtp = False
    return mtp, not copy_drafts and is_alone and (in_mlx_lm or not runs_here)


def _download(
    checkpoint: CheckpointReader, revision: str | None, mtp: bool | str, is_plain: bool, stage: range | None, check: Any
) -> CheckpointReader:
    """Check the headers of a checkpoint, and download it or the files of a stage."""
    name, own = checkpoint.name, list[str]()
    files = None if stage is None else files_of(checkpoint, stage)
    if not is_plain:
        config = check_config(checkpoint.config, name)
        if checkpoint.folder is None:
            find_tables(skeleton(config, name), checkpoint)
    if checkpoint.folder is None:
        check(checkpoint, checkpoint if mtp else None, is_plain=is_plain)
    with suppress(MTPError, OSError):  # the error is raised, or logged, when the head is read
        own = checkpoint.head_files if mtp in (True, "auto", "cached") else []
    folder = fetch(name, revision, *own, weights=files or files_to_fetch(checkpoint))
    checkpoint = CheckpointReader(name, folder=folder, needed=files)
    _ = checkpoint.model_map  # raises here, since nothing is loaded without the model's files
    return checkpoint


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


def check_family(path_or_hf_repo: str, revision: str | None = None) -> None:
    """Raise an MTPError for ``--mtp`` with a model of a family that only mlx-lm supports. Weights are not downloaded."""
    with suppress(OSError):  # load tells why
        read_config(fetch(path_or_hf_repo, revision, weights=()), path_or_hf_repo)


def _float16_key(checkpoint: CheckpointReader, adapter_path: str | None, mtp: bool | str) -> str:
    return f"{', '.join(machine().values())}, {key_of(checkpoint, checkpoint, adapter_path)} {mtp}"


def _check_arguments(
    mtp: bool | str, drafting: Drafting, settings: bool | str | Path, adapter_path: str | None, dtype: str
) -> None:
    _check_drafting(mtp, drafting, settings)
    check_bits(*drafting[1:])
    if not isinstance(settings, bool):
        read_settings(Path(settings))
    if adapter_path is not None:
        check_adapter(adapter_path)
    if dtype not in (AUTO, *DTYPES):
        raise MTPError(f"dtype must be one of {', '.join((AUTO, *DTYPES))}, not {dtype!r}.")


def _check_drafting(mtp: bool | str, drafting: Drafting, settings: bool | str | Path) -> None:
    """Raise an MTPError if an argument requires the head, and there is none."""
    if not mtp and (any(x is not None for x in drafting) or not isinstance(settings, bool)):
        raise MTPError(
            "draft_vocab, mtp_bits, draft_head_bits and settings require the MTP head: omit them, or load it."
        )


def _cached_head(checkpoint: CheckpointReader) -> bool | str:
    """What ``mtp="cached"`` stands for. A head of its own that cannot be used is no error, since nobody has asked for it."""
    check_config(checkpoint.config, checkpoint.name)
    try:
        if checkpoint.head_map:
            check_head(checkpoint)
            return True
    except (MTPError, OSError) as e:
        log.warning(f"[WARNING] {checkpoint.name} generates without drafts: {e}")
        return False
    return "auto" if fetched_before(checkpoint) is not None else False


def _head_if_any(checkpoint: CheckpointReader) -> bool | str:
    """What ``mtp="auto"`` stands for. Some families' checkpoints may lack a head, and run as in mlx-lm then."""
    family = family_in(checkpoint.config)
    if family is not None and not family.needs_head:
        try:
            fetch_missing_head(checkpoint)
        except FileNotFoundError as e:
            log.warning(f"[WARNING] {checkpoint.name} generates without drafts: {e}")
            return False
    return "auto"


def _head_of(checkpoint: CheckpointReader, mtp: bool | str) -> tuple[CheckpointReader | None, FetchedHead | None]:
    """The checkpoint of the head to load, and the base model's if it was fetched. Raises an error if it cannot be used."""
    fetched = None
    if mtp == "auto":
        fetched = fetch_missing_head(checkpoint)
        mtp = True if fetched is None else str(fetched.folder)
    if isinstance(mtp, str):
        return fetch_drafter(mtp, checkpoint), fetched
    if mtp:
        check_head(checkpoint)
    return checkpoint if mtp else None, None


def _check_accepted(model: MTPModel, checkpoint: CheckpointReader, is_asked: bool) -> None:
    """Warn of a head that the model rejects. Another checkpoint's is an MTPError or, where nobody has asked for it, dropped."""
    accepted, name, fetched = model.head_acceptance_rate, checkpoint.name, model.fetched_head
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
    config, loaded = check_config(checkpoint.config, checkpoint.name), set[str]()
    awq = awq_of(checkpoint)
    module = model_module(config["model_type"])
    base: Any = module.Model

    class Model(base):  # loads the head, or only the tensors of a stage
        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            own = weights if stage is None else own_weights(weights, stage, self)
            separate = () if head is None else (dict(head.weights), head.raw)
            if head is not None:
                head.weights.clear()  # so that tensors of which others are made are freed
            sanitized: dict[str, mx.array] = super().sanitize(own, *separate)
            if awq is not None:  # as mlx-lm, which would take a quantized head for AWQ as well
                own_head = {name: w for name, w in sanitized.items() if is_head(name)}
                backbone = {name: w for name, w in sanitized.items() if name not in own_head}
                sanitized = _transform_awq_weights(backbone, awq)[0] | own_head
            loaded.update(sanitized)
            return sanitized

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
            get_model_classes=lambda config: (Model, module.ModelArgs),
            trust_remote_code=trust_remote_code,
        )
    if stage is not None:
        model.model.pipeline(mx.distributed.init())
        if missing := sorted(dict(tree_flatten(model.parameters())).keys() - loaded):
            raise MTPError(f"{checkpoint.name} lacks the tensor {missing[0]}: download it again.")
        if (n := min(len(own.weight) for own in (model.model.embed_tokens, model.output_layer))) < model.vocab_size:
            raise MTPError(
                f"{checkpoint.name} has rows of {n} tokens, and its config says {model.vocab_size}: correct it."
            )
    return model, config


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
        tokenizer = load_tokenizer(checkpoint.path, tokenizer_config, eos_token_ids=config.get("eos_token_id"))
        if not tokenizer.encode("a", add_special_tokens=False):
            raise MTPError("it encodes no text")
    except Exception as e:  # tokenizers has no more specific exception
        raise MTPError(
            f"The tokenizer of {checkpoint.name} is missing or damaged ({e}): download its files again."
        ) from e
    if isinstance(tokenizer.chat_template, str):
        tokenizer.chat_template = tokenizer.chat_template.removeprefix("\ufeff")
    tokenizer.eos_token_ids |= ends_of_text(checkpoint.path)
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
