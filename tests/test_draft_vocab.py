"""Cheaper drafts: their output layer has the model's rows for the draft vocabulary, and verification is unchanged."""

import json
import shutil
from collections import Counter

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.lora import LoRALinear
from tokenizers import Tokenizer, models, pre_tokenizers

import mlx_mtp
from mlx_mtp import make_sampler, mtp_generate_step
from mlx_mtp.checkpoint.load import DEMO
from mlx_mtp.checkpoint.vocabulary import LIST_FILE, always_in, cheapen_drafts
from mlx_mtp.draft_vocab import count_tokens, draft_vocab, main, rank
from mlx_mtp.generate import __main__ as generate
from mlx_mtp.layers.draft_lm_head import BITS, DraftLMHead
from tests.support.commands import assert_refused, run_command
from tests.support.decoding import plain
from tests.support.models import DATA, arrays_equal, tiny_model

CHECKPOINTS = ["dense", "moe35", "next"]
LAYERS = ["dense", "next"]  # with tied embeddings, and without
FORMATS = {
    "bfloat16": None,
    "float32": None,
    "4 bit": {"group_size": 64, "bits": 4},
    "8 bit": {"group_size": 64, "bits": 8},
    "4 bit float32": {"group_size": 32, "bits": 4},
    "mxfp4": {"mode": "mxfp4"},
}


def load(name, **kwargs):
    return mlx_mtp.load(str(DATA / name), **kwargs)


def set_output_layer(model, layer):
    text = getattr(model, "language_model", model)
    if text.args.tie_word_embeddings:
        text.model.embed_tokens = layer
    else:
        text.lm_head = layer


def hidden_states(model, n_tokens, seed=0):
    norm = model.model.norm.weight
    return mx.random.normal((1, n_tokens, norm.size), key=mx.random.key(seed)).astype(norm.dtype)


# The layer


def load_in(name, form):
    model, tokenizer = load(name)
    if "float32" in form:
        model.set_dtype(mx.float32)
    if FORMATS[form]:
        set_output_layer(model, model.output_layer.to_quantized(**FORMATS[form]))
    return model, tokenizer


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("form", FORMATS)
def test_draft_logits_are_the_models_rows(name, form):
    model, tokenizer = load_in(name, form)
    size = model.output_layer.weight.shape[0]
    ids = {0, *range(3, size, 5), size - 1}
    cheapen_drafts(model, tokenizer, DEMO, list(ids), None, None)
    assert model.drafting.lm_head.ids.tolist() == sorted(ids | always_in(tokenizer, size))
    for n_tokens in (1, 2, 5):
        hidden = hidden_states(model, n_tokens)
        logits = model.draft_logits(hidden)
        assert logits.shape == (1, n_tokens, model.drafting.lm_head.ids.size)
        assert arrays_equal(logits, model.logits(hidden)[..., model.drafting.lm_head.ids])


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("form", FORMATS)
def test_adds_the_tokens_of_the_text(name, form):
    model, _ = load_in(name, form)
    head = DraftLMHead(model.output_layer, [0, 5, 9])
    more = head.with_tokens([9, 300, 2, 300, 0])
    most = more.with_tokens([2, 7]).with_tokens([300])
    assert more.with_tokens([300, 9]) is more
    hidden = hidden_states(model, 2)
    for h, ids in ((head, [0, 5, 9]), (more, [0, 5, 9, 300, 2]), (most, [0, 5, 9, 300, 2, 7])):
        assert h.ids.tolist() == ids
        assert h.ids.dtype == mx.uint32
        assert arrays_equal(h(hidden), model.logits(hidden)[..., h.ids])
    whole = DraftLMHead(model.output_layer, None)
    assert whole.with_tokens([300]) is whole


def test_quantizes_the_added_tokens():
    model, _ = load("dense")
    hidden = hidden_states(model, 2)
    one_by_one = DraftLMHead(model.output_layer, [0, 5, 9], 4).with_tokens([300]).with_tokens([12])
    at_once = DraftLMHead(model.output_layer, [0, 5, 9, 12, 300], 4)
    order = mx.argsort(one_by_one.ids)
    assert arrays_equal(one_by_one(hidden)[..., order], at_once(hidden))
    assert one_by_one.layers[1].bits == 4


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_default_draft_logits_are_the_models(name):
    model, _ = load(name)
    hidden = hidden_states(model, 3)
    assert model.drafting.lm_head is None
    assert arrays_equal(model.draft_logits(hidden), model.logits(hidden))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_draft_head_bits_quantizes_a_copy(name):
    model, tokenizer = load(name)
    model.set_dtype(mx.float32)
    weight = model.output_layer.weight
    for bits in BITS:
        cheapen_drafts(model, tokenizer, DEMO, [0, 1, 2, 5], None, bits)
        hidden = hidden_states(model, 2)
        back = mx.dequantize(*mx.quantize(weight[model.drafting.lm_head.ids], 64, bits), 64, bits)
        assert mx.allclose(model.draft_logits(hidden), hidden @ back.T, atol=1e-4)
        cheapen_drafts(model, tokenizer, DEMO, 0, None, bits)
        assert model.drafting.lm_head.ids is None
        assert model.draft_logits(hidden).shape == model.logits(hidden).shape
        rows = DraftLMHead(model.output_layer, [0, 1, 2, 5], bits)
        assert arrays_equal(model.draft_logits(hidden)[..., rows.ids], rows(hidden))
    assert model.output_layer.weight is weight


def test_requantizes_a_quantized_output_layer():
    model, tokenizer = load("dense")
    model.set_dtype(mx.float32)
    layer = model.output_layer.to_quantized(group_size=64, bits=8)
    set_output_layer(model, layer)
    cheapen_drafts(model, tokenizer, DEMO, None, None, 4)
    weight = mx.dequantize(layer.weight, layer.scales, layer.biases, 64, 8)
    back = mx.dequantize(*mx.quantize(weight, 64, 4), 64, 4)
    hidden = hidden_states(model, 2)
    assert mx.allclose(model.draft_logits(hidden), hidden @ back.T, atol=1e-4)
    for bits in (8, 6):
        set_output_layer(model, model.drafting.lm_head.layers[0] if bits == 6 else layer)
        with pytest.raises(ValueError, match=f"draft_head_bits must be less than the {8 if bits == 8 else 4} bits"):
            cheapen_drafts(model, tokenizer, DEMO, None, None, bits)


def test_includes_an_adapter_of_the_output_layer():
    model, _ = load("next")
    model.set_dtype(mx.float32)
    adapted = LoRALinear.from_base(model.lm_head)
    adapted.lora_b = mx.random.normal(adapted.lora_b.shape, key=mx.random.key(1))
    rows, hidden = [1, 4, 9], hidden_states(model, 2)
    head = DraftLMHead(adapted, rows, None)
    assert mx.allclose(head(hidden), adapted(hidden)[..., rows], rtol=1e-4, atol=1e-4)
    assert not mx.allclose(head(hidden), model.lm_head(hidden)[..., rows], rtol=1e-2, atol=1e-2)


# The MTP head


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_mtp_bits_spares_fc_and_routers(name):
    model, tokenizer = load(name)
    before = dict(tree_flatten(model.parameters()))
    cheapen_drafts(model, tokenizer, DEMO, None, 4, None)
    after = dict(tree_flatten(model.parameters()))
    quantized = {path for path, m in model.mtp.named_modules() if hasattr(m, "bits")}
    attention = {f"layers.0.self_attn.{p}_proj" for p in "qkvo"}
    shared = "mlp.shared_expert." if "switch_mlp" in str(before) else "mlp."
    mlp = {f"layers.0.{shared}{p}_proj" for p in ("gate", "up", "down")}
    experts = (
        {f"layers.0.mlp.switch_mlp.{p}_proj" for p in ("gate", "up", "down")} if "switch_mlp" in str(before) else set()
    )
    assert quantized == attention | mlp | experts
    for path, w in before.items():
        module = path.partition("mtp.")[2].removesuffix(".weight")
        if module not in quantized:
            assert after[path].dtype == w.dtype
            assert mx.array_equal(after[path], w), path


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_8_bit_head_is_nearly_the_same(name):
    model, tokenizer = load(name)
    model.set_dtype(mx.float32)
    hidden, tokens = hidden_states(model, 6), mx.arange(6)[None]
    full = model.mtp(model.model.embed_tokens(tokens), hidden)
    cheapen_drafts(model, tokenizer, DEMO, None, 8, None)
    quantized = model.mtp(model.model.embed_tokens(tokens), hidden)
    error = mx.linalg.norm(quantized - full) / mx.linalg.norm(full)
    assert 0 < error.item() < 0.05


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_verification_is_unchanged(name):
    model, tokenizer = load(name)
    model.set_dtype(mx.float32)
    prompt = mx.array([[5, 40, 3, 300, 12, 7, 9]])
    before = model(prompt, return_hidden=True)
    cheapen_drafts(model, tokenizer, DEMO, 64, 4, 4)
    assert model.drafting.lm_head.ids.size == 64
    assert arrays_equal(model(prompt, return_hidden=True), before)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_draft_lm_head_is_not_a_parameter(name):
    model, _ = load(name, draft_vocab=64, draft_head_bits=4)
    plain, _ = load(name)
    assert arrays_equal(model.parameters(), plain.parameters())
    names = [[(path, type(m).__name__) for path, m in m.named_modules()] for m in (model, plain)]
    assert names[0] == names[1]


def test_load_applies_its_arguments():
    model, _ = load("dense", draft_vocab=64, mtp_bits=4, draft_head_bits=8)
    hidden = hidden_states(model, 2)
    assert model.draft_logits(hidden).shape == (1, 2, 64)
    assert model.drafting.lm_head.layers[0].bits == 8
    assert model.mtp.layers[0].mlp.up_proj.bits == 4


# The ids

ALWAYS = {0, 1, 2, 7, 4000, 4001, 4095}


def test_first_ids_include_special_and_stop_tokens(tmp_path):
    folder = with_added_tokens(tmp_path / "model")
    model, tokenizer = mlx_mtp.load(str(folder), draft_vocab=100)
    assert {7, 4001} <= set(tokenizer.eos_token_ids)
    assert always_in(tokenizer, 4096) == ALWAYS
    assert model.drafting.lm_head.ids.tolist() == [*range(97), 4000, 4001, 4095]
    assert model.drafting.lm_head.ids.dtype == mx.uint32
    for size in (len(ALWAYS), len(ALWAYS) + 1, 4096):
        model, _ = mlx_mtp.load(str(folder), draft_vocab=size)
        assert model.drafting.lm_head.ids.size == size
        assert set(model.drafting.lm_head.ids.tolist()) >= ALWAYS
    with pytest.raises(ValueError, match="its 7 special and stop tokens are always included"):
        mlx_mtp.load(str(folder), draft_vocab=len(ALWAYS) - 1)


def test_given_ids_include_special_and_stop_tokens(tmp_path):
    folder = str(with_added_tokens(tmp_path / "model"))
    for ids in ([9, 3, 3, 50], (9, 3, 50), mx.array([9, 3, 50]), np.array([50, 9, 3])):
        model, _ = mlx_mtp.load(folder, draft_vocab=ids)
        assert model.drafting.lm_head.ids.tolist() == sorted({*ALWAYS, 3, 9, 50})


def with_added_tokens(folder):
    """The dense checkpoint (special tokens 0, 1, 2) with two added tokens, one of them special, and two stop tokens."""
    shutil.copytree(DATA / "dense", folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    form = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    vocab = tokenizer["model"]["vocab"]
    by_id = {i: token for token, i in vocab.items()}
    for i, special in ((4000, False), (4095, True)):
        tokenizer["added_tokens"].append({"id": i, "content": by_id[i], "special": special, **form})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 4001]}))
    return folder


def test_finds_the_list_beside_the_checkpoint(tmp_path):
    folder = shutil.copytree(DATA / "dense", tmp_path / "model")
    (folder / LIST_FILE).write_text(json.dumps({"vocab_size": 4096, "ids": [5, 9]}))
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"vocab_size": 4096, "ids": [6]}))

    def ids(draft_vocab=None):
        model, _ = mlx_mtp.load(str(folder), draft_vocab=draft_vocab)
        return None if model.drafting.lm_head is None else model.drafting.lm_head.ids.tolist()

    assert ids() == [0, 1, 2, 5, 9]
    assert ids(0) is None
    assert ids(4) == [0, 1, 2, 3]
    assert ids([4]) == [0, 1, 2, 4]
    assert ids(other) == ids(str(other)) == [0, 1, 2, 6]
    plain, _ = mlx_mtp.load(str(folder), mtp=False)
    assert type(plain).__module__ == "mlx_lm.models.qwen3_5"


# The corpus


def word_model(folder):
    """A checkpoint whose tokens are words: <|endoftext|> 0, then a to j, 1 to 10."""
    shutil.copytree(DATA / "moe35", folder)
    tokenizer = Tokenizer(
        models.WordLevel({"<|endoftext|>": 0, **{w: i for i, w in enumerate("abcdefghij", 1)}}, unk_token="j")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_ranks_a_corpus_by_frequency(tmp_path, capsys):
    folder = word_model(tmp_path / "model")
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    one.write_text("g g g c\nc h h b\n")
    two.write_text("g h\nc b c")
    # g 4, c 4, h 3, b 2, the others 0: ties are in the order of the vocabulary.
    _, tokenizer = mlx_lm.load(str(folder), lazy=True)
    counts = count_tokens(tokenizer, [one, two])
    assert counts == {7: 4, 3: 4, 8: 3, 2: 2}
    assert rank(counts, 11) == [3, 7, 8, 2, 0, 1, 4, 5, 6, 9, 10]
    sizes = {1: ([0], "0.00%"), 2: ([0, 3], "30.77%"), 4: ([0, 3, 7, 8], "84.62%"), 6: ([0, 1, 2, 3, 7, 8], "100.00%")}
    for size, (ids, share) in sizes.items():
        file = draft_vocab(str(folder), [one, str(two)], size)
        assert file == folder / LIST_FILE
        assert json.loads(file.read_text()) == {"vocab_size": 512, "ids": ids}
        assert f"{size} of 512 token ids, {share} of the 13 tokens of the corpus" in capsys.readouterr().out
        model, _ = mlx_mtp.load(str(folder))
        assert model.drafting.lm_head.ids.tolist() == ids


def test_counts_a_long_text_in_chunks_of_lines(tmp_path, monkeypatch):
    text = "".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(50))
    file = tmp_path / "text.py"
    file.write_text(text)
    pieces = []

    class Characters:
        def encode(self, piece, **kwargs):
            pieces.append(piece)
            return [ord(c) for c in piece]

    for chunk, n_pieces in ((1 << 20, 1), (100, 15)):
        monkeypatch.setattr("mlx_mtp.draft_vocab.CHUNK", chunk)
        pieces.clear()
        assert count_tokens(Characters(), [file, file]) == Counter(map(ord, 2 * text))
        assert "".join(pieces) == 2 * text
        assert all(piece.endswith("\n") for piece in pieces)
        assert len(pieces) == pytest.approx(2 * n_pieces, abs=6)


def test_command_writes_the_list_that_load_uses(tmp_path, capsys):
    folder = shutil.copytree(DATA / "dense", tmp_path / "model")
    corpus = tmp_path / "corpus.py"
    corpus.write_text("def read(path):\n    with open(path) as f:\n        return f.read()\n" * 2000)
    flags = ["--model", str(folder), "--corpus", str(corpus), "--size", "256"]
    status, _, err = run_command(main, capsys, *flags)
    assert (status, err) == (0, "")
    model, tokenizer = mlx_mtp.load(str(folder))
    assert model.drafting.lm_head.ids.size == 256
    assert set(tokenizer.encode("    return f.read()")) <= set(model.drafting.lm_head.ids.tolist())
    assert sorted(p.name for p in folder.iterdir()) == sorted(
        [*(p.name for p in (DATA / "dense").iterdir()), LIST_FILE]
    )


def test_failure_keeps_the_old_list(tmp_path, monkeypatch):
    folder = word_model(tmp_path / "model")
    good, bad = tmp_path / "good.txt", tmp_path / "bad.txt"
    good.write_text("a b")
    bad.write_bytes(b"a b \xff\xfe\n")
    file = draft_vocab(str(folder), [good], 2)
    before, names = file.read_bytes(), sorted(folder.iterdir())
    with pytest.raises(ValueError, match=r"bad\.txt is not UTF-8 text"):
        draft_vocab(str(folder), [good, bad], 3)

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space left"):
        draft_vocab(str(folder), [good], 3)
    assert file.read_bytes() == before
    assert sorted(folder.iterdir()) == names


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "MODEL", "--corpus", "none.txt", "--size", "5"], "none.txt"),
        (["--model", "MODEL", "--corpus", "EMPTY", "--size", "5"], "The corpus has no text"),
        (["--model", "MODEL", "--corpus", "GOOD", "--size", "0"], "--size must be 1 or more, not 0"),
        (
            ["--model", "MODEL", "--corpus", "GOOD", "--size", "513"],
            "this model has 512, and its 1 special and stop tokens",
        ),
        (["--model", "EMPTY", "--corpus", "GOOD"], "empty"),
        (["--model", "MODEL", "--corpus", "GOOD", "--size", "2", "--output", "no/folder/list.json"], "no/folder"),
    ],
)
def test_bad_input_is_one_line(flags, message, tmp_path, monkeypatch, capsys):
    word_model(tmp_path / "model")
    (tmp_path / "good.txt").write_text("a b")
    (tmp_path / "empty").write_text("")
    names = {"MODEL": tmp_path / "model", "GOOD": tmp_path / "good.txt", "EMPTY": tmp_path / "empty"}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert_refused(main, capsys, *(names.get(flag, flag) for flag in flags), message=message)
    assert not (tmp_path / "model" / LIST_FILE).exists()


# Errors of load


LOAD_ERRORS = [
    ({"draft_vocab": 513}, "draft vocabulary of 513 token ids is not possible: this model has 512"),
    ({"draft_vocab": -1}, "draft vocabulary of -1 token ids is not possible"),
    ({"draft_vocab": True}, "draft_vocab has no list of token ids"),
    ({"draft_vocab": []}, "draft_vocab has no list of token ids"),
    ({"draft_vocab": [1.5]}, "draft_vocab has no list of token ids"),
    ({"draft_vocab": [[1]]}, "draft_vocab has no list of token ids"),
    ({"draft_vocab": [3, 512]}, "draft_vocab has the token id 512, and this model has 512"),
    ({"draft_vocab": [-3]}, "draft_vocab has the token id -3"),
    ({"draft_vocab": "none.json"}, "There is no draft vocabulary none.json: write it with `mlx_mtp draft_vocab"),
    ({"mtp_bits": 7}, "mtp_bits is 7; MLX quantizes to 2, 3, 4, 5, 6, 8 bits"),
    ({"draft_head_bits": 16}, "draft_head_bits is 16; MLX quantizes to"),
    ({"mtp": False, "draft_vocab": 64}, "require the MTP head"),
    ({"mtp": False, "mtp_bits": 4}, "require the MTP head"),
    ({"mtp": False, "draft_head_bits": 4}, "require the MTP head"),
]


@pytest.mark.parametrize(("arguments", "message"), LOAD_ERRORS)
def test_load_rejects_bad_arguments(arguments, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message) as error:
        load("next", **arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not a draft vocabulary: write it with"),
        ("[1]", "is not a draft vocabulary"),
        ('{"ids": [1]}', "is not a draft vocabulary"),
        ('{"ids": [1], "vocab_size": 4096}', "is for a vocabulary of 4096 ids, and this model has 512: write it with"),
        ('{"ids": 1, "vocab_size": 512}', "has no list of token ids"),
        ('{"ids": [true], "vocab_size": 512}', "has no list of token ids"),
        ('{"ids": [600], "vocab_size": 512}', "has the token id 600, and this model has 512"),
    ],
)
def test_load_rejects_a_bad_list(text, message, tmp_path):
    folder = shutil.copytree(DATA / "next", tmp_path / "model")
    (folder / LIST_FILE).write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        mlx_mtp.load(str(folder))
    assert str(folder / LIST_FILE) in str(error.value)
    mlx_mtp.load(str(folder), draft_vocab=0)


def test_load_rejects_mtp_bits_for_a_quantized_head(tmp_path):
    mlx_mtp.convert(str(DATA / "dense"), str(tmp_path / "model"), quantize=True, mtp_bits=4, skip_check=True)
    with pytest.raises(ValueError, match="already quantized: mtp_bits requires one in 16 bits"):
        mlx_mtp.load(str(tmp_path / "model"), mtp_bits=4)


# The command line


def test_flags_of_generate_keep_the_text(monkeypatch, capsys):
    loaded = []

    def load(*args, **kwargs):
        loaded.append(mlx_mtp.load(*args, **kwargs))
        return loaded[-1]

    def run(*flags):
        common = ["--model", DATA / "dense", "--prompt", "def f(x):", "-m", 12, "--verbose", "False"]
        return run_command(generate.main, capsys, *common, *flags)

    monkeypatch.setattr(generate, "load", load)
    plain = run()
    assert plain[1].strip()
    assert run("--mtp") == plain
    assert run("--mtp", "--draft-vocab", "64", "--mtp-bits", "4", "--draft-head-bits", "4") == plain
    model = loaded[-1][0]
    assert model.drafting.lm_head.ids.tolist() == list(range(64))
    assert (model.drafting.lm_head.layers[0].bits, model.mtp.layers[0].mlp.up_proj.bits) == (4, 4)
    for flags in (["--draft-vocab", "64"], ["--mtp-bits", "4"], ["--mtp", "--draft-vocab", "none.json"]):
        status, _, err = run(*flags)
        assert (status, err.count("\n")) == (2, 1)


@pytest.mark.parametrize("sampled", [False, True])
def test_drafts_come_from_the_vocabulary_and_the_text(sampled):
    model, n = tiny_model("qwen3_5"), 12
    prompt = mx.array([3, 21, 4, 1, 30])
    model.drafting.lm_head = DraftLMHead(model.output_layer, list(range(n)))
    drafted = []
    draft_logits = model.draft_logits

    class Watched:
        def __getattr__(self, name):
            return getattr(model, name)

        def __call__(self, inputs, **kwargs):
            drafted.extend(inputs[0, 1:].tolist())
            return model(inputs, **kwargs)

    assert draft_logits(mx.zeros((1, 1, 64))).shape == (1, 1, n)
    mx.random.seed(1)
    sampler = make_sampler(temp=1.0) if sampled else None
    steps = mtp_generate_step(
        prompt, Watched(), max_tokens=40, num_draft_tokens=3, sampler=sampler, prefill_step_size=1
    )
    tokens = [token for token, _, _ in steps]
    assert drafted
    assert set(drafted) <= {*range(n), *prompt.tolist(), *tokens}
    assert max(drafted) >= n
    if not sampled:
        assert tokens == plain(prompt, model, max_tokens=40)
