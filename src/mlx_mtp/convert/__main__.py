"""The command line of ``mlx_mtp convert``: mlx-lm's flags, those of heads and vision encoders, recipes, and ``--inspect``."""

from contextlib import suppress
from pathlib import Path
from shlex import quote

from ..checkpoint.catalog import Published, published
from ..checkpoint.config import Config, check_config, family_in, skeleton
from ..checkpoint.heads.acceptance import key_of, known, shifted
from ..checkpoint.heads.formats import check_head, first_tensor, has_raw_backbone, has_raw_head
from ..checkpoint.heads.originals import check_method
from ..checkpoint.ngram_files import find_tables, place_of
from ..checkpoint.reader import INDEX_FILE, CheckpointReader, Tensor, Tensors, n_bytes, tower_tensors
from ..cli.display import one_line_errors
from ..cli.parser import parse
from ..cli.parsers import convert_parser
from ..errors import MTPError, MTPFileNotFoundError
from ..memory import size, sizes_of
from .conversion import convert


@one_line_errors("mlx_mtp convert")
def main() -> None:
    parser = convert_parser()
    args = vars(parse(parser))
    if (recipe := args.pop("recipe")) is not None:
        if (model := recipes().get(recipe)) is None:
            raise MTPError(f"There is no recipe {recipe}: give one of {', '.join(recipes())}.")
        needs = f"{model.disk_gb} GB on disk and a machine with {model.memory_gb} GB of memory"
        print(f"[INFO] {recipe}: the result takes {needs}")
        folder = f"{model.original.rpartition('/')[2]}-4bit"
        parser.set_defaults(hf_path=model.original, mlx_path=folder, quantize=True, q_bits=4)
        args = vars(parser.parse_args())
        del args["recipe"]
    if (name := args.pop("inspect")) is not None:
        print(inspect(name, args["revision"]))
        return
    if args["hf_path"] is None:
        raise MTPError("--hf-path is required: a folder or a Hugging Face repo.")
    convert(**args)
    target = Path(args["mlx_path"])
    n_bytes = sum(file.stat().st_size for file in target.iterdir())
    print(f"[INFO] Wrote {target}, {size(n_bytes)}")
    print(f"[INFO] Next: `mlx_mtp chat {'--mtp ' * args['mtp']}--model {quote(str(target))}`")


def recipes() -> dict[str, Published]:
    return {name: model for name, model in published().items() if name.endswith("-4bit")}


def inspect(path_or_hf_repo: str, revision: str | None = None) -> str:
    """Describe a checkpoint: type, quantization, head, vision encoder, the outcome of ``--mtp``, and the head's memory."""
    checkpoint = CheckpointReader(path_or_hf_repo, revision)
    config = checkpoint.config
    if config is None:
        raise MTPFileNotFoundError(f"{path_or_hf_repo} is not a model: it has no config.json.")
    tower = tower_tensors(checkpoint)
    head = Tensors()
    told = "none"
    with suppress(FileNotFoundError, MTPError):  # told by the verdict
        head = checkpoint.head()
    measured = known(key_of(checkpoint, checkpoint)) if head else None
    try:
        check_method(checkpoint)
        find_tables(skeleton(check_config(config, checkpoint.name), checkpoint.name), checkpoint)
        check_head(checkpoint)
        verdict = "ready" if measured is None else f"ready, {measured.rate:.0%} of drafts accepted on built-in text"
    except MTPError as e:
        verdict = str(e)
    if head:
        where = f" in {', '.join(files)}" if (files := checkpoint.head_files) else ""
        quantized = ", quantized" if any(name.endswith(".scales") for name in head) else ""
        layout = _layout(checkpoint, has_raw_head(checkpoint))
        if measured is not None and measured.reading is not None:
            layout = f"norms to be shifted: {shifted(measured.reading)}"
        told = f"{len(head)} tensors{where}, {size(n_bytes(head))}{quantized}, {layout}"
    commit = f" at {checkpoint.revision}" if checkpoint.revision else ""
    n_table = n_bytes(checkpoint.tensors({n: file for n, file in checkpoint.model_map.items() if place_of(n)}))
    index = checkpoint.read_json(INDEX_FILE) if INDEX_FILE in checkpoint.files else {}
    total = (index.get("metadata") or {}).get("total_size")
    if not isinstance(total, int):
        total = n_bytes(checkpoint.tensors(checkpoint.model_map))
    quantization = _quantization(config, first_tensor(checkpoint, "embed_tokens.weight"))
    lines = {
        "Model": checkpoint.name + commit,
        "Model type": config.get("model_type"),
        "Backbone": f"{quantization}, {_layout(checkpoint, bool(has_raw_backbone(checkpoint)))}",
        "Size": size(total),
        **({"N-grams": f"{size(n_table)} of that size, read from the files by row"} if n_table else {}),
        "MTP head": told,
        "Vision": f"{len(tower)} tensors, {size(n_bytes(tower))}" if tower else "none",
        "--mtp": verdict,
    }
    if verdict.startswith("ready"):
        n_values = sizes_of(skeleton(config, checkpoint.name), 2).head_values
        own = f"for its own keys and values {2 * n_values:,} bytes per token of context"
        lines["Memory"] = f"{size(n_bytes(head))} for the head, and {own}"
    return "\n".join(f"{key + ':':<12}{value}" for key, value in lines.items())


def _quantization(config: Config, embedding: Tensor | None) -> str:
    quantization = config.get("quantization") or config.get("quantization_config")
    if not quantization:
        return "not quantized" if embedding is None else f"not quantized ({embedding.dtype})"
    if "group_size" not in quantization or "quant_method" in quantization:
        return f"quantized ({quantization.get('quant_method')})"
    own = sum(isinstance(value, dict) and "ngram_embedding" not in name for name, value in quantization.items())
    bits = quantization["bits"]
    mode = quantization.get("mode", "affine")
    return f"{bits} bits in groups of {quantization['group_size']} ({mode})" + f", {own} modules otherwise" * (own > 0)


def _layout(checkpoint: CheckpointReader, raw: bool) -> str:
    name, norms = ("raw", "to be shifted") if raw else ("converted", "shifted")
    family = family_in(checkpoint.config)
    return f"{name} (norms {norms})" if family is None or family.shifts_norms else name


if __name__ == "__main__":
    main()
