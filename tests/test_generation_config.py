"""The sampling of a model where neither a flag nor a request says it."""

import json
import logging
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

import mlx_mtp
from mlx_mtp.chat.__main__ import main
from mlx_mtp.checkpoint.settings import Sampling, sampling_defaults
from mlx_mtp.server.engine.admission import Admission
from tests.support.commands import run_command
from tests.support.engine import Engine
from tests.support.models import TRAINED

QWEN = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.95, "eos_token_id": 0}
ASKED = [{"role": "user", "content": "def read(path):"}]
SAMPLED = Sampling(0.8, 0.95, 20)


def advising(folder: Path, advice: dict, source: str = TRAINED) -> str:
    folder.mkdir()
    for file in Path(source).iterdir():
        if file.name != "generation_config.json":
            (folder / file.name).symlink_to(file)
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


@pytest.fixture
def used(monkeypatch):
    found, make_sampler = [], Admission.make_sampler

    def note(self, request):
        found.append(Sampling(**{name: getattr(request.args.sampling, name) for name in asdict(Sampling())}))
        return make_sampler(self, request)

    monkeypatch.setattr(Admission, "make_sampler", note)
    return found


def test_requests_without_sampling_have_the_models(tmp_path, used, caplog):
    """Of the model that they name, and what a request says comes first."""
    model, other = advising(tmp_path / "model", QWEN), advising(tmp_path / "other", {"temperature": 0.6})
    flags = ["--mtp", "--model", model, "--serve-model", other, "--min-p", "0.01"]
    with caplog.at_level(logging.INFO), Engine(*flags) as engine:
        bodies = [
            {"seed": 7},
            {"seed": 7, **{k: v for k, v in QWEN.items() if k in asdict(Sampling())}},
            {"temperature": 0, "top_k": 3},
            {"model": other, "seed": 1},
        ]
        texts = [engine.ask(ASKED, max_tokens=8, **body).tokens for body in bodies]
    assert texts[0] == texts[1]
    sampled = Sampling(0.8, 0.95, 20, 0.01)
    assert used == [sampled, sampled, Sampling(0, 0.95, 3, 0.01), Sampling(0.6, min_p=0.01)]
    lines = [r.message.partition(": ")[2] for r in caplog.records if r.message.startswith("Default sampling")]
    assert lines == [str(sampled), "temperature 0.6, min_p 0.01"]  # at each load


def test_a_damaged_file_ends_the_start(tmp_path):
    with pytest.raises(ValueError, match="temperature must be"):
        Engine("--model", advising(tmp_path / "model", {"temperature": -1}))
