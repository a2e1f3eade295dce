"""A conversion without a head drafts with that of its base model, which is found, fetched once and tried."""

import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from tempfile import TemporaryDirectory

import huggingface_hub
import mlx.core as mx
import pytest
from mlx_lm.models import qwen3_5

import mlx_mtp
from mlx_mtp.checkpoint import catalog
from mlx_mtp.checkpoint.heads import originals
from mlx_mtp.checkpoint.heads.acceptance import FLOOR
from mlx_mtp.checkpoint.heads.originals import MAX_STEPS, fetch_missing_head, fetched_heads, head_to_fetch
from mlx_mtp.checkpoint.reader import CheckpointReader, n_bytes, tower_tensors
from mlx_mtp.server.command_line import make_parser
from mlx_mtp.server.engine.models import ModelProvider
from mlx_mtp.server.options import check
from tests.support.bad_checkpoints import configured, dropped
from tests.support.checkpoints import WEIGHTS, accepting, config_of, configure, converted, copied, edit, loaded, no_head
from tests.support.commands import refused
from tests.support.decoding import PROMPT, mtp, plain
from tests.support.hub_stand_in import HEADER_BYTES
from tests.support.images import add_tower, picture
from tests.support.models import DATA, arrays_equal
from tests.support.profiles import LONG

FAMILIES = ["dense", "moe35", "moe36", "next"]
HEAD_BYTES = {name: n_bytes(CheckpointReader(str(DATA / name)).head()) for name in FAMILIES}
DENSE, BASE_MODEL = DATA / "dense", "org/original"


@pytest.fixture(autouse=True)
def accepted(monkeypatch):
    """These models were never trained on the built-in text."""
    accepting(monkeypatch, 0.8)


@pytest.fixture
def go_offline(hub, monkeypatch):
    def offline():
        hub.reset_counts()
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    return offline


def card(folder, *base_models):
    bases = "".join(f"\n- {base}" for base in base_models)
    (folder / "README.md").write_text(f"---\nlicense: apache-2.0\nbase_model:{bases}\n---\n# A model\n")
    return folder


@cache
def headless(family):
    """A conversion of a family's checkpoint that has lost the head, as most have, in a temporary folder."""
    folder = TemporaryDirectory(prefix="conversion-")
    converted(DATA / family, f"{folder.name}/out", mtp=False, quantize=True, q_bits=4, q_group_size=32)
    return folder


def conversion(folder, *base_models, family="dense"):
    """A copy of it, whose name and card say no more than given."""
    shutil.copytree(f"{headless(family).name}/out", folder)
    (folder / "README.md").unlink(missing_ok=True)
    configure(folder, mlx_mtp=None)
    return card(folder, *base_models) if base_models else folder


@pytest.fixture
def folder(hub, tmp_path):
    """A conversion of an original on the hub."""
    hub.publish(BASE_MODEL, DENSE)
    return conversion(tmp_path / "conversion", BASE_MODEL)


load = partial(loaded, mtp="auto")


def error_of(name) -> str:
    return refused(".", load, name, error=(FileNotFoundError, ValueError))


@pytest.mark.parametrize("family", FAMILIES if LONG else ["dense", "moe36", "next"])
def test_the_head_is_that_of_the_original(family, hub, tmp_path):
    """Only its bytes are fetched, the first time; it is that of a graft."""
    hub.publish(BASE_MODEL, DATA / family)
    model = load(folder := conversion(tmp_path / "conversion", BASE_MODEL, family=family))
    weights = [n for file, n in hub.served.items() if file.endswith(".safetensors")]
    assert HEAD_BYTES[family] <= sum(weights) <= HEAD_BYTES[family] + 2 * HEADER_BYTES * len(weights)
    head = model.fetched_head
    assert head.source == BASE_MODEL
    assert head.nbytes >= HEAD_BYTES[family]

    graft = converted(folder, tmp_path / "graft", graft_mtp_from=str(DATA / family), skip_check=True)
    assert arrays_equal(model.mtp.parameters(), mlx_mtp.load(str(graft))[0].mtp.parameters())
    model.set_dtype(mx.float32)  # MLX's CPU backend multiplies gathered matrices in nothing else
    assert mtp(PROMPT, model, max_tokens=12, num_draft_tokens=2) == plain(PROMPT, model, max_tokens=12)


def test_conversions_share_a_head(hub, folder, tmp_path):
    """Also two at once, in threads, which lock the folder as two processes do."""
    with ThreadPoolExecutor(2) as pool:
        heads = [*pool.map(lambda _: fetch_missing_head(CheckpointReader(str(folder))), range(2))]
    assert heads[0].folder == heads[1].folder
    assert hub.served[WEIGHTS] <= HEAD_BYTES["dense"] + 4 * HEADER_BYTES
    head = load(folder).fetched_head.folder
    hub.reset_counts()
    assert load(conversion(tmp_path / "two", BASE_MODEL)).fetched_head.folder == head
    assert hub.served[WEIGHTS] <= 2 * HEADER_BYTES
    assert [head.folder for head in fetched_heads()] == [head]
    shutil.rmtree(head)
    assert [*fetched_heads()] == []
    assert load(folder).fetched_head.folder == head


def test_nothing_is_asked_for_where_the_model_has_a_head_or_none_is_looked_for(hub, folder):
    assert mlx_mtp.load(str(DENSE))[0].fetched_head is None
    with pytest.raises(ValueError, match='load it with mtp="auto"'):
        mlx_mtp.load(str(folder), mtp=True)
    assert isinstance(mlx_mtp.load(str(folder), mtp="cached")[0], qwen3_5.Model)
    assert mlx_mtp.load(str(folder), mtp="cached", copy_drafts=True)[0].fetched_head is None
    assert hub.requests == []


def test_a_head_fetched_before_is_used_without_asking(hub, folder, go_offline, monkeypatch):
    """With ``mtp="cached"``, as commands load by default; once the model has refused it, it is used no more."""
    mlx_mtp.load(str(folder))
    go_offline()
    assert load(folder).fetched_head.source == BASE_MODEL
    assert mlx_mtp.load(str(folder), mtp="cached")[0].fetched_head.source == BASE_MODEL
    accepting(monkeypatch, 0.1)
    tune(folder)
    assert "accepts 10% of the drafts" in error_of(folder)
    assert isinstance(mlx_mtp.load(str(folder), mtp="cached")[0], qwen3_5.Model)
    assert hub.requests == []


def test_a_head_that_could_be_fetched_is_known_with_its_size(hub, folder, tmp_path, monkeypatch):
    """Nothing of the head is downloaded, and the published models are known without the hub."""
    assert head_to_fetch(str(folder)) == (BASE_MODEL, HEAD_BYTES["dense"])
    assert hub.served[WEIGHTS] <= HEADER_BYTES
    assert head_to_fetch(str(conversion(tmp_path / "unknown"))) is None
    text, model = config_of(folder)["text_config"], catalog.published()["qwen3.5-0.8b-4bit"]
    model = replace(model, layers=text["num_hidden_layers"], hidden_size=text["hidden_size"])
    monkeypatch.setattr(originals, "published", lambda: {model.name: model})
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert head_to_fetch(str(card(folder, model.original))) == (model.original, model.head_gb * 1e9)
    assert head_to_fetch(str(card(folder, "org/other"))) is None


def test_the_server_says_what_could_be_fetched(hub, folder, caplog):
    """In its log, and drafts with the head once it was fetched, with the flag or before."""
    caplog.set_level("INFO")
    line = f"Generating without drafts: --mtp downloads the MTP head of {BASE_MODEL} once, "
    for flags, *want in (("", False, True), (" --no-mtp", False, False), (" --mtp", True, False), ("", True, False)):
        caplog.clear()
        models = ModelProvider(check(make_parser().parse_args(f"--model {folder}{flags}".split())))
        models.load(models.options.model)
        assert [models.drafts, line in caplog.text] == want
        assert models.has_head == models.drafts


# Finding the original


def tune(folder):
    edit(folder, lambda w: w.update({n: 1.01 * x for n, x in w.items() if n.endswith("input_layernorm.weight")}))


def chain(hub, folder, n):
    names = [*(f"org/step{i}" for i in range(1, n)), BASE_MODEL]
    for name, base in pairwise(names):
        (step := folder.with_name(name.replace("/", "-"))).mkdir()
        for file in ("config.json", WEIGHTS):
            shutil.copy(folder / file, step)
        hub.publish(name, card(step, base))
    return card(folder, names[0])


def test_four_steps_are_followed_and_no_more(hub, folder, tmp_path):
    # A fine-tune's own weights stay
    hub.publish("org/conversion", folder)
    tune(tuned := shutil.copytree(folder, tmp_path / "tuned"))
    hub.publish("me/tuned", card(tuned, "org/conversion"))
    model = load("me/tuned")
    assert model.fetched_head.source == BASE_MODEL
    assert mtp(PROMPT, model, max_tokens=8) == plain(PROMPT, model, max_tokens=8)
    further = shutil.copytree(folder, folder.with_name("further"))
    assert fetch_missing_head(CheckpointReader(str(chain(hub, folder, MAX_STEPS)))).source == BASE_MODEL
    hub.publish("org/last", card(folder, "org/step1"))
    assert "base model was not found" in error_of(card(further, "org/last"))


def test_cards_that_name_each_other(hub, tmp_path, monkeypatch):
    folder = conversion(tmp_path / "conversion", "org/b")
    for name, base in (("b", "org/c"), ("c", "org/b")):
        hub.publish(f"org/{name}", card(shutil.copytree(folder, tmp_path / name), base))
    message = error_of(folder)
    for part in ("org/b has no MTP head: ", "org/c has no MTP head: ", "--mtp HEAD", "--graft-mtp-from"):
        assert part in message
    # A card without metadata is no warning: a user of a conversion need not know of it
    monkeypatch.setattr("huggingface_hub.repocard.logger.warning", None)
    no_head(base := copied(tmp_path))
    (base / "README.md").write_text("# A model\n")
    hub.publish("org/base", base)
    assert "org/base has no MTP head" in error_of(conversion(tmp_path / "another", "org/base"))


def test_a_published_model_by_name_and_size(hub, tmp_path, monkeypatch):
    hub.publish("Qwen/Qwen3.5-0.8B", DENSE)
    folder = conversion(tmp_path / "someone--qwen3.5-0.8b-4bit")
    message = "No model card, config or published model of this size names it."
    assert f"found. It has no README.md here. {message}" in error_of(folder)
    assert f"found. {message}" in error_of(card(shutil.copytree(folder, tmp_path / "named"), ""))
    text, model = config_of(folder)["text_config"], catalog.published()["qwen3.5-0.8b-4bit"]
    model = replace(model, layers=text["num_hidden_layers"], hidden_size=text["hidden_size"])
    monkeypatch.setitem(originals.originals_like.__globals__, "published", lambda: {model.name: model})
    assert load(folder).fetched_head.source == "Qwen/Qwen3.5-0.8B"
    # Or by the name in its config
    hub.publish(BASE_MODEL, DENSE)
    configure(folder := conversion(tmp_path / "conversion"), _name_or_path=BASE_MODEL)
    assert load(folder).fetched_head.source == BASE_MODEL


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (configured(text={"intermediate_size": 1024}), "org/other does not fit .*: intermediate_size is"),
        (no_head, "org/other has no MTP head"),
        (dropped("mtp.fc.weight"), r"The MTP head lacks mtp\.fc\.weight"),
        (configured(model_type="llama"), "Model type llama"),
        (None, "org/other is not a folder, and the hub has no repository"),
    ],
)
def test_a_card_that_lies(hub, tmp_path, change, message):
    """Nothing of another model's head is downloaded."""
    if change is not None:
        change(other := copied(tmp_path))
        hub.publish("org/other", other)
    assert re.search(message, error_of(conversion(tmp_path / "conversion", "org/other")))
    assert hub.served[WEIGHTS] <= 2 * HEADER_BYTES
    assert [*fetched_heads()] == []


def test_without_a_network_a_cached_original_serves(hub, folder, go_offline):
    mlx_mtp.load(BASE_MODEL)
    go_offline()
    assert load(folder).fetched_head.source == BASE_MODEL
    assert hub.requests == []


def test_a_broken_download_resumes(hub, folder, monkeypatch):
    monkeypatch.setattr("mlx_mtp.checkpoint.heads.originals.CHUNK_BYTES", 50_000)
    read, files = CheckpointReader.read, []

    def breaks(self, file, start=0, stop=None):
        files.extend([file] * file.endswith(".safetensors"))
        if len(files) > 4:
            raise FileNotFoundError("org/original could not be downloaded: the network is down.")
        return read(self, file, start, stop)

    with monkeypatch.context() as broken:
        broken.setattr(CheckpointReader, "read", breaks)
        assert "the network is down" in error_of(folder)
    assert [*fetched_heads()] == []
    hub.reset_counts()
    head = load(folder).fetched_head
    assert hub.served[WEIGHTS] < HEAD_BYTES["dense"] - 100_000 + 2 * HEADER_BYTES
    assert fetch_missing_head(CheckpointReader(str(folder))).folder == head.folder
    assert not [*head.folder.glob("*.part")]


def test_a_head_that_is_not_accepted_is_not_used(hub, folder, monkeypatch):
    """The verdict is remembered; for another backbone the head is tried anew."""
    runs = accepting(monkeypatch, FLOOR / 2)
    for _ in range(2):
        message = error_of(folder)
        assert "accepts 15% of the drafts from the head of org/original" in message
        assert "mlx_mtp fit --model" in message
    assert len(runs) == 1
    tune(folder)
    error_of(folder)
    assert len(runs) == 2


# The vision encoder


def test_the_tower_is_that_of_the_original(hub, folder, tmp_path, go_offline):
    """Only its bytes are fetched, the first time."""
    # Which may have none
    with pytest.raises(FileNotFoundError, match=r"org/original has no vision encoder: .*--graft-vision-from"):
        load(folder, vision="auto")
    hub.publish(BASE_MODEL, whole := add_tower(copied(tmp_path)))
    vision, own = load(folder, vision="auto").vision, mlx_mtp.load(str(whole))[0].vision
    pixels = own.processor.preprocess_image(picture())
    assert mx.array_equal(vision.tower(pixels), own.tower(pixels))
    tower = n_bytes(tower_tensors(CheckpointReader(str(whole))))
    assert tower <= hub.served["model-tower.safetensors"] <= tower + 3 * HEADER_BYTES
    go_offline()
    assert mx.array_equal(load(folder, vision="auto").vision.tower(pixels), own.tower(pixels))
    assert hub.requests == []
    assert load(folder).vision is None
