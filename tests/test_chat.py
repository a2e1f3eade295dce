"""The chat in the terminal: its turns, its commands, its history, and what Ctrl-C leaves."""

import re
import sys
from types import SimpleNamespace

import pytest
from mlx_lm.chat import setup_arg_parser
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

import mlx_mtp
from mlx_mtp import PromptStore
from mlx_mtp.chat import __main__ as command
from mlx_mtp.chat import commands, terminal
from mlx_mtp.chat import conversation as conversation_module
from mlx_mtp.chat.__main__ import main, make_parser
from mlx_mtp.chat.conversation import Conversation, Message, load_messages, save_messages
from mlx_mtp.generate import GenerationResponse
from tests.support.commands import assert_refused, run_command
from tests.support.decoding import plain, text_of
from tests.support.models import TRAINED

TURNS = ("def read(path):", "class Reader:")
FIGURES = r"\[20 tokens \(--max-tokens\), [\d.]+ tokens-per-sec(.*)\]"


def template(messages, enable_thinking, **_):
    return "".join(f"<{m['role']}>{m['content']}\n" for m in messages) + "<think>" * enable_thinking


def run(capsys, *args, stdin=""):
    """The command line in this process: (exit status, stdout, stderr). The last ``--model`` is the one that counts."""
    return run_command(main, capsys, "--model", TRAINED, *args, stdin=stdin)


def started(trained, *flags, chat_template=None, store=None) -> Conversation:
    """A conversation with a model that has no chat template of its own."""
    model, tokenizer = trained
    tokenizer = TokenizerWrapper(tokenizer._tokenizer, chat_template=chat_template)
    args = make_parser().parse_args(["--num-draft-tokens", "2", "-m", "20", *flags])
    return command.start(args, model, tokenizer, store)


def cut_after(n: int, pieces: list[str]):
    """Note the pieces of an answer, and press Ctrl-C at the n-th."""

    def show(text):
        pieces.append(text)
        if len(pieces) == n:
            raise KeyboardInterrupt

    return show


@pytest.fixture(scope="module")
def answers(trained):
    """Plain mlx-lm's, over one cache."""
    model, tokenizer = trained
    cache, texts = make_prompt_cache(model), []
    for turn in TURNS:
        tokens = plain(tokenizer.encode(turn + "\n"), model, max_tokens=20, prompt_cache=cache)
        texts.append(text_of(tokenizer, tokens))
    return texts


def test_every_flag_is_mlx_lms():
    theirs, ours = ({a.dest: a for a in p._actions} for p in (setup_arg_parser(), make_parser()))
    assert theirs.keys() <= ours.keys()
    for name, a in theirs.items():
        assert (a.option_strings, a.nargs, a.type) == (ours[name].option_strings, ours[name].nargs, ours[name].type)
        if name not in ("model", "seed"):
            assert a.default == ours[name].default
            assert ours[name].help.startswith(a.help.removesuffix("."))
    assert ours["seed"].default is None, "with a seed, sampled drafts are coupled"


STORED = ("--mtp", "--num-draft-tokens", "3", "--prompt-cache-dir")


@pytest.mark.parametrize("flags", [(), STORED], ids=str)
def test_turns_share_a_cache_until_it_is_reset(capsys, answers, flags, tmp_path):
    flags = [*flags, tmp_path / "store"] if flags == STORED else flags
    stdin = "\n".join([*TURNS, "", "/reset", TURNS[1], "/help", "/exit ", "not reached"])
    status, out, err = run(capsys, *flags, "-m", 20, stdin=stdin)
    assert (status, err) == (0, "")
    said = re.split(r">> ", out)[1:]
    found = [re.fullmatch(rf"(.*)\n{FIGURES}\n", text, re.S) for text in said]
    texts = [match[1] for match in found if match]
    assert texts[:2] == answers
    assert len(texts) == 3
    assert texts[2] != texts[1]
    drafts = r", \d+ of \d+ drafts accepted, [\d.]+ tokens-per-step" if flags else ""
    assert all(re.fullmatch(drafts, match[2]) for match in found if match)
    assert out.count("/help ") == 2
    assert "not reached" not in out


def test_a_folder_keeps_the_turns_for_the_next_chat(demo, tmp_path):
    """Also one that Ctrl-C has ended."""
    for n_before in (0, 1):
        with PromptStore(demo[0], folder=tmp_path) as store:
            conversation, pieces = started(demo, "--mtp", store=store), []
            for turn in TURNS:
                conversation.answer(turn, cut_after(7, pieces))
                pieces.clear()
            tokens = demo[1].encode(TURNS[0])  # its chat template passes code on
            assert conversation.text[: len(tokens)] == tokens
            assert store.fetch([*conversation.text, 1])[1] == len(conversation.text)
            assert (store.disk.bytes_read > 0) == bool(n_before)


def test_the_end_of_the_input_ends_the_chat(capsys):
    status, out, err = run(capsys)
    assert (status, err) == (0, "")
    assert out.endswith(">> \n")


def test_copies_have_figures_of_their_own(capsys):
    stdin = "x = [1, 2, 3] y = [4, 5, 6] " * 6
    _, out, _ = run(capsys, "--copy-drafts", "4", "-m", 20, stdin=stdin)
    assert re.search(r"tokens-per-sec, \d+ of \d+ copies accepted, [\d.]+ tokens-per-step\]\n", out)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--model /no/such/model", "/no/such/model"),
        ("--max-tokens 0", "--max-tokens must be"),
        ("--mtp --max-kv-size 9", "--mtp cannot be combined with --max-kv-size"),
        ("--images --max-kv-size 9", "--images cannot be combined with --max-kv-size"),
        ("--draft-p-min 0.5", "--draft-p-min requires --mtp"),
        ("--thinking on", "has no switch for thinking"),
        ("--prompt-cache-dir /tmp", "--prompt-cache-dir requires --mtp"),
    ],
)
def test_an_error_is_one_line_and_status_2(capsys, flags, message):
    assert_refused(main, capsys, "--model", TRAINED, *flags.split(), message=message)


# Ctrl-C


def test_ctrl_c_ends_an_answer_and_keeps_what_was_said(trained):
    model, tokenizer = trained
    conversation, said, texts = started(trained, "--mtp"), [], []
    assert conversation.answer(TURNS[0], cut_after(7, said)).generation_tokens == 7
    conversation.answer(TURNS[1], texts.append)
    read = tokenizer.encode(TURNS[0] + "\n")
    read += plain(read, model, max_tokens=7)
    want = plain([*read, *tokenizer.encode(TURNS[1] + "\n")], model, max_tokens=20)
    assert "".join(texts) == tokenizer.decode(want)


def test_ctrl_c_before_the_answer_keeps_the_question(trained, monkeypatch):
    model, tokenizer = trained
    long = "\n".join(f"import module_{i}" for i in range(30))
    conversation, texts = started(trained, "--mtp", "--prefill-step-size", "50"), []
    with monkeypatch.context() as m:
        calls, forward = [], type(model).__call__

        def interrupted(*args, **kwargs):
            calls.append(1)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return forward(*args, **kwargs)

        m.setattr(type(model), "__call__", interrupted)
        assert conversation.answer(long, texts.append) is None
    assert 0 < len(conversation.unread) < len(tokenizer.encode(long + "\n"))
    conversation.answer(TURNS[1], texts.append)
    want = plain(tokenizer.encode(long + "\n") + tokenizer.encode(TURNS[1] + "\n"), model, max_tokens=20)
    assert "".join(texts) == tokenizer.decode(want)


def test_ctrl_c_on_ranks_ends_the_chat(trained):
    conversation = started(trained, "--mtp")
    conversation.ranks = object()
    with pytest.raises(KeyboardInterrupt):
        conversation.answer(TURNS[0], cut_after(1, []))


# The chat template


@pytest.fixture
def prompts(monkeypatch):
    """The prompts that answers are generated from; the answers are empty, and end."""
    given = []

    def remember(model, tokenizer, prompt, **options):
        given.append(tokenizer.decode(prompt))
        yield GenerationResponse("", 0, None, False, 1, 1.0, 1, 1.0, 0.0, finish_reason="stop")

    monkeypatch.setattr(conversation_module, "stream_generate", remember)
    return given


def test_the_system_prompt_comes_once(trained, prompts):
    conversation = started(trained, "--system-prompt", "Be brief.", chat_template=template)
    for query in ("a", "b"):
        conversation.answer(query, str)
    conversation.reset()
    conversation.answer("c", str)
    assert prompts == ["<system>Be brief.\n<user>a\n", "<user>b\n", "<system>Be brief.\n<user>c\n"]


def test_thinking_is_switched(trained, prompts, capsys):
    conversation = started(trained, "--thinking", "on", chat_template=template)
    for query in ("a", "/think", "b", "/think", "c"):
        command.respond(query, conversation)
    assert prompts == ["<user>a\n<think>", "<user>b\n", "<user>c\n<think>"]
    assert re.findall("Thinking is (on|off)", capsys.readouterr().out) == ["off", "on"]


@pytest.mark.parametrize("text", ["h", "r", "t", "q", "help", " /etc/hosts", "a /reset"])
def test_any_word_can_be_said_to_the_model(trained, prompts, text):
    conversation = started(trained, chat_template=template)
    command.respond(text, conversation)
    assert prompts == [f"<user>{text.strip()}\n"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/quit", "There is no command /quit: see /help, or put a space before it to send it to the model."),
        ("/etc/hosts what is it?", "There is no command /etc/hosts: "),
        ("/", "There is no command /: "),
        ("/reset now", "/reset takes no argument."),
        ("/image", "/image takes a file: /image FILE."),
        ("/image .", ". is not a file."),
    ],
)
def test_a_command_that_cannot_be_done_is_one_line(trained, prompts, capsys, monkeypatch, line, message):
    monkeypatch.setattr(conversation_module, "vision_of", lambda model: None)
    conversation = started(trained, chat_template=template)
    command.respond("a", conversation)
    capsys.readouterr()
    command.respond(line, conversation)
    out = capsys.readouterr().out
    assert out.startswith(message)
    assert out.count("\n") == 1
    assert (prompts, conversation.turn) == (["<user>a\n"], 1)


def test_thinking_without_a_switch_is_one_line(trained, prompts, capsys):
    conversation = started(trained)
    command.respond("/think", conversation)
    assert (prompts, conversation.thinking) == ([], False)
    assert "has no switch for thinking" in capsys.readouterr().out


def test_an_answer_that_was_cut_is_closed(trained):
    """The template's next turn follows the end of an answer, which the model did not come to write."""
    conversation = started(trained, chat_template=template)
    end = trained[1].eos_token_id
    assert conversation._encode([Message("user", "import os")])[0] != end
    conversation.answer("import os", cut_after(2, []))
    assert conversation._encode([Message("user", "b")]) == [
        end,
        *trained[1].encode("<user>b\n", add_special_tokens=False),
    ]


def test_turns_with_a_seed_draw_other_numbers(trained):
    def say(seed):
        conversation, texts = started(trained, "--mtp", "--temp", "1", "--seed", seed, "-m", "6"), []
        for _ in range(2):
            conversation.answer("x", texts.append)
            conversation.cache = mlx_mtp.make_prompt_cache(conversation.model)  # the same text before each answer
        text = "".join(texts)
        return text

    assert say("5") == say("5") != say("6")


# Saved conversations


def test_a_saved_conversation_goes_on_as_if_it_had_not_ended(trained, prompts, tmp_path, capsys):
    file = tmp_path / "chat.json"
    first = started(trained, "--system-prompt", "Be brief.", chat_template=template)
    for line in ("a", f"/save {file}"):
        command.respond(line, first)
    second = started(trained, chat_template=template)
    for line in ("other", f"/load '{file}'", "b", "c"):
        command.respond(line, second)
    assert prompts[2:] == ["<system>Be brief.\n<user>a\n<assistant>\n<user>b\n", "<user>c\n"]
    assert second.transcript[:3] == first.transcript
    assert "Loaded 2 messages from" in capsys.readouterr().out


def test_a_loaded_conversation_has_the_text_of_one_prompt(trained, tmp_path):
    """Its answers are those of plain mlx-lm to all messages together."""
    model, tokenizer = trained
    first, said = started(trained, "--mtp"), []
    first.answer(TURNS[0], said.append)
    save_messages(tmp_path / "chat.json", first.transcript)
    second, texts = started(trained, "--mtp"), []
    second.restore(load_messages(tmp_path / "chat.json"))
    second.answer(TURNS[1], texts.append)
    prompt = tokenizer.encode(f"{TURNS[0]}\n{''.join(said)}\n{TURNS[1]}\n")
    assert "".join(texts) == tokenizer.decode(plain(prompt, model, max_tokens=20))


def test_a_new_system_prompt_comes_before_all_messages(trained, prompts, capsys):
    conversation = started(trained, chat_template=template)
    for line in ("a", "/system Be brief.", "b", "c", "/system"):
        command.respond(line, conversation)
    assert prompts == ["<user>a\n", "<system>Be brief.\n<user>a\n<assistant>\n<user>b\n", "<user>c\n"]
    assert capsys.readouterr().out.endswith("System prompt: Be brief.\n")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"\xff",
        b'{"messages": [{"role": "tool", "content": "a"}]}',
        b'{"messages": [{"role": "user", "content": 1}]}',
        b'{"messages": [{"role": "user", "content": "a", "images": 1}]}',
        b'{"messages": [{"role": "user", "content": "a", "name": "b"}]}',
        b'{"messages": [{"role": "user", "content": "a", "images": ["/no/such.png"]}]}',
    ],
)
def test_a_file_that_cannot_be_loaded_changes_nothing(trained, prompts, tmp_path, capsys, content):
    (file := tmp_path / "chat.json").write_bytes(content)
    conversation = started(trained, chat_template=template)
    for line in ("a", f"/load {file}", "b"):
        command.respond(line, conversation)
    assert prompts == ["<user>a\n", "<user>b\n"]
    assert "is not a conversation" in (out := capsys.readouterr().out) or "takes no images" in out


def test_a_failed_question_is_forgotten(trained, prompts, monkeypatch):
    conversation = started(trained, chat_template=template)

    def fail(*_, **__):
        raise ValueError("no")

    with monkeypatch.context() as m:
        m.setattr(conversation_module, "stream_generate", fail)
        command.respond("a", conversation)
    command.respond("b", conversation)
    assert prompts == ["<user>b\n"]


def test_figures_are_switched_off(trained, prompts, capsys):
    conversation = started(trained, chat_template=template)
    for line in ("a", "/figures", "b"):
        command.respond(line, conversation)
    assert capsys.readouterr().out.count("tokens-per-sec") == 1
    assert not make_parser().parse_args(["--no-figures"]).figures


# The terminal


@pytest.fixture
def keys(monkeypatch, tmp_path):
    """Types keys, as a terminal sends them, and returns what the chat reads."""
    monkeypatch.setattr(terminal, "history_file", lambda: tmp_path / "mlx_mtp" / "chat_history")
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):

        def typed(*lines: str) -> list[str]:
            is_terminal = SimpleNamespace(isatty=lambda: True)
            streams = SimpleNamespace(stdin=is_terminal, stdout=is_terminal, stderr=sys.stderr)
            monkeypatch.setattr(terminal, "sys", streams)
            read = terminal.make_reader({name: c.argument for name, c in commands.COMMANDS.items()})
            said = []
            for line in lines:
                pipe.send_text(line)
                said.append(command.ask(read, None))
            return said

        yield typed


ENTER, ALT_ENTER, UP, CTRL_C, CTRL_D = "\r", "\x1b\r", "\x1b[A", "\x03", "\x04"
PASTE = "\x1b[200~{}\x1b[201~"


def test_a_question_may_have_several_lines(keys):
    typed = f"a\\{ENTER}b{ENTER}", f"a{ALT_ENTER}b{ENTER}", PASTE.format("a\r\nb") + ENTER
    assert keys(*typed) == ["a\nb"] * 3


def test_lines_are_edited_and_remembered(keys):
    """Arrow up brings the line before, of this chat or of an earlier one; Ctrl-C leaves the line, and Ctrl-D the chat."""
    assert keys(f"import os{ENTER}", f"import sys{CTRL_C}", f"{UP}.path{ENTER}", CTRL_D) == [
        "import os",
        "",
        "import os.path",
        commands.EXIT,
    ]
    assert keys(UP + ENTER, UP + UP + UP + ENTER) == ["import os.path", "import os"]


@pytest.mark.parametrize(
    ("typed", "completions"),
    [
        ("/s", ["/system", "/save"]),
        ("/load ch", ["at.json"]),
        ("/reset ch", []),
        ("/load ", ["chat.json"]),
        ("a /s", []),
        ("", []),
    ],
)
def test_tab_completes_commands_and_files(typed, completions, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat.json").touch()
    completer = terminal.CommandCompleter({name: c.argument for name, c in commands.COMMANDS.items()})
    found = completer.get_completions(Document(typed), CompleteEvent())
    assert [completion.text for completion in found] == completions


def test_a_history_that_cannot_be_kept_is_one_line(keys, tmp_path, capsys):
    (tmp_path / "mlx_mtp").touch()
    assert keys(f"import os{ENTER}", f"{UP}{ENTER}") == ["import os"] * 2
    err = capsys.readouterr().err
    assert err.startswith("The history is not kept: ")
    assert err.count("\n") == 1
