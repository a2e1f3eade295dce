"""Find the base model of a conversion or a fine-tune, with the MTP head or the vision encoder that it lacks.

A model card names the checkpoint that its model was made from (``base_model``), whose card may name another one. If the cards
do not lead to the original, the config's ``_name_or_path`` is tried, then the published models with a fitting name and size.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from huggingface_hub import RepoCard
from huggingface_hub.utils import TensorInfo
from yaml import YAMLError

from ..catalog import Published, originals_like, published
from ..config import Config, check_config, first_difference, text_config_of
from ..storage.reader import CheckpointReader

MAX_STEPS = 4  # from a checkpoint to its base model
CARD = "README.md"


def find_original(
    name: str, folder: Path, config: Config, what: str, describe: Callable[[CheckpointReader], dict[str, TensorInfo]]
) -> tuple[CheckpointReader, dict[str, TensorInfo]]:
    """Find the base model of a checkpoint that lacks a part. Return it, and the tensors of the part.

    This downloads only cards, configs and headers from the hub.

    Args:
        name (str): The checkpoint's path or repository, for errors.
        what (str): The part, for errors.
        describe (Callable[[CheckpointReader], Dict[str, TensorInfo]]): See ``fetch_from_original``.

    Raises:
        FileNotFoundError: There is no original, or it cannot be read; the message has the reason for each candidate.
    """
    tried: dict[str, str] = {}
    for original in _candidates(name, folder, config):
        try:
            reader = CheckpointReader(original)
            return reader, describe(reader)
        except (FileNotFoundError, ValueError) as e:
            tried[original] = str(e)
    reasons = " ".join(tried.values()) or "No model card, config or published model of this size names it."
    raise FileNotFoundError(f"{name} has no {what}, and its base model was not found. {reasons}")


def check_sizes(original: CheckpointReader, config: Config, name: str) -> Config:
    """Return the config of an original after checking that its sizes match a model's.

    Raises:
        ValueError: A size differs, or models of this type are not supported.
    """
    own = check_config(original.config, original.name)
    ties = [bool(c.get("tie_word_embeddings", text_config_of(c).get("tie_word_embeddings"))) for c in (own, config)]
    difference = first_difference(own, config)
    if not difference and ties[0] != ties[1]:
        difference = f"tie_word_embeddings is {ties[0]}, not {ties[1]}"
    if difference:
        raise ValueError(f"{original.name} does not fit {name}: {difference}.")
    return own


def _candidates(name: str, folder: Path, config: Config) -> Iterator[str]:
    """Repositories and folders that may be the original, the nearest first, without repetition."""
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


def published_base(name: str, folder: Path, config: Config) -> Published | None:
    """The published model that a checkpoint's own card, config or name says it was made from, without the hub."""
    own_name = config.get("_name_or_path") or text_config_of(config).get("_name_or_path")
    text = text_config_of(config)
    sizes = text.get("num_hidden_layers"), text.get("hidden_size")
    by_original = {m.original: m for m in published().values() if (m.layers, m.hidden_size) == sizes}
    likely = [*base_models(folder / CARD), own_name, *originals_like(f"{name} {own_name}", config)]
    return next((by_original[original] for original in likely if original in by_original), None)


def _bases_of(name: str) -> list[str]:
    """The ``base_model`` of a checkpoint that may not be readable."""
    try:
        reader = CheckpointReader(name)
        return [*_parse(reader.read(CARD).decode("utf-8"))] if CARD in reader.files else []
    except (FileNotFoundError, ValueError):
        return []  # its error is reported when its head is tried


def base_models(card: Path) -> Iterable[str]:
    """The ``base_model`` of a model card: the checkpoints that its model was made from."""
    return _parse(card.read_text(encoding="utf-8", errors="replace")) if card.exists() else []


def _parse(card: str) -> list[str]:
    if not card.lstrip().startswith("---"):
        return []  # no metadata: huggingface_hub would warn
    try:
        bases = RepoCard(card, ignore_metadata_errors=True).data.get("base_model")
    except (ValueError, YAMLError):
        return []  # written by hand
    return [base for base in (bases if isinstance(bases, list) else [bases]) if isinstance(base, str) and base]
