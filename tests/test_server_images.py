"""Images of requests: in each API, in tool results, at once, cached by their content, and from where they may come."""

import base64
import re
import shutil
from types import SimpleNamespace

import pytest

from mlx_mtp import MTPError, load, stream_generate
from mlx_mtp.generate.__main__ import main as generate
from mlx_mtp.images import open as opening
from mlx_mtp.images.open import open_image
from mlx_mtp.images.prompt import PLACEHOLDER
from mlx_mtp.server.engine import encode as encoding
from mlx_mtp.server.request import ApiError, Request
from tests.support.checkpoints import config_of, configure
from tests.support.commands import refusal
from tests.support.engine import Engine
from tests.support.image_prompts import FOLDER, IMAGE_TOKEN
from tests.support.images import encoded, picture
from tests.support.requests import text
from tests.support.server_process import server_of

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:"
FLAGS = ["--model", str(FOLDER), "--mtp", "--num-draft-tokens", "2", "--chat-template", TEMPLATE]


def png(seed: int, width: int = 24, height: int = 16) -> bytes:
    return encoded(picture(width, height, seed))


def url_of(image: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(image).decode()


def part(image: bytes | str) -> dict:
    return {"type": "image_url", "image_url": {"url": image if isinstance(image, str) else url_of(image)}}


def block(image: bytes) -> dict:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": url_of(image)[22:]}}


def user(*content: dict) -> dict:
    return {"role": "user", "content": [*content]}


@pytest.fixture(scope="module")
def text_of():
    """What the model says, without a server: prompt -> text."""
    model, tokenizer = load(str(FOLDER))

    def text_of(prompt: str, *images: bytes, n: int = 12) -> str:
        return "".join(r.text for r in stream_generate(model, tokenizer, prompt, max_tokens=n, images=images))

    return text_of


server = server_of(lambda _: [*FLAGS, "--served-model-name", "tiny"])


def test_each_api_takes_images(client, claude, text_of):
    """Also in the result of a tool, as an agent's screenshots are."""
    shown = part(png(1))
    messages = [user(text("one "), shown, text(" two "), part(png(2, 16, 32)))]
    want = text_of(f"u:one {PLACEHOLDER} two {PLACEHOLDER};a:", png(1), png(2, 16, 32))
    for form in (shown["image_url"], url_of(png(1))):  # the second one as some clients send it
        shown["image_url"] = form
        answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=12)
        assert answer.choices[0].message.content == want
        assert answer.usage.prompt_tokens == len("u:one  two ;a:") + 4 + 6 + 8

    result = {"type": "tool_result", "tool_use_id": "1", "content": [text("ok"), block(png(2))]}
    messages = [user(block(png(1)), text("what?")), {"role": "assistant", "content": "see"}, user(result, text("so?"))]
    answer = claude.messages.create(model="tiny", max_tokens=12, messages=messages)
    prompt = f"u:{PLACEHOLDER}\nwhat?;a:see;t:ok\n{PLACEHOLDER};u:so?;a:"
    assert answer.content[0].text == text_of(prompt, png(1), png(2))
    counted = claude.messages.count_tokens(model="tiny", messages=messages).input_tokens
    assert counted == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)

    first, second = ({"type": "input_image", "image_url": url_of(png(i))} for i in (1, 2))
    items = [
        user(text("a", "input_text"), first),
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": [second, text("b", "input_text")]},
    ]
    answer = client.responses.create(model="tiny", input=items, max_output_tokens=12)
    assert answer.output_text == text_of(f"u:a{PLACEHOLDER};a:;t:{PLACEHOLDER}b;a:", png(1), png(2))


BROKEN = [
    "data:image/png;base64,", "data:image/png;base64,AAAAA", "data:image/png;base64,AAAA", "data:image/svg+xml,<svg/>",
    url_of(png(1)[:60]), url_of(png(1)[:-30]), url_of(png(1, 8, 2000)), url_of(b"%PDF-1.7"), "https://a.b/c.png",
]  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN, ids=lambda url: url[:30])
def test_a_mark_stands_for_a_broken_image_of_an_earlier_turn(server, broken):
    """The other images stay, and it ends no conversation. In the question, and in the newest result, it is refused."""
    tokenizer = server.engine.frontend.models.tokenizer
    turns = [user(part(broken), text("a"), part(png(1))), {"role": "assistant", "content": "see"}]
    calls = [{"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
    shown = [{"role": "assistant", "content": "", "tool_calls": calls}, {"role": "tool", "content": [part(broken)]}]
    question, answer = user(text("b"), part(png(2, 16, 32))), {"role": "assistant", "content": "no"}
    prompt = server.engine.ask([*turns, question, *shown, answer, user(text("c"))], max_tokens=2).prompt
    want = f"u:[image left out]a{PLACEHOLDER};a:see;u:b{PLACEHOLDER};a:;t:[image left out];a:no;u:c;a:"
    assert [t for t in prompt if t != IMAGE_TOKEN] == [t for t in tokenizer.encode(want) if t != IMAGE_TOKEN]
    assert prompt.count(IMAGE_TOKEN) == 6 + 8
    for newest in ([user(text("b"), part(broken))], [user(text("b")), *shown]):
        with pytest.raises((ApiError, MTPError), match=r"Image 3 |data URL") as refused:
            server.engine.ask([*turns, *newest], max_tokens=2)
        assert getattr(refused.value, "param", "messages") == "messages"


def test_each_way_to_send_an_image(server):
    want = server.engine.ask([user(part(png(1)))], max_tokens=2).prompt
    plain = url_of(png(1))[22:]
    for source in (
        {"source": {"type": "base64", "media_type": "image/png", "data": url_of(png(1))}},
        {"source": {"type": "base64", "data": " " + url_of(png(1))}},
        {"source": {"type": "url", "url": url_of(png(1)).replace("data:", "DATA:")}},
        {"data": plain, "mimeType": "image/png"},  # MCP's
        {"image_url": {"url": "\n" + url_of(png(1)).rstrip("=")}},
    ):
        assert server.engine.ask([user({"type": "image", **source})], max_tokens=2).prompt == want, source.keys()


def test_quoted_placeholders_are_text(server):
    """With an image and without, and the model sees the same characters as ordinary tokens."""
    quoted = "<|vision_start|><|image_pad|><|vision_end|> is no image, and <|video_pad|> no video"
    tokenizer = server.engine.frontend.models.tokenizer
    special = {tokenizer.convert_tokens_to_ids(t) for t in re.findall(r"<\|\w+\|>", quoted)}
    assert IMAGE_TOKEN in special
    alone = server.engine.ask([user(text(quoted))], max_tokens=2)
    assert tokenizer.decode(alone.prompt) == f"u:{quoted};a:"
    assert not special & {*alone.prompt}
    shown = [user(part(png(1)), text(quoted))]
    for chat in (shown, [*shown, {"role": "assistant", "content": quoted}, user(text(quoted))]):
        prompt = server.engine.ask(chat, max_tokens=2).prompt
        assert [t for t in prompt if t in special].count(IMAGE_TOKEN) == 6
        said = [t for t in prompt if t not in special]
        assert tokenizer.decode(said) == "".join(f"{m['role'][0]}:{quoted};" for m in chat) + "a:"
    assert server.engine.ask([user(text(quoted))], max_tokens=2).prompt == alone.prompt


def test_at_once_and_cached_by_content(server):
    """Answers are the same bits from the cache, and in a batch the same tokens; no picture is taken for another of its size."""
    chats = [[user(text("look: "), part(png(seed)), text("?"))] for seed in range(3)]
    first = [server.engine.ask(chat, max_tokens=12) for chat in chats]
    before = first[0].prompt.index(IMAGE_TOKEN)
    assert len({tuple(a.tokens) for a in first}) == 3
    assert [a.n_cached <= before for a in first] == [True] * 3
    again = [server.engine.ask(chat, max_tokens=12) for chat in chats]
    assert [(a.tokens, a.logprobs) for a in again] == [(a.tokens, a.logprobs) for a in first]
    assert all(a.n_read < 8 for a in again)
    together = server.engine.ask_all([(chat, None) for chat in [*chats, [user(text("text"))]]], max_tokens=12)
    assert [a.tokens for a in together[:3]] == [a.tokens for a in first]
    assert all(a.n_read < 8 for a in together[:3])
    longer = [*chats[1], {"role": "assistant", "content": "x"}, user(part(png(7)), part(png(8)))]
    assert server.engine.ask(longer, max_tokens=4).n_cached >= len(first[1].prompt) - 3


def test_scaled_positions_take_no_images(tmp_path, capsys):
    """Of a model with a vision encoder whose context was extended by YaRN."""
    folder = shutil.copytree(FOLDER, tmp_path / "model")
    rope = config_of(folder)["text_config"]["rope_parameters"]
    scaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    configure(folder, text={"rope_parameters": rope | scaled})
    with Engine(*FLAGS, "--model", str(folder)) as engine:
        client = engine.client
        assert client.get("/v1/models").json()["data"][0]["takes_images"] is False
        for stream in (False, True):
            body = {"messages": [user(text("what?"), part(png(1)))], "max_tokens": 4, "stream": stream}
            answer = client.post("/v1/chat/completions", json=body)
            assert (answer.status_code, "The model takes no images" in answer.text) == (400, True)
        assert engine.ask([user(text("what?"))], max_tokens=2).tokens
    picture(24, 16).save(tmp_path / "a.png")
    flags = ("--model", folder, "--image", tmp_path / "a.png", "--prompt", "a")
    assert "takes no images: its positions have one axis, or are scaled (YaRN)" in refusal(generate, capsys, *flags)


def request_of(n: int) -> Request:
    return Request("chat", "", [], None, None, images=[url_of(png(1))] * n, askers=["user"] * n)


def test_the_server_bounds_images_before_it_decodes_one_and_looks_for_its_client(server, monkeypatch):
    """An error gives back what is decoded, though it has the frame."""
    tokenizer, account = next(iter(server.engine.frontend.models.tokenizers.values())), SimpleNamespace(left=1 << 30)
    most, decoded, request = 3 * 24 * 16, [], request_of(3)

    def note(source, name):
        decoded.append(name)
        request.is_gone = len(decoded) == 5
        return open_image(source, name)

    def read(request):
        return encoding._read_images(tokenizer, request, [IMAGE_TOKEN] * len(request.images), account)

    monkeypatch.setattr(opening, "open_image", note)
    for max_pixels, i in ((most - 1, 3), (1, 1)):
        monkeypatch.setattr(encoding, "MAX_PIXELS", max_pixels)
        with pytest.raises(ValueError, match=f"up to number {i} have more than {max_pixels} pixels"):
            read(request_of(3))
    assert decoded == []
    monkeypatch.setattr(encoding, "MAX_PIXELS", most)
    assert len(read(request_of(3))) == len(decoded) == 3
    with pytest.raises(ApiError, match="has disconnected") as gone:
        read(request)
    assert request.images == []
    (frame,) = [tb.frame for tb in gone.traceback if tb.name == "read_pixels"]
    assert (len(decoded), frame.f_locals["pixel_values"]) == (5, [])
    with pytest.raises(ApiError, match="start the server with --images"):
        encoding._read_images(SimpleNamespace(vision=None), request_of(1), [IMAGE_TOKEN], account)
    account.left = 24 * 16 * 3 * 4  # an image's patches in float32 alone
    with pytest.raises(ApiError, match=r"needs [\d.]+ kB of memory, and 4\.6 kB are left") as refused:
        read(request_of(1))
    assert (refused.value.status, refused.value.code) == (507, "insufficient_memory")
