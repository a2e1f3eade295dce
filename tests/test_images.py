"""Images: opened right or refused in a line, and the processor's patches against transformers'."""

import base64
import io
import json
import struct
import sys
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers.image_transforms import convert_to_rgb
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mlx_mtp.images import open as opening
from mlx_mtp.images.open import FORMATS, decode_url, open_image
from mlx_mtp.images.processor import Processor
from mlx_mtp.images.vision import Vision
from tests.support import hostile_images
from tests.support.images import PREPROCESSOR, VISION_CONFIG, picture
from tests.support.profiles import examples

PUBLISHED = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def encoded(image, format="PNG", **options):
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def png(width, height, data=b"", depth=8, color=2):
    """A PNG whose header claims these sizes, with sound checksums."""

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def refused(source, match, **options):
    with pytest.raises(ValueError, match=match) as e:
        open_image(source, **options)
    assert "\n" not in str(e.value)


# Opening


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
def test_modes_are_those_of_transformers(mode):
    rgba = Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 7, 4), dtype=np.uint8))
    image = rgba.convert("RGB").convert("P") if mode == "P" else rgba.convert(mode)
    data = encoded(image)
    expected = convert_to_rgb(Image.open(io.BytesIO(data)), return_numpy=True)
    np.testing.assert_array_equal(np.asarray(open_image(data)), expected)
    np.testing.assert_array_equal(np.asarray(open_image(image)), convert_to_rgb(image, return_numpy=True))


def test_transparent_parts_are_white():
    image = Image.new("RGBA", (2, 1), (200, 0, 0, 255))
    image.putpixel((1, 0), (0, 0, 0, 0))
    assert np.asarray(open_image(encoded(image))).tolist() == [[[200, 0, 0], [255, 255, 255]]]
    palette = Image.new("P", (2, 1), 0)
    palette.putpalette([0, 0, 0, 200, 0, 0])
    palette.putpixel((1, 0), 1)
    assert np.asarray(open_image(encoded(palette, "GIF", transparency=0))).tolist() == [[[255] * 3, [200, 0, 0]]]
    assert np.asarray(open_image(encoded(palette, transparency=0))).tolist() == [[[255] * 3, [200, 0, 0]]]


def test_cmyk():
    cyan = Image.new("CMYK", (16, 16), (255, 0, 0, 0))
    for format in ("TIFF", "JPEG"):
        assert np.asarray(open_image(encoded(cyan, format)))[8, 8] == pytest.approx([0, 255, 255], abs=3)


def test_16_bits_keep_their_brightness():
    image = Image.fromarray(np.array([[0, 0x7FFF, 0xFFFF]], np.uint16))
    for format in ("PNG", "TIFF"):
        assert np.asarray(open_image(encoded(image, format)))[..., 0].tolist() == [[0, 0x7F, 0xFF]]
    color = png(2, 1, b"\0" + struct.pack(">6H", 0, 0x7FFF, 0xFFFF, 0x100, 0x200, 0x300), depth=16)
    assert np.asarray(open_image(color)).tolist() == [[[0, 0x7F, 0xFF], [1, 2, 3]]]


@pytest.mark.parametrize(
    ("orientation", "turn"),
    [
        (1, lambda a: a),
        (2, lambda a: a[:, ::-1]),
        (3, lambda a: a[::-1, ::-1]),
        (4, lambda a: a[::-1]),
        (5, lambda a: a.transpose(1, 0, 2)),
        (6, lambda a: np.rot90(a, -1)),
        (7, lambda a: a[::-1, ::-1].transpose(1, 0, 2)),
        (8, lambda a: np.rot90(a, 1)),
    ],
)
def test_exif_turns_upright(orientation, turn):
    image, exif = picture(5, 3), Image.Exif()
    exif[0x0112] = orientation
    data = encoded(image, exif=exif)
    np.testing.assert_array_equal(np.asarray(open_image(data)), turn(np.asarray(image)))


def test_an_image_of_the_caller_is_left_as_it_is():
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.open(io.BytesIO(encoded(picture(5, 3), exif=exif)))
    assert open_image(image).size == (3, 5)
    assert image.size == (5, 3)


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_of_an_animation_the_first_frame(format):
    frames = [Image.new("RGB", (4, 4), color) for color in ("#ff0000", "#0000ff")]
    options = {"lossless": True} if format == "WEBP" else {}
    data = encoded(frames[0], format, save_all=True, append_images=frames[1:], **options)
    assert np.asarray(open_image(data))[0, 0].tolist() == [255, 0, 0]


def test_a_file_and_its_name(tmp_path):
    file = tmp_path / "a.png"
    file.write_bytes(encoded(picture()))
    for source in (file, str(file), file.read_bytes()):
        np.testing.assert_array_equal(np.asarray(open_image(source)), np.asarray(picture()))
    file.write_bytes(b"GIF89a")
    refused(file, rf"^{file} ")
    refused(file, "^the second image ", name="the second image")
    with pytest.raises(FileNotFoundError, match=r"There is no image .*missing\.png"):
        open_image(tmp_path / "missing.png")
    refused(tmp_path, "is not a file")


@pytest.mark.parametrize("data", [b"", b"no image", b"%!PS-Adobe-3.0 EPSF-3.0\n", b"<svg/>", b"P6 1 1 255 abc"])
def test_other_files_are_refused(data):
    refused(data, r"The image is not an image of a known format \(PNG, JPEG,")


@pytest.mark.parametrize("format", [*FORMATS, "MPO"])  # which is JPEG with several images
def test_truncated_files_are_refused(format):
    options = {"save_all": True, "append_images": [picture(64, 64, 1)]} if format == "MPO" else {}
    data = encoded(picture(64, 64), format, **options)
    assert open_image(data).size == (64, 64)
    for n in (len(data) // 3, 100):
        refused(data[:n], r"^The image (cannot be read|is not an image)")


def test_bombs_are_refused_by_their_headers():
    for side in (100_000, 2**31 - 1):
        refused(png(side, side), "has more than 67,108,864 pixels: make it smaller")
    refused(png(12_000, 12_000), "12000 x 12000 = 144,000,000 pixels, more than 67,108,864: make it smaller")
    refused(png(9_000, 8_000), "9000 x 8000 = 72,000,000 pixels, more than 67,108,864: make it smaller")
    refused(png(0, 5), "is not an image")


def test_long_images_are_refused():
    refused(encoded(Image.new("RGB", (10_000, 10))), "10000 x 10 pixels: one side may be at most 200 times")
    refused(encoded(Image.new("RGB", (1, 201))), "1 x 201 pixels: one side")
    assert open_image(encoded(Image.new("RGB", (1, 200)))).size == (1, 200)
    assert open_image(encoded(Image.new("RGB", (1, 1)))).size == (1, 1)


def test_too_many_bytes_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "MAX_BYTES", 99)
    refused(b"a" * 100, "The image has 100 bytes, more than 99: make it smaller")
    (tmp_path / "a.png").write_bytes(b"a" * 100)
    refused(tmp_path / "a.png", "a.png has 100 bytes, more than 99: make it smaller")
    with pytest.raises(ValueError, match="more than 99 bytes"):
        decode_url("data:image/png;base64," + "A" * 400)


def test_numbers_without_a_range_are_refused():
    for dtype in (np.int32, np.float32):
        refused(encoded(Image.fromarray(np.ones((2, 2), dtype)), "TIFF"), "32-bit numbers, of which black and white")


def test_warnings_are_neither_shown_nor_silenced():
    """Pillow warns of large images. The filters of warnings are the process's, also where several threads open images."""
    before = list(warnings.filters)
    with warnings.catch_warnings(record=True) as shown:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda _: refused(png(12_000, 12_000), "12000 x 12000 = 144,000,000 pixels"), range(20)))
        assert [str(w.message) for w in shown] == []
    assert warnings.filters == before


def test_without_pillow_a_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    refused(b"", "Images require Pillow: pip install pillow")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://example.com/a.png", "is not a data URL .* begins with 'https://example.com/'"),
        ("data:image/png;base64", "is not a data URL"),
        ("data:image/svg+xml,<svg/>", "without ;base64"),
        ("data:image/png;base64,AA$A", "is not valid base64"),
        ("data:image/png;base64,AAA", "is not valid base64"),
        ("data:image/png;base64,ÄÄÄÄ", "is not valid base64"),
    ],
)
def test_other_urls_are_refused(url, message):
    with pytest.raises(ValueError, match=message) as e:
        decode_url(url)
    assert len(str(e.value)) < 200


@pytest.mark.parametrize("source", [None, 3, ["a.png"]])
def test_other_sources_are_refused(source):
    refused(source, f"The image must be a file, bytes or an image of Pillow, not {type(source).__name__}")


def test_data_urls():
    text = base64.b64encode(bytes(range(256))).decode()
    assert decode_url("data:image/png;base64," + text) == bytes(range(256))
    image = encoded(picture())
    np.testing.assert_array_equal(
        np.asarray(open_image("data:image/png;base64," + base64.b64encode(image).decode())), np.asarray(picture())
    )
    assert decode_url("data:;base64," + text[:76] + "\r\n" + text[76:]) == bytes(range(256))


# The processor

SETTINGS = {
    "published": PUBLISHED,
    "tiny": PREPROCESSOR,
    "other colors": {**PREPROCESSOR, "image_mean": [0.48, 0.45, 0.41], "image_std": [0.26, 0.27, 0.28]},
}


@pytest.mark.parametrize("size", [(1, 1), (10, 2000), (33, 900), (777, 1234)])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_patches_are_bit_for_bit_those_of_transformers(settings, size):
    image = picture(*size)
    theirs = Qwen2VLImageProcessorPil(**settings)(images=[image], return_tensors="np")
    processor = Processor.from_config(settings)
    for ours in (processor.preprocess_image(image), processor.preprocess_image(np.asarray(image))):
        rows, columns, _, P = ours.shape
        assert theirs["image_grid_thw"].tolist() == [[1, rows * 2, columns * 2]]
        np.testing.assert_array_equal(np.asarray(ours).reshape(-1, P), theirs["pixel_values"])


def test_more_pixels_than_the_largest_are_scaled_down():
    processor = Processor()
    for size in ((8000, 8000), (30_000, 200)):
        rows, columns = processor.grid(*size)
        assert rows * columns * 32**2 <= processor.max_pixels
    assert Processor.from_config({**PUBLISHED, "max_pixels": 65536}).grid(8000, 8000) == (8, 8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"patch_size": 0}, "patch_size must be a whole number of 1 or more, not 0"),
        ({"merge_size": 2.5}, "merge_size must be a whole number"),
        ({"size": {"shortest_edge": 10, "longest_edge": 5}}, "min_pixels 10 is larger than max_pixels 5"),
        ({"do_normalize": False}, "do_normalize must be True, not False"),
        ({"resample": 2}, "resample must be 3, not 2"),
        ({"image_std": [0.5, 0, 0.5]}, "image_mean and image_std must be 3 numbers each"),
        ({"image_mean": [0.5]}, "image_mean and image_std must be 3 numbers each"),
    ],
)
def test_settings_that_cannot_be_used(settings, message):
    with pytest.raises(ValueError, match=message):
        Processor.from_config(settings)


def test_settings_are_the_files(tmp_path):
    config = {"vision_config": VISION_CONFIG | {"out_hidden_size": 8}, "text_config": {"hidden_size": 8}}
    assert Vision(tmp_path, config, []).processor == Processor(patch_size=4)  # of the tower, and the published values
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    assert Vision(tmp_path, config, []).processor == Processor.from_config(PREPROCESSOR)
    newer = {**PREPROCESSOR, "size": {"shortest_edge": 64, "longest_edge": 512}}
    (tmp_path / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen3VLProcessor"}))
    assert Vision(tmp_path, config, []).processor == Processor.from_config(PREPROCESSOR)
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": newer}))
    assert Vision(tmp_path, config, []).processor.max_pixels == 512


@pytest.mark.parametrize("pixels", [np.zeros((4, 4), np.uint8), np.zeros((4, 4, 3)), np.zeros((0, 4, 3), np.uint8)])
def test_other_arrays_are_refused(pixels):
    with pytest.raises(ValueError, match=r"must be uint8 \[height, width, 3\], not (uint8|float64) \["):
        Processor().preprocess_image(pixels)


@examples(60)
@given(way=st.sampled_from(hostile_images.WAYS), seed=st.integers(0, 2**64 - 1))
def test_random_images_are_refused_or_right(way, seed):
    hostile_images.assert_refused_or_right(way, seed)
