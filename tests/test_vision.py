"""The vision tower against transformers' values (tests/data/vision_tiny), and what ``mlx_mtp.load`` makes of it."""

import json

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

import mlx_mtp
from mlx_mtp.images import tower as vision
from mlx_mtp.images.tower import PATCH_KERNEL, VisionArgs, make_tower, split_tower
from tests.support.checkpoints import configure, copied
from tests.support.images import VISION_CONFIG, add_tower, picture, tower_tensors
from tests.support.models import DATA

TOWERS = ("small", "wide")  # heads of 16 and of 72
GRIDS = range(5)


def stored(name):
    folder = DATA / "vision_tiny" / name
    args = VisionArgs.from_dict(json.loads((folder / "config.json").read_text())["vision_config"])
    language, tensors = split_tower(mx.load(str(folder / "model.safetensors")))
    assert language == {}
    return args, tensors, np.load(folder / "reference.npz")


def in_float32(tensors):
    return {name: w.astype(mx.float32) for name, w in tensors.items()}


def run(tower, reference, j):
    rows, columns = reference[f"grid_{j}"].tolist()
    out = tower(mx.array(reference[f"pixels_{j}"]).reshape(rows, columns, 4, -1))
    assert out.shape == (rows * columns, tower.args.out_hidden_size)
    return np.array(out.astype(mx.float32))


@pytest.mark.parametrize("j", GRIDS)
@pytest.mark.parametrize("name", TOWERS)
def test_rows_are_those_of_transformers(name, j):
    args, tensors, reference = stored(name)
    rows = run(make_tower(args, in_float32(tensors)), reference, j)
    np.testing.assert_allclose(rows, reference[f"rows_{j}"], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", TOWERS)
def test_bfloat16_rounds_as_transformers(name):
    """As far from its values in bfloat16 as those are from its own in float32, and no farther."""
    args, tensors, reference = stored(name)
    tower = make_tower(args, tensors)
    theirs = [reference[f"rows_bfloat16_{j}"] for j in GRIDS]
    noise = np.concatenate([(b - reference[f"rows_{j}"]).ravel() for j, b in enumerate(theirs)])
    ours = np.concatenate([(run(tower, reference, j) - b).ravel() for j, b in enumerate(theirs)])
    assert tower(mx.zeros((1, 1, 4, args.patch_dim))).dtype == mx.bfloat16
    assert np.std(ours) < 1.25 * np.std(noise)


@pytest.mark.parametrize("size", [1, 10_000, 300_000, 5_000_000])
def test_an_image_in_pieces_is_the_same(size):
    """Of one patch of a layer or of many."""
    args, tensors, reference = stored("wide")
    tower = make_tower(args, in_float32(tensors))
    whole, (rows, columns) = run(tower, reference, 4), reference["grid_4"].tolist()
    pixels = mx.array(reference["pixels_4"]).reshape(rows, columns, 4, -1)
    costs, rows_of_pieces = [], None
    pieces = tower.pieces(pixels, lambda: size)
    while rows_of_pieces is None:
        try:
            costs.append(next(pieces))
        except StopIteration as end:
            rows_of_pieces = end.value
    np.testing.assert_allclose(np.array(rows_of_pieces), whole, atol=1e-5)
    n, D = rows * columns * 4, args.hidden_size
    patch = 2 * n * D + D * D + 2 * D * args.intermediate_size  # of a layer, behind the queries, keys and values
    merged = D * args.spatial_merge_size**2
    assert max(costs) <= max(size, patch, merged * (merged + args.out_hidden_size))
    if size == 1:
        assert len(costs) == n * (1 + 2 * args.depth) + rows * columns


def test_scores_are_never_all_in_memory(monkeypatch):
    args, tensors, _ = stored("wide")
    tower = make_tower(args, in_float32(tensors))
    rows, columns = 30, 30
    pixels = mx.random.normal((rows, columns, 4, args.patch_dim))
    mx.eval(pixels, tower.parameters())
    n = rows * columns * 4
    scores = 4 * args.num_heads * n * n
    monkeypatch.setattr(vision, "SCORE_BYTES", scores // 64)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    tower(pixels)
    assert mx.get_peak_memory() - before < scores / 3


def test_both_layouts_make_the_same_tower():
    args = VisionArgs.from_dict(VISION_CONFIG | {"out_hidden_size": 8})
    towers = [make_tower(args, split_tower(tower_tensors(args, raw))[1]) for raw in (True, False)]
    a, b = (dict(tree_flatten(tower.parameters())) for tower in towers)
    assert a.keys() == b.keys()
    assert all(mx.array_equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("merger.norm.weight"), "merger.norm.weight"),
        (lambda w: w.update({"blocks.2.norm1.weight": mx.zeros(32)}), "blocks.2.norm1.weight"),
        (lambda w: w.update({PATCH_KERNEL: mx.zeros((32, 5, 5))}), "proj.weight"),
        (lambda w: w.update({"merger.linear_fc1.scales": mx.zeros(8)}), "is quantized: graft the original's"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_in_a_line(change, message):
    args = VisionArgs.from_dict(VISION_CONFIG | {"out_hidden_size": 8})
    tensors = split_tower(tower_tensors(args, True))[1]
    change(tensors)
    with pytest.raises(ValueError, match=message) as e:
        make_tower(args, tensors)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "silu"}, "hidden_act must be gelu_pytorch_tanh, not silu"),
        ({"deepstack_visual_indexes": [1]}, r"deepstack_visual_indexes must be empty, not \[1\]"),
        ({"num_heads": 3}, "hidden_size 32 must be a multiple of 4 .* num_heads"),
    ],
)
def test_other_towers_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        VisionArgs.from_dict(VISION_CONFIG | change)


def test_images_of_another_shape_or_too_many_pixels_are_refused():
    args = VisionArgs.from_dict(VISION_CONFIG | {"out_hidden_size": 8})
    tower = make_tower(args, split_tower(tower_tensors(args, True))[1])
    with pytest.raises(ValueError, match=r"must be \[rows, columns, 4, 96\], not \[2, 2, 4, 95\]"):
        tower(mx.zeros((2, 2, 4, 95)))
    with pytest.raises(ValueError, match=r"must be \[rows, columns, 4, 96\], not \[0, 2, 4, 96\]"):
        tower(mx.zeros((0, 2, 4, 96)))
    with pytest.raises(ValueError, match=r"1,056,768 pixels is larger than the 1,048,576 .* make it smaller"):
        tower(mx.zeros((128, 129, 4, 96)))


@pytest.fixture
def checkpoint(tmp_path):
    return add_tower(copied(tmp_path))


def test_load_finds_the_tower_and_reads_it_when_asked(checkpoint):
    model, _ = mlx_mtp.load(str(checkpoint))
    assert "tower" not in vars(model.vision)
    assert not any("vision" in name for name, _ in tree_flatten(model.parameters()))
    pixels = model.vision.processor.preprocess_image(picture())
    rows = model.vision.tower(pixels)
    assert rows.shape == (pixels.shape[0] * pixels.shape[1], 192)
    assert "tower" in vars(model.vision)


def test_a_model_without_a_tower_has_no_vision(tmp_path):
    assert mlx_mtp.load(str(copied(tmp_path)))[0].vision is None
    configure(tmp_path / "model", vision_config=VISION_CONFIG)  # that of the original of a conversion
    assert mlx_mtp.load(str(tmp_path / "model"))[0].vision is None


def test_text_is_the_same_with_a_tower_in_the_checkpoint(checkpoint, tmp_path):
    tokens = []
    for folder in (checkpoint, DATA / "dense"):
        model, _ = mlx_mtp.load(str(folder))
        tokens.append([token for token, *_ in mlx_mtp.mtp_generate_step(mx.array([5, 6, 7]), model, max_tokens=8)])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda f: configure(f, vision_config=VISION_CONFIG | {"out_hidden_size": 8}),
            "makes embeddings of 8, its model takes 192",
        ),
        (lambda f: configure(f, vision_config=VISION_CONFIG | {"depth": 3, "out_hidden_size": 192}), "blocks.2"),
        (lambda f: configure(f, vision_config=VISION_CONFIG | {"num_heads": 3}), "multiple of 4 . num_heads"),
        (lambda f: (f / "preprocessor_config.json").write_text("{"), "image settings of .*model are not usable"),
        (lambda f: (f / "preprocessor_config.json").write_text("[1]"), "image settings of .*model are not usable"),
        (
            lambda f: (f / "preprocessor_config.json").write_text('{"patch_size": 8}'),
            "have patch_size 8, its vision tower 4",
        ),
        (
            lambda f: (f / "preprocessor_config.json").write_text('{"size": 3}'),
            "image settings of .*model are not usable",
        ),
    ],
)
def test_damage_is_told_with_the_first_image_in_a_line(checkpoint, damage, message):
    damage(checkpoint)
    model, _ = mlx_mtp.load(str(checkpoint))
    with pytest.raises(ValueError, match=message) as e:
        model.vision.tower(model.vision.processor.preprocess_image(picture()))
    assert "\n" not in str(e.value)


def test_keys_tell_images_of_one_size_apart(checkpoint):
    images = mlx_mtp.load(str(checkpoint))[0].vision
    pixels = [images.processor.preprocess_image(picture(seed=seed)) for seed in (0, 1)]
    a, b = map(images.key, pixels)
    assert a != b
    assert images.key(images.processor.preprocess_image(picture())) == a
    assert images.key(pixels[0].reshape(pixels[0].shape[1], pixels[0].shape[0], 4, -1)) != a
    assert all(-(2**60) <= key < 0 for key in (a, b))
