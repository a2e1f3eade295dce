"""Files with a machine's results: ``--report`` writes them, ``scripts/results_table.py`` makes the table of docs/results.md.

They have the machine, the versions and the model, and nothing private: no path, no prompt, no host name.
"""

import os
import platform
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn

from ..checkpoint.config import read_json
from .measure import OVERALL, Report, Result
from .runs import AUTO, COPIES, COPY, HEAD, NO_COPIES, TARGET, Run

VERSION = 1  # version of the file's layout
HEAD_DEPTHS = (1, 2, 3, 4)
RUNS: tuple[Run, ...] = (*HEAD_DEPTHS, NO_COPIES, COPIES, AUTO)  # runs in a report
NAME = {"type": "string", "pattern": "^[^|<>\\n]{1,200}$"}  # valid in a cell of a table
POSITIVE = {"type": "number", "exclusiveMinimum": 0}
SHARE = {"type": "number", "minimum": 0, "maximum": 1}
COUNT, OR_NONE = {"type": "integer", "minimum": 1}, {"anyOf": [NAME, {"type": "null"}]}


def _fields(**fields: Any) -> dict[str, Any]:
    """The schema of an object with exactly these fields."""
    return {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}


PLAIN_SCHEMA = {"tokens_per_second": POSITIVE, "first_token_s": POSITIVE, "peak_gb": POSITIVE}
RUN_SCHEMA = _fields(
    **PLAIN_SCHEMA,
    ratio=POSITIVE,
    ratio_low=POSITIVE,
    ratio_high=POSITIVE,
    head=SHARE,
    copies=SHARE,
    target=SHARE,
    acceptance={"type": "array", "items": SHARE},
    same_tokens={"type": "boolean"},
)
SCHEMA = _fields(
    version={"const": VERSION},
    date={"type": "string", "pattern": r"^\d{4}-\d\d-\d\d$"},
    machine=_fields(chip=NAME, device={"enum": ["cpu", "gpu"]}, cores=COUNT, memory_gb=POSITIVE, os=NAME),
    versions={"type": "object", "required": ["mlx", "mlx-lm", "mlx-mtp"], "additionalProperties": NAME},
    model=_fields(name=NAME, type=NAME, backbone=NAME, head=NAME, draft_lm_head=OR_NONE, settings=OR_NONE),
    prompts=_fields(kind=NAME, number=COUNT, mean_tokens=COUNT, repeated=SHARE),
    max_tokens=COUNT,
    repeat=COUNT,
    plain=_fields(**PLAIN_SCHEMA),
    runs=_fields(**{str(run): RUN_SCHEMA for run in RUNS}),
)


def make_results(report: Report, model: Any, name: str, kind: str) -> dict[str, Any]:
    """Convert a report of ``RUNS`` to results. ``name`` may be a folder, of which only the last part is used."""
    first, *_ = results = report.of(OVERALL)
    n_prompts = len({r.prompt for r in report.results}) - 1
    return {
        "version": VERSION,
        "date": date.today().isoformat(),
        "machine": describe_machine(),
        "versions": report.versions,
        "model": {"name": Path(name).resolve().name if Path(name).exists() else name, **describe_model(model)},
        "prompts": {
            "kind": kind,
            "number": n_prompts,
            "mean_tokens": first.prompt_tokens // n_prompts,
            "repeated": statistics.mean(report.repeated.values()),
        },
        "max_tokens": report.max_tokens,
        "repeat": report.repeat,
        "plain": {
            "tokens_per_second": first.plain_tps,
            "first_token_s": first.plain_first_token,
            "peak_gb": first.plain_peak_memory,
        },
        "runs": {str(r.run): _describe_run(r) for r in results},
    }


def _describe_run(r: Result) -> dict[str, Any]:
    return {
        "tokens_per_second": r.mtp_tps,
        "first_token_s": r.mtp_first_token,
        "peak_gb": r.mtp_peak_memory,
        "ratio": r.ratio,
        "ratio_low": r.ratio_low,
        "ratio_high": r.ratio_high,
        "head": r.fraction(HEAD),
        "copies": r.fraction(COPY),
        "target": r.fraction(TARGET),
        "acceptance": r.acceptance,
        "same_tokens": r.identical,
    }


def describe_machine() -> dict[str, Any]:
    """The chip by MLX's name, and other properties that affect the speed."""
    return {
        "chip": str(mx.device_info()["device_name"]),
        "device": mx.default_device().type.name,
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "os": f"macOS {macos}" if (macos := platform.mac_ver()[0]) else f"{platform.system()} {platform.release()}",
    }


def describe_model(model: Any) -> dict[str, Any]:
    """The model's type, the precision of its weights, and its settings for drafts."""
    tuned, lm_head = model.drafting.tuned, model.drafting.lm_head
    layer = None if lm_head is None else lm_head.layers[0]
    return {
        "type": model.model_type,
        "backbone": precision([m for path, m in model.named_modules() if "mtp." not in path]),
        "head": precision([m for _, m in model.mtp.named_modules()]),
        "draft_lm_head": None if layer is None else f"{len(layer.weight)} rows, {precision([layer])}",
        "settings": None if tuned is None else str(tuned),
    }


def precision(modules: Sequence[nn.Module]) -> str:
    """The precision of most weights: ``4-bit`` for MLX's affine quantization, another quantization, or a dtype."""
    sizes: Counter[str] = Counter()
    for m in modules:
        if "weight" in m:
            bits = getattr(m, "bits", None)
            if bits is None:
                sizes[str(m.weight.dtype).rpartition(".")[2]] += m.weight.size
            else:
                sizes[f"{bits}-bit" if m.mode == "affine" else m.mode] += m.weight.size * 32 // bits
    return sizes.most_common(1)[0][0]


def read_results(file: Path) -> dict[str, Any]:
    """Read results, or raise a ValueError if the file is not from this version's ``--report``."""
    from jsonschema import Draft202012Validator  # of the extra ``test``
    from jsonschema.exceptions import best_match

    results = read_json(file)
    error = best_match(Draft202012Validator(SCHEMA).iter_errors(results))
    if error is not None:
        where = ".".join(map(str, error.absolute_path)) or "the file"
        raise ValueError(f"{file} is not a report of this version's `--report`: in {where}, {error.message[:200]}")
    return results


def markdown(machines: Sequence[Mapping[str, Any]]) -> str:
    """A table with a row for the results of each machine."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (COLUMNS, ["---"] * len(COLUMNS))]
    lines += ["| " + " | ".join(cell(results) for cell in COLUMNS.values()) + " |" for results in machines]
    return "\n".join(lines)


def _machine(results: Mapping[str, Any]) -> str:
    machine = results["machine"]
    cpu = f", CPU with {machine['cores']} cores" if machine["device"] == "cpu" else ""
    return f"{machine['chip']}{cpu}, {machine['memory_gb']:.0f} GB"


def _model(results: Mapping[str, Any]) -> str:
    model = results["model"]
    more = [f"head {model['head']}"] if model["head"] != model["backbone"] else []
    more += [f"drafts from {model['draft_lm_head']}"] if model["draft_lm_head"] else []
    return ", ".join([f"{model['name']}, {model['backbone']}", *more])


def describe(results: Mapping[str, Any]) -> tuple[str, str, str]:
    """Describe the machine, the model and the prompts of results."""
    return _machine(results), _model(results), f"prompts: {results['prompts']['kind']}"


def _ratio(results: Mapping[str, Any], run: Run) -> str:
    return f"{results['runs'][str(run)]['ratio']:.2f}"


def _auto(results: Mapping[str, Any]) -> str:
    auto = results["runs"][AUTO]
    return f"{auto['ratio']:.2f} ({auto['head']:.0%} head, {auto['copies']:.0%} copies)"


def _pair(results: Mapping[str, Any], name: str, digits: int) -> str:
    return f"{results['plain'][name]:.{digits}f} {results['runs'][AUTO][name]:.{digits}f}"


COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "machine": _machine,
    "model": _model,
    "prompts": lambda results: results["prompts"]["kind"],
    "plain mlx-lm, tokens/s": lambda results: f"{results['plain']['tokens_per_second']:.1f}",
    "head alone, 1 2 3 4 drafts": lambda results: " ".join(_ratio(results, k) for k in HEAD_DEPTHS),
    "head alone, auto": lambda results: _ratio(results, NO_COPIES),
    "copies alone": lambda results: _ratio(results, COPIES),
    "both, auto": _auto,
    "accepted at 1 2 3 4": lambda results: " ".join(
        f"{a:.2f}" for a in results["runs"][str(HEAD_DEPTHS[-1])]["acceptance"]
    ),
    "text that repeats itself": lambda results: f"{results['prompts']['repeated']:.0%}",
    "first token, s": lambda results: _pair(results, "first_token_s", 2),
    "peak GB": lambda results: _pair(results, "peak_gb", 2),
    "mlx-mtp, date": lambda results: f"{results['versions']['mlx-mtp']}, {results['date']}",
}
