"""Prompts with images, from pictures to text: in Python, with a prompt store, and from the command line."""

import json
from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.tokenizer_utils import load as load_tokenizer
from PIL import Image

from mlx_mtp import PromptStore, stream_generate
from mlx_mtp.chat import conversation
from mlx_mtp.chat.__main__ import make_parser, obey
from mlx_mtp.chat.conversation import Conversation, Message
from mlx_mtp.generate import __main__ as generate_command
from mlx_mtp.images.prompt import read_images
from mlx_mtp.images.vision import PLACEHOLDER, Vision
from tests.support.image_prompts import FOLDER, PROMPTS, VALUES, image_model, image_prompt
from tests.support.models import tiny_model
from tests.support.profiles import LONG

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
    store, tokens = PromptStore(model), with_placeholders(0)
    own, other = pictures(0), [255 - picture for picture in pictures(0)]

    def read(images):
        """The text, and the prompt tokens that are read."""
        seen = []
        options = dict(prefill_step_size=1, prompt_progress_callback=lambda n, _: seen.append(n))
        return answer(model, tokenizer, tokens, 8, images, prompt_store=store, **options), len({*seen}) - 1

    want, want_other = (answer(model, tokenizer, tokens, 8, images) for images in (own, other))
    assert want != want_other
    n, first = len(image_prompt(0).tokens), image_prompt(0).images[0].start
    assert read(own) == (want, n)
    text, n_read = read(other)
    assert text == want_other
    assert n_read >= n - first  # from the first image on, at least
    for images, again in ((own, want), (other, want_other)):
        text, n_read = read(images)
        assert text == again
        assert n_read <= 2


def test_what_does_not_go(model, tokenizer):
    tokens = with_placeholders(0)
    plain = tiny_model("qwen3_5", vocab_size=300)
    cases = [
        (model, tokens, pictures(0)[:1], {}, "2 placeholders .* for 1 images"),
        (model, [*tokens, VIDEO_TOKEN], pictures(0), {}, "videos are not supported"),
        (plain, tokens, pictures(0), {}, "has no vision encoder"),
        (model, tokens, ["no.png", "no.png"], {}, "no image no.png"),
        (model, tokens, [np.zeros((4, 4), np.uint8)] * 2, {}, r"uint8 \[height, width, 3\]"),
    ]
    for m, prompt, images, options, what in cases:
        with pytest.raises((ValueError, FileNotFoundError), match=what):
            answer(m, tokenizer, prompt, 8, images, **options)


@pytest.fixture
def files(tmp_path):
    files = [tmp_path / f"{k} picture.png" for k in range(2)]
    for picture, file in zip(pictures(0), files):
        Image.fromarray(picture).save(file)
    return files


# Uncompiled: the CPU backend would compile kernels for this checkpoint in bfloat16.
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("flags", [[], ["--check"], ["--num-draft-tokens", "3"]])
def test_the_command(flags, files, capsys, monkeypatch):
    given = f"mlx_mtp.generate --mtp --model {FOLDER} --prompt What? -m 12 --image".split()
    monkeypatch.setattr("sys.argv", [*given, *map(str, files), *flags])
    if "--check" in flags:
        with pytest.raises(SystemExit, match="0"):
            generate_command.main()
        assert "Identical" in capsys.readouterr().out
    else:
        generate_command.main()
        n = sum(rows * columns for _, rows, columns in image_prompt(0).images) + 4 + len("What?")
        assert f"Prompt: {n} tokens" in capsys.readouterr().out


@pytest.mark.parametrize("stored", [False, True], ids=["prompt cache", "prompt store"])
def test_a_chat_with_pictures(stored, model, tokenizer, files, monkeypatch):
    args = make_parser().parse_args(["--mtp", "--num-draft-tokens", "2", "-m", "8", "--model", str(FOLDER)])
    chat = Conversation(args, model, tokenizer, PromptStore(model) if stored else None)
    text: list[int] = []
    for i, (query, file) in enumerate(zip(("a", "b"), files), 1):
        obey(f"/image '{file}'", chat)
        text += tokenizer.encode(PLACEHOLDER + query + "\n")
        want, shown = answer(model, tokenizer, text, 8, files[:i]), []
        chat.answer(query, shown.append)
        assert "".join(shown) == tokenizer.decode(want)
        text += want

    chat.attach(str(files[0]))
    monkeypatch.setattr(conversation, "stream_generate", Mock(side_effect=KeyboardInterrupt))
    assert chat.answer("c", print) is None
    assert (chat.attached, chat.shown, chat.n_rendered) == ([], [], 0)
    assert chat.messages[-1] == Message("user", "c", [str(files[0])])  # the next turn processes it again
    with pytest.raises(FileNotFoundError, match=r"^There is no image no\.png\.$"):
        obey("/image no.png", chat)
    with pytest.raises(ValueError, match=r"takes no images: its checkpoint has no vision encoder, .*--images"):
        obey("/image no.png", Conversation(args, tiny_model("qwen3_5"), tokenizer))
