"""``mlx_mtp demo``, and the bundled model's chat template."""

import re
from functools import partial
from types import SimpleNamespace

import mlx_mtp
from mlx_mtp.cli import display
from mlx_mtp.generate import demo as command
from tests.support.commands import run_command
from tests.support.decoding import plain
from tests.support.models import TRAINED


def test_plain_and_drafts_are_compared(capsys, trained, equal_steps, monkeypatch):
    monkeypatch.setattr(command, "ROUNDS", 1)
    model, tokenizer = trained
    prompt = "def read(path):\n    with open(path) as f:"
    status, out, err = run_command(command.main, capsys, "--model", TRAINED, "--prompt", prompt, "-m", 20)
    assert (status, err) == (0, "")
    assert tokenizer.decode(plain(tokenizer.encode(prompt), model, max_tokens=20)) in out
    rows = {line[:12]: line.split()[-2:] for line in out.splitlines()}
    assert float(rows["plain mlx-lm"][0]) > 0
    assert int(rows["plain mlx-lm"][1]) == 20 > int(rows["with drafts "][1])
    assert " times as fast. Both texts are the same 20 tokens.\n" in out
    counts = [int(n) for n in re.findall(r"^(?:the model's own|drafted .*|copied .*): (\d+) tokens", out, re.M)]
    assert sum(counts) == 20 > counts[0] == int(rows["with drafts "][1])
    assert "Demo model" not in out
    assert out.splitlines()[-1].startswith("Next: `mlx_mtp ")


def test_a_run_before_the_timed_ones_is_repeated_until_it_makes_no_trace(monkeypatch):
    made, runs = 0, []

    def run(name, n_traced):
        nonlocal made
        runs.append(name)
        made += runs.count(name) <= n_traced

    monkeypatch.setattr(display, "n_traces", lambda: made)
    display.prepare([partial(run, "plain", 0), partial(run, "drafts", 2), partial(run, "endless", 99)])
    assert runs == ["plain", *["drafts"] * 3, *["endless"] * display.MAX_REPEATS]


def test_a_difference_is_not_hidden_and_the_last_line_is_the_next_command():
    first, second, other = (SimpleNamespace(token=t, generation_tps=1.0, from_draft=False) for t in range(3))
    plain, drafted = [first, second], [first, other]
    assert "Both texts are the same 2 tokens." in command.figures(plain, plain, 1.0)
    assert "The texts differ: " in command.figures(plain, drafted, 1.0)
    assert "`mlx_mtp models`" in command.next_step(str(mlx_mtp.DEMO), True, 2.0)
    assert "`mlx_mtp chat --mtp --model org/model`" in command.next_step("org/model", False, 1.5)
    assert "`mlx_mtp benchmark --tune --model org/model`" in command.next_step("org/model", False, 0.9)


# The chat template


def rendered(tokenizer, *texts, **options):
    """A conversation that begins with a user's text."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def test_a_request_to_the_demo_becomes_a_function_that_is_right(demo):
    """The request of README's examples. Code goes on as it is."""
    model, tokenizer = demo
    head = rendered(tokenizer, command.REQUEST, add_generation_prompt=True)
    assert head == "def binary_search("
    code = head + mlx_mtp.generate(model, tokenizer, tokenizer.encode(head), max_tokens=140)
    exec(code, namespace := {})
    items = [1, 3, 4, 8, 9]
    assert [namespace["binary_search"](items, item) for item in (3, 9, 5)] == [1, 4, -1]
    code = "def read(path):\n    with open(path) as f:\n"
    assert rendered(tokenizer, code, add_generation_prompt=True) == code
    turns = ("def f(", "x):\n    return x\n", "Sort a list.")
    assert rendered(tokenizer, *turns) == "def f(x):\n    return x\n\n\n\ndef sort_list("
    assert rendered(tokenizer, *turns[:2], continue_final_message=True) == "def f(x):\n    return x\n"
    system = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "def f("}]
    assert tokenizer.apply_chat_template(system, tokenize=False) == "def f("
