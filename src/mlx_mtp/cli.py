"""What the command lines share: flags of models that draft, checks of flags, and errors in one line."""

import argparse
import difflib
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import mlx.core as mx
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from mlx_lm.models.cache import QuantizedKVCache
from mlx_lm.sample_utils import Sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ._version import __version__
from .caches.checks import BITS, GROUP_SIZES
from .checkpoint.generation_config import RANGES, Sampling, sampling_defaults
from .checkpoint.vocabulary import LIST_FILE
from .distributed.ranks import Ranks
from .distributed.watch import watch
from .drafts.options import asks_for_copies, check_copy_drafts, check_num_draft_tokens
from .files import check_source, make_folder
from .images.open import size_of
from .pacing.depth import MAX_COPY_TOKENS, MAX_DRAFT_TOKENS
from .prompt_store import PromptStore
from .sampling.sampler import AcceptanceName, make_sampler

INTERRUPTED = 130  # the exit status of a program that Ctrl-C has ended
BROKEN_PIPE = 141  # of one that SIGPIPE has ended
SYSTEM_ERRORS: dict[type[OSError], str] = {
    FileNotFoundError: "There is no file or folder {}.",
    FileExistsError: "{} exists already.",
    IsADirectoryError: "{} is a folder: name a file.",
    NotADirectoryError: "{} is below a file, which is not a folder.",
    PermissionError: "You have no permission to use {}.",
}
# Text, of which there may be none. All other flags that take a word name something.
TEXTS = (
    "prompt",
    "system_prompt",
    "prefill_response",
    "chat_template",
    "chat_template_config",
    "allowed_origins",
    "api_key",
)
# The flags of sampling, and their names in generation_config.json and in requests.
SAMPLING = {"temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}
# The lowest and the highest value of each flag.
LIMITS: dict[str, tuple[float, float]] = {
    **{flag: RANGES[field] for flag, field in SAMPLING.items()},
    "min_tokens_to_keep": (1, math.inf),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 0.5),
    "seed": (0, 2**64 - 1),
    "prefill_step_size": (1, math.inf),
    "max_kv_size": (1, math.inf),
    "quantized_kv_start": (0, math.inf),
    "draft_p_min": (0, 1),
}
LONGEST_NAME = 60  # characters of what was given for a name, in an error
MODEL = "Local directory or Hugging Face repo (default: the bundled demo)."  # the help of --model
# The groups of --help and their flags, in this order.
GROUPS: dict[str, Sequence[str]] = {
    "model": (
        "model", "synthetic", "assume_acceptance", "served_model_name", "adapter_path", "serve_model", "allow_any_model",
        "trust_remote_code", "quantize_activations",
    ),
    "prompt": (
        "prompt", "prompts", "context", "system_prompt", "image", "images", "prefill_response", "thinking", "chat_template",
        "use_default_chat_template", "ignore_chat_template", "chat_template_config", "chat_template_args",
        "extra_eos_token",
    ),
    "drafts": (
        "mtp", "copy_drafts", "acceptance", "draft_p_min", "exact", "check", "show_drafts", "draft_vocab", "draft_head_bits",
        "mtp_bits", "settings", "num_draft_tokens", "draft_model",
    ),
    "sampling": (
        "max_tokens", "json_schema", "temp", "top_p", "top_k", "min_p", "min_tokens_to_keep", "xtc_probability",
        "xtc_threshold", "seed",
    ),
    "caches": (
        "prefill_step_size", "max_kv_size", "kv_bits", "kv_group_size", "quantized_kv_start", "prompt_cache_file",
        "prompt_cache_dir", "prompt_cache_size", "prompt_cache_bytes", "prompt_cache_disk_bytes",
    ),
    "requests": (
        "host", "port", "print_config", "api_key", "api_key_file", "allowed_origins", "allowed_hosts",
        "allowed_local_media_path", "allowed_media_domains", "no_ui", "log_level", "max_queue", "decode_concurrency",
        "prompt_concurrency", "max_token_gap", "min_decode_share",
    ),
    "machines": ("pipeline",),
}  # fmt: skip


def finish(parser: argparse.ArgumentParser, groups: Mapping[str, Sequence[str]] = GROUPS) -> argparse.ArgumentParser:
    """Sort the flags of a parser, which may be mlx-lm's, into groups; show their defaults; add ``--version``.

    Args:
        parser (argparse.ArgumentParser): With all flags of the command.
        groups (Mapping[str, Sequence[str]]): Titles, and the flags below them; the first that names a flag has it.

    Returns:
        argparse.ArgumentParser: The same.
    """
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    ungrouped, flags = parser._optionals._group_actions, {a.dest: a for a in parser._actions}
    for title, names in groups.items():
        if found := [flags[name] for name in names if flags.get(name) in ungrouped]:
            group = parser.add_argument_group(title)
            for action in found:
                ungrouped.remove(action)
                group._group_actions.append(action)
    for action in flags.values():
        text, default = action.help or "", action.default
        is_value = isinstance(default, (str, int, float)) and default not in ("", argparse.SUPPRESS)
        if is_value and default is not False and action.nargs != 0 and "efault" not in text:
            action.help = text.removesuffix(".") + " (default: %(default)s)" + "." * text.endswith(".")
    required = [f"{a.option_strings[0]} {a.metavar or a.dest.upper()}" for a in flags.values() if a.required]
    parser.usage = " ".join(["%(prog)s", *required, "[flags]"])
    return parser


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of columns no wider than the terminal: the first left, the others right.

    Columns that do not fit come below, beside the first again. A row may end early.
    """
    columns = range(max(map(len, rows)))
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in columns]
    parts, used = [[0]], widths[0]
    for i in columns[1:]:
        used += 2 + widths[i]
        if used > shutil.get_terminal_size().columns and parts[-1] != [0]:
            parts.append([0])
            used = widths[0] + 2 + widths[i]
        parts[-1].append(i)
    lines = []
    for part in parts:
        lines += [""] * (part is not parts[0])
        for row in rows:
            cells = [f"{row[i]:>{widths[i]}}" for i in part[1:] if i < len(row)]
            lines.append("  ".join([f"{row[0]:<{widths[0]}}", *cells]).rstrip())
    return lines


@contextmanager
def one_line_errors(program: str, on_loss: Sequence[Callable[[str], None]] = ()) -> Iterator[None]:
    """Exit with status 2 and one line for an error of the user's, with 130 when interrupted, and with 141 without a word
    where what reads the output has ended: ``| head``.

    Of the processes of ``mlx.launch``, rank 0 prints, and where one is lost, the others call ``on_loss`` and end.
    """
    group = mx.distributed.init()
    with _silent_where_nobody_reads(), rank_0_prints():
        try:
            with watch(Ranks(group) if group.size() > 1 else None, on_loss=on_loss):
                yield
        except BrokenPipeError:
            raise
        except (ValueError, OSError) as e:
            print(f"{program}: error: {' '.join(sentence(e).split())}", file=sys.stderr)
            sys.exit(2)
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)


def sentence(error: ValueError | OSError) -> str:
    """What an error says; of one of the system's own, without its number."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    if error.filename is None:
        return f"{error.strerror}."
    for kind, text in SYSTEM_ERRORS.items():
        if isinstance(error, kind):
            return text.format(error.filename)
    return f"{error.filename}: {error.strerror}."


@contextmanager
def _silent_where_nobody_reads() -> Iterator[None]:
    try:
        try:
            yield
        finally:
            print(end="", flush=True)
    except BrokenPipeError:
        # Python flushes what it could not write once more when it ends.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(nowhere, stream.fileno())
        sys.exit(BROKEN_PIPE)


@contextmanager
def rank_0_prints() -> Iterator[None]:
    """Inside, the other processes of ``mlx.launch`` are silent: output, warnings and bars. A traceback comes after it."""
    if mx.distributed.init().rank() == 0:
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The flags of the command line.

    Raises:
        ValueError: A flag that names something is empty.
    """
    args, unknown = parser.parse_known_args()
    if unknown:
        similar = _similar(unknown, parser._option_string_actions)
        question = f": did you mean {' '.join(similar)}?" if similar else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{question}")
    for name, value in vars(args).items():
        if name not in TEXTS and "" in (value if isinstance(value, list) else [value]):
            raise ValueError(f"{_flag(name)} is empty: give it a value, or leave it out.")
    return args


def _similar(unknown: Sequence[str], flags: Iterable[str]) -> list[str]:
    """The flag that each unknown one resembles most, if any."""
    words = [word.partition("=")[0] for word in unknown if word.startswith("-")]
    return [match for word in words for match in difflib.get_close_matches(word, flags, n=1)]


def extend(parser: argparse.ArgumentParser, program: str, description: str) -> argparse.ArgumentParser:
    """mlx-lm's parser under another name; a flag that is added to it replaces mlx-lm's of that name."""
    options: dict[str, Any] = {"conflict_handler": "resolve", "add_help": False}  # it has -h
    return argparse.ArgumentParser(prog=program, description=description, parents=[parser], **options)


def add_drafting(parser: argparse.ArgumentParser) -> None:
    """Add the flags that ``generate`` and ``chat`` share, and our help for mlx-lm's where its own does not hold."""
    add = parser.add_argument
    add("--model", type=str, help=MODEL)
    add("--max-kv-size", type=int, help="Set the maximum key-value cache size; not with --mtp or --copy-drafts.")
    add(
        "--seed",
        type=int,
        help="PRNG seed (default: none, so that --temp gives another text each time). With --mtp, the text depends on the "
        "prompt and the seed alone: see --acceptance.",
    )
    add_num_draft_tokens(parser)
    add_mtp(parser)
    add_draft_p_min(parser)
    add_show_drafts(parser)
    add_prompt_cache_dir(parser)
    add_copy_drafts(parser)
    add_arguments(parser)
    add_acceptance(parser, without_mtp=" Without --mtp, defaults to match.")
    add_pipeline(parser)


class Given(argparse.Action):
    """Stores a flag's value, and as ``has_NAME`` that the command line has it."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        setattr(namespace, self.dest, values)
        setattr(namespace, f"has_{self.dest}", True)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add the flags whose defaults are the model's; ``given_sampling`` returns those of the command line."""
    for flag, kind, text in (
        ("temp", float, "temperature; 0 chooses the most likely token"),
        ("top_p", float, "top-p"),
        ("top_k", int, "top-k; 0 is all tokens"),
        ("min_p", float, "min-p"),
    ):
        default = getattr(Sampling, SAMPLING[flag])
        text = f"Sampling {text} (default: that of the model's generation_config.json, or {default})."
        parser.add_argument(_flag(flag), type=kind, default=default, action=Given, help=text)
        parser.set_defaults(**{f"has_{flag}": False})


def add_images(parser: argparse.ArgumentParser) -> None:
    """Add the flag of the vision tower."""
    parser.add_argument(
        "--images",
        action="store_true",
        help="Take images: where the checkpoint has no vision tower, that of its original is fetched once. A checkpoint with a "
        "tower takes images without this flag, if it drafts.",
    )


def given_sampling(args: argparse.Namespace) -> dict[str, float]:
    """The sampling that the command line has, by the names of ``Sampling``."""
    return {field: getattr(args, flag) for flag, field in SAMPLING.items() if getattr(args, f"has_{flag}")}


def set_sampling(args: argparse.Namespace, ranks: Ranks | None) -> Sampling:
    """Give the flags of sampling that the command line lacks the model's values -> all of them."""
    sampling = sampling_defaults(args.model, given_sampling(args), ranks)
    for flag, field in SAMPLING.items():
        setattr(args, flag, getattr(sampling, field))
    return sampling


def add_pipeline(parser: argparse.ArgumentParser) -> None:
    """Add mlx-lm's flag of several machines."""
    parser.add_argument(
        "--pipeline",
        action="store_true",
        help="Use pipelining instead of tensor parallelism, with mlx.launch.",
    )


def groups(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of ``mlx_mtp.load`` that say how the processes of ``mlx.launch`` run the model together."""
    group = mx.distributed.init()
    if group.size() == 1:
        return {}
    return {"pipeline_group" if args.pipeline else "tensor_group": group}


def check_alone(args: argparse.Namespace, *flags: str) -> None:
    """
    Raises:
        ValueError: There are several processes, and one of the flags, which run in one alone, is given.
    """
    if (n := mx.distributed.init().size()) > 1:
        for name in flags:
            if getattr(args, name):
                raise ValueError(f"{_flag(name)} runs in one process, not in {n}: leave it out.")


def add_mtp(parser: argparse.ArgumentParser) -> None:
    """Add the flag of the head."""
    parser.add_argument(
        "--mtp",
        nargs="?",
        const=True,
        default=False,
        metavar="HEAD",
        help="Draft with the model's multi-token-prediction head. Where the checkpoint lacks it, the head of its original is "
        "fetched once. HEAD is another one: a folder or Hugging Face repo with a head alone (model type qwen3_5_mtp).",
    )


def add_draft_p_min(parser: argparse.ArgumentParser) -> None:
    """Add the flag of the least probability of a draft."""
    parser.add_argument(
        "--draft-p-min",
        type=float,
        help="Stop drafting where the head gives no token this probability (default: that of the settings, or 0.0).",
    )


def add_show_drafts(parser: argparse.ArgumentParser) -> None:
    """Add the flag of colours."""
    parser.add_argument(
        "--show-drafts",
        action="store_true",
        help="Colour each token by its source, in a terminal: accepted drafts of the head green, accepted copies yellow.",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a model that drafts."""
    parser.add_argument(
        "--draft-vocab",
        metavar="N|FILE",
        type=lambda x: int(x) if x.isdecimal() else x,
        help="Draft from the first N token ids, or from those in a file of mlx_mtp.draft_vocab; verification uses the whole "
        f"vocabulary. 0 is the whole vocabulary. Defaults to {LIST_FILE} beside the checkpoint where there is one.",
    )
    parser.add_argument(
        "--mtp-bits",
        type=int,
        metavar="BITS",
        help="Quantize the head's decoder layer to this many bits on loading. Defaults to no quantization.",
    )
    parser.add_argument(
        "--draft-head-bits",
        type=int,
        metavar="BITS",
        help="Draft with a copy of lm_head in this many bits; verification uses lm_head itself. Defaults to no copy.",
    )
    parser.add_argument(
        "--settings",
        default=True,
        metavar="FILE|off",
        type=lambda x: False if x == "off" else x,
        help="Settings that `mlx_mtp.benchmark --tune` has written; off ignores them. Defaults to a file in the "
        "user's cache folder, if there is one. Ignored with --draft-vocab, --draft-head-bits or --mtp-bits.",
    )


def add_acceptance(parser: argparse.ArgumentParser, without_mtp: str = "") -> None:
    """Add the flag that says how sampled drafts are accepted; ``without_mtp`` is its default then, in a sentence."""
    parser.add_argument(
        "--acceptance",
        choices=get_args(AcceptanceName),
        help="How sampled drafts are accepted; the distribution is the model's in each case. rejection accepts the most; "
        "coupled makes the text a function of the prompt and the seed alone, the same at every depth and without --mtp; match "
        "draws the tokens of mlx-lm with the same seed. Defaults to coupled with a seed and to rejection without."
        + without_mtp,
    )


def add_num_draft_tokens(parser: argparse.ArgumentParser) -> None:
    """Add the flag of the number of drafts."""
    parser.add_argument(
        "--num-draft-tokens",
        metavar="auto|N",
        type=number_or("auto"),
        help=f"Number of tokens to draft in a step, up to {MAX_DRAFT_TOKENS}, or auto: chosen at every step for speed "
        "(default: that of the settings, or auto; 3 for a draft model).",
    )


def add_copy_drafts(parser: argparse.ArgumentParser) -> None:
    """Add the flag of copy drafts."""
    parser.add_argument(
        "--copy-drafts",
        metavar="auto|off|N",
        type=number_or("auto", "off"),
        help="Where the text repeats itself, draft what followed there: auto, wherever that is faster than the head's drafts, "
        f"or N tokens at a time, up to {MAX_COPY_TOKENS}. Also without --mtp, for a model without a head. Defaults to off "
        "without --mtp and with a number of --num-draft-tokens, and to auto otherwise.",
    )


def add_prompt_cache_dir(parser: argparse.ArgumentParser, requires_drafts: bool = True) -> None:
    """Add the flag of a prompt store's folder."""
    required = " Requires --mtp or --copy-drafts." if requires_drafts else ""
    parser.add_argument(
        "--prompt-cache-dir",
        metavar="DIR",
        help="Keep what was read of prompts in this folder, which other commands may share: a text that begins alike is not "
        f"read again, nor after a restart. It holds the texts themselves.{required}",
    )


def check_prompt_cache_dir(args: argparse.Namespace, *flags: str, requires_drafts: bool = True) -> None:
    """
    Args:
        flags (str): Those that it does not go with.
        requires_drafts (bool): Whether it needs ``--mtp`` or ``--copy-drafts``. Default: ``True``.

    Raises:
        OSError: ``--prompt-cache-dir`` cannot be written to.
        ValueError: It is given, and the model does not draft, or so is one of the flags.
    """
    if args.prompt_cache_dir is None:
        return
    if requires_drafts and not drafts(args):
        raise ValueError("--prompt-cache-dir requires --mtp or --copy-drafts.")
    for name in flags:
        if getattr(args, name):
            raise ValueError(f"--prompt-cache-dir and {_flag(name)} cannot be combined.")
    make_folder(Path(args.prompt_cache_dir), "--prompt-cache-dir")


def check_images(args: argparse.Namespace) -> None:
    """
    Raises:
        FileNotFoundError: A file of ``--image`` is missing.
        ValueError: It is not an image.
    """
    for file in args.image or ():
        if file.startswith("data:") or drafts(args):
            size_of(file)
        else:  # the model may be of another family, whose images mlx-lm opens
            check_source(Path(file), "--image")


def open_prompt_store(args: argparse.Namespace, model: Any) -> AbstractContextManager[PromptStore | None]:
    """The prompt store that the flags ask for, if any."""
    return nullcontext() if args.prompt_cache_dir is None else PromptStore(model, folder=args.prompt_cache_dir)


def head(args: argparse.Namespace) -> bool | str:
    """The ``mtp`` of ``mlx_mtp.load``: a command finds a missing head by itself."""
    return "auto" if args.mtp is True else args.mtp


def copies(args: argparse.Namespace) -> bool:
    """Whether ``--copy-drafts`` asks for copies."""
    return asks_for_copies(getattr(args, "copy_drafts", None))


def drafts(args: argparse.Namespace) -> bool:
    """Whether the flags ask for drafts of the model's head or for copies."""
    return bool(args.mtp) or copies(args)


def number_or(*words: str) -> Callable[[str], str | int]:
    """The type of a flag that takes a number or one of these words."""

    def convert(text: str) -> str | int:
        try:
            return text if text in words else int(text)
        except ValueError as e:
            raise argparse.ArgumentTypeError(f"must be {', '.join(words)} or a number, not {text!r}") from e

    return convert


def options(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of ``mlx_mtp.load`` that the flags of ``add_arguments`` give."""
    return {name: getattr(args, name) for name in ("draft_vocab", "mtp_bits", "draft_head_bits", "settings")}


def check_generation_flags(args: argparse.Namespace, no_limit: bool = True) -> None:
    """
    Check the flags of sampling, sizes and drafts that a command line has, before anything is loaded.

    Without ``--mtp``, ``num_draft_tokens`` becomes mlx-lm's default where it was not given.

    Args:
        args (argparse.Namespace): The parsed flags; a flag that the command line lacks is not checked.
        no_limit (bool): Allow ``--max-tokens -1``, which is no limit. Default: ``True``.

    Raises:
        ValueError: A flag is out of range, or does not go with another.
    """
    for name, (low, high) in LIMITS.items():
        value = getattr(args, name, None)
        if value is not None and not (low <= value <= high and value < math.inf):
            allowed = f"{low} or more" if high == math.inf else f"from {low} to {high}"
            raise ValueError(f"{_flag(name)} must be {allowed}, not {value}.")
    if args.max_tokens < 1 and not (no_limit and args.max_tokens == -1):
        allowed = "1 or more, or -1 for no limit" if no_limit else "1 or more"
        raise ValueError(f"--max-tokens must be {allowed}, not {args.max_tokens}.")
    for name, values in (("kv_bits", BITS), ("kv_group_size", GROUP_SIZES)):
        value = getattr(args, name, None)
        if value is not None and value not in values:
            raise ValueError(f"{_flag(name)} must be one of {', '.join(map(str, values))}, not {value}.")
    _check_drafting(args)


def check_head(args: argparse.Namespace) -> None:
    """
    Raises:
        ValueError: ``--mtp`` has a value that names no head, such as a prompt.
    """
    if not isinstance(args.mtp, str) or os.path.isdir(args.mtp):
        return
    try:
        validate_repo_id(args.mtp)
        is_name = "/" in args.mtp  # every head is a user's
    except HFValidationError:
        is_name = False
    if not is_name:
        prompt = " The prompt of a text is given with --prompt." if hasattr(args, "prompt") else ""
        text = args.mtp if len(args.mtp) <= LONGEST_NAME else f"{args.mtp[:LONGEST_NAME]}..."
        raise ValueError(f"--mtp takes a head, and {text!r} is neither a folder nor the name of a repository.{prompt}")


def _check_drafting(args: argparse.Namespace) -> None:
    check_head(args)
    draft_model = getattr(args, "draft_model", None)
    if args.mtp and draft_model is not None:
        raise ValueError("--mtp and --draft-model cannot be combined.")
    n = args.num_draft_tokens
    if getattr(args, "copy_drafts", None) is not None:
        check_copy_drafts(args.copy_drafts, "--copy-drafts")
    if copies(args) and draft_model is not None:
        raise ValueError("--copy-drafts and --draft-model cannot be combined.")
    if copies(args) and not args.mtp and n is not None:
        raise ValueError(
            "--num-draft-tokens requires --mtp or --draft-model: with --copy-drafts alone there is no head."
        )
    if n is None and not args.mtp:
        args.num_draft_tokens = n = 3
    if n == "auto" and not args.mtp:
        raise ValueError("--num-draft-tokens auto requires --mtp.")
    if args.mtp and n is not None:
        check_num_draft_tokens(n, "--num-draft-tokens")
    if not args.mtp and n < 1:
        raise ValueError(f"--num-draft-tokens must be 1 or more, not {n}.")
    acceptance = getattr(args, "acceptance", None)
    if acceptance == "rejection" and not args.mtp:
        raise ValueError("--acceptance rejection requires --mtp.")
    if acceptance == "coupled" and draft_model is not None:
        raise ValueError("--acceptance coupled cannot be combined with --draft-model.")
    if getattr(args, "show_drafts", False) and not drafts(args):
        raise ValueError("--show-drafts requires --mtp or --copy-drafts.")
    for name in ("exact", "check", "draft_p_min"):
        if getattr(args, name, None) and not args.mtp:
            raise ValueError(f"{_flag(name)} requires --mtp.")
    images = getattr(args, "images", False)
    if (drafts(args) or images) and getattr(args, "max_kv_size", None) is not None:
        flag = "--mtp" if args.mtp else "--copy-drafts" if copies(args) else "--images"
        raise ValueError(f"{flag} cannot be combined with --max-kv-size: the caches of these models do not rotate.")


def check_model_flags(args: argparse.Namespace, config: Mapping[str, Any]) -> None:
    """
    Check the flags that depend on the model, once its config is known.

    Args:
        args (argparse.Namespace): The parsed flags.
        config (Mapping[str, Any]): The model's config.

    Raises:
        ValueError: A flag does not fit the model.
    """
    text_config = config.get("text_config", config)
    vocab_size, head_dim = text_config.get("vocab_size"), text_config.get("head_dim")
    if vocab_size is not None:
        for name, high in (("top_k", vocab_size - 1), ("min_tokens_to_keep", vocab_size)):
            if getattr(args, name, 0) > high:
                raise ValueError(
                    f"{_flag(name)} must be at most {high} for a vocabulary of {vocab_size} tokens, "
                    f"not {getattr(args, name)}."
                )
    if getattr(args, "kv_bits", None) is not None and head_dim is not None:
        row = mx.zeros((1, 1, 1, head_dim))
        try:
            mx.eval(QuantizedKVCache(args.kv_group_size, args.kv_bits).update_and_fetch(row, row))
        except ValueError as e:
            raise ValueError(
                f"--kv-bits {args.kv_bits} with --kv-group-size {args.kv_group_size} does not fit the model, whose "
                f"attention heads have {head_dim} values: use --kv-bits 4 or 8 and --kv-group-size 32 or 64."
            ) from e


def sampler_of(args: argparse.Namespace, tokenizer: TokenizerWrapper, turn: int = 0) -> Sampler:
    """The sampler that the flags ask for; with a seed, each turn of a conversation has one of its own."""
    acceptance: AcceptanceName | None = args.acceptance or (None if args.mtp else "match")
    is_seeded = args.seed is not None and acceptance in (None, "coupled")  # the others draw from MLX's random state
    return make_sampler(
        args.temp,
        args.top_p,
        args.min_p,
        args.min_tokens_to_keep,
        args.top_k,
        args.xtc_probability,
        args.xtc_threshold,
        tokenizer.encode("\n") + list(tokenizer.eos_token_ids),
        acceptance=acceptance,
        seed=(args.seed + turn) % 2**64 if is_seeded else None,
    )


def report_settings(args: argparse.Namespace, model: Any) -> None:
    """Print which head was fetched and which tuned settings are in use, if any."""
    if args.mtp and (fetched := model.fetched_head) is not None:
        when = "fetched to" if fetched.is_new else "fetched before to"
        print(f"MTP head: of {fetched.source}, {fetched.nbytes / 1e6:.1f} MB, {when} {fetched.folder}", file=sys.stderr)
        accepted = fetched.acceptance(model.fingerprint())
        print(f"Drafts accepted on built-in text: {accepted or 0:.0%}", file=sys.stderr)
    if args.mtp and model.drafting.tuned is not None:
        given = {name: getattr(args, name) for name in ("num_draft_tokens", "draft_p_min")}
        used = replace(model.drafting.tuned, **{name: value for name, value in given.items() if value is not None})
        print(f"Using tuned settings: {used} (--settings off ignores them)", file=sys.stderr)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
