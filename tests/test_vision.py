"""The vision encoder against transformers' values (tests/data/vision_tiny), and what ``mlx_mtp.load`` makes of it."""

import json
import sys
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

import mlx_mtp
from mlx_mtp import stream_generate
from mlx_mtp.images import tower as vision
from mlx_mtp.images.prompt import PLACEHOLDER
from mlx_mtp.images.tower import PATCH_KERNEL, VisionArgs, make_tower, split_tower
from tests.support.checkpoints import configure, copied, loaded
from tests.support.commands import refused
from tests.support.decoding import mtp
from tests.support.images import VISION_CONFIG, add_tower, picture, tower_tensors
from tests.support.models import DATA
from tests.support.profiles import LONG

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from captions import make_checkpoint

TOWERS = ("small", "wide")  # heads of 16 and of 72


def stored(name):
    folder = DATA / "vision_tiny" / name
    args = VisionArgs.from_dict(json.loads((folder / "config.json").read_text())["vision_config"])
    language, tensors = split_tower(mx.load(str(folder / "model.safetensors")))
    assert language == {}
    return args, tensors, dict(np.load(folder / "reference.npz"))


def in_float32(tensors):
    return {name: w.astype(mx.float32) for name, w in tensors.items()}


def run(tower, reference, j):
    rows, columns = reference[f"grid_{j}"].tolist()
    out = tower(mx.array(reference[f"pixels_{j}"]).reshape(rows, columns, 4, -1))
    assert out.shape == (rows * columns, tower.args.out_hidden_size)
    return np.array(out.astype(mx.float32))


@pytest.mark.parametrize("name", TOWERS)
def test_rows_are_those_of_transformers(name):
    """In bfloat16 as far from its values as those are from its own in float32, and no farther."""
    args, tensors, reference = stored(name)
    exact, rounded = make_tower(args, in_float32(tensors)), make_tower(args, tensors)
    assert rounded(mx.zeros((1, 1, 4, args.patch_dim))).dtype == mx.bfloat16
    noise, ours = [], []
    for j in range(5):
        want, theirs = reference[f"rows_{j}"], reference[f"rows_bfloat16_{j}"]
        np.testing.assert_allclose(run(exact, reference, j), want, atol=1e-5, rtol=1e-5)
        noise.append((theirs - want).ravel())
        ours.append((run(rounded, reference, j) - theirs).ravel())
    assert np.std(np.concatenate(ours)) < 1.25 * np.std(np.concatenate(noise))


@pytest.mark.parametrize("size", [1, 10_000, 300_000, 5_000_000] if LONG else [1, 300_000])
def test_an_image_in_pieces_is_the_same(size):
    args, tensors, reference = stored("wide")
    tower = make_tower(args, in_float32(tensors))
    whole, (rows, columns) = run(tower, reference, 4), reference["grid_4"].tolist()
    pieces = tower.pieces(mx.array(reference["pixels_4"]).reshape(rows, columns, 4, -1), lambda: size)
    costs = []
    with pytest.raises(StopIteration) as end:
        while True:
            costs.append(next(pieces))
    np.testing.assert_allclose(np.array(end.value.value), whole, atol=1e-5)
    n, D = rows * columns * 4, args.hidden_size
    patch = 2 * n * D + D * D + 2 * D * args.intermediate_size  # of a layer, behind the queries, keys and values
    merged = D * args.spatial_merge_size**2
    assert max(costs) <= max(size, patch, merged * (merged + args.out_hidden_size))
    assert size > 1 or len(costs) == n * (1 + 2 * args.depth) + rows * columns


def test_scores_are_never_all_in_memory(monkeypatch):
    args, tensors, _ = stored("wide")
    tower, rows, columns = make_tower(args, in_float32(tensors)), 20, 20
    pixels = mx.random.normal((rows, columns, 4, args.patch_dim))
    mx.eval(pixels, tower.parameters())
    scores = 4 * args.num_heads * (rows * columns * 4) ** 2
    monkeypatch.setattr(vision, "SCORE_BYTES", scores // 64)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    tower(pixels)
    assert mx.get_peak_memory() - before < scores


SMALL = VISION_CONFIG | {"out_hidden_size": 8}


def small_tower(raw=True, change=lambda tensors: None):
    args = VisionArgs.from_dict(SMALL)
    tensors = split_tower(tower_tensors(args, raw))[1]
    change(tensors)
    return make_tower(args, tensors)


def test_both_layouts_make_the_same_tower_and_others_are_refused():
    """Tensors that do not fit, other towers, images of another shape or of too many pixels."""
    # The layouts make the same tower
    a, b = (dict(tree_flatten(small_tower(raw).parameters())) for raw in (True, False))
    assert a.keys() == b.keys()
    assert all(mx.array_equal(a[name], b[name]) for name in a)
    raw, from_config, tower = partial(small_tower, True), VisionArgs.from_dict, small_tower()
    for message, make, given in [
        ("merger.norm.weight", raw, lambda w: w.pop("merger.norm.weight")),
        ("blocks.2.norm1.weight", raw, lambda w: w.update({"blocks.2.norm1.weight": mx.zeros(32)})),
        ("proj.weight", raw, lambda w: w.update({PATCH_KERNEL: mx.zeros((32, 5, 5))})),
        ("is quantized: graft the base model's", raw, lambda w: w.update({"merger.linear_fc1.scales": mx.zeros(8)})),
        ("hidden_act must be gelu_pytorch_tanh, not silu", from_config, VISION_CONFIG | {"hidden_act": "silu"}),
        (r"visual_indexes must be empty, not \[1\]", from_config, VISION_CONFIG | {"deepstack_visual_indexes": [1]}),
        ("hidden_size 32 must be a multiple of 4 .* num_heads", from_config, VISION_CONFIG | {"num_heads": 3}),
        (r"must be \[rows, columns, 4, 96\], not \[2, 2, 4, 95\]", tower, mx.zeros((2, 2, 4, 95))),
        (r"must be \[rows, columns, 4, 96\], not \[0, 2, 4, 96\]", tower, mx.zeros((0, 2, 4, 96))),
        ("1,056,768 pixels is larger than the 1,048,576 .* make it smaller", tower, mx.zeros((128, 129, 4, 96))),
    ]:
        refused(message, make, given)


@pytest.fixture
def checkpoint(tmp_path):
    return add_tower(copied(tmp_path))


def test_load_finds_the_tower_and_reads_it_when_asked(checkpoint, tmp_path):
    """And its keys tell images of one size apart."""
    model = loaded(checkpoint)
    images, encode = model.vision, model.vision.processor.preprocess_image
    assert "tower" not in vars(images)
    assert not any("vision" in name for name, _ in tree_flatten(model.parameters()))
    pixels = [encode(picture(seed=seed)) for seed in (0, 1)]
    rows, columns = pixels[0].shape[:2]
    assert images.tower(pixels[0]).shape == (rows * columns, 192)
    assert "tower" in vars(images)
    a, b = map(images.key, pixels)
    assert a != b
    assert images.key(encode(picture())) == a
    assert images.key(pixels[0].reshape(columns, rows, 4, -1)) != a
    assert all(-(2**60) <= key < 0 for key in (a, b))
    # A model without a tower has no vision, and text is the same with one
    plain = copied(tmp_path / "plain")
    texts = [mtp([5, 6, 7], loaded(folder), max_tokens=8) for folder in (checkpoint, plain)]
    assert texts[0] == texts[1]
    assert loaded(plain).vision is None
    configure(plain, vision_config=VISION_CONFIG)  # that of the base model of a conversion
    assert loaded(plain).vision is None


def test_damage_is_told_with_the_first_image_in_a_line(checkpoint):
    images = loaded(checkpoint).vision
    other_patches = "have patch_size 8, its vision encoder 4"
    wrong = {
        "{": "are not usable",
        '{"size": 3}': "are not usable",
        '{"size": []}': "are not usable",
        '{"patch_size": 8}': other_patches,
    }
    for settings, message in wrong.items():
        (checkpoint / "preprocessor_config.json").write_text(settings)
        refused(f"image settings of .*model {message}", getattr, images, "processor")
    configure(checkpoint, vision_config=VISION_CONFIG | {"out_hidden_size": 8})
    images = loaded(checkpoint).vision
    refused("makes embeddings of 8, its model takes 192", getattr, images, "processor")


# A trained tower

FOLDER = DATA / "captions"
CAPTIONS = json.loads((FOLDER / "captions.json").read_text())
ONE, TWO, QUOTES = CAPTIONS["one"], CAPTIONS["two"], CAPTIONS["prompt"]
PROMPT = PLACEHOLDER + QUOTES
N = 12  # tokens of a caption, and of what ends it
RIGHT = 0.9  # of the captions, at least


def test_captions_are_right(tmp_path):
    """In bfloat16, as the checkpoint is loaded: of a picture, and of a second one behind the first and its caption."""
    model, tokenizer = mlx_mtp.load(str(make_checkpoint(tmp_path / "model")))

    def caption(files: list[str], *parts: str) -> str:
        tokens = [token for part in parts for token in tokenizer.encode(part)]
        options = dict(max_tokens=N, images=[FOLDER / file for file in files], num_draft_tokens=4)
        return "".join(r.text for r in stream_generate(model, tokenizer, tokens, **options)).partition(QUOTES)[0]

    step, captions = 1 if LONG else 6, {one["file"]: one["caption"] for one in ONE}
    are_right = [caption([one["file"]], PROMPT) == one["caption"] for one in ONE[::step]]
    for two in TWO[::step]:
        first, second = two["files"]
        text = caption([first, second], PROMPT, captions[first] + QUOTES, "\n\n", PROMPT)
        are_right.append(text == two["answer"].partition(QUOTES)[0])  # transformers' answer
    assert sum(are_right) >= RIGHT * len(are_right)
