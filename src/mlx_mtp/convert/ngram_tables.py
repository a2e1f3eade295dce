"""The tables of n-gram embeddings in ``mlx_mtp convert``, of which a part is read, converted and written at a time."""

from itertools import accumulate
from pathlib import Path
from typing import Any

import mlx.core as mx
from tqdm import tqdm

from ..checkpoint import output
from ..checkpoint.config import Config
from ..core.models.ngrams import NgramTable, Quantized, floats

FOUR_BITS = Quantized(32, 4, "affine")  # a row has 160 numbers, which larger groups do not divide
NAME = "language_model.model.layers.{}.ple.ple_embedding.ngram_embedding.shards.{}"

Written = dict[str, tuple[str, int]]  # the file of each tensor, and its bytes


def write_tables(folder: Path, model: Any, config: Config, quantize: bool, dtype: mx.Dtype | None) -> Written:
    """Write the tables of a model, if any, quantized if asked, or in ``dtype``, and record their quantization in the config."""
    written: Written = {}
    ngrams = getattr(model, "ngrams", None)  # mlx-lm's own models have none
    for i, table in (ngrams.tables if ngrams is not None else {}).items():
        of_rows = table.quantized or (FOUR_BITS if quantize else None)
        size, others = divmod(len(table.rows), n := model.text_args.split_ngram_parts)
        ends = [*accumulate((size + (j < others) for j in range(n)), initial=0)]  # parts as mlx-vlm reads them
        for j in tqdm(range(n), desc="Writing the n-gram table", unit="part", disable=None):
            name, file = NAME.format(i, j), f"model-ngrams-{i}-{j + 1:05d}-of-{n:05d}.safetensors"
            part = _part(table, ends[j], ends[j + 1], of_rows, dtype)
            output.save(folder / file, {f"{name}.{kind}": x for kind, x in part.items()})
            written |= {f"{name}.{kind}": (file, x.nbytes) for kind, x in part.items()}
            for key in ("quantization", "quantization_config"):
                if of_rows is not None and key in config:
                    config[key][name] = of_rows._asdict()
            del part
            mx.clear_cache()
    return written


def _part(
    table: NgramTable, begin: int, end: int, of_rows: Quantized | None, dtype: mx.Dtype | None
) -> dict[str, mx.array]:
    blocks = []
    for i, k in table.blocks(begin, end):
        rows = {name: floats(mx.array(x)) for name, x in table.rows.read_range(i, k).items()}
        if table.quantized is None:
            w = rows["weight"] if dtype is None else rows["weight"].astype(dtype)
            arrays = (w,) if of_rows is None else mx.quantize(w, *of_rows)
            rows = dict(zip(("weight", "scales", "biases"), arrays))
        mx.eval(rows)
        blocks.append(rows)
    return {name: mx.concatenate([block[name] for block in blocks]) for name in blocks[0]}
