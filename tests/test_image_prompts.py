"""Prompts with images, from pictures to text: in Python, with a prompt store, and from the command line."""

import json

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.tokenizer_utils import load as load_tokenizer
from PIL import Image

from mlx_mtp import PromptStore, stream_generate
from mlx_mtp.chat import __main__ as chat_command
from mlx_mtp.chat import conversation
from mlx_mtp.chat.__main__ import make_parser, obey
from mlx_mtp.chat.conversation import Message
from mlx_mtp.decoding.loop import prefill
from mlx_mtp.images.processor import PLACEHOLDER
from mlx_mtp.images.prompt import read_images
from mlx_mtp.images.vision import Vision
from tests.support.image_prompts import FOLDER, PROMPTS, VALUES, image_model, image_prompt
from tests.support.models import tiny_model

TOLERANCE = 5e-4
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


def tokens_of(responses) -> list[int]:
    return [r.token for r in responses]


@pytest.mark.parametrize("j", PROMPTS)
def test_a_prompt_is_that_of_transformers(j, model):
    prompt, want = read_images(model.vision, with_placeholders(j), pictures(j)), image_prompt(j)
    assert prompt.tokens == want.tokens.tolist()
    assert prompt.images == want.images
    pixels = np.concatenate([np.array(p).reshape(-1, p.shape[-1]) for p in prompt.pixel_values])
    assert np.abs(pixels - VALUES[f"pixels_{j}"]).max() <= 1e-6
    assert float(mx.abs(prompt.embed(model) - want.embeddings).max()) <= TOLERANCE
    for begin in (1, want.images[0].end - 1, want.images[-1].start + 1, len(prompt.tokens) - 1):
        assert mx.array_equal(prompt.embed(model, begin), prompt.embed(model)[begin:])


@pytest.mark.parametrize("j", PROMPTS)
@pytest.mark.parametrize("options", [dict(mtp=False), dict(), dict(num_draft_tokens=2)], ids=str)
def test_the_text_is_that_of_transformers(j, options, model, tokenizer):
    responses = stream_generate(model, tokenizer, with_placeholders(j), max_tokens=24, images=pictures(j), **options)
    assert tokens_of(responses) == VALUES[f"greedy_{j}"].tolist()


@pytest.mark.parametrize("options", [dict(mtp=False), dict(num_draft_tokens=2)], ids=str)
def test_a_second_turn(options, model, tokenizer):
    """With the prompt cache of the first, whose images are not given again."""
    turns, images = (with_placeholders(0), with_placeholders(1)), (pictures(0), pictures(1))
    whole = stream_generate(model, tokenizer, turns[0] + turns[1], max_tokens=12, images=images[0] + images[1])
    first = read_images(model.vision, turns[0], images[0])
    cache = first.cache(model, None)
    prefill(mx.array(first.tokens), model, prompt_cache=cache, input_embeddings=first.embed(model))
    responses = stream_generate(
        model, tokenizer, turns[1], max_tokens=12, images=images[1], prompt_cache=cache, **options
    )
    assert tokens_of(responses) == tokens_of(whole)


def test_a_prompt_store_knows_an_image_by_its_content(model, tokenizer):
    store, tokens = PromptStore(model), with_placeholders(0)
    other = [255 - picture for picture in pictures(0)]

    def read(images):
        """The text, and the prompt tokens that are read."""
        seen = []
        responses = stream_generate(
            model,
            tokenizer,
            tokens,
            max_tokens=8,
            images=images,
            prompt_store=store,
            prefill_step_size=1,
            prompt_progress_callback=lambda n, _: seen.append(n),
        )
        return tokens_of(responses), len({*seen}) - 1

    want = {
        key: tokens_of(stream_generate(model, tokenizer, tokens, max_tokens=8, images=images))
        for key, images in (("own", pictures(0)), ("other", other))
    }
    assert want["own"] != want["other"]
    n, first = len(image_prompt(0).tokens), image_prompt(0).images[0].start
    assert read(pictures(0)) == (want["own"], n)
    text, n_read = read(other)
    assert text == want["other"]
    assert n_read >= n - first  # from the first image on, at least
    for images, key in ((pictures(0), "own"), (other, "other")):
        text, n_read = read(images)
        assert text == want[key]
        assert n_read <= 2


def test_what_does_not_go(model, tokenizer):
    tokens = with_placeholders(0)
    plain = tiny_model("qwen3_5", vocab_size=300)
    held = read_images(model.vision, tokens, pictures(0)).cache(model, None)
    cases = [
        (model, tokens, pictures(0)[:1], {}, "2 placeholders .* for 1 images"),
        (model, [1, 2], pictures(0)[:1], {}, "0 placeholders .* for 1 images"),
        (model, [*tokens, VIDEO_TOKEN], pictures(0), {}, "videos are not supported"),
        (plain, tokens, pictures(0), {}, "has no vision tower"),
        (model, tokens, pictures(0), dict(draft_model=plain, mtp=False), "omit draft_model"),
        (model, [1], [], dict(draft_model=plain, mtp=False, prompt_cache=held), "omit draft_model"),
        (model, tokens, ["no.png", "no.png"], {}, "no image no.png"),
        (model, tokens, [b"", b""], {}, "Image 1 "),
        (model, tokens, [np.zeros((4, 4), np.uint8)] * 2, {}, r"uint8 \[height, width, 3\]"),
    ]
    for m, prompt, images, options, what in cases:
        with pytest.raises((ValueError, FileNotFoundError), match=what):
            [*stream_generate(m, tokenizer, prompt, images=images, **options)]


@pytest.mark.parametrize("flags", [[], ["--check"], ["--num-draft-tokens", "3"]])
def test_the_command(flags, tmp_path, capsys, monkeypatch):
    from mlx_mtp.generate.__main__ import main

    files = [str(tmp_path / f"{k}.png") for k in range(2)]
    for picture, file in zip(pictures(0), files):
        Image.fromarray(picture).save(file)
    monkeypatch.setattr(
        "sys.argv",
        [
            "mlx_mtp.generate",
            "--mtp",
            "--model",
            str(FOLDER),
            "--prompt",
            "What?",
            "--image",
            *files,
            "-m",
            "12",
            *flags,
        ],
    )
    if "--check" in flags:
        with pytest.raises(SystemExit, match="0"):
            main()
        assert "Identical" in capsys.readouterr().out
    else:
        main()
        out = capsys.readouterr().out
        n = sum(rows * columns for _, rows, columns in (i for i in image_prompt(0).images)) + 4 + len("What?")
        assert f"Prompt: {n} tokens" in out


@pytest.mark.parametrize("stored", [False, True], ids=["prompt cache", "prompt store"])
def test_a_chat_with_pictures(stored, model, tokenizer, tmp_path, monkeypatch):
    files = [tmp_path / f"{k} picture.png" for k in range(2)]
    for picture, file in zip(pictures(0), files):
        Image.fromarray(picture).save(file)
    args = make_parser().parse_args(["--mtp", "--num-draft-tokens", "2", "-m", "8", "--model", str(FOLDER)])
    chat = chat_command.start(args, model, tokenizer, PromptStore(model) if stored else None)
    text: list[int] = []
    for query, file in zip(("a", "b"), files):
        obey(f"/image '{file}'", chat)
        text += tokenizer.encode(PLACEHOLDER + query + "\n")
        want = tokens_of(stream_generate(model, tokenizer, text, max_tokens=8, images=files[: files.index(file) + 1]))
        shown: list[str] = []
        chat.answer(query, shown.append)
        assert "".join(shown) == tokenizer.decode(want)
        text += want

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    chat.attach(str(files[0]))
    monkeypatch.setattr(conversation, "stream_generate", interrupted)
    assert chat.answer("c", print) is None
    assert (chat.attached, chat.unread, chat.shown, chat.n_rendered) == ([], [], [], 0)
    assert chat.messages[-1] == Message("user", "c", [str(files[0])])  # the next turn processes it again


def test_a_chat_says_what_is_wrong_with_a_picture(model, tokenizer):
    args = make_parser().parse_args(["--mtp"])
    with pytest.raises(FileNotFoundError, match=r"^There is no image no\.png\.$"):
        obey("/image no.png", chat_command.start(args, model, tokenizer, None))
    with pytest.raises(ValueError, match=r"takes no images: its checkpoint has no vision tower\. .*--images"):
        obey("/image no.png", chat_command.start(args, tiny_model("qwen3_5"), tokenizer, None))
