"""The chat in the terminal: its turns, its commands, its history, and what Ctrl-C leaves."""

import re
import shutil
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

import mlx_mtp
from mlx_mtp import PromptStore
from mlx_mtp import chat as command
from mlx_mtp.chat import Conversation, main
from mlx_mtp.cli.parsers import chat_parser
from mlx_mtp.core.caches.prompt_cache import n_tokens
from mlx_mtp.errors import FAILED_PASS, MTPError
from mlx_mtp.generate import GenerationResponse
from tests.support.commands import refusal, run_command
from tests.support.decoding import interrupt_at, plain, text_of
from tests.support.models import TRAINED

TURNS = ("def read(path):", "class Reader:")
FIGURES = r"\[stopped at 12 tokens \(--max-tokens\), [\d.]+ tokens-per-sec(.*)\]"
BRIEF = "<system>Be brief.\n"


def template(messages, enable_thinking, **_):
    return "".join(f"<{m['role']}>{m['content']}\n" for m in messages) + "<think>" * enable_thinking


def started(trained, *flags, chat_template=None, store=None) -> Conversation:
    """A conversation with a model that has no chat template of its own."""
    model, tokenizer = trained
    tokenizer = TokenizerWrapper(tokenizer._tokenizer, chat_template=chat_template)
    args = chat_parser().parse_args(["--num-draft-tokens", "2", "-m", "12", *flags])
    return Conversation(args, model, tokenizer, store)


def cut_after(n: int, pieces: list[str]):
    """Note the pieces of an answer, and press Ctrl-C at the n-th."""

    def show(text):
        pieces.append(text)
        if len(pieces) == n:
            raise KeyboardInterrupt

    return show


def said_by(conversation, question) -> str:
    conversation.answer(question, (pieces := []).append)
    return "".join(pieces)


def test_turns_share_a_cache_until_it_is_reset(capsys, trained, tmp_path):
    """Their texts are plain mlx-lm's, over one cache."""
    cache, answers = make_prompt_cache(trained[0]), []
    for turn in TURNS:
        tokens = plain(trained[1].encode(turn + "\n"), trained[0], max_tokens=12, prompt_cache=cache)
        answers.append(text_of(trained[1], tokens))
    stdin = "\n".join([*TURNS, "", "/reset", TURNS[1], "/help", "/exit ", "not reached"])
    for flags in (("--no-mtp",), ("--num-draft-tokens", "3", "--prompt-cache-dir", tmp_path)):
        status, out, err = run_command(main, capsys, "--model", TRAINED, *flags, "-m", 12, stdin=stdin)
        assert (status, err) == (0, "")
        found = [re.fullmatch(rf"(.*)\n{FIGURES}\n", text, re.S) for text in out.split(">> ")[1:]]
        first, second, after_reset = [match[1] for match in found if match]
        assert [first, second] == answers
        assert after_reset != second
        drafts = r", \d+ of \d+ drafted tokens accepted, [\d.]+ tokens-per-step" if "--no-mtp" not in flags else ""
        assert all(re.fullmatch(drafts, match[2]) for match in found if match)
        assert out.count("/help ") == 2
        assert "not reached" not in out


def test_a_folder_keeps_the_turns_for_the_next_chat(demo, tmp_path):
    """Also one that Ctrl-C has ended."""
    with PromptStore(demo[0], folder=tmp_path) as store:
        conversation = started(demo, "--mtp", store=store)
        for turn in TURNS:
            conversation.answer(turn, cut_after(7, []))
        tokens = demo[1].encode(TURNS[0])  # its chat template passes code on
        assert conversation.text[: len(tokens)] == tokens
    with PromptStore(demo[0], folder=tmp_path) as store:
        assert store.fetch([*conversation.text, 1])[1] == len(conversation.text)
        assert store.disk.bytes_read > 0


def test_an_error_is_one_line_and_status_2(capsys, tmp_path):
    advised = shutil.copytree(TRAINED, tmp_path / "model")
    (advised / "generation_config.json").write_text('{"do_sample": true, "top_k": 1000000}')
    for model, flags, message in (
        (TRAINED, "--mtp --max-kv-size 9", "--mtp cannot be combined with --max-kv-size"),
        (TRAINED, "--no-mtp --draft-p-min 0.5", "--draft-p-min requires an MTP head"),
        (TRAINED, "--thinking on", "has no switch for thinking"),
        (advised, "", "--top-k must be from 0 to "),
    ):
        assert message in refusal(main, capsys, "--model", model, *flags.split())


# Ctrl-C


def test_ctrl_c_ends_an_answer_and_keeps_what_was_said(trained):
    model, tokenizer = trained
    conversation = started(trained, "--mtp")
    assert conversation.answer(TURNS[0], cut_after(7, [])).generation_tokens == 7
    read = tokenizer.encode(TURNS[0] + "\n")
    read += plain(read, model, max_tokens=7)
    want = plain([*read, *tokenizer.encode(TURNS[1] + "\n")], model, max_tokens=12)
    assert said_by(conversation, TURNS[1]) == tokenizer.decode(want)


def test_ctrl_c_before_the_answer_keeps_the_question(trained, monkeypatch):
    model, tokenizer = trained
    long = "\n".join(f"import module_{i}" for i in range(30))
    conversation = started(trained, "--mtp", "--prefill-step-size", "50")
    with monkeypatch.context() as m:
        m.setattr(command, "prompt_progress", lambda: nullcontext(interrupt_at(100)))
        assert conversation.answer(long, str) is None
    assert n_tokens(conversation.cache) == 100  # two passes, which the next turn does not repeat
    want = plain(tokenizer.encode(f"{long}\n{TURNS[1]}\n"), model, max_tokens=12)
    assert said_by(conversation, TURNS[1]) == tokenizer.decode(want)


def test_ctrl_c_on_ranks_ends_the_chat(trained):
    conversation = started(trained, "--mtp")
    conversation.ranks = object()
    with pytest.raises(KeyboardInterrupt):
        conversation.answer(TURNS[0], cut_after(1, []))


# Lines that are typed: commands, and what the chat template makes of questions


@pytest.fixture
def prompts(monkeypatch):
    """The prompts that answers are generated from; the answers are empty, and end."""
    given = []

    def remember(model, tokenizer, prompt, **options):
        given.append(tokenizer.decode(prompt))
        yield GenerationResponse("", 0, None, False, 1, 1.0, 1, 1.0, 0.0, finish_reason="stop")

    monkeypatch.setattr(command, "stream_generate", remember)
    return given


@pytest.fixture
def typed(trained, prompts):
    """Types lines to a conversation, a new one by default."""

    def type_lines(*lines, flags=(), to=None) -> Conversation:
        conversation = started(trained, *flags, chat_template=template) if to is None else to
        for line in lines:
            command.respond(line, conversation)
        return conversation

    return type_lines


WORDS = "h", "r", "t", "q", "help", " /etc/hosts", "a /reset"


@pytest.mark.parametrize(
    ("flags", "lines", "want", "said"),
    [
        # The system prompt comes once, and a new one before all messages.
        (["--system-prompt", "Be brief."], ["a", "b", "/reset", "c"], [f"{BRIEF}<user>a", "<user>b", f"{BRIEF}<user>c"], ""),
        ([], ["a", "/system Be brief.", "b", "c", "/system"],
         ["<user>a", f"{BRIEF}<user>a\n<assistant>\n<user>b", "<user>c"], "System prompt: Be brief.\n"),
        (["--thinking", "on"], ["a", "/think", "b", "/think", "c"], ["<user>a\n<think>", "<user>b", "<user>c\n<think>"],
         "Thinking is on.\n"),
        ([], WORDS, [f"<user>{text.strip()}" for text in WORDS], ""),  # any word can be said to the model
    ],
    ids=["", "new", "thinking", "words"],
)  # fmt: skip
def test_what_is_typed_becomes_prompts(typed, prompts, capsys, flags, lines, want, said):
    typed(*lines, flags=flags)
    assert [prompt.removesuffix("\n") for prompt in prompts] == want
    assert said in capsys.readouterr().out


def test_a_command_that_cannot_be_done_is_one_line(typed, prompts, capsys, monkeypatch):
    monkeypatch.setattr(command, "vision_of", lambda model: None)
    conversation = typed("a")
    capsys.readouterr()
    for line, message in (
        ("/quit", "There is no command /quit: see /help, or put a space before it to send it to the model."),
        ("/etc/hosts what is it?", "There is no command /etc/hosts: "),
        ("/reset now", "/reset takes no argument."),
        ("/image", "/image takes a file: /image FILE."),
        ("/image .", ". is not a file."),
    ):
        typed(line, to=conversation)
        out = capsys.readouterr().out
        assert (out.startswith(message), out.count("\n")) == (True, 1), out
        assert (prompts, conversation.turn) == (["<user>a\n"], 1)


def test_an_answer_that_was_cut_is_closed(trained):
    """The template's next turn follows the end of an answer, which the model did not come to write."""
    conversation, end = started(trained, chat_template=template), trained[1].eos_token_id
    assert conversation._encode([{"role": "user", "content": "import os"}])[0] != end
    conversation.answer("import os", cut_after(2, []))
    question = trained[1].encode("<user>b\n", add_special_tokens=False)
    assert conversation._encode([{"role": "user", "content": "b"}]) == [end, *question]


@pytest.mark.parametrize("error", [MTPError("no"), RuntimeError(f"[METAL] {FAILED_PASS}: Impacting Interactivity.")])
def test_a_failed_question_is_forgotten(typed, prompts, monkeypatch, capsys, error):
    with monkeypatch.context() as m:
        m.setattr(command, "stream_generate", Mock(side_effect=error))
        conversation = typed("a")
    out = capsys.readouterr().out
    assert (out.startswith(str(error)), out.count("\n")) == (True, 1)
    typed("b", to=conversation)
    assert prompts == ["<user>b\n"]


def test_a_foreign_error_ends_the_chat_with_its_traceback(typed, monkeypatch):
    monkeypatch.setattr(command, "stream_generate", Mock(side_effect=ValueError("[matmul] no")))
    with pytest.raises(ValueError, match="matmul"):
        typed("a")


def test_turns_with_a_seed_draw_other_numbers(trained):
    def say(seed):
        conversation, answers = started(trained, "--mtp", "--temp", "1", "--seed", seed, "-m", "6"), []
        for _ in range(2):
            answers.append(said_by(conversation, "x"))
            conversation.cache = mlx_mtp.make_prompt_cache(conversation.model)  # the same text before each answer
        return answers

    first, second = say("5")
    assert first != second
    assert [first, second] == say("5") != say("6")


# The terminal


@pytest.fixture
def keys(monkeypatch, tmp_path):
    """Types keys, as a terminal sends them, and returns what the chat reads."""
    monkeypatch.setattr(command, "HISTORY", tmp_path / "mlx_mtp" / "chat_history")
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):

        def type_keys(*lines: str) -> list[str]:
            is_terminal = SimpleNamespace(isatty=lambda: True)
            streams = SimpleNamespace(stdin=is_terminal, stdout=is_terminal, stderr=sys.stderr)
            monkeypatch.setattr(command, "sys", streams)
            read = command.make_reader()
            said = []
            for line in lines:
                pipe.send_text(line)
                said.append(command.ask(read, None))
            return said

        yield type_keys


ENTER, ALT_ENTER, UP, CTRL_C, CTRL_D = "\r", "\x1b\r", "\x1b[A", "\x03", "\x04"
PASTE = "\x1b[200~{}\x1b[201~"


def test_a_question_may_have_several_lines(keys):
    assert keys(f"a\\{ENTER}b{ENTER}", f"a{ALT_ENTER}b{ENTER}", PASTE.format("a\r\nb") + ENTER) == ["a\nb"] * 3


def test_lines_are_edited_and_remembered(keys):
    """Arrow up brings the line before, of this chat or of an earlier one; Ctrl-C leaves the line, and Ctrl-D the chat."""
    said = keys(f"import os{ENTER}", f"import sys{CTRL_C}", f"{UP}.path{ENTER}", CTRL_D)
    assert said == ["import os", "", "import os.path", command.EXIT]
    assert keys(UP + ENTER, UP + UP + UP + ENTER) == ["import os.path", "import os"]


def test_a_history_that_cannot_be_kept_is_one_line(keys, tmp_path, capsys):
    (tmp_path / "mlx_mtp").touch()
    assert keys(f"import os{ENTER}", f"{UP}{ENTER}") == ["import os"] * 2
    assert re.fullmatch("The history is not kept: .*\n", capsys.readouterr().err)
