"""Find the original of a checkpoint: the one that has the MTP head which a conversion or a fine-tune of it lacks.

A model card names the checkpoint that its model was made from (``base_model``), and that one's card the next. Where no card
leads to a head, the config's ``_name_or_path`` is tried, and then the published models whose name and sizes fit.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from huggingface_hub import RepoCard
from huggingface_hub.utils import TensorInfo
from yaml import YAMLError

from ...models.mtp import split_head
from ..catalog import originals_like
from ..config import Config, check_config, first_difference, text_config_of
from ..head_formats import check_head
from ..reader import CheckpointReader
from ..skeleton import check_shapes, skeleton

MAX_STEPS = 4  # from a checkpoint to its original
CARD = "README.md"
DTYPES = ("BF16", "F16", "F32")


def find_original(name: str, folder: Path, config: Config) -> CheckpointReader:
    """Find the original of a checkpoint without a head.

    From a repository on the hub this downloads cards, configs and headers only.

    Args:
        name (str): The checkpoint's path or repository, as the user knows it.
        folder (Path): The checkpoint.
        config (Dict[str, Any]): Its config.json.

    Returns:
        CheckpointReader: A checkpoint whose head fits.

    Raises:
        FileNotFoundError: There is none, or it cannot be read; the message names each that was tried, and why not.
    """
    tried: dict[str, str] = {}
    for original in _candidates(name, folder, config):
        try:
            reader = CheckpointReader(original)
            fitting_head(reader, config, name)
        except (FileNotFoundError, ValueError) as e:
            tried[original] = str(e)
            continue
        return reader
    reasons = " ".join(tried.values()) or "No model card, config or published model of this size names it."
    raise FileNotFoundError(
        f"{name} has no MTP head, and its original was not found. {reasons} Name a head with --mtp HEAD, add one with "
        f"`mlx_mtp.convert --graft-mtp-from ORIGINAL --model {name} --mlx-path NEW`, or use --copy-drafts auto without --mtp."
    )


def fitting_head(original: CheckpointReader, config: Config, name: str) -> dict[str, TensorInfo]:
    """Describe the tensors of an original's head.

    Args:
        config (Dict[str, Any]): That of the model which is to draft with it.
        name (str): That model's.

    Raises:
        ValueError: There is no head, or it does not fit the model, or it is quantized.
    """
    own = check_config(original.config, original.name)
    tensors = original.head()
    if not tensors:
        raise ValueError(f"{original.name} has no MTP head.")
    check_head(original.name, own, original.weight_map)
    ties = [bool(c.get("tie_word_embeddings", text_config_of(c).get("tie_word_embeddings"))) for c in (own, config)]
    difference = first_difference(own, config)
    if not difference and ties[0] != ties[1]:
        difference = f"tie_word_embeddings is {ties[0]}, not {ties[1]}"
    if difference:
        raise ValueError(f"The MTP head of {original.name} does not fit {name}: {difference}.")
    if any(t.dtype not in DTYPES for t in tensors.values()) or any(n.endswith(".scales") for n in tensors):
        raise ValueError(f"The MTP head of {original.name} is quantized.")
    check_shapes(skeleton(config, name), split_head(tensors)[1])
    return tensors


def _candidates(name: str, folder: Path, config: Config) -> Iterator[str]:
    """Repositories and folders that may be the original, the nearest first, each once."""
    seen = {name, str(folder)}
    bases = [*base_models(folder / CARD)]
    for _ in range(MAX_STEPS):
        found: list[str] = []
        for base in bases:
            if base not in seen:
                seen.add(base)
                yield base
                found += _bases_of(base)
        bases = found
    own_name = config.get("_name_or_path") or text_config_of(config).get("_name_or_path")
    for other in (own_name, *originals_like(f"{name} {own_name}", config)):
        if isinstance(other, str) and other and other not in seen:
            seen.add(other)
            yield other


def _bases_of(name: str) -> list[str]:
    """The ``base_model`` of a checkpoint that may not be readable."""
    try:
        reader = CheckpointReader(name)
        return [*_parse(reader.read(CARD).decode("utf-8"))] if CARD in reader.files else []
    except (FileNotFoundError, ValueError):
        return []  # its own error is reported where its head is tried


def base_models(card: Path) -> Iterable[str]:
    """The ``base_model`` of a model card: the checkpoints that its model was made from."""
    return _parse(card.read_text(encoding="utf-8", errors="replace")) if card.exists() else []


def _parse(card: str) -> list[str]:
    try:
        bases = RepoCard(card, ignore_metadata_errors=True).data.get("base_model")
    except (ValueError, YAMLError):
        return []  # written by hand
    return [base for base in (bases if isinstance(bases, list) else [bases]) if isinstance(base, str) and base]
