"""Small files are written completely or not at all, and errors name them. A byte order mark is no text."""

import json

import mlx.core as mx
import pytest

from mlx_mtp import chat, load
from mlx_mtp.checkpoint.heads.originals import base_models
from mlx_mtp.checkpoint.reader import CheckpointReader
from mlx_mtp.files import replacing, write_atomic
from mlx_mtp.fit.texts import read_corpus
from mlx_mtp.generate import __main__ as generate
from mlx_mtp.prompts import read_prompts
from tests.support.checkpoints import copied, full_disk
from tests.support.commands import refusal, run_command
from tests.support.models import TRAINED


def save(file, n):
    with replacing(file) as new:
        mx.save_safetensors(str(new), {"a": mx.zeros(n)})


WRITES = {"text": lambda file, n: write_atomic(file, "a" * n), "arrays": save}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_failure_leaves_the_old_file_and_is_an_error_that_names_it(tmp_path, write):
    file, missing = tmp_path / "file.safetensors", tmp_path / "none" / "file.safetensors"
    write(file, 10)
    before = file.read_bytes()
    with full_disk(1000), pytest.raises(OSError, match=f"^{file} could not be written: "):
        write(file, 10_000)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]
    write(file, 11)
    assert file.read_bytes() != before
    with pytest.raises(OSError, match=f"^{missing} could not be written: No such file or directory$"):
        write(missing, 10)


CONFIGS = {
    "generation_config.json": '{"eos_token_id": 77}',
    "chat_template.jinja": "{{ messages[0].content }}",
    "README.md": "---\nbase_model: org/base\n---\n",
}


def test_a_byte_order_mark_is_no_text(tmp_path, capsys, trained):
    tokenizer, folder = trained[1], copied(tmp_path)
    for name, text in CONFIGS.items():
        (folder / name).write_text(text)
    texts = {"p.txt": "a\n--- \nb", "c.md": "text", "c.jsonl": json.dumps({"text": "a\u2028b"}, ensure_ascii=False)}
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    for file in (*tmp_path.glob("*.*"), *(folder / name for name in CONFIGS)):
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    own = load(str(folder), lazy=True)[1]
    assert own.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x"
    assert 77 in own.eos_token_ids
    assert base_models(CheckpointReader(str(folder))) == ["org/base"]
    assert read_prompts(tmp_path / "p.txt") == {"prompt_1": "a", "prompt_2": "b"}
    found = [tokenizer.decode(read_corpus([tmp_path / name], tokenizer, 64)[0].tokens) for name in ("c.md", "c.jsonl")]
    assert [text.removesuffix(tokenizer.eos_token) for text in found] == ["text", "a\u2028b"]
    flags = ("--model", TRAINED, "--prompt", "-", "-m", "4", "--verbose", "False")
    assert len({run_command(generate.main, capsys, *flags, stdin=f"{mark}x =")[1] for mark in ("", "\ufeff")}) == 1


def test_text_that_is_not_utf_8_is_one_line(tmp_path, capsys):
    (file := tmp_path / "schema.json").write_text('{"type": "object"}', encoding="utf-16")
    flags = ("--model", TRAINED, "--prompt")
    assert f"{file} is not text in UTF-8" in refusal(generate.main, capsys, *flags, "x", "--json-schema", file)
    for main, args in ((generate.main, (*flags, "-")), (chat.main, flags[:2])):
        _, _, said = run_command(main, capsys, *args, stdin="caf\udce9")
        assert "error: Standard input is not text in UTF-8" in said
        assert said.count("\n") == 1
