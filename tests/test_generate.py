"""Text generation and its command line: mlx-lm's, with drafts."""

import json
import re
import sys
from unittest.mock import Mock

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import StopSequences
from mlx_lm.models.cache import save_prompt_cache
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, NaiveStreamingDetokenizer, TokenizerWrapper
from PIL import Image

import mlx_mtp
from mlx_mtp.chat import figures
from mlx_mtp.cli.arguments import check_generation_flags, sampler_of
from mlx_mtp.cli.parsers import generate_parser
from mlx_mtp.core.drafts.sources import PromptLookup
from mlx_mtp.core.sampling.acceptance import Coupled, RejectionSampling, TokenMatch, make_acceptance
from mlx_mtp.errors import FAILED_PASS
from mlx_mtp.generate import __main__ as command
from mlx_mtp.generate.__main__ import main
from tests.support.checkpoints import copied, no_head
from tests.support.commands import refusal, run_command
from tests.support.models import TRAINED

PROMPT = "def read(path):\n    with open(path) as f:\n"
COPIED = "import os\nimport sys\nimport re\n\nimport os\nimport sys\n"
REPEATS = "def area(width, height):\n    return width * height\n\n\n" * 3


def run(capsys, *argv, stdin=""):
    """The command line in this process, with a model that is smaller than the demo: (exit status, stdout, stderr)."""
    return run_command(main, capsys, "--model", TRAINED, *argv, stdin=stdin)


def refused(capsys, *argv):
    return refusal(main, capsys, "--model", TRAINED, *argv)


def summary(responses):
    """What mlx-lm's responses and ours must agree on: all but times, memory and drafts."""
    return [(r.text, r.token, r.prompt_tokens, r.generation_tokens, r.finish_reason) for r in responses]


@pytest.mark.parametrize(
    ("depth", "max_tokens"),
    [(4, 1), (2, 20), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 2), (4, 7), (1, 40), (4, 40)))],
)
def test_responses_are_mlx_lms(trained, depth, max_tokens):
    """Of a text, and of tokens."""
    tokens, want = trained[1].encode(PROMPT), summary(mlx_lm.stream_generate(*trained, PROMPT, max_tokens))
    for prompt in (PROMPT, tokens, mx.array(tokens)):
        ours = list(mlx_mtp.stream_generate(*trained, prompt, max_tokens, num_draft_tokens=depth))
        assert summary(ours) == want
        assert min(ours[-1].generation_tps, ours[-1].prompt_tps) > 0
    plain = list(mlx_mtp.stream_generate(*trained, PROMPT, max_tokens, mtp=False))
    assert summary(plain) == want
    assert {(r.from_draft, r.drafted, r.accepted) for r in plain} == {(False, (), ())}


@pytest.mark.parametrize(("given", "n"), [({}, 4), ({"max_tokens": 2}, 2)])
def test_the_limit_is_that_of_the_options_unless_one_is_given(trained, given, n):
    model, tokenizer = trained
    prompt = tokenizer.encode(PROMPT)
    given["options"] = mlx_mtp.TextOptions(4)
    texts = [[*mlx_mtp.stream_generate(model, tokenizer, prompt, mtp=mtp, **given)] for mtp in (True, False)]
    texts += mlx_mtp.batch_generate(model, tokenizer, [prompt], return_token_ids=True, **given).token_ids
    assert [*map(len, texts)] == [n, n, n]


@pytest.mark.parametrize("options", [{}, {"mtp": False}])
def test_prompt_and_text_are_the_decoding_of_all_tokens(trained, options):
    """Also of a text that begins with a space, which mlx-lm drops."""
    (model, tokenizer), spaces = trained, 0
    for detokenizer in (BPEStreamingDetokenizer, NaiveStreamingDetokenizer):
        own = TokenizerWrapper(tokenizer._tokenizer, detokenizer)
        for prompt in (tokenizer.encode(PROMPT), tokenizer.encode("x =")):
            responses = list(mlx_mtp.stream_generate(model, own, prompt, 6, **options))
            text = "".join(r.text for r in responses)
            assert tokenizer.decode(prompt) + text == tokenizer.decode([*prompt, *(r.token for r in responses)])
            spaces += text.startswith(" ")
    assert spaces > 0


@pytest.mark.parametrize(("prompt", "copies", "source"), [(PROMPT, "off", "head"), (COPIED, 4, "copies")])
def test_drafts_are_counted_by_position_and_source(trained, prompt, copies, source):
    options = dict(num_draft_tokens=3, copy_drafts=copies)
    responses = list(mlx_mtp.stream_generate(*trained, prompt, 40, **options))
    told, last = [r.source for r in responses], responses[-1]
    assert [name != "model" for name in told] == [r.from_draft for r in responses]
    for r in responses:
        assert len(r.drafted) == len(r.accepted) <= 3
        assert all(a <= d for a, d in zip(r.accepted, r.drafted))
        assert list(r.accepted) == sorted(r.accepted, reverse=True)
    counted = {"head": sum(last.accepted), "copies": sum(last.copies_accepted)}
    assert counted == {name: told.count(name) for name in counted}
    assert told.count(source) > 5
    n_steps = sum(last.drafted[:1]) + sum(last.copied[:1])
    assert last.tokens_per_step == 1 + sum(counted.values()) / n_steps


@pytest.mark.parametrize(("prompt", "copies", "colour"), [(PROMPT, "off", "\033[32m"), (COPIED, 4, "\033[33m")])
def test_drafts_are_coloured_in_a_terminal(trained, monkeypatch, capsys, prompt, copies, colour):
    options = {"max_tokens": 16, "num_draft_tokens": 2, "copy_drafts": copies, "verbose": True}
    want = mlx_lm.generate(*trained, prompt, max_tokens=16)
    for is_terminal, show_drafts in ((True, True), (False, True), (True, False)):
        monkeypatch.setattr(sys.stdout, "isatty", lambda is_terminal=is_terminal: is_terminal, raising=False)
        assert mlx_mtp.generate(*trained, prompt, show_drafts=show_drafts, **options) == want
        shown = capsys.readouterr().out
        assert (colour in shown) == ("\033" in shown) == (is_terminal and show_drafts)
        assert want in re.sub(r"\033\[\d+m", "", shown)


def test_a_source_that_no_table_has_is_shown_by_its_name(trained, monkeypatch, capsys):
    monkeypatch.setattr(PromptLookup, "name", "echo")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    options = {"max_tokens": 16, "mtp": False, "copy_drafts": 4}
    mlx_mtp.generate(*trained, COPIED, verbose=True, show_drafts=True, **options)
    shown = capsys.readouterr().out
    assert "\033[36m" in shown
    (told,) = re.findall(r"Drafts: (\d+ of \d+ echo tokens accepted), ", shown)
    *_, last = mlx_mtp.stream_generate(*trained, COPIED, **options)
    assert (list(last.counts), last.copied, told in figures(last)) == (["echo"], (), True)


def test_a_stop_token_in_the_middle_of_a_window(trained):
    """The token that stops is one that the head drafted."""
    model, tokenizer = trained
    drafted = {r.token for r in mlx_mtp.stream_generate(*trained, PROMPT, 24, num_draft_tokens=4) if r.from_draft}
    for token in sorted(drafted)[:3] or pytest.fail("no drafts"):
        stopping = TokenizerWrapper(tokenizer._tokenizer, eos_token_ids=[token])
        cache = mlx_mtp.make_prompt_cache(model)
        ours = list(mlx_mtp.stream_generate(model, stopping, PROMPT, 24, num_draft_tokens=4, prompt_cache=cache))
        assert summary(ours) == summary(mlx_lm.stream_generate(model, stopping, PROMPT, 24))
        assert ours[-1].finish_reason == "stop"
        # As in mlx-lm, the token that stops is in the cache.
        assert cache[len(model.layers)].offset == len(tokenizer.encode(PROMPT)) + ours[-1].generation_tokens - 1


def test_refuses_arguments_that_do_not_go_together(trained):
    for options, message in (
        ({"mtp": False, "draft_model": trained[0]}, "requires mlx_lm.stream_generate"),
        ({"mtp": False, "draft_p_min": 0.5}, "requires mtp=True"),
        ({"max_tokens": 0}, "non-zero"),
        ({"stop_sequences": StopSequences()}, "stop_sequences require BatchGenerator or mtp_generate_step"),
    ):
        with pytest.raises(ValueError, match=message):
            next(mlx_mtp.stream_generate(*trained, PROMPT, **options))


# Command line


def test_the_summary(capsys):
    args = ("--prompt", REPEATS, "-m", 16, "--ignore-chat-template")
    rate, texts, drafts = r"[\d.]+ tokens-per-sec", {}, r"[\d.]+, [\d.]+, [\d.]+ accepted by position"
    copies, per_step = r"\d+ of \d+ copied tokens accepted", r"[\d.]+ tokens-per-step"
    for flags, told in (
        ("--mtp --num-draft-tokens 3", f"\nDrafts: {drafts}, {per_step}"),
        ("--mtp --num-draft-tokens 0", "\nDrafts: none, 1.000 tokens-per-step"),
        ("--num-draft-tokens 1 --copy-drafts 5", rf"\nDrafts: [\d.]+ accepted by position, {copies}, {per_step}"),
        ("--no-mtp --copy-drafts 5", f"\nDrafts: {copies}, {per_step}"),
        ("", "\nDrafts: .*"),
        ("--no-mtp", ""),
    ):
        status, out, _ = run(capsys, *args, *flags.split())
        _, texts[flags], figures = out.split("==========")
        lines = rf"\nPrompt: \d+ tokens, {rate}\nGeneration: 16 tokens, {rate}\nPeak memory: [\d.]+ GB"
        assert status == 0
        assert re.fullmatch(lines + told, figures.rstrip()), flags
    (text,) = set(texts.values())
    assert run(capsys, *args, "--verbose", "F")[1].strip() == text.strip()


def test_sampler_of_flags(trained):
    for flags, acceptance in (
        ("--mtp", RejectionSampling),
        ("--mtp --seed 5", Coupled),
        ("--mtp --acceptance rejection --seed 5", RejectionSampling),
        ("--mtp --acceptance match", TokenMatch),
        ("--no-mtp --acceptance coupled", Coupled),
        ("--no-mtp --seed 5", TokenMatch),
        ("", RejectionSampling),
    ):
        args = generate_parser().parse_args(["--temp", "1", *flags.split()])
        assert type(make_acceptance(sampler_of(args, trained[1]))) is acceptance, flags


def test_resumes_a_prompt_cache_file(capsys, trained, tmp_path):
    model, tokenizer = trained
    cache, more = mlx_mtp.make_prompt_cache(model), "        for line in f:"
    list(mlx_mtp.mtp_generate_step(mx.array(tokenizer.encode(PROMPT)), model, max_tokens=0, prompt_cache=cache))
    file, metadata = tmp_path / "cache.safetensors", {"model": TRAINED, "tokenizer_config": "{}"}
    save_prompt_cache(str(file), cache, metadata)
    args = ["--mtp", "-m", 15, "--verbose", "F", "--prompt-cache-file", file, "--prompt", more]
    tokens = tokenizer.encode(PROMPT) + tokenizer.encode(more)
    want = mlx_lm.generate(model, tokenizer, tokens, max_tokens=15).rstrip("\n")
    status, out, err = run_command(main, capsys, *args)
    assert (status, out.rstrip("\n")) == (0, want), err

    assert refused(capsys, *args, "--model", mlx_mtp.DEMO)
    cache[-1][2] = mx.array([4_000_000], mx.uint32)
    save_prompt_cache(str(file), cache, metadata)
    for flags in (["--check"], []):
        assert "Entry 9 of the prompt cache is damaged" in refused(capsys, *args, *flags)


def test_a_head_that_could_be_downloaded_is_named(monkeypatch, capsys, tmp_path):
    """Without a flag, a model without a head decodes plainly."""
    no_head(headless := copied(tmp_path))
    cut = "stopped at 5 tokens (--max-tokens)\n"
    for found, note in ((None, ""), (("org/base", 2**30), "--mtp downloads the MTP head of org/base once, 1.07 GB.\n")):
        monkeypatch.setattr("mlx_mtp.cli.arguments.head_to_fetch", lambda name, found=found: found)
        status, out, err = run(capsys, "--model", headless, "-m", 5)
        assert (status, "Generation: 5 tokens" in out, "Drafts" in out) == (0, True, False)
        assert err == (note and f"Generating without drafts: {note}") + cut
        assert run(capsys, "--model", headless, "-m", 5, "--no-mtp")[2] == cut


OUT_OF_RANGE = [
    "--max-tokens 0", "--max-tokens -2", "--temp -1", "--temp inf", "--top-p 1.1", "--top-p nan", "--min-p 2",
    "--top-k -1", "--min-tokens-to-keep 0", "--xtc-probability 2", "--xtc-threshold 0.6", f"--seed {2**64}", "--kv-bits 7",
    "--kv-group-size 17", "--quantized-kv-start -1", "--prefill-step-size 0", "--max-kv-size 0", "--num-draft-tokens 9",
    "--copy-drafts 0", "--copy-drafts 17",
]  # fmt: skip


def test_refuses_a_flag_out_of_range_before_loading(monkeypatch, capsys):
    monkeypatch.setattr(command.arguments, "load", lambda *args, **kwargs: pytest.fail("loaded"))
    for flags in OUT_OF_RANGE:
        flag, value = flags.split()
        name = flag.removeprefix("--").replace("-", "_")  # in errors of the library
        pattern = rf"mlx_mtp generate: error: ({flag}|{name}) must be .*, not {value}(\.0)?\.\n"
        assert re.fullmatch(pattern, refused(capsys, flag, value)), flags
    for flags in ("--max-tokens -1", f"--seed {2**64 - 1}", "--top-p 0", "--temp 0", "--kv-bits 3"):
        check_generation_flags(generate_parser().parse_args(flags.split()))


def test_stop_tokens_are_given_by_text_or_by_id(trained):
    tokenizer = TokenizerWrapper(trained[1]._tokenizer, eos_token_ids=[0])
    command.add_eos_tokens(tokenizer, ["def", "4095"])
    assert tokenizer.eos_token_ids == {0, tokenizer.convert_tokens_to_ids("def"), 4095}


@pytest.mark.parametrize("name", ["async_eval", "synchronize"])
def test_a_failure_of_the_gpu_is_one_line_and_nothing_of_it_is_kept(monkeypatch, capsys, tmp_path, name):
    """Of a step, and where MLX reports it only after the last one. An interrupt has no line at all."""
    error = f"[METAL] {FAILED_PASS}: Caused GPU Timeout Error."
    monkeypatch.setattr(mx, name, Mock(side_effect=RuntimeError(error)))
    flags = "--prompt-cache-dir", tmp_path, "--max-tokens", "4", "--ignore-chat-template"
    status, _, err = run(capsys, "--prompt", PROMPT, *flags)
    assert (status, err.count("\n")) == (1, 1)
    assert err.startswith(f"mlx_mtp generate: error: {error} A pass has failed on this device")
    # The prompt was computed before the first step.
    assert (len([*tmp_path.glob("*.safetensors")]) > 0) == (name == "async_eval")
    monkeypatch.setattr(command.arguments, "load", Mock(side_effect=KeyboardInterrupt))
    assert run(capsys) == (130, "", "")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--draft-model x", "mlx_lm.generate --draft-model x"),
        ("--mtp --max-kv-size 100", "do not rotate"),
        ("--mtp --prompt-cache-file FOLDER/none.safetensors", "There is no prompt cache"),
        ("--mtp --prompt=", "The prompt is empty"),
        ("--mtp --prompt caf\udce9", "is not text in UTF-8"),
        ("--check --no-mtp", "--check requires an MTP head"),
        ("--mtp --check --temp 0.7", "cannot be combined with --temp"),
        ("--mtp --prompt-cache-dir FOLDER --check", "--prompt-cache-dir and --check cannot be combined"),
        ("--no-mtp --acceptance rejection", "--acceptance requires an MTP head: remove --no-mtp"),
        ("--mtp --model HEADLESS", "has no MTP head, and its base model was not found. "),
        ("--num-draft-tokens 2 --model HEADLESS", "--num-draft-tokens requires an MTP head: "),
        ("--max-kv-size 9 --copy-drafts auto", "--copy-drafts cannot be combined with --max-kv-size"),
        ("--mtp --json-schema FOLDER/cut", "cut: The schema is not JSON: Expecting property name"),
        ("--mtp --json-schema FOLDER/person", "person: llguidance cannot read the grammar"),
        ("--mtp --json-schema FOLDER/any --check", "--check compares free text"),
        # With this model. mlx-lm takes the first for the unknown token, which in this vocabulary ends the text.
        ("--extra-eos-token=no-such -m 1", "--extra-eos-token no-such is not a token of the model"),
        ("--extra-eos-token=4096 -m 1 --no-mtp", "--extra-eos-token 4096 is not a token of the model"),
        ("--min-tokens-to-keep 4097 --min-p 0.1 --temp 1", "must be from 1 to 4096, not 4097"),
        ("--top-k 4096 --temp 1 --no-mtp", "--top-k must be from 0 to 4095, not 4096."),
        ("--kv-bits 4 --kv-group-size 128", "attention heads have 64 values: use --kv-bits 4 or 8"),
        ("--image FOLDER/a.png", "has no vision encoder, and its base model was not found"),
    ],
    ids=str,
)
def test_an_error_is_one_line_and_status_2(monkeypatch, capsys, tmp_path, flags, message):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name, text in (("cut", "{"), ("person", '{"type": "person"}'), ("any", "{}")):
        (tmp_path / name).write_text(text)
    if "a.png" in flags:
        Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    if "HEADLESS" in flags:
        no_head(copied(tmp_path))
    flags = flags.replace("HEADLESS", "FOLDER/model").replace("FOLDER", str(tmp_path))
    assert message in refused(capsys, *flags.split())


def test_json_of_a_schema(capsys, tmp_path):
    of_n = {"type": "object", "properties": {"n": {"enum": [10, 20]}}, "required": ["n"], "additionalProperties": False}
    (file := tmp_path / "schema.json").write_text(schema := json.dumps(of_n))
    for given, *mtp in ((file, "--mtp"), (f" {schema}", "--no-mtp"), (file,)):
        status, out, _ = run(capsys, *mtp, "--json-schema", given, "--verbose", "False", "-m", "50")
        assert (status, json.loads(out) in ({"n": 10}, {"n": 20})) == (0, True)


def test_the_prompt_has_escapes_and_standard_input_has_none(capsys, monkeypatch):
    seen = []
    monkeypatch.setattr(command, "print_text", lambda _, __, prompt, **___: seen.append(prompt) or ("", Mock()))
    text = r"\nabla C:\new\table"
    for prompt in (text, "-"):
        assert run(capsys, "--prompt", prompt, "--ignore-chat-template", stdin=text)[0] == 0
    encode = mlx_mtp.load(TRAINED)[1].encode
    assert seen == [encode("\nabla C:\new\table"), encode(text)]
    assert "use '-' for text as it is" in " ".join(generate_parser().format_help().split())
