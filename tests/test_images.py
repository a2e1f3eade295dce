"""Images: opened right or refused in a line, and the processor's patches against transformers'."""

import base64
import io
import json
import random
import resource
import struct
import sys
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock
from urllib.parse import quote

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import load as load_tokenizer
from PIL import Image, ImageOps
from transformers.image_transforms import convert_to_rgb
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mlx_mtp import PromptStore, stream_generate
from mlx_mtp import chat as command
from mlx_mtp.chat import Conversation, obey
from mlx_mtp.cli.parsers import chat_parser
from mlx_mtp.generate import __main__ as generate_command
from mlx_mtp.images import open as opening
from mlx_mtp.images.open import MAX_RATIO, Processor, decode_url, open_image
from mlx_mtp.images.prompt import PLACEHOLDER, read_images
from mlx_mtp.images.tower import Vision
from tests.support.commands import refused, run_command
from tests.support.image_prompts import FOLDER, PROMPTS, VALUES, image_model, image_prompt
from tests.support.images import PREPROCESSOR, VISION_CONFIG, encoded, picture
from tests.support.profiles import LONG, examples

PUBLISHED = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
}  # fmt: skip


def opened(source):
    return np.asarray(open_image(source))


def png(width, height, data=b"", depth=8, color=2, interlaced=0):
    """A PNG whose header claims these sizes, with sound checksums."""

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, interlaced)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def turned(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def test_colors():
    """Transparent parts of a palette are white, and 16 bits keep their brightness. Other modes are in the random images."""
    palette = Image.new("P", (2, 1), 0)
    palette.putpalette([0, 0, 0, 200, 0, 0])
    palette.putpixel((1, 0), 1)
    gray = Image.fromarray(np.array([[0, 0x7FFF, 0xFFFF]], np.uint16))
    for format in ("GIF", "PNG"):
        assert opened(encoded(palette, format, transparency=0)).tolist() == [[[255] * 3, [200, 0, 0]]]
    for format in ("PNG", "TIFF"):
        assert opened(encoded(gray, format))[..., 0].tolist() == [[0, 0x7F, 0xFF]]
    color = png(2, 1, b"\0" + struct.pack(">6H", 0, 0x7FFF, 0xFFFF, 0x100, 0x200, 0x300), depth=16)
    assert opened(color).tolist() == [[[0, 0x7F, 0xFF], [1, 2, 3]]]
    for dtype in (np.int32, np.float32):
        tiff = encoded(Image.fromarray(np.ones((2, 2), dtype)), "TIFF")
        refused("32-bit numbers, of which black and white", open_image, tiff)


def test_files_and_data_urls(tmp_path):
    file, image = tmp_path / "a.png", encoded(picture())
    file.write_bytes(image)
    for source in (file, str(file), image, "data:image/png;base64," + base64.b64encode(image).decode()):
        np.testing.assert_array_equal(opened(source), np.asarray(picture()))
    own = Image.open(io.BytesIO(encoded(picture(5, 3), exif=turned(6))))
    assert (opened(own).shape, own.size) == ((5, 3, 3), (5, 3))  # upright, and the caller's is left as it is
    file.write_bytes(b"GIF89a")
    refused(rf"^{file} ", open_image, file)
    refused("^the second image ", open_image, file, "the second image")
    refused(r"There is no image .*missing\.png", open_image, tmp_path / "missing.png", error=FileNotFoundError)
    refused("is not a file", open_image, tmp_path)
    text = base64.b64encode(bytes(range(256))).decode()
    head = "data:image/png;base64,"
    for url in (
        head + text, "data:;base64," + text[:76] + "\r\n" + text[76:], f" \n{head} {text}\n", "DATA:IMAGE/PNG;BASE64," + text,
        "data:image/png; charset=utf-8; Base64 ," + text, head * 2 + text, head + text.rstrip("="), head + text + "=",
        head + text.replace("+", "-").replace("/", "_"), head + text.replace("+", "-"), head + quote(text, safe=""),
        quote(head + text), quote(head + text, safe=""),
    ):  # fmt: skip
        assert decode_url(url) == bytes(range(256)), url[:40]
    for url, message in [
        ("https://example.com/a.png", "is not a data URL .* begins with 'https://example.com/'"),
        ("data:image/png;base64", "is not a data URL"),
        ("data:image/svg+xml,<svg/>", "without ;base64"),
        *((head + damaged, "is not valid base64") for damaged in ("AA$A", "AAAAA", "ÄÄÄÄ", "AA==AA==", "AAAA,AAAA")),
    ]:
        assert len(refused(message, decode_url, url)) < 200


def test_other_files_are_refused(tmp_path, monkeypatch):
    for data in (b"", b"no image", b"%!PS-Adobe-3.0 EPSF-3.0\n", b"<svg/>", b"P6 1 1 255 abc", b"8BPS\0\1"):
        refused(r"The image is not an image of a known format \(PNG, JPEG,", open_image, data)
    for source in (None, 3, ["a.png"]):
        kind = type(source).__name__
        refused(f"The image must be a file, bytes or an image of Pillow, not {kind}", open_image, source)
    file = tmp_path / "a.png"
    file.write_bytes(b"a" * 100)
    with monkeypatch.context() as patch:
        patch.setattr(opening, "MAX_BYTES", 99)
        refused("The image has 100 bytes, more than 99: make it smaller", open_image, b"a" * 100)
        refused("a.png has 100 bytes, more than 99: make it smaller", open_image, file)
        refused("has 300 bytes, more than 99", decode_url, "data:image/png;base64," + "A" * 400)
    monkeypatch.setitem(sys.modules, "PIL", None)
    refused("An image requires PIL: pip install 'mlx-mtp.image.'", open_image, b"")


def test_sizes_are_refused_by_the_header():
    """Pillow warns of large images. The filters of warnings are the process's, also where several threads open images."""
    for side in (100_000, 2**31 - 1):
        refused("has more than 67,108,864 pixels: make it smaller", open_image, png(side, side))
    refused("9000 x 8000 = 72,000,000 pixels, more than 67,108,864: make it smaller", open_image, png(9_000, 8_000))
    refused("is not an image", open_image, png(0, 5))
    refused("10000 x 10 pixels: one side may be at most 200 times", open_image, encoded(Image.new("RGB", (10_000, 10))))
    refused("1 x 201 pixels: one side", open_image, encoded(Image.new("RGB", (1, 201))))
    for size in ((1, 200), (1, 1)):
        assert open_image(encoded(Image.new("RGB", size))).size == size
    before = list(warnings.filters)
    message = "12000 x 12000 = 144,000,000 pixels, more than 67,108,864: make it smaller"
    with warnings.catch_warnings(record=True) as shown:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda _: refused(message, open_image, png(12_000, 12_000)), range(20)))
        assert [str(w.message) for w in shown] == []
    assert warnings.filters == before


def test_settings_and_arrays_that_cannot_be_used():
    wrong = [{"patch_size": 0}, {"merge_size": 2.5}, {"size": "x"}, {"do_resize": False}, {"image_std": [0.5, 0, 0.5]}]
    for settings in (*wrong, {"image_mean": [0.5]}, {"rescale_factor": "x"}):
        refused("Qwen2VLImageProcessor|size", Processor, settings)
    for pixels in (np.zeros((4, 4), np.uint8), np.zeros((4, 4, 3)), np.zeros((0, 4, 3), np.uint8)):
        refused(r"must be uint8 \[height, width, 3\], not (uint8|float64) \[", Processor({}).preprocess_image, pixels)
    # More pixels than the largest are scaled down
    for size in ((8000, 8000), (30_000, 200)):
        rows, columns = Processor({}).grid(*size)
        assert rows * columns * 32**2 <= 16_777_216
    assert Processor(PUBLISHED | {"max_pixels": 65536}).grid(8000, 8000) == (8, 8)


def test_settings_are_the_files(tmp_path):
    """Their patches are those of transformers, for an image and for its values."""
    config = {"vision_config": VISION_CONFIG | {"out_hidden_size": 8}, "text_config": {"hidden_size": 8}}
    newer, image = {**PREPROCESSOR, "size": {"shortest_edge": 64, "longest_edge": 512}}, picture(33, 90)
    for name, settings, want in [
        ("text_config", {}, PUBLISHED | {"patch_size": 4}),  # of the tower, and the published values
        ("preprocessor_config", PREPROCESSOR, PREPROCESSOR),
        ("processor_config", {"processor_class": "Qwen3VLProcessor"}, PREPROCESSOR),
        ("processor_config", {"image_processor": newer}, newer),
    ]:
        (tmp_path / f"{name}.json").write_text(json.dumps(settings))
        theirs = Qwen2VLImageProcessorPil(**want)(images=[image], return_tensors="np")
        for source in (image, np.asarray(image)):
            ours = Vision(tmp_path, config, []).processor.preprocess_image(source)
            rows, columns, _, P = ours.shape
            assert theirs["image_grid_thw"].tolist() == [[1, rows * 2, columns * 2]]
            np.testing.assert_array_equal(np.asarray(ours).reshape(-1, P), theirs["pixel_values"])


# Random images: sound ones of every mode, format and orientation, damaged files, headers that lie, odd shapes

# What each format keeps without loss, or is decoded in one way only
MODES = {
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA"),
    "GIF": ("1", "L", "P", "RGB", "RGBA"),
    "BMP": ("1", "L", "P", "RGB"),
    "TIFF": ("1", "L", "P", "RGB", "RGBA", "CMYK"),
    "WEBP": ("RGB", "RGBA"),
    "JPEG": ("L", "RGB", "CMYK"),
    "AVIF": ("RGB", "RGBA"),
}
WAYS = ("sound", "sound", "cut", "flipped", "spliced", "noise", "header", "shape")


def random_image(r: random.Random, width: int, height: int) -> bytes:
    format = r.choice([*MODES])
    mode = r.choice(MODES[format])
    pixels = np.random.default_rng(r.getrandbits(32)).integers(0, 256, (height, width, 4), dtype=np.uint8)
    image = Image.fromarray(pixels)
    image = image.convert("RGB").convert(mode) if mode in ("P", "CMYK") else image.convert(mode)
    options: dict[str, Any] = {}
    if format in ("PNG", "JPEG", "WEBP", "TIFF") and r.random() < 0.4:
        options["exif"] = turned(r.randrange(1, 9))
    if format in ("GIF", "PNG", "WEBP") and r.random() < 0.2:
        options |= {"save_all": True, "append_images": [image.rotate(180)]}
    if format == "WEBP":
        options["lossless"] = True
    return encoded(image, format, **options)


def damaged(r: random.Random, way: str, data: bytes) -> bytes:
    i, j = sorted((r.randrange(len(data)), r.randrange(len(data))))
    if way == "cut":
        return data[:i]
    if way == "flipped":
        changed = bytearray(data)
        for _ in range(r.choice((1, 3, 30))):
            changed[r.randrange(min(r.choice((64, len(data))), len(data)))] = r.randrange(256)
        return bytes(changed)
    if way == "spliced":
        return data[:i] + r.choice((b"", data[i:j] * 3, r.randbytes(50))) + data[j:]
    if way == "noise":
        magic = (b"", data[:12], b"\xff\xd8\xff\xe0", b"II*\0", b"GIF89a", b"BM", b"RIFF\0\0\0\0WEBPVP8 ")
        return r.choice(magic) + r.randbytes(r.choice((0, 10, 5000)))
    sizes = [r.choice((0, 1, 2, 31, 4000, 8000, 65_535, 2**31 - 1, 2**32 - 1)) for _ in range(2)]
    pixels, depth = bytes(r.choice((0, 100, 10_000_000))), r.choice((1, 2, 4, 8, 16))
    return png(*sizes, pixels, depth, r.choice((0, 2, 3, 4, 6)), r.choice((0, 1)))


def peak() -> int:
    """The most memory that the process ever had, in bytes."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024


@examples(60)
@given(way=st.sampled_from(WAYS), seed=st.integers(0, 2**64 - 1))
def test_random_images_are_refused_or_right(way, seed):
    """A sound one becomes transformers' patches, any other is opened or refused with one sentence, and memory grows little."""
    peak_before, r, error = peak(), random.Random(seed), ""
    small, is_sound = (r.randrange(1, 90), r.randrange(1, 90)), way in ("sound", "shape")
    size = r.choice(((1, 1), (1, 200), (1, 201), (10_000, 10), (3, 700))) if way == "shape" else small
    data = random_image(r, *size)
    data = data if is_sound else damaged(r, way, data)
    try:
        image = open_image(data, "picture 7")
        ours = np.asarray(Processor(PREPROCESSOR).preprocess_image(image))
    except ValueError as e:
        error = str(e)
    if error:
        assert error.startswith("picture 7 ")
        assert "\n" not in error
        assert not is_sound or max(size) > MAX_RATIO * min(size), f"a sound image is refused: {error}"
    else:
        assert np.isfinite(ours).all()
        assert ours.size <= 2 * 3 * PREPROCESSOR["size"]["longest_edge"]  # each frame twice
        if is_sound:
            rgb = convert_to_rgb(ImageOps.exif_transpose(Image.open(io.BytesIO(data))), return_numpy=True)
            assert np.array_equal(np.asarray(image), rgb), "other pixels"
    assert peak() - peak_before < 1 << 30, f"memory grew by {(peak() - peak_before) / 1e6:.0f} MB"


# Prompts with images, from pictures to text: in Python, with a prompt store, and from the command line


TOLERANCE, N_TOKENS = 5e-4, 24 if LONG else 12
VIDEO_TOKEN = json.loads((FOLDER / "config.json").read_text())["video_token_id"]


@pytest.fixture(scope="module")
def model():
    """In float32, with its tower."""
    model = image_model()
    model.vision = Vision(FOLDER, json.loads((FOLDER / "config.json").read_text()), ["model.safetensors"])
    model.vision.tower.set_dtype(mx.float32)
    return model


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(FOLDER)


def pictures(j: int) -> list[np.ndarray]:
    return [VALUES[f"image_{j}_{k}"] for k in range(len(VALUES[f"grids_{j}"]))]


def with_placeholders(j: int) -> list[int]:
    """The prompt with ``<|image_pad|>`` once for each image."""
    p = image_prompt(j)
    inside = {i for image in p.images for i in range(image.start + 1, image.end)}
    return [t for i, t in enumerate(p.tokens.tolist()) if i not in inside]


def answer(model, tokenizer, prompt, n, images, **options) -> list[int]:
    return [r.token for r in stream_generate(model, tokenizer, prompt, max_tokens=n, images=images, **options)]


@pytest.mark.parametrize("j", PROMPTS)
def test_prompt_and_text_are_those_of_transformers(j, model, tokenizer):
    prompt, want = read_images(model.vision, with_placeholders(j), pictures(j)), image_prompt(j)
    assert prompt.tokens == want.tokens.tolist()
    assert prompt.images == want.images
    pixels = np.concatenate([np.array(p).reshape(-1, p.shape[-1]) for p in prompt.pixel_values])
    assert np.abs(pixels - VALUES[f"pixels_{j}"]).max() <= 1e-6
    assert float(mx.abs(prompt.embed(model) - want.embeddings).max()) <= TOLERANCE
    for begin in (1, want.images[0].end - 1, want.images[-1].start + 1, len(prompt.tokens) - 1):
        assert mx.array_equal(prompt.embed(model, begin), prompt.embed(model)[begin:])
    for options in (dict(mtp=False), dict(), dict(num_draft_tokens=2)):
        text = answer(model, tokenizer, with_placeholders(j), N_TOKENS, pictures(j), **options)
        assert text == VALUES[f"greedy_{j}"].tolist()[:N_TOKENS], options


def test_a_prompt_store_knows_an_image_by_its_content(model, tokenizer):
    store, tokens, n_read = PromptStore(model), with_placeholders(0), []
    n, first = len(image_prompt(0).tokens), image_prompt(0).images[0].start
    own, other = pictures(0), [255 - picture for picture in pictures(0)]
    texts = [answer(model, tokenizer, tokens, 8, images) for images in (own, other)]
    assert texts[0] != texts[1]
    for i in (0, 1, 0, 1):
        progress = set()
        options = dict(prefill_step_size=1, prompt_progress_callback=lambda n, _, progress=progress: progress.add(n))
        assert answer(model, tokenizer, tokens, 8, (own, other)[i], prompt_store=store, **options) == texts[i]
        n_read.append(len(progress) - 1)
    assert n_read[0] == n
    assert n_read[1] >= n - first  # from the first image on, at least
    assert max(n_read[2:]) <= 2


def test_another_number_of_images_and_videos_are_refused(model, tokenizer):
    for more, what in (([VIDEO_TOKEN], "videos are not supported"), ([], "2 placeholders .* for 1 images")):
        refused(what, answer, model, tokenizer, [*with_placeholders(0), *more], 8, pictures(0)[:1])


@pytest.fixture
def files(tmp_path):
    files = [tmp_path / f"{k} picture.png" for k in range(2)]
    for own, file in zip(pictures(0), files):
        Image.fromarray(own).save(file)
    return files


# The CPU backend would compile kernels for this checkpoint in bfloat16.
@pytest.mark.usefixtures("uncompiled")
def test_the_command(files, capsys):
    flags = ["--mtp", "--model", FOLDER, "--prompt", "What?", "-m", 12, "--image", *files]
    status, out, _ = run_command(generate_command.main, capsys, *flags)
    n = sum(rows * columns for _, rows, columns in image_prompt(0).images) + 4 + len("What?")
    assert (status, f"Prompt: {n} tokens" in out) == (0, True)
    status, out, _ = run_command(generate_command.main, capsys, *flags, "--check")
    assert (status, "Identical" in out) == (0, True)


@pytest.mark.parametrize("stored", [False, True], ids=["prompt cache", "prompt store"])
def test_a_chat_with_pictures(stored, model, tokenizer, files, monkeypatch):
    args = chat_parser().parse_args(["--mtp", "--num-draft-tokens", "2", "-m", "8", "--model", str(FOLDER)])
    chat, text = Conversation(args, model, tokenizer, PromptStore(model) if stored else None), []
    for i, (query, file) in enumerate(zip(("a", "b"), files), 1):
        obey(f"/image '{file}'", chat)
        text += tokenizer.encode(PLACEHOLDER + query + "\n")
        want, shown = answer(model, tokenizer, text, 8, files[:i]), []
        chat.answer(query, shown.append)
        assert "".join(shown) == tokenizer.decode(want)
        text += want

    chat.attach(str(files[0]))
    monkeypatch.setattr(command, "stream_generate", Mock(side_effect=KeyboardInterrupt))
    assert chat.answer("c", print) is None
    assert (chat.attached, chat.shown, chat.n_rendered) == ([], [], 0)
    last = {"role": "user", "content": f"{PLACEHOLDER}c", "images": [str(files[0])]}
    assert chat.messages[-1] == last  # the next turn processes it again
    refused(r"^There is no image no\.png\.$", obey, "/image no.png", chat, error=FileNotFoundError)
    monkeypatch.setattr(model, "vision", None)
    refused("takes no images: its checkpoint has no vision encoder. .*--images", obey, "/image no.png", chat)
