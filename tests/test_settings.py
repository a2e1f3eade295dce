"""Settings that --tune wrote: used only for the checkpoint, device and versions that they name, overridden by arguments.
The sampling of a model where neither a flag nor a request says it."""

import json
import logging
import shutil
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest

import mlx_mtp
from mlx_mtp.benchmark import __main__ as benchmark
from mlx_mtp.benchmark import tune
from mlx_mtp.benchmark.tune import Measured
from mlx_mtp.chat import main
from mlx_mtp.checkpoint import settings
from mlx_mtp.checkpoint.settings import Sampling, sampling_defaults
from mlx_mtp.core.drafts.settings import Settings
from mlx_mtp.generate import __main__ as generate
from mlx_mtp.server.engine.admission import Admission
from tests.support.checkpoints import configure, copied, edit
from tests.support.commands import run_command
from tests.support.decoding import plain
from tests.support.engine import Engine
from tests.support.models import DATA, TRAINED

PROMPT = "class Queue:\n    def __init__(self, maxsize=0):\n"  # a text that goes on
TUNED = Settings("auto", 8, 4, 1024, 0.3, {0: 0.01, 1: 0.012, 3: 0.02}, compiled=False)


@pytest.fixture
def tuned_model(monkeypatch, tmp_path):
    """Write settings for the trained model to the cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def write(found, **changes):
        key = settings.key_of(DATA / "dense")
        settings.check_writable(file := settings.default_file(key))
        settings.write(file, {**key, **changes}, "dense", found)
        return file

    return write


def test_load_finds_settings_and_keeps_the_text(tuned_model):
    untuned, tokenizer = mlx_mtp.load(TRAINED)
    assert not untuned.draft_settings.are_tuned
    tuned_model(TUNED)
    model, _ = mlx_mtp.load(TRAINED)
    assert model.draft_settings.tuned == TUNED
    assert model.device.compiled is False
    assert model.pace.times.estimate[:4] == pytest.approx([0.01, 0.012, 0.016, 0.02])
    assert {m.bits for _, m in model.mtp.named_modules() if hasattr(m, "bits")} == {8}
    assert model.draft_settings.lm_head.ids.size == 1024
    assert model.draft_settings.lm_head.layers[0].bits == 4
    prompt = tokenizer.encode(PROMPT)
    tokens = [token for token, _, _ in mlx_mtp.mtp_generate_step(mx.array(prompt), model, max_tokens=16)]
    assert tokens == plain(prompt, untuned, max_tokens=16)
    # Each overrides.
    for argument in ({"mtp_bits": 4}, {"draft_head_bits": 8}, {"draft_vocab": 0}, {"settings": False}):
        model, _ = mlx_mtp.load(TRAINED, **argument)
        assert not model.draft_settings.are_tuned, argument
        assert {m.bits for _, m in model.mtp.named_modules() if hasattr(m, "bits")} == {4} & {argument.get("mtp_bits")}


def test_drafts_follow_settings_unless_given(tuned_model, equal_steps):
    for k in (0, 3):
        tuned_model(Settings(k))
        model, tokenizer = mlx_mtp.load(TRAINED)
        for asked, drafted in ((None, k), (2, 2)):
            *_, last = mlx_mtp.stream_generate(model, tokenizer, PROMPT, 6, num_draft_tokens=asked)
            assert len(last.drafted) == drafted
    *_, last = mlx_mtp.stream_generate(model, tokenizer, PROMPT, 60, num_draft_tokens="auto", copy_drafts="off")
    assert last.drafted[0] >= 2  # the argument overrides
    assert model.pace.times.seconds
    tuned_model(Settings(2, draft_p_min=1.0))
    model, tokenizer = mlx_mtp.load(TRAINED)
    for given, drafts in ((None, False), (0.0, True)):
        *_, last = mlx_mtp.stream_generate(model, tokenizer, "def read(path):", 6, draft_p_min=given)
        assert (last.drafted != ()) == drafts


def test_benchmark_ignores_settings_unless_given(monkeypatch, capsys, tuned_model):
    file, measured = tuned_model(Settings(0)), []

    def measure(model, *_, name, **__):
        measured.append((name, model.draft_settings.tuned))
        raise SystemExit

    monkeypatch.setattr(benchmark, "measure", measure)
    for flags in ((), ("--settings", file)):
        run_command(benchmark.main, capsys, "--model", TRAINED, *flags)
    assert measured == [("dense", Settings()), ("dense with off", Settings(0))]


def test_warns_of_settings_for_something_else(tuned_model, caplog):
    caplog.set_level(logging.WARNING)  # a server in the same process logs more
    for part in ("checkpoint", "device", "mlx", "mlx-lm", "mlx-mtp"):
        caplog.clear()
        file = tuned_model(TUNED, **{part: "another"})
        assert settings.find(True, [DATA / "dense"]) is None
        assert all(words in caplog.text for words in (f"{part} is ", "not another", str(file)))
    assert not mlx_mtp.load(TRAINED)[0].draft_settings.are_tuned
    # Those of one process are not for several
    caplog.clear()
    file = tuned_model(TUNED)
    assert settings.find(True, [DATA / "dense"]) == TUNED
    assert settings.find(True, [DATA / "dense"], n_ranks=2) is None
    assert caplog.text == ""
    assert settings.find(file, [DATA / "dense"], n_ranks=2) is None
    assert "are ignored, because device is 2 times" in caplog.text


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
    '"unknown": 1', '"mtp_bits": "4"', '"num_draft_tokens": null', '"seconds": {"0": 0}', '"seconds": [1]',
    '"draft_p_min": "high"', '"draft_vocab": -1', '"draft_vocab": true', '"compiled": 1',
]  # fmt: skip
DAMAGED = ["", "{", "[]", "{}", '{"key": 5, "settings": {}}', *(f'{{"key": {{}}, "settings": {{{w}}}}}' for w in WRONG)]


def test_what_is_no_longer_tuned_is_ignored(tmp_path):
    (tmp_path / "s.json").write_text(
        '{"key": {}, "settings": {"num_draft_tokens": 2, "attention_rows": 0, "pieces": 4}}'
    )
    assert settings.read(tmp_path / "s.json") == ({}, Settings(2))


def test_rejects_a_file_that_is_damaged_or_missing_and_a_model_without_its_head(tmp_path):
    for text in DAMAGED:
        (tmp_path / "s.json").write_text(text)
        with pytest.raises(ValueError, match=r"s\.json is not a settings file: write it again with `mlx_mtp benchmark"):
            settings.read(tmp_path / "s.json")
    with pytest.raises(FileNotFoundError, match="There is no settings file"):
        mlx_mtp.load(TRAINED, settings=tmp_path / "none.json")
    with pytest.raises(ValueError, match="settings require the MTP head"):
        mlx_mtp.load(TRAINED, mtp=False, settings=tmp_path / "s.json")


def test_command_prints_the_settings(capsys, tuned_model, equal_steps):
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
    assert mlx_mtp.load(TRAINED, mtp="me/head")[0].draft_settings.tuned == TUNED
    assert not mlx_mtp.load(TRAINED)[0].draft_settings.are_tuned


# Sampling that a model advises

QWEN = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.95, "eos_token_id": 0}
ASKED = [{"role": "user", "content": "def read(path):"}]
SAMPLED = Sampling(0.8, 0.95, 20)


def advising(folder: Path, advice: dict) -> str:
    shutil.copytree(TRAINED, folder)
    (folder / "generation_config.json").write_text(json.dumps(advice))
    return str(folder)


def test_what_is_given_comes_before_the_advice(tmp_path):
    for advice, given, sampling in (
        (QWEN, {}, SAMPLED),
        (QWEN, {"temperature": 0.0}, Sampling(0.0, 0.95, 20)),
        (QWEN, {"top_k": 0, "min_p": 0.1}, Sampling(0.8, 0.95, 0, 0.1)),
        ({**QWEN, "do_sample": False}, {}, Sampling()),
        ({"do_sample": True}, {}, Sampling(1.0)),  # transformers leaves out what is its default
        ({"eos_token_id": 0}, {}, Sampling()),
        ({"temperature": "hot"}, {"temperature": 0.5}, Sampling(0.5)),
    ):
        (tmp_path / "generation_config.json").write_text(json.dumps(advice))
        assert sampling_defaults(str(tmp_path), given) == sampling


def test_a_wrong_value_is_told_with_its_file(tmp_path):
    # Without a file, it is greedy
    assert sampling_defaults(str(tmp_path), {}) == sampling_defaults(str(mlx_mtp.DEMO), {}) == Sampling()
    assert str(Sampling()) == "temperature 0"
    assert str(SAMPLED) == "temperature 0.8, top_p 0.95, top_k 20"
    for text, message in [
        ('{"temperature": "hot"}', "temperature must be a number of 0 or more, not 'hot': correct it, or give --temp."),
        ('{"temperature": Infinity}', "temperature must be a number of 0 or more, not inf"),
        ('{"top_p": 1.5}', "top_p must be a number from 0 to 1, not 1.5: correct it, or give --top-p."),
        ('{"top_k": 2.5}', "top_k must be a number of 0 or more, not 2.5"),
        ('{"min_p": true}', "min_p must be a number from 0 to 1, not True"),
        ("{", "is not JSON"),
    ]:
        (tmp_path / "generation_config.json").write_text(text)
        with pytest.raises(ValueError, match=f"{'generation_config.json'}.*{message}"):
            sampling_defaults(str(tmp_path), {})


def test_ranks_sample_as_rank_0_says(tmp_path):
    """Another rank may not have the file."""
    (tmp_path / "generation_config.json").write_text(json.dumps(QWEN))
    shared = []
    first = SimpleNamespace(rank=0, broadcast=lambda value: shared.append(value) or value)
    assert sampling_defaults(str(tmp_path), {}, first) == SAMPLED
    other = SimpleNamespace(rank=1, broadcast=lambda value: shared[0])
    assert sampling_defaults("not/there", {}, other) == SAMPLED


def test_the_chat_samples_as_advised(capsys, tmp_path):
    model = advising(tmp_path / "model", QWEN)

    def said(*flags):
        """(the sampling that is told, the answer)"""
        flags = ("--mtp", "-m", 10, "--num-draft-tokens", 2, *flags)
        _, out, _ = run_command(main, capsys, *flags, stdin="def read(path):")
        return out.partition("[INFO] Sampling: ")[2].partition(".\n")[0], out.partition(">> ")[2].partition("\n[")[0]

    greedy, seeded = said("--model", TRAINED), ("--seed", 3)
    sampled = said("--model", TRAINED, *seeded, "--temp", 0.8, "--top-p", 0.95, "--top-k", 20)
    assert said("--model", model, *seeded) == sampled
    assert sampled[0] == str(SAMPLED)
    assert said("--model", model, *seeded, "--temp", 0)[1] == greedy[1] != sampled[1]


def test_requests_without_sampling_have_the_models(tmp_path, monkeypatch, caplog):
    """Of the model that they name, and what a request says comes first."""
    used, make_sampler = [], Admission.make_sampler

    def note(self, request):
        used.append(request.args.sampling)
        return make_sampler(self, request)

    monkeypatch.setattr(Admission, "make_sampler", note)
    model, other = advising(tmp_path / "model", QWEN), advising(tmp_path / "other", {"temperature": 0.6})
    flags = ["--mtp", "--model", model, "--serve-model", other, "--min-p", "0.01", "--top-n-sigma", "3"]
    with caplog.at_level(logging.INFO), Engine(*flags) as engine:
        bodies = [
            {"seed": 7},
            {"seed": 7, **{k: v for k, v in QWEN.items() if k in asdict(Sampling())}},
            {"temperature": 0, "top_k": 3, "top_n_sigma": -1},  # which is llama.cpp's for 0
            {"model": other, "seed": 1},
        ]
        texts = [engine.ask(ASKED, max_tokens=8, **body).tokens for body in bodies]
    assert texts[0] == texts[1]
    sampled = Sampling(0.8, 0.95, 20, 0.01, top_n_sigma=3.0)
    assert used == [sampled, sampled, Sampling(0, 0.95, 3, 0.01), Sampling(0.6, min_p=0.01, top_n_sigma=3)]
    lines = [r.message.partition(": ")[2] for r in caplog.records if r.message.startswith("Default sampling")]
    assert lines == [str(sampled), "temperature 0.6, min_p 0.01, top_n_sigma 3.0"]  # at each load
