"""Settings that --tune wrote: used only for the checkpoint, device and versions that they name, overridden by arguments."""

import json
import logging
import shutil
import sys
from dataclasses import replace

import mlx.core as mx
import pytest

import mlx_mtp
from mlx_mtp.benchmark import __main__ as benchmark
from mlx_mtp.benchmark import tune
from mlx_mtp.benchmark.recommend import Measured
from mlx_mtp.checkpoint import settings
from mlx_mtp.generate import __main__ as generate
from mlx_mtp.layers.drafting import Settings
from mlx_mtp.pacing.timing import timing_of
from tests.support.checkpoints import configure, copied, edit
from tests.support.decoding import plain
from tests.support.models import DATA, TRAINED

PROMPT = "class Queue:\n    def __init__(self, maxsize=0):\n"  # a text that goes on
TUNED = Settings("auto", 8, 4, 1024, 0.3, {0: 0.01, 1: 0.012, 3: 0.02})


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


def run(monkeypatch, module, *argv) -> None:
    monkeypatch.setattr(sys, "argv", ["command", *map(str, argv)])
    module.main()


PASSES = Settings(attention_rows=4, compiled=False, pieces=8)


@pytest.mark.parametrize("tuned", [Settings(0), Settings(3, draft_vocab=0), PASSES, TUNED])
def test_reads_what_was_written(tmp_path, tuned):
    file = tmp_path / "s.json"
    settings.write(file, {"mlx": "1"}, "demo", tuned)
    assert settings.read(file) == ({"mlx": "1"}, tuned)
    assert [f.name for f in tmp_path.iterdir()] == ["s.json"]


def test_load_finds_settings_and_keeps_the_text(tuned_model):
    untuned, tokenizer = mlx_mtp.load(TRAINED)
    assert untuned.drafting.tuned is None
    tuned_model(TUNED)
    model, _ = mlx_mtp.load(TRAINED)
    assert model.drafting.tuned == TUNED
    assert {m.bits for _, m in model.mtp.named_modules() if hasattr(m, "bits")} == {8}
    assert model.drafting.lm_head.ids.size == 1024
    assert model.drafting.lm_head.layers[0].bits == 4
    prompt = tokenizer.encode(PROMPT)
    tokens = [token for token, _, _ in mlx_mtp.mtp_generate_step(mx.array(prompt), model, max_tokens=16)]
    assert tokens == plain(prompt, untuned, max_tokens=16)


def test_settings_of_one_process_are_not_for_several(tuned_model, caplog):
    file = tuned_model(TUNED)
    assert settings.find(True, [DATA / "dense"]) == TUNED
    assert settings.find(True, [DATA / "dense"], n_ranks=2) is None
    assert caplog.text == ""
    assert settings.find(file, [DATA / "dense"], n_ranks=2) is None
    assert "are ignored, because device is 2 times" in caplog.text


def test_attention_follows_settings(tuned_model):
    for rows in (3, None):
        tuned_model(Settings(attention_rows=rows))
        assert mlx_mtp.load(TRAINED)[0].drafting.attention_rows == rows
    tuned_model(Settings(compiled=False, pieces=2))
    drafting = mlx_mtp.load(TRAINED)[0].drafting
    assert (drafting.compiled, drafting.pieces) == (False, 2)


def test_depth_follows_settings_unless_given(tuned_model):
    tuned_model(TUNED)
    assert timing_of(mlx_mtp.load(TRAINED)[0]).of_one.by_depth() == TUNED.seconds
    for k in (0, 3):
        tuned_model(Settings(k))
        model, tokenizer = mlx_mtp.load(TRAINED)
        for asked, drafted in ((None, k), (2, 2)):
            *_, last = mlx_mtp.stream_generate(model, tokenizer, PROMPT, 6, num_draft_tokens=asked)
            assert len(last.drafted) == drafted
        *_, last = mlx_mtp.stream_generate(model, tokenizer, PROMPT, 12, num_draft_tokens="auto")
        assert last.drafted[0] >= 2  # the argument overrides
        assert timing_of(model).of_one.seconds


def test_draft_p_min_follows_settings_unless_given(tuned_model):
    tuned_model(Settings(2, draft_p_min=1.0))
    model, tokenizer = mlx_mtp.load(TRAINED)
    for given, drafts in ((None, False), (0.0, True)):
        *_, last = mlx_mtp.stream_generate(model, tokenizer, "def read(path):", 6, draft_p_min=given)
        assert (last.drafted != ()) == drafts


def test_benchmark_ignores_settings_unless_given(monkeypatch, tuned_model):
    file, measured = tuned_model(Settings(0)), []

    def measure(model, *_, name, **__):
        measured.append((name, model.drafting.tuned))
        raise SystemExit

    monkeypatch.setattr(benchmark, "measure", measure)
    for flags in ((), ("--settings", file)):
        with pytest.raises(SystemExit):
            run(monkeypatch, benchmark, "--model", TRAINED, *flags)
    assert measured == [(TRAINED, None), (f"{TRAINED} with off", Settings(0))]


@pytest.mark.parametrize("argument", [{"mtp_bits": 4}, {"draft_head_bits": 8}, {"draft_vocab": 0}, {"settings": False}])
def test_argument_overrides_settings(tuned_model, argument):
    tuned_model(TUNED)
    model, _ = mlx_mtp.load(TRAINED, **argument)
    assert model.drafting.tuned is None
    assert {m.bits for _, m in model.mtp.named_modules() if hasattr(m, "bits")} == {4} & {argument.get("mtp_bits")}


@pytest.mark.parametrize("part", ["checkpoint", "device", "mlx", "mlx-lm", "mlx-mtp"])
def test_warns_of_settings_for_something_else(tuned_model, caplog, part):
    file = tuned_model(TUNED, **{part: "another"})
    with caplog.at_level(logging.WARNING):
        model, _ = mlx_mtp.load(TRAINED)
    assert model.drafting.tuned is None
    assert f"{part} is " in caplog.text
    assert "not another" in caplog.text
    assert str(file) in caplog.text


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


DAMAGED = [
    "",
    "{",
    "[]",
    "{}",
    '{"key": {}, "settings": {"unknown": 1}}',
    '{"key": {}, "settings": {"mtp_bits": "4"}}',
    '{"key": {}, "settings": {"num_draft_tokens": null}}',
    '{"key": {}, "settings": {"seconds": {"0": 0}}}',
    '{"key": {}, "settings": {"seconds": [1]}}',
    '{"key": {}, "settings": {"draft_p_min": "high"}}',
    '{"key": {}, "settings": {"attention_rows": 0}}',
    '{"key": {}, "settings": {"attention_rows": true}}',
    '{"key": {}, "settings": {"pieces": 0}}',
    '{"key": {}, "settings": {"compiled": 1}}',
    '{"key": 5, "settings": {}}',
]


@pytest.mark.parametrize("text", DAMAGED)
def test_rejects_a_damaged_file(tmp_path, text):
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(ValueError, match=r"s\.json is not a settings file: write it again with `mlx_mtp benchmark"):
        settings.read(tmp_path / "s.json")


def test_rejects_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no settings file"):
        mlx_mtp.load(TRAINED, settings=tmp_path / "s.json")


def test_settings_require_the_head(tmp_path):
    with pytest.raises(ValueError, match="settings require the MTP head"):
        mlx_mtp.load(TRAINED, mtp=False, settings=tmp_path / "s.json")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "off"),
        (["--num-draft-tokens", 2], "--num-draft-tokens 2"),
        (["--num-draft-tokens", "auto"], "auto"),
        (["--num-draft-tokens", 2, "--draft-p-min", 0.1], "--num-draft-tokens 2 --draft-p-min 0.1"),
        (["--settings", "off"], None),
        (["--mtp-bits", 8], None),
        (["--check"], None),
    ],
)
def test_command_prints_the_settings(monkeypatch, capsys, tuned_model, flags, said):
    tuned_model(Settings(0))
    command = ("--mtp", "--model", TRAINED, "--prompt", PROMPT, "-m", 8, *flags)
    if flags == ["--check"]:
        with pytest.raises(SystemExit, match="0"):
            run(monkeypatch, generate, *command)
    else:
        run(monkeypatch, generate, *command)
    out, err = capsys.readouterr()
    assert err == ("" if said is None else f"Using tuned settings: {said} (--settings off ignores them)\n")
    if said == "off":
        assert "Drafts: none" in out
    elif flags != ["--check"]:
        assert "accepted by position" in out


def test_settings_of_a_head_on_the_hub_are_found_from_any_folder(hub, monkeypatch, tmp_path):
    """`--tune` writes them for a model and a head of its own, and loading the two finds them."""
    head = copied(tmp_path / "head")
    edit(head, lambda w: [w.pop(name) for name in list(w) if not name.startswith("mtp.")])
    configure(head, model_type="qwen3_5_mtp")
    hub.publish("me/head", head)
    monkeypatch.setattr(tune, "tune", lambda *_, **__: [Measured(TUNED, [1.0])])
    monkeypatch.setattr(
        sys, "argv", ["mlx_mtp.benchmark", "--model", str(DATA / "dense"), "--mtp", "me/head", "--tune"]
    )
    benchmark.main()
    monkeypatch.chdir(tmp_path)
    assert mlx_mtp.load(str(DATA / "dense"), mtp="me/head")[0].drafting.tuned == TUNED
    assert mlx_mtp.load(str(DATA / "dense"))[0].drafting.tuned is None


def test_checks_the_folder_before_measuring(monkeypatch, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(benchmark.tune, "tune", None)
    with pytest.raises(SystemExit) as e:
        run(monkeypatch, benchmark, "--tune", tmp_path / "file" / "s.json")
    assert e.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_failure_keeps_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "s.json"
    settings.write(file, {}, "demo", TUNED)
    before = file.read_text()
    monkeypatch.setattr(json, "dumps", lambda *args, **kwargs: "\ud800")  # cannot be encoded as UTF-8
    with pytest.raises(UnicodeEncodeError):
        settings.write(file, {}, "demo", replace(TUNED, mtp_bits=2))
    assert file.read_text() == before
    assert [f.name for f in tmp_path.iterdir()] == ["s.json"]
