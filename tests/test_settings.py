"""Settings that --tune wrote: used only for the checkpoint, device and versions that they name, overridden by arguments."""

import logging
import shutil

import mlx.core as mx
import pytest

import mlx_mtp
from mlx_mtp.benchmark import __main__ as benchmark
from mlx_mtp.benchmark import tune
from mlx_mtp.benchmark.tune import Measured
from mlx_mtp.checkpoint import settings
from mlx_mtp.core.layers.drafting import Settings
from mlx_mtp.core.pacing.step_times import times_of
from mlx_mtp.generate import __main__ as generate
from tests.support.checkpoints import configure, copied, edit
from tests.support.commands import run_command
from tests.support.decoding import plain
from tests.support.models import DATA, TRAINED

PROMPT = "class Queue:\n    def __init__(self, maxsize=0):\n"  # a text that goes on
TUNED = Settings("auto", 8, 4, 1024, 0.3, {0: 0.01, 1: 0.012, 3: 0.02}, attention_rows=3, compiled=False, pieces=2)


@pytest.fixture
def tuned_model():
    """Write settings for the trained model to the cache folder."""
    files = []

    def write(found, **changes):
        key = settings.key_of(DATA / "dense")
        files.append(settings.default_file(key))
        settings.check_writable(files[-1])
        settings.write(files[-1], {**key, **changes}, "dense", found)
        return files[-1]

    yield write
    for file in files:
        file.unlink(missing_ok=True)


def test_reads_what_was_written(tmp_path):
    for tuned in (Settings(0), Settings(3, draft_vocab=0), TUNED):
        settings.write(tmp_path / "s.json", {"mlx": "1"}, "demo", tuned)
        assert settings.read(tmp_path / "s.json") == ({"mlx": "1"}, tuned)
        assert [f.name for f in tmp_path.iterdir()] == ["s.json"]


def test_load_finds_settings_and_keeps_the_text(tuned_model):
    untuned, tokenizer = mlx_mtp.load(TRAINED)
    assert untuned.drafting.tuned is None
    tuned_model(TUNED)
    model, _ = mlx_mtp.load(TRAINED)
    drafting = model.drafting
    assert drafting.tuned == TUNED
    assert (drafting.attention_rows, drafting.compiled, drafting.pieces) == (3, False, 2)
    assert times_of(model).estimate[:4] == pytest.approx([0.01, 0.012, 0.016, 0.02])
    assert {m.bits for _, m in model.mtp.named_modules() if hasattr(m, "bits")} == {8}
    assert model.drafting.lm_head.ids.size == 1024
    assert model.drafting.lm_head.layers[0].bits == 4
    prompt = tokenizer.encode(PROMPT)
    tokens = [token for token, _, _ in mlx_mtp.mtp_generate_step(mx.array(prompt), model, max_tokens=16)]
    assert tokens == plain(prompt, untuned, max_tokens=16)
    # Each overrides.
    for argument in ({"mtp_bits": 4}, {"draft_head_bits": 8}, {"draft_vocab": 0}, {"settings": False}):
        model, _ = mlx_mtp.load(TRAINED, **argument)
        assert model.drafting.tuned is None, argument
        assert {m.bits for _, m in model.mtp.named_modules() if hasattr(m, "bits")} == {4} & {argument.get("mtp_bits")}


def test_settings_of_one_process_are_not_for_several(tuned_model, caplog):
    caplog.set_level(logging.WARNING)  # a server in the same process logs more
    file = tuned_model(TUNED)
    assert settings.find(True, [DATA / "dense"]) == TUNED
    assert settings.find(True, [DATA / "dense"], n_ranks=2) is None
    assert caplog.text == ""
    assert settings.find(file, [DATA / "dense"], n_ranks=2) is None
    assert "are ignored, because device is 2 times" in caplog.text


def test_drafts_follow_settings_unless_given(tuned_model, equal_steps):
    for k in (0, 3):
        tuned_model(Settings(k))
        model, tokenizer = mlx_mtp.load(TRAINED)
        for asked, drafted in ((None, k), (2, 2)):
            *_, last = mlx_mtp.stream_generate(model, tokenizer, PROMPT, 6, num_draft_tokens=asked)
            assert len(last.drafted) == drafted
    *_, last = mlx_mtp.stream_generate(model, tokenizer, PROMPT, 60, num_draft_tokens="auto", copy_drafts="off")
    assert last.drafted[0] >= 2  # the argument overrides
    assert times_of(model).seconds
    tuned_model(Settings(2, draft_p_min=1.0))
    model, tokenizer = mlx_mtp.load(TRAINED)
    for given, drafts in ((None, False), (0.0, True)):
        *_, last = mlx_mtp.stream_generate(model, tokenizer, "def read(path):", 6, draft_p_min=given)
        assert (last.drafted != ()) == drafts


def test_benchmark_ignores_settings_unless_given(monkeypatch, capsys, tuned_model):
    file, measured = tuned_model(Settings(0)), []

    def measure(model, *_, name, **__):
        measured.append((name, model.drafting.tuned))
        raise SystemExit

    monkeypatch.setattr(benchmark, "measure", measure)
    for flags in ((), ("--settings", file)):
        run_command(benchmark.main, capsys, "--model", TRAINED, *flags)
    assert measured == [("dense", None), ("dense with off", Settings(0))]


def test_warns_of_settings_for_something_else(tuned_model, caplog):
    for part in ("checkpoint", "device", "mlx", "mlx-lm", "mlx-mtp"):
        file = tuned_model(TUNED, **{part: "another"})
        with caplog.at_level(logging.WARNING):
            assert settings.find(True, [DATA / "dense"]) is None
        said = caplog.text
        assert all(words in said for words in (f"{part} is ", "not another", str(file)))
        caplog.clear()
    assert mlx_mtp.load(TRAINED)[0].drafting.tuned is None


def test_each_checkpoint_has_its_key(tmp_path):
    folder = shutil.copytree(DATA / "dense", tmp_path / "model")
    keys = [settings.key_of(folder), settings.key_of(DATA / "dense"), settings.key_of(folder, tmp_path)]
    with (folder / "model.safetensors").open("ab") as f:
        f.write(b"\0")
    keys.append(settings.key_of(folder))
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    keys.append(settings.key_of(folder))
    assert len({key["checkpoint"] for key in keys}) == 5
    assert len({settings.default_file(key) for key in keys}) == 5


WRONG = [
    '"unknown": 1', '"mtp_bits": "4"', '"num_draft_tokens": null', '"seconds": {"0": 0}', '"seconds": [1]', '"pieces": 0',
    '"draft_p_min": "high"', '"attention_rows": -1', '"attention_rows": true', '"compiled": 1',
]  # fmt: skip
DAMAGED = ["", "{", "[]", "{}", '{"key": 5, "settings": {}}', *(f'{{"key": {{}}, "settings": {{{w}}}}}' for w in WRONG)]


def test_rejects_a_file_that_is_damaged_or_missing_and_a_model_without_its_head(tmp_path):
    for text in DAMAGED:
        (tmp_path / "s.json").write_text(text)
        with pytest.raises(ValueError, match=r"s\.json is not a settings file: write it again with `mlx_mtp benchmark"):
            settings.read(tmp_path / "s.json")
    with pytest.raises(FileNotFoundError, match="There is no settings file"):
        mlx_mtp.load(TRAINED, settings=tmp_path / "none.json")
    with pytest.raises(ValueError, match="settings require the MTP head"):
        mlx_mtp.load(TRAINED, mtp=False, settings=tmp_path / "s.json")


def test_command_prints_the_settings(capsys, tuned_model):
    tuned_model(Settings(0))
    for flags, said in (
        ("", "off"),
        ("--num-draft-tokens 2", "--num-draft-tokens 2"),
        ("--num-draft-tokens 2 --draft-p-min 0.1", "--num-draft-tokens 2 --draft-p-min 0.1"),
        ("--settings off", None),
        ("--mtp-bits 8", None),
    ):
        argv = "--mtp", "--model", TRAINED, "--prompt", PROMPT, "-m", 8, *flags.split()
        _, out, err = run_command(generate.main, capsys, *argv)
        note = "" if said is None else f"Using tuned settings: {said} (--settings off ignores them)\n"
        assert err == note + "stopped at 8 tokens (--max-tokens)\n"
        assert ("Drafts: none" if said == "off" else "accepted by position") in out


def test_settings_of_a_head_on_the_hub_are_found_from_any_folder(hub, monkeypatch, capsys, tmp_path):
    """`--tune` writes them for a model and a head of its own, and loading the two finds them."""
    head = copied(tmp_path / "head")
    edit(head, lambda w: [w.pop(name) for name in list(w) if not name.startswith("mtp.")])
    configure(head, model_type="qwen3_5_mtp")
    hub.publish("me/head", head)
    monkeypatch.setattr(tune, "tune", lambda *_, **__: [Measured(TUNED, [1.0])])
    assert run_command(benchmark.main, capsys, "--model", TRAINED, "--mtp", "me/head", "--tune")[0] == 0
    monkeypatch.chdir(tmp_path)
    assert mlx_mtp.load(TRAINED, mtp="me/head")[0].drafting.tuned == TUNED
    assert mlx_mtp.load(TRAINED)[0].drafting.tuned is None
