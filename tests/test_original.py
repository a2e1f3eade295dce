"""A conversion without a head drafts with that of its original, which is found, fetched once and tried."""

import base64
import io
import json
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from tempfile import TemporaryDirectory

import huggingface_hub
import mlx.core as mx
import pytest

import mlx_mtp
from mlx_mtp.__main__ import main
from mlx_mtp.checkpoint import load as loading
from mlx_mtp.checkpoint.originals import find, head
from mlx_mtp.checkpoint.originals.find import MAX_STEPS
from mlx_mtp.checkpoint.originals.head import FLOOR, fetch_missing_head, fetched_heads, remove
from mlx_mtp.checkpoint.storage.reader import CheckpointReader, n_bytes
from mlx_mtp.convert import convert
from mlx_mtp.images.processor import PLACEHOLDER
from mlx_mtp.server.request import ApiError
from tests.support.checkpoints import configure, copied, edit, no_head
from tests.support.decoding import PROMPT, mtp, plain
from tests.support.engine import Engine
from tests.support.hub_stand_in import HEADER_BYTES, TOKEN
from tests.support.images import add_tower, picture
from tests.support.models import DATA, arrays_equal

FAMILIES = ["dense", "moe35", "moe36", "next"]
HEAD_BYTES = {name: sum(map(n_bytes, CheckpointReader(str(DATA / name)).head().values())) for name in FAMILIES}


@pytest.fixture
def accepted(monkeypatch):
    """These models were never trained on the built-in text."""
    monkeypatch.setattr(loading, "measure_acceptance", lambda model, tokenizer: 0.8)


def card(folder, *base_models):
    """Write a model card."""
    bases = "".join(f"\n- {base}" for base in base_models)
    (folder / "README.md").write_text(f"---\nlicense: apache-2.0\nbase_model:{bases}\n---\n# A model\n")
    return folder


@cache
def converted(family):
    """A conversion of a family's checkpoint that has lost the head, as most have, in a temporary folder."""
    folder = TemporaryDirectory(prefix="conversion-")
    convert(str(DATA / family), f"{folder.name}/out", mtp=False, quantize=True, q_bits=4, q_group_size=32)
    return folder


def conversion(folder, family="dense", *base_models):
    """A copy of it, whose name and card say no more than given."""
    shutil.copytree(f"{converted(family).name}/out", folder)
    (folder / "README.md").unlink(missing_ok=True)
    configure(folder, mlx_mtp=None)
    return card(folder, *base_models) if base_models else folder


def load(name, **options):
    return mlx_mtp.load(str(name), mtp="auto", **options)[0]


def error_of(name) -> str:
    with pytest.raises((FileNotFoundError, ValueError)) as e:
        load(name)
    assert "\n" not in str(e.value)
    return str(e.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_is_that_of_the_original(family, hub, tmp_path, accepted):
    """Only its bytes are fetched, the first time; what is drafted and generated is that of a graft."""
    hub.publish("org/original", DATA / family)
    folder = conversion(tmp_path / "conversion", family, "org/original")
    model = load(folder)
    weights = [n for file, n in hub.served.items() if file.endswith(".safetensors")]
    n_files = sum(file.endswith(".safetensors") for file in hub.served)
    assert HEAD_BYTES[family] <= sum(weights) <= HEAD_BYTES[family] + 2 * HEADER_BYTES * n_files
    head = model.fetched_head
    assert (head.source, head.is_new) == ("org/original", True)
    assert head.nbytes >= HEAD_BYTES[family]

    convert(str(folder), str(tmp_path / "graft"), graft_mtp_from=str(DATA / family), skip_check=True)
    graft = mlx_mtp.load(str(tmp_path / "graft"))[0]
    assert arrays_equal(graft.mtp.parameters(), model.mtp.parameters())
    counts = [mlx_mtp.DraftCounts(), mlx_mtp.DraftCounts()]
    for m in (model, graft):
        m.set_dtype(mx.float32)  # MLX's CPU backend multiplies gathered matrices in nothing else
    texts = [mtp(PROMPT, m, max_tokens=12, num_draft_tokens=2, counts=c) for m, c in zip((model, graft), counts)]
    assert texts[0] == texts[1] == plain(PROMPT, model, max_tokens=12)
    assert counts[0] == counts[1]


def test_the_second_start_asks_for_nothing(hub, tmp_path, monkeypatch, accepted):
    hub.publish("org/original", DATA / "dense")
    hub.publish("org/conversion", conversion(tmp_path / "conversion", "dense", "org/original"))
    load("org/conversion")
    hub.reset_counts()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert load("org/conversion").fetched_head.is_new is False
    assert hub.requests == []


def test_conversions_share_a_head(hub, tmp_path, accepted):
    hub.publish("org/original", DATA / "dense")
    first, second = (conversion(tmp_path / name, "dense", "org/original") for name in ("one", "two"))
    folder = load(first).fetched_head.folder
    hub.reset_counts()
    assert load(second).fetched_head.folder == folder
    assert hub.served["model.safetensors"] <= 2 * HEADER_BYTES
    assert [head.folder for head in fetched_heads()] == [folder]
    remove(next(fetched_heads()))
    assert [*fetched_heads()] == []
    assert load(first).fetched_head.is_new


def test_a_model_with_a_head_keeps_its_own(hub):
    assert load(DATA / "dense").fetched_head is None
    assert hub.requests == []


def test_true_is_as_before_and_names_auto(hub, tmp_path):
    folder = conversion(tmp_path / "conversion", "dense", "org/original")
    with pytest.raises(ValueError, match='load it with mtp="auto"'):
        mlx_mtp.load(str(folder))
    assert hub.requests == []


# Finding the original


def test_a_fine_tune_of_a_conversion(hub, tmp_path, accepted):
    """Each card names the one before; the fine-tune's own weights stay."""
    hub.publish("org/original", DATA / "dense")
    hub.publish("org/conversion", conversion(tmp_path / "conversion", "dense", "org/original"))
    tuned = shutil.copytree(tmp_path / "conversion", tmp_path / "tuned")
    edit(tuned, lambda w: w.update({n: 1.01 * x for n, x in w.items() if n.endswith("input_layernorm.weight")}))
    hub.publish("me/tuned", card(tuned, "org/conversion"))
    model = load("me/tuned")
    assert model.fetched_head.source == "org/original"
    assert mtp(PROMPT, model, max_tokens=8) == plain(PROMPT, model, max_tokens=8)


def chain(hub, tmp_path, n):
    """A conversion, n cards away from the original."""
    hub.publish("org/original", DATA / "dense")
    folder = conversion(tmp_path / "conversion")
    names = [f"org/step{i}" for i in range(1, n)]
    for name, base in zip(names, [*names[1:], "org/original"]):
        (step := tmp_path / name.replace("/", "-")).mkdir()
        shutil.copy(folder / "config.json", step)
        shutil.copy(folder / "model.safetensors", step)
        hub.publish(name, card(step, base))
    return card(folder, [*names, "org/original"][0])


def test_four_steps_are_followed(hub, tmp_path, accepted):
    assert load(chain(hub, tmp_path, MAX_STEPS)).fetched_head.source == "org/original"


def test_five_steps_are_not(hub, tmp_path):
    assert "original was not found" in error_of(chain(hub, tmp_path, MAX_STEPS + 1))


def test_cards_that_name_each_other(hub, tmp_path):
    folder = conversion(tmp_path / "conversion", "dense", "org/b")
    hub.publish("org/b", card(shutil.copytree(folder, tmp_path / "b"), "org/c"))
    hub.publish("org/c", card(shutil.copytree(folder, tmp_path / "c"), "org/b"))
    message = error_of(folder)
    assert "org/b has no MTP head. org/c has no MTP head." in message
    assert "--mtp HEAD" in message
    assert "--graft-mtp-from" in message


def test_a_card_without_metadata_is_no_warning(hub, tmp_path, monkeypatch):
    """A user of a conversion need not know of it."""
    monkeypatch.setattr("huggingface_hub.repocard.logger.warning", None)
    no_head(base := copied(tmp_path))
    (base / "README.md").write_text("# A model\n")
    hub.publish("org/base", base)
    assert "org/base has no MTP head" in error_of(conversion(tmp_path / "conversion", "dense", "org/base"))


def test_the_name_in_the_config(hub, tmp_path, accepted):
    hub.publish("org/original", DATA / "dense")
    configure(folder := conversion(tmp_path / "conversion"), _name_or_path="org/original")
    assert load(folder).fetched_head.source == "org/original"


def test_a_published_model_by_name_and_size(hub, tmp_path, accepted, monkeypatch):
    hub.publish("Qwen/Qwen3.5-0.8B", DATA / "dense")
    folder = conversion(tmp_path / "someone--qwen3.5-0.8b-4bit")
    assert "No model card, config or published model of this size names it." in error_of(folder)
    text = json.loads((folder / "config.json").read_text())["text_config"]
    published = find.originals_like.__globals__["published"]()["qwen3.5-0.8b-4bit"]
    sizes = {"layers": text["num_hidden_layers"], "hidden_size": text["hidden_size"]}
    other = type(published)(**{**vars(published), **sizes})
    monkeypatch.setitem(find.originals_like.__globals__, "published", lambda: {other.name: other})
    assert load(folder).fetched_head.source == "Qwen/Qwen3.5-0.8B"


# Refusing it


def smaller(folder):
    text = json.loads((folder / "config.json").read_text())["text_config"]
    configure(folder, text_config={**text, "intermediate_size": 2 * text["intermediate_size"]})


def tied(folder):
    configure(
        folder, tie_word_embeddings=not json.loads((folder / "config.json").read_text()).get("tie_word_embeddings")
    )


def quantized_head(folder):
    weights = {name: w for name, w in mx.load(str(folder / "model.safetensors")).items() if not name.startswith("mtp.")}
    w, scales, biases = mx.quantize(mx.zeros((192, 384), mx.bfloat16), 32, 4)
    parts = {"mtp.fc.weight": w, "mtp.fc.scales": scales, "mtp.fc.biases": biases}
    mx.save_safetensors(str(folder / "model.safetensors"), weights | parts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (smaller, r"org/other does not fit .*: intermediate_size is"),
        (tied, r"does not fit .*: tie_word_embeddings is"),
        (no_head, "org/other has no MTP head"),
        (quantized_head, "The MTP head of org/other is quantized"),
        (lambda folder: edit(folder, lambda w: w.pop("mtp.fc.weight")), r"The MTP head lacks mtp\.fc\.weight"),
        (lambda folder: configure(folder, model_type="llama"), "Model type llama"),
        (lambda folder: (folder / "config.json").unlink(), "org/other is not a model"),
    ],
)
def test_a_card_that_lies(hub, tmp_path, change, message):
    """Nothing of another model's head is downloaded."""
    change(other := copied(tmp_path))
    hub.publish("org/other", other)
    folder = conversion(tmp_path / "conversion", "dense", "org/other")
    assert re.search(message, error_of(folder))
    assert hub.served["model.safetensors"] <= 2 * HEADER_BYTES
    assert [*fetched_heads()] == []


def test_a_gated_original(hub, tmp_path, monkeypatch, accepted):
    hub.publish("org/gated", DATA / "dense", gated=True)
    folder = conversion(tmp_path / "conversion", "dense", "org/gated")
    assert re.search("org/gated is gated: .*hf auth login", error_of(folder))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert load(folder).fetched_head.source == "org/gated"


def test_an_original_that_is_not_there(hub, tmp_path):
    assert "org/nowhere is not a folder, and the hub has no repository" in error_of(
        conversion(tmp_path / "conversion", "dense", "org/nowhere")
    )


def test_without_a_network(hub, tmp_path, monkeypatch):
    hub.publish("org/original", DATA / "dense")
    folder = conversion(tmp_path / "conversion", "dense", "org/original")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in error_of(folder)
    assert hub.requests == []


def test_a_cached_original_serves_without_a_network(hub, tmp_path, monkeypatch, accepted):
    hub.publish("org/original", DATA / "dense")
    mlx_mtp.load("org/original")
    folder = conversion(tmp_path / "conversion", "dense", "org/original")
    hub.reset_counts()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert load(folder).fetched_head.source == "org/original"
    assert hub.requests == []


# Downloading it


def test_a_broken_download_resumes(hub, tmp_path, monkeypatch, accepted):
    monkeypatch.setattr("mlx_mtp.checkpoint.originals.fetch.CHUNK_BYTES", 50_000)
    hub.publish("org/original", DATA / "dense")
    folder = conversion(tmp_path / "conversion", "dense", "org/original")
    read, n_reads = CheckpointReader.read, 0

    def breaks(self, file, start=0, stop=None):
        nonlocal n_reads
        n_reads += file.endswith(".safetensors")
        if n_reads > 4:
            raise FileNotFoundError("org/original could not be downloaded: the network is down.")
        return read(self, file, start, stop)

    monkeypatch.setattr(CheckpointReader, "read", breaks)
    assert "the network is down" in error_of(folder)
    assert [*fetched_heads()] == []
    monkeypatch.setattr(CheckpointReader, "read", read)
    hub.reset_counts()
    head = load(folder).fetched_head
    assert hub.served["model.safetensors"] < HEAD_BYTES["dense"] - 100_000 + 2 * HEADER_BYTES
    whole = fetch_missing_head(str(folder), folder, json.loads((folder / "config.json").read_text()))
    assert whole.folder == head.folder
    assert not [*head.folder.glob("*.part")]


def test_two_at_once(hub, tmp_path):
    """In threads, which lock the folder as two processes do."""
    hub.publish("org/original", DATA / "dense")
    folder = conversion(tmp_path / "conversion", "dense", "org/original")
    config = json.loads((folder / "config.json").read_text())
    with ThreadPoolExecutor(2) as pool:
        heads = [*pool.map(lambda _: fetch_missing_head(str(folder), folder, config), range(2))]
    assert heads[0].folder == heads[1].folder
    assert sorted(head.is_new for head in heads) == [False, True]
    assert hub.served["model.safetensors"] <= HEAD_BYTES["dense"] + 4 * HEADER_BYTES


# Trying it


def test_a_head_that_is_not_accepted_is_not_used(hub, tmp_path, monkeypatch):
    """The verdict is remembered; for another backbone the head is tried anew."""
    hub.publish("org/original", DATA / "dense")
    folder = conversion(tmp_path / "conversion", "dense", "org/original")
    runs = []
    monkeypatch.setattr(loading, "measure_acceptance", lambda model, tokenizer: runs.append(model) or FLOOR / 2)
    for _ in range(2):
        message = error_of(folder)
        assert "accepts 15% of the drafts from the head of org/original" in message
        assert "mlx_mtp fit --model" in message
    assert len(runs) == 1
    edit(folder, lambda w: w.update({n: 1.01 * x for n, x in w.items() if n.endswith("input_layernorm.weight")}))
    error_of(folder)
    assert len(runs) == 2


def test_the_head_is_tried_on_text(hub, tmp_path, monkeypatch):
    """Its acceptance is that of the original with its own head, on the same text."""
    monkeypatch.setattr(head, "PYTHON", head.PYTHON[:1])
    hub.publish("org/original", mlx_mtp.DEMO)
    convert(str(mlx_mtp.DEMO), str(tmp_path / "bare"), mtp=False)
    configure(card(tmp_path / "bare", "org/original"), mlx_mtp=None)
    model = load(tmp_path / "bare")
    whole, tokenizer = mlx_mtp.load(str(mlx_mtp.DEMO))
    assert model.fetched_head.acceptance(model.fingerprint()) == head.measure_acceptance(whole, tokenizer) > FLOOR


# The vision tower


def seeing(tmp_path):
    return add_tower(shutil.copytree(DATA / "dense", tmp_path / "seeing"))


def test_the_tower_is_that_of_the_original(hub, tmp_path, accepted, monkeypatch):
    """Only its bytes are fetched, the first time."""
    whole = seeing(tmp_path)
    hub.publish("org/original", whole)
    folder = conversion(tmp_path / "conversion", "dense", "org/original")
    vision = load(folder, vision="auto").vision
    own = mlx_mtp.load(str(whole))[0].vision
    pixels = own.processor.preprocess_image(picture())
    assert mx.array_equal(vision.tower(pixels), own.tower(pixels))
    tower = sum(map(n_bytes, CheckpointReader(str(whole)).tower().values()))
    assert tower <= hub.served["model-tower.safetensors"] <= tower + 3 * HEADER_BYTES
    hub.reset_counts()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert mx.array_equal(load(folder, vision="auto").vision.tower(pixels), own.tower(pixels))
    assert hub.requests == []
    assert load(folder).vision is None


def test_an_original_without_a_tower(hub, tmp_path, accepted):
    hub.publish("org/original", DATA / "dense")
    folder = conversion(tmp_path / "conversion", "dense", "org/original")
    with pytest.raises(FileNotFoundError, match=r"org/original has no vision tower\. .*--graft-vision-from"):
        load(folder, vision="auto")


@pytest.mark.parametrize("flags", [["--mtp"], []], ids=["with drafts", "without"])
def test_generate_shows_a_picture_to_a_conversion(flags, hub, tmp_path, accepted, capsys, monkeypatch):
    """In one command, with drafts or without, the same text."""
    hub.publish("org/original", DATA / "images")
    convert(str(DATA / "images"), str(tmp_path / "bare"), mtp=False, vision=False)
    configure(card(folder := tmp_path / "bare", "org/original"), mlx_mtp=None)
    picture().save(file := tmp_path / "picture.png")
    prompt = PLACEHOLDER + "What is this?"
    command = ["generate", *flags, "--model", str(folder), "--image", str(file), "--prompt", prompt, "-m", "6"]
    monkeypatch.setattr(sys, "argv", ["mlx_mtp", *command, "--verbose", "False", "--ignore-chat-template"])
    main()
    text = capsys.readouterr().out
    model, tokenizer = mlx_mtp.load(str(folder), mtp="auto", vision="auto")
    want = mlx_mtp.generate(model, tokenizer, prompt, max_tokens=6, images=[str(file)])
    assert text.endswith(want + "\n")
    assert want


@pytest.fixture
def blind(hub, tmp_path, accepted):
    """A conversion that has lost the head and the tower, and a picture."""
    hub.publish("org/original", DATA / "images")
    convert(str(DATA / "images"), str(tmp_path / "bare"), mtp=False, vision=False)
    configure(card(tmp_path / "bare", "org/original"), mlx_mtp=None)
    picture().save(tmp_path / "picture.png")
    return tmp_path / "bare", tmp_path / "picture.png"


@pytest.mark.parametrize("flags", [["--mtp"], []], ids=["with drafts", "without"])
def test_a_chat_shows_a_picture_to_a_conversion(flags, blind, capsys, monkeypatch):
    """With drafts or without, the same text as a checkpoint that has kept its tower; also in the turn after."""
    folder, file = blind

    def said(*flags):
        monkeypatch.setattr(sys, "argv", ["mlx_mtp", "chat", "-m", "6", "--temp", "0", *flags])
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"/image {file}\nWhat is this?\nAnd then?"))
        main()
        return [text.partition("\n[")[0] for text in capsys.readouterr().out.split(">> ")[2:4]]

    want = said("--mtp", "--model", str(DATA / "images"))
    assert said(*flags, "--images", "--model", str(folder)) == want
    assert all(want)
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"/image {file}"))
    monkeypatch.setattr(sys, "argv", ["mlx_mtp", "chat", *flags, "--model", str(folder)])
    main()
    assert "--images" in capsys.readouterr().out.partition(">> ")[2], "what to do"


def test_a_server_shows_a_picture_to_a_conversion(blind):
    folder, file = blind
    url = "data:image/png;base64," + base64.b64encode(file.read_bytes()).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    messages, template = [{"role": "user", "content": content}], "{% for m in messages %}{{ m.content }}{% endfor %}"
    answers = []
    for flags in (["--model", str(DATA / "images")], ["--model", str(folder), "--images"]):
        with Engine(*flags, "--chat-template", template) as engine:
            answers.append(engine.ask(messages, max_tokens=6))
    assert answers[0].tokens == answers[1].tokens
    assert answers[0].prompt == answers[1].prompt
    refused = pytest.raises(ApiError, match="start the server with --images")
    with Engine("--model", str(folder), "--chat-template", template) as engine, refused:
        engine.ask(messages, max_tokens=1)
