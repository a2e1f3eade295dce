"""Text generation and its command line: mlx-lm's, with drafts."""

import json
import re
import shutil
import sys
from functools import cache as cached

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import main as mlx_lm_main
from mlx_lm.generate import setup_arg_parser
from mlx_lm.models.cache import save_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from PIL import Image

import mlx_mtp
from mlx_mtp.cli.arguments import sampler_of
from mlx_mtp.cli.checks import check_generation_flags, check_model_flags
from mlx_mtp.generate import __main__ as command
from mlx_mtp.generate.__main__ import main, make_parser
from mlx_mtp.sampling.acceptance import Coupled, RejectionSampling, TokenMatch, make_acceptance
from tests.support.checkpoints import BAD, BAD_IDS, configure, copied, cut_short, edit, no_head
from tests.support.commands import assert_refused, run_command
from tests.support.models import TRAINED

COPIED = "import os\nimport sys\nimport re\n\nimport os\nimport sys\n"
PROMPT = "def read(path):\n    with open(path) as f:\n"


def run(capsys, *args, stdin=""):
    """The command line in this process: (exit status, stdout, stderr). The model is a smaller one than the demo."""
    if not {"--model", "--prompt-cache-file"} & set(args):
        args = ("--model", TRAINED, *args)
    return run_command(main, capsys, *args, stdin=stdin)


def refused(capsys, *args, message):
    assert_refused(main, capsys, *(() if "--model" in args else ("--model", TRAINED)), *args, message=message)


def summary(responses):
    """What mlx-lm's responses and ours must agree on: all but times, memory and drafts."""
    return [(r.text, r.token, r.prompt_tokens, r.generation_tokens, r.finish_reason) for r in responses]


@pytest.fixture(scope="module")
def plain_summary(trained):
    """What plain mlx-lm says after ``PROMPT``, by the number of tokens."""
    model, tokenizer = trained
    return cached(lambda max_tokens: summary(mlx_lm.stream_generate(model, tokenizer, PROMPT, max_tokens)))


@pytest.mark.parametrize(
    ("depth", "max_tokens"),
    [(4, 1), (1, 2), (4, 7), (2, 20), *(pytest.param(k, 40, marks=pytest.mark.slow) for k in (1, 4))],
)
def test_responses_are_mlx_lms(trained, plain_summary, depth, max_tokens):
    model, tokenizer = trained
    ours = list(mlx_mtp.stream_generate(model, tokenizer, PROMPT, max_tokens, num_draft_tokens=depth))
    assert summary(ours) == plain_summary(max_tokens)
    assert ours[-1].generation_tps > 0
    assert ours[-1].prompt_tps > 0


@pytest.mark.parametrize("kind", [list, mx.array])
def test_a_prompt_may_be_tokens(trained, plain_summary, kind):
    model, tokenizer = trained
    prompt = kind(tokenizer.encode(PROMPT))
    assert summary(mlx_mtp.stream_generate(model, tokenizer, prompt, 7)) == plain_summary(7)


def test_drafts_are_counted_by_position(trained):
    model, tokenizer = trained
    responses = list(mlx_mtp.stream_generate(model, tokenizer, PROMPT, 30, num_draft_tokens=3))
    for r in responses:
        assert len(r.drafted) == len(r.accepted) <= 3
        assert all(a <= d for a, d in zip(r.accepted, r.drafted))
        assert list(r.accepted) == sorted(r.accepted, reverse=True)
    last = responses[-1]
    assert sum(last.accepted) == sum(r.from_draft for r in responses)
    assert last.tokens_per_step == 1 + sum(last.accepted) / last.drafted[0]


class Counting:
    """A processor that keeps state: drafts are handed over before they are counted."""

    def __call__(self, tokens, logits):
        return logits

    def copy(self):
        return self


@pytest.mark.parametrize("processors", [[], [Counting()]], ids=["", "a processor that keeps state"])
@pytest.mark.parametrize(("prompt", "copies", "source"), [(PROMPT, "off", "head"), (COPIED, 4, "copies")])
def test_each_token_has_a_source(trained, prompt, copies, source, processors):
    options = dict(num_draft_tokens=2, copy_drafts=copies, logits_processors=processors)
    responses = list(mlx_mtp.stream_generate(*trained, prompt, 40, **options))
    told, last = [r.source for r in responses], responses[-1]
    assert [name != "model" for name in told] == [r.from_draft for r in responses]
    # A step may go on behind the last token.
    counted = {"head": sum(last.accepted), "copies": sum(last.copies_accepted)}
    assert all(told.count(name) <= counted[name] <= told.count(name) + 4 for name in counted)
    assert told.count(source) > 5


@pytest.mark.parametrize(("prompt", "copies", "colour"), [(PROMPT, "off", "\033[32m"), (COPIED, 4, "\033[33m")])
def test_drafts_are_coloured_in_a_terminal(trained, monkeypatch, capsys, prompt, copies, colour):
    options = {"max_tokens": 30, "num_draft_tokens": 2, "copy_drafts": copies, "verbose": True}
    for is_terminal, show_drafts in ((True, True), (False, True), (True, False)):
        monkeypatch.setattr(sys.stdout, "isatty", lambda is_terminal=is_terminal: is_terminal, raising=False)
        text = mlx_mtp.generate(*trained, prompt, show_drafts=show_drafts, **options)
        shown = capsys.readouterr().out
        assert (colour in shown) == ("\033" in shown) == (is_terminal and show_drafts)
        assert text in re.sub(r"\033\[\d+m", "", shown)


def test_a_stop_token_in_the_middle_of_a_window(trained):
    """The token that stops is one that the head drafted."""
    model, tokenizer = trained
    responses = list(mlx_mtp.stream_generate(model, tokenizer, PROMPT, 24, num_draft_tokens=4))
    drafted = {r.token for r in responses if r.from_draft}
    assert drafted
    for token in sorted(drafted)[:3]:
        stopping = TokenizerWrapper(tokenizer._tokenizer, eos_token_ids=[token])
        cache = mlx_mtp.make_prompt_cache(model)
        ours = list(mlx_mtp.stream_generate(model, stopping, PROMPT, 24, num_draft_tokens=4, prompt_cache=cache))
        assert summary(ours) == summary(mlx_lm.stream_generate(model, stopping, PROMPT, 24))
        assert ours[-1].finish_reason == "stop"
        # As in mlx-lm, the token that stops is in the cache.
        n_tokens = len(tokenizer.encode(PROMPT)) + ours[-1].generation_tokens
        assert cache[len(model.layers)].offset == n_tokens - 1


def test_without_mtp_it_is_plain_mlx_lm(trained):
    model, tokenizer = trained
    ours = list(mlx_mtp.stream_generate(model, tokenizer, PROMPT, 12, mtp=False))
    assert summary(ours) == summary(mlx_lm.stream_generate(model, tokenizer, PROMPT, 12))
    assert {(r.from_draft, r.drafted, r.accepted) for r in ours} == {(False, (), ())}
    text = mlx_lm.generate(model, tokenizer, PROMPT, max_tokens=12)
    assert mlx_mtp.generate(model, tokenizer, PROMPT, max_tokens=12, mtp=False) == text
    assert mlx_mtp.generate(model, tokenizer, PROMPT, max_tokens=12) == text


REPEATS = "def area(width, height):\n    return width * height\n\n\n" * 3


@pytest.mark.parametrize("options", [{"copy_drafts": 6}, {"copy_drafts": 6, "mtp": False}, {}], ids=str)
def test_copies_are_counted(trained, options):
    model, tokenizer = trained
    *_, last = mlx_mtp.stream_generate(
        model, tokenizer, REPEATS, 30, num_draft_tokens=2 * options.get("mtp", True), **options
    )
    assert last.generation_tokens == 30
    assert (sum(last.copies_accepted) > 0) == bool(options)
    assert (last.drafted == ()) == (options.get("mtp") is False)
    steps = sum(last.drafted[:1]) + sum(last.copied[:1])
    assert last.tokens_per_step == 1 + (sum(last.accepted) + sum(last.copies_accepted)) / steps


def test_refuses_arguments_that_do_not_go_together(trained):
    model, tokenizer = trained
    with pytest.raises(ValueError, match="requires mtp=False"):
        next(mlx_mtp.stream_generate(model, tokenizer, PROMPT, draft_model=model))
    with pytest.raises(ValueError, match="require mtp=True"):
        next(mlx_mtp.stream_generate(model, tokenizer, PROMPT, mtp=False, exact=True))
    with pytest.raises(ValueError, match="omit copy_drafts"):
        next(mlx_mtp.stream_generate(model, tokenizer, PROMPT, mtp=False, draft_model=model, copy_drafts=4))
    with pytest.raises(ValueError, match="non-zero"):
        next(mlx_mtp.stream_generate(model, tokenizer, PROMPT, max_tokens=0))


# Command line


def test_every_flag_is_mlx_lms():
    theirs = {a.dest: a for a in setup_arg_parser()._actions}
    ours = {a.dest: a for a in make_parser()._actions}
    assert ours.keys() - theirs.keys() == {
        "mtp",
        "exact",
        "check",
        "json_schema",
        "show_drafts",
        "copy_drafts",
        "draft_p_min",
        "draft_vocab",
        "mtp_bits",
        "draft_head_bits",
        "settings",
        "acceptance",
        "pipeline",  # as in mlx-lm's chat
        "prompt_cache_dir",
        "max_memory",
        "version",
    }
    assert theirs.keys() <= ours.keys()
    for name, a in theirs.items():
        assert (a.option_strings, a.nargs) == (ours[name].option_strings, ours[name].nargs)
        if name not in ("model", "num_draft_tokens", "seed"):
            assert ours[name].help.startswith(a.help.removesuffix("."))
        if name == "num_draft_tokens":
            assert (a.default, ours[name].default) == (3, None)  # 3 with a draft model
            assert (ours[name].type("4"), ours[name].type("auto")) == (4, "auto")
        else:
            assert (a.default, a.type) == (ours[name].default, ours[name].type)


def test_summary_without_drafts(capsys):
    args = ["--prompt", PROMPT, "-m", 5, "--num-draft-tokens", 0]
    assert run(capsys, "--mtp", *args)[1].endswith("\nDrafts: none, 1.000 tokens-per-step\n")
    assert "Drafts" not in run(capsys, "--prompt", PROMPT, "-m", 5)[1]


def test_summary_lines(capsys):
    args = ["--mtp", "--prompt", PROMPT, "-m", 16, "--num-draft-tokens", 3]
    status, out, _ = run(capsys, *args)
    assert status == 0
    *_, rule, prompt, generation, memory, drafts = out.strip().split("\n")
    assert rule == "=========="
    assert re.fullmatch(r"Prompt: \d+ tokens, [\d.]+ tokens-per-sec", prompt)
    assert re.fullmatch(r"Generation: 16 tokens, [\d.]+ tokens-per-sec", generation)
    assert re.fullmatch(r"Peak memory: [\d.]+ GB", memory)
    assert re.fullmatch(r"Drafts: [\d.]+, [\d.]+, [\d.]+ accepted by position, [\d.]+ tokens-per-step", drafts)

    _, plain, _ = run(capsys, *args[1:])
    assert plain.split("==========")[1] == out.split("==========")[1]
    assert "Drafts" not in plain
    _, quiet, _ = run(capsys, *args, "--verbose", "F")
    assert quiet.strip() == out.split("==========")[1].strip()


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        ("--mtp --num-draft-tokens 1 --copy-drafts 5", r"[\d.]+ accepted by position, \d+ of \d+ copies accepted"),
        ("--copy-drafts 5", r"\d+ of \d+ copies accepted"),
        pytest.param("--copy-drafts off", None, marks=pytest.mark.slow),
    ],
)
def test_copies_in_the_summary(capsys, flags, pattern):
    args = ["--prompt", REPEATS, "-m", 24, "--ignore-chat-template"]
    _, plain, _ = run(capsys, *args)
    _, out, _ = run(capsys, *args, *flags.split())
    assert out.split("==========")[1] == plain.split("==========")[1]
    *_, last = out.strip().split("\n")
    assert re.fullmatch(rf"Drafts: {pattern}, [\d.]+ tokens-per-step", last) if pattern else "Drafts" not in out


def test_reads_the_prompt_from_stdin(capsys):
    _, piped, _ = run(capsys, "--mtp", "--prompt", "-", "-m", 12, "--verbose", "F", stdin=PROMPT)
    _, given, _ = run(capsys, "--mtp", "--prompt", PROMPT, "-m", 12, "--verbose", "F")
    assert piped == given != "\n"


SAMPLED = ("--prompt", PROMPT, "-m", 16, "--temp", 0.9, "--top-p", 0.95, "--verbose", "F")


@pytest.fixture
def sampled(capsys):
    """The text that the command samples with some flags."""

    def text(*flags):
        status, out, err = run(capsys, *SAMPLED, *flags)
        assert (status, err) == (0, "")
        return out

    return text


def test_a_seed_gives_one_text_at_every_depth_and_without_mtp(sampled):
    plain = sampled("--seed", 5, "--acceptance", "coupled")
    for depth in (0, 4, "auto"):
        assert sampled("--seed", 5, "--mtp", "--num-draft-tokens", depth) == plain
    assert sampled("--seed", 6, "--mtp") != plain


@pytest.mark.slow
def test_match_gives_the_text_of_mlx_lms_command(sampled, monkeypatch, capsys):
    argv = ["mlx_lm.generate", "--model", TRAINED, *SAMPLED, "--seed", 5]
    monkeypatch.setattr(sys, "argv", [*map(str, argv)])
    mlx_lm_main()
    text, _ = capsys.readouterr()
    for flags in ([], ["--acceptance", "match"], ["--mtp", "--acceptance", "match", "--num-draft-tokens", 2]):
        assert sampled("--seed", 5, *flags) == text


@pytest.mark.parametrize(
    ("flags", "acceptance"),
    [
        ("--mtp", RejectionSampling),
        ("--mtp --seed 5", Coupled),
        ("--mtp --acceptance coupled", Coupled),
        ("--mtp --acceptance rejection --seed 5", RejectionSampling),
        ("--mtp --acceptance match", TokenMatch),
        ("--acceptance coupled", Coupled),
        ("--seed 5", TokenMatch),
        ("", TokenMatch),
    ],
)
def test_sampler_of_flags(trained, flags, acceptance):
    args = make_parser().parse_args(["--temp", "1", *flags.split()])
    assert type(make_acceptance(sampler_of(args, trained[1]))) is acceptance


def test_resumes_a_prompt_cache_file(capsys, trained, tmp_path):
    model, tokenizer = trained
    cache = mlx_mtp.make_prompt_cache(model)
    list(mlx_mtp.mtp_generate_step(mx.array(tokenizer.encode(PROMPT)), model, max_tokens=0, prompt_cache=cache))
    metadata = {"model": TRAINED, "tokenizer_config": "{}"}
    save_prompt_cache(str(tmp_path / "cache.safetensors"), cache, metadata)
    more = "        for line in f:"
    args = ["--mtp", "-m", 15, "--verbose", "F"]
    _, warm, _ = run(capsys, *args, "--prompt-cache-file", tmp_path / "cache.safetensors", "--prompt", more)
    tokens = tokenizer.encode(PROMPT) + tokenizer.encode(more)
    assert warm.rstrip("\n") == mlx_lm.generate(model, tokenizer, tokens, max_tokens=15).rstrip("\n")

    status, _, err = run(capsys, *args, "--prompt-cache-file", tmp_path / "cache.safetensors", "--model", mlx_mtp.DEMO)
    assert (status, err.count("\n")) == (2, 1)

    cache[-1][2] = mx.array([4_000_000], mx.uint32)
    save_prompt_cache(str(tmp_path / "damaged.safetensors"), cache, metadata)
    for flags in (["--check"], []):
        status, _, err = run(
            capsys, *args, *flags, "--prompt-cache-file", tmp_path / "damaged.safetensors", "--prompt", more
        )
        assert (status, err.count("\n")) == (2, 1)
        assert "has the token 4000000, and the vocabulary ends at 4095" in err


def test_default_number_of_draft_tokens_of_a_draft_model(monkeypatch, capsys):
    given = []
    monkeypatch.setattr(command, "generate", lambda *_, num_draft_tokens, **__: given.append(num_draft_tokens))
    for flags in ([], ["--num-draft-tokens", 5]):
        run(capsys, "--model", TRAINED, "--draft-model", TRAINED, *flags)
    assert given == [3, 5]


def test_a_missing_head_is_an_error_without_fallback(capsys, tmp_path):
    headless = copied(tmp_path)
    no_head(headless)
    status, out, err = run(capsys, "--mtp", "--model", headless, "-m", 5)
    assert (status, out) == (2, "")
    assert re.fullmatch(
        r"mlx_mtp generate: error: .* has no MTP head, and its original was not found\. .* without --mtp\.\n", err
    )
    status, out, _ = run(capsys, "--model", headless, "-m", 5)
    assert status == 0
    assert "Generation: 5 tokens" in out


def test_a_drafter_drafts_as_the_models_own_head(capsys, tmp_path):
    folder = copied(tmp_path)
    drafter = shutil.copytree(folder, tmp_path / "drafter")
    edit(drafter, lambda w: [w.pop(name) for name in list(w) if not name.startswith("mtp.")])
    configure(drafter, model_type="qwen3_5_mtp")
    args = ["--model", folder, "--prompt", "def f", "-m", 20, "--num-draft-tokens", 2, "--mtp"]
    status, want, _ = run(capsys, *args)
    no_head(folder)
    assert run(capsys, *args)[0] == 2
    status, got, _ = run(capsys, *args, drafter)
    assert status == 0

    def untimed(text):
        return [line for line in text.splitlines() if "-per-sec" not in line and "memory" not in line]

    assert untimed(got) == untimed(want)
    assert any("tokens-per-step" in line for line in untimed(got))


@pytest.mark.parametrize("spoil", [bad[0] for bad in BAD[::6]], ids=BAD_IDS[::6])
def test_a_bad_checkpoint_is_one_line_and_status_2(capsys, tmp_path, spoil):
    """More are in test_load.py."""
    spoil(folder := copied(tmp_path))
    refused(capsys, "--mtp", "--model", folder, "-m", 1, message="mlx_mtp generate: error: ")


def test_a_truncated_file_is_one_line_without_mtp(capsys, tmp_path):
    cut_short(folder := copied(tmp_path))
    refused(capsys, "--model", folder, "-m", 1, message=str(folder))


@pytest.mark.parametrize(
    "flags",
    [
        "--max-tokens 0",
        "--max-tokens -2",
        "--temp -1",
        "--temp nan",
        "--temp inf",
        "--top-p -0.1",
        "--top-p 1.1",
        "--top-p nan",
        "--min-p 2",
        "--min-p nan",
        "--top-k -1",
        "--min-tokens-to-keep 0",
        "--xtc-probability 2",
        "--xtc-threshold 0.6",
        "--seed -1",
        f"--seed {2**64}",
        "--kv-bits 7",
        "--kv-bits 1",
        "--kv-group-size 17",
        "--quantized-kv-start -1",
        "--prefill-step-size 0",
        "--prefill-step-size -5",
        "--max-kv-size 0",
        "--num-draft-tokens 0",
        "--copy-drafts 0",
        "--copy-drafts 17",
    ],
)
def test_refuses_a_flag_out_of_range_before_loading(monkeypatch, capsys, flags):
    monkeypatch.setattr(command, "load", lambda *args, **kwargs: pytest.fail("loaded"))
    status, out, err = run(capsys, *flags.split())
    assert (status, out, err.count("\n")) == (2, "", 1)
    name, value = flags.split()
    assert re.fullmatch(rf"mlx_mtp generate: error: {name} must be .*, not {value}(\.0)?\.\n", err)


@pytest.mark.parametrize("flags", ["--max-tokens -1", f"--seed {2**64 - 1}", "--top-p 0", "--temp 0", "--kv-bits 3"])
def test_accepts_the_ends_of_a_range(flags):
    check_generation_flags(make_parser().parse_args(flags.split()))


def test_the_server_needs_a_limit_of_tokens():
    with pytest.raises(ValueError, match="--max-tokens must be 1 or more, not -1"):
        check_generation_flags(make_parser().parse_args(["--max-tokens", "-1"]), no_limit=False)


def test_stop_tokens_are_given_by_text_or_by_id(trained):
    tokenizer = TokenizerWrapper(trained[1]._tokenizer, eos_token_ids=[0])
    def_id = tokenizer.convert_tokens_to_ids("def")
    command.add_eos_tokens(tokenizer, ["def", "4095"])
    assert tokenizer.eos_token_ids == {0, def_id, 4095}


def test_kv_bits_that_mlx_lm_cannot_pack_into_the_heads_are_refused():
    args = make_parser().parse_args(["--kv-bits", "3"])
    check_model_flags(args, {"text_config": {"head_dim": 64}})
    with pytest.raises(ValueError, match="use --kv-bits 4 or 8"):
        check_model_flags(args, {"head_dim": 256})


def test_an_interrupt_has_no_traceback(monkeypatch, capsys):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "load", interrupt)
    assert run(capsys) == (130, "", "")


def test_a_folder_keeps_what_was_read(capsys, tmp_path):
    flags = ["--prompt", PROMPT, "--max-tokens", "8", "--verbose", "False", "--ignore-chat-template"]
    _, want, _ = run(capsys, *flags)
    flags += ["--mtp", "--prompt-cache-dir", tmp_path]
    found = []
    for _ in range(2):
        assert run(capsys, *flags) == (0, want, "")
        found.append({file: file.stat().st_mtime_ns for file in tmp_path.glob("*.safetensors")})
    assert found[0] == found[1] != {}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--mtp --draft-model x", "cannot be combined"),
        ("--mtp --num-draft-tokens 9", "must be auto or from 0 to 8"),
        ("--mtp --num-draft-tokens -1", "must be auto or from 0 to 8"),
        ("--mtp --max-kv-size 100", "do not rotate"),
        ("--mtp --model no/such-model", "the hub has no repository"),
        ("--mtp --model FOLDER", "no config.json"),
        ("--mtp --prompt-cache-file FOLDER/none.safetensors", "There is no prompt cache"),
        (["--mtp", "--prompt", ""], "The prompt is empty"),
        ("--mtp --prompt -", "The prompt is empty"),
        ("--mtp --prompt caf\udce9", "is not text in UTF-8"),
        ("--mtp --check --settings off", "cannot be combined with --settings"),
        ("--mtp --chat-template-config []", "must be a JSON object, not []"),
        ("--mtp --chat-template-config {", "is not JSON"),
        ("--mtp --draft-p-min 7", "from 0 to 1, not 7"),
        ("--mtp --settings FOLDER", "There is no settings file"),
        ("--mtp --prompt-cache-dir FOLDER --check", "--prompt-cache-dir and --check cannot be combined"),
        ("--acceptance rejection", "--acceptance rejection requires --mtp"),
        ("--acceptance coupled --draft-model x", "--acceptance coupled cannot be combined with --draft-model"),
        # With copies
        ("--draft-model x --copy-drafts 5", "--copy-drafts and --draft-model cannot be combined"),
        ("--num-draft-tokens 2 --copy-drafts auto", "--num-draft-tokens requires --mtp or --draft-model"),
        ("--max-kv-size 9 --copy-drafts auto", "--copy-drafts cannot be combined with --max-kv-size"),
        ("--exact --copy-drafts auto", "--exact requires --mtp"),
        # With this model. mlx-lm takes the first for the unknown token, which in this vocabulary ends the text.
        ("--extra-eos-token=no-such -m 1", "--extra-eos-token no-such is not a token of the model"),
        ("--extra-eos-token=4096 -m 1", "--extra-eos-token 4096 is not a token of the model"),
        ("--extra-eos-token=-1 -m 1", "--extra-eos-token -1 is not a token of the model"),
        *(
            (mtp + flags, message)
            for mtp in ("", "--mtp ")
            for flags, message in (
                ("--min-tokens-to-keep 4097 --min-p 0.1 --temp 1", "at most 4096 for a vocabulary of 4096 tokens"),
                ("--top-k 4096 --temp 1", "--top-k must be at most 4095 for a vocabulary of 4096 tokens, not 4096."),
                ("--kv-bits 4 --kv-group-size 128", "attention heads have 64 values"),
            )
        ),
    ],
    ids=str,
)
def test_an_error_is_one_line_and_status_2(monkeypatch, capsys, tmp_path, flags, message):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    flags = flags if isinstance(flags, list) else flags.replace("FOLDER", str(tmp_path)).split()
    refused(capsys, *flags, message=message)


@pytest.mark.parametrize(
    ("model_type", "advice"), [("llama", "generate without --mtp"), ("qwen4_exp", "neither here nor by mlx-lm")]
)
def test_a_model_of_another_family_is_one_line(capsys, tmp_path, model_type, advice):
    configure(folder := copied(tmp_path), model_type=model_type)
    refused(capsys, "--mtp", "--model", folder, message=advice)


def test_an_image_is_refused_by_the_model(capsys, tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    for mtp in ([], ["--mtp"]):
        refused(
            capsys, *mtp, "--image", tmp_path / "a.png", message="has no vision tower, and its original was not found"
        )


@pytest.mark.parametrize(("mtp", "is_file"), [(["--mtp"], True), (["--mtp"], False), ([], True)])
def test_json_of_a_schema(capsys, tmp_path, mtp, is_file):
    file, schema = (
        tmp_path / "schema.json",
        '{"type": "object", "properties": {"n": {"enum": [10, 20]}}, "required": ["n"]}',
    )
    file.write_text(schema)
    flags = "--json-schema", str(file) if is_file else f" {schema}", "--verbose", "False", "-m", "50"
    status, out, _ = run(capsys, *mtp, *flags)
    assert status == 0
    assert json.loads(out)["n"] in (10, 20)


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        ("{", (), "schema.json: Expecting property name"),
        ('{"type": "person"}', (), "schema.json: llguidance cannot read the grammar"),
        (None, (), "--json-schema: there is no file"),
        (None, ("--json-schema", '{"type": "person"}'), '--json-schema {"type": "person"}: llguidance cannot read the'),
        ("{}", ("--check",), "--check compares free text"),
    ],
)
def test_a_bad_schema_is_one_line(capsys, tmp_path, text, flags, message):
    schema = tmp_path / "schema.json"
    if text is not None:
        schema.write_text(text)
    refused(capsys, "--mtp", "--json-schema", schema, *flags, message=message)
