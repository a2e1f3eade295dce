"""The vision encoder's time and memory, beside reading as many tokens of text as the image has.

    python -m benchmarks.tower
    python -m benchmarks.tower --published --model PATH_OR_REPO

The tower is random. Without ``--published`` it is one for the demo: 4 layers of 192 with heads of 48. The published one is that
of the larger Qwen3.5: 27 layers of 1152 with heads of 72. Memory is the peak above the weights.
"""

import math
from collections.abc import Callable

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

import mlx_mtp
from benchmarks.timing import seconds
from mlx_mtp.cli.display import table
from mlx_mtp.images.tower import VisionArgs, VisionTower
from scripts.shared import script_parser

DEMO_TOWER = {"depth": 4, "hidden_size": 192, "intermediate_size": 768, "num_heads": 4}
CHUNK = 2048  # tokens prefilled in a pass


def measure(run: Callable[[], mx.array], repeat: int) -> tuple[float, int]:
    """The least time in seconds, and the peak memory above what was there, in bytes."""
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    least = min(seconds(lambda: mx.eval(run())) for _ in range(repeat))
    return least, mx.get_peak_memory() - before


def prefill(model, n_tokens: int) -> mx.array:
    """A prompt of random tokens, as a generation prefills it -> the last logits."""
    cache, tokens = model.make_cache(), mx.random.randint(0, model.vocab_size, (1, n_tokens))
    for i in range(0, n_tokens, CHUNK):
        out, _ = model(tokens[:, i : i + CHUNK], cache, return_hidden=True)
        mx.eval([c.state for c in cache])
    return out[:, -1:]


def row(megapixels: float, tower: VisionTower, model, repeat: int) -> list[str]:
    args = tower.args
    side = round(math.sqrt(megapixels * 1e6) / (args.patch_size * args.spatial_merge_size))
    pixels = mx.random.uniform(-1, 1, (side, side, args.spatial_merge_size**2, args.patch_dim))
    mx.eval(pixels)
    took, n_bytes = measure(lambda: tower(pixels), repeat)
    prompt_took, prompt_bytes = measure(lambda: prefill(model, side * side), repeat)
    size = (side * args.patch_size * args.spatial_merge_size) ** 2 / 1e6
    times = f"{took:.2f} s", f"{n_bytes / 1e6:,.0f} MB", f"{prompt_took:.2f} s", f"{prompt_bytes / 1e6:,.0f} MB"
    return [f"{size:.2f}", f"{side * side * args.spatial_merge_size**2:,}", f"{side * side:,}", *times]


def main() -> None:
    flags = dict(model=(str(mlx_mtp.DEMO), "Whose prompts are read."), megapixels=[0.25, 1.0, 4.0])
    flags |= dict(dtype=("bfloat16", "The tower's."), repeat=(2, "Runs, of which the fastest counts."))
    options = script_parser(__doc__, published=(False, "The tower of the larger Qwen3.5."), **flags).parse_args()
    model, _ = mlx_mtp.load(options.model)
    sizes = {} if options.published else DEMO_TOWER
    args = VisionArgs(**sizes, out_hidden_size=model.model.embed_tokens(mx.array([0])).shape[-1])
    tower = VisionTower(args)
    tower.update(tree_map(lambda w: w.astype(getattr(mx, options.dtype)), tower.parameters()))
    mx.eval(tower.parameters())
    n_parameters = sum(w.size for _, w in tree_flatten(tower.parameters()))
    about = f"a tower of {args.depth} layers of {args.hidden_size} in {options.dtype}"
    print(f"{mx.default_device()}; {about}, {n_parameters / 1e6:.1f}M parameters")
    header = ["megapixels", "patches", "tokens", "tower", "its memory", "reading tokens", "its memory"]
    print(*table([header, *(row(m, tower, model, options.repeat) for m in options.megapixels)]), sep="\n")


if __name__ == "__main__":
    main()
