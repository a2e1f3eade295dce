"""Cheaper drafts: their output layer has the model's rows for the draft vocabulary, and verification is unchanged."""

import json
from collections import Counter

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.tuner.lora import LoRALinear
from tokenizers import Tokenizer, models, pre_tokenizers

import mlx_mtp
from mlx_mtp import make_sampler, mtp_generate_step
from mlx_mtp.checkpoint.load import DEMO
from mlx_mtp.checkpoint.vocabulary import LIST_FILE, always_in, cheapen_drafts
from mlx_mtp.draft_vocab import count_tokens, draft_vocab, main, rank
from mlx_mtp.generate import __main__ as generate
from mlx_mtp.layers.draft_lm_head import BITS, DraftLMHead
from tests.support.checkpoints import converted, copied, differing, parameters
from tests.support.commands import refusal, run_command
from tests.support.decoding import plain
from tests.support.models import DATA, arrays_equal, tiny_model

CHECKPOINTS = ["dense", "moe35", "next"]  # the first ties its embeddings
FORMATS = {
    "bfloat16": None,
    "float32": None,
    "4 bit": {"group_size": 64, "bits": 4},
    "8 bit": {"group_size": 64, "bits": 8},
    "4 bit float32": {"group_size": 32, "bits": 4},
    "mxfp4": {"mode": "mxfp4"},
}


def load(name, dtype=None, **options):
    model, tokenizer = mlx_mtp.load(str(DATA / name), **options)
    if dtype is not None:
        model.set_dtype(dtype)
    return model, tokenizer


def set_output_layer(model, layer):
    text = getattr(model, "language_model", model)
    if text.args.tie_word_embeddings:
        text.model.embed_tokens = layer
    else:
        text.lm_head = layer


def hidden_states(model, n_tokens):
    norm = model.model.norm.weight
    return mx.random.normal((1, n_tokens, norm.size), key=mx.random.key(0)).astype(norm.dtype)


def ids_of(folder, **options):
    """The draft vocabulary of a model."""
    head = mlx_mtp.load(str(folder), **options)[0].drafting.lm_head
    return None if head is None else head.ids.tolist()


# The layer


@pytest.mark.parametrize("name", ["dense", "next"])
@pytest.mark.parametrize("form", FORMATS)
def test_draft_logits_are_the_models_rows(name, form):
    model, tokenizer = load(name, mx.float32 if "float32" in form else None)
    if FORMATS[form]:
        set_output_layer(model, model.output_layer.to_quantized(**FORMATS[form]))
    size = model.output_layer.weight.shape[0]
    ids = {0, *range(3, size, 5), size - 1}
    cheapen_drafts(model, tokenizer, DEMO, list(ids), None, None)
    assert model.drafting.lm_head.ids.tolist() == sorted(ids | always_in(tokenizer, size))
    for n_tokens in (1, 2, 5):
        logits = model.draft_logits(hidden := hidden_states(model, n_tokens))
        assert arrays_equal(logits, model.logits(hidden)[..., model.drafting.lm_head.ids])

    # Those of the text are added.
    head = DraftLMHead(model.output_layer, [0, 5, 9])
    more = head.with_tokens([9, 300, 2, 300, 0])
    most = more.with_tokens([2, 7]).with_tokens([300])
    assert more.with_tokens([300, 9]) is more
    hidden = hidden_states(model, 2)
    for h, ids in ((head, [0, 5, 9]), (more, [0, 5, 9, 300, 2]), (most, [0, 5, 9, 300, 2, 7])):
        assert (h.ids.tolist(), h.ids.dtype) == (ids, mx.uint32)
        assert arrays_equal(h(hidden), model.logits(hidden)[..., h.ids])
    whole = DraftLMHead(model.output_layer, None)
    assert whole.with_tokens([300]) is whole


def test_quantizes_the_added_tokens():
    model, _ = load("dense")
    hidden = hidden_states(model, 2)
    one_by_one = DraftLMHead(model.output_layer, [0, 5, 9], 4).with_tokens([300]).with_tokens([12])
    at_once = DraftLMHead(model.output_layer, [0, 5, 9, 12, 300], 4)
    assert arrays_equal(one_by_one(hidden)[..., mx.argsort(one_by_one.ids)], at_once(hidden))
    assert one_by_one.layers[1].bits == 4


def in_bits(weight, bits):
    """The weights that are left of those."""
    return mx.dequantize(*mx.quantize(weight, 64, bits), 64, bits)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_draft_head_bits_quantizes_a_copy(name):
    model, tokenizer = load(name, mx.float32)
    weight, hidden = model.output_layer.weight, hidden_states(model, 2)
    for bits in BITS:
        cheapen_drafts(model, tokenizer, DEMO, [0, 1, 2, 5], None, bits)
        rows = in_bits(weight[model.drafting.lm_head.ids], bits)
        assert mx.allclose(model.draft_logits(hidden), hidden @ rows.T, atol=1e-4)
        cheapen_drafts(model, tokenizer, DEMO, 0, None, bits)
        assert model.drafting.lm_head.ids is None
        assert model.draft_logits(hidden).shape == model.logits(hidden).shape
        rows = DraftLMHead(model.output_layer, [0, 1, 2, 5], bits)
        assert arrays_equal(model.draft_logits(hidden)[..., rows.ids], rows(hidden))
    assert model.output_layer.weight is weight


def test_requantizes_a_quantized_output_layer():
    model, tokenizer = load("dense", mx.float32)
    layer = model.output_layer.to_quantized(group_size=64, bits=8)
    set_output_layer(model, layer)
    cheapen_drafts(model, tokenizer, DEMO, None, None, 4)
    weight, hidden = mx.dequantize(layer.weight, layer.scales, layer.biases, 64, 8), hidden_states(model, 2)
    assert mx.allclose(model.draft_logits(hidden), hidden @ in_bits(weight, 4).T, atol=1e-4)
    of_4_bits = model.drafting.lm_head.layers[0]
    for own, n, bits in ((layer, 8, 8), (of_4_bits, 4, 6)):
        set_output_layer(model, own)
        with pytest.raises(ValueError, match=f"draft_head_bits must be less than the {n} bits"):
            cheapen_drafts(model, tokenizer, DEMO, None, None, bits)


def test_includes_an_adapter_of_the_output_layer():
    model, _ = load("next", mx.float32)
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
    before = parameters(model)
    cheapen_drafts(model, tokenizer, DEMO, None, 4, None)
    quantized = {path for path, m in model.mtp.named_modules() if hasattr(m, "bits")}
    mlps = ["mlp"] if name == "dense" else ["mlp.shared_expert", "mlp.switch_mlp"]
    layers = [f"self_attn.{p}_proj" for p in "qkvo"]
    layers += [f"{mlp}.{p}_proj" for mlp in mlps for p in ("gate", "up", "down")]
    assert quantized == {f"layers.0.{layer}" for layer in layers}
    changed = {path.partition("mtp.")[2].rpartition(".")[0] for path in differing(before, parameters(model))}
    assert changed == quantized


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_8_bit_head_is_nearly_the_same(name):
    model, tokenizer = load(name, mx.float32)
    hidden, embeddings = hidden_states(model, 6), model.model.embed_tokens(mx.arange(6)[None])
    full = model.mtp(embeddings, hidden)
    cheapen_drafts(model, tokenizer, DEMO, None, 8, None)
    error = mx.linalg.norm(model.mtp(embeddings, hidden) - full) / mx.linalg.norm(full)
    assert 0 < error.item() < 0.05


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_verification_is_unchanged(name):
    (model, tokenizer), (other, _) = load(name, mx.float32), load(name, mx.float32)
    prompt, hidden = mx.array([[5, 40, 3, 300, 12, 7, 9]]), hidden_states(model, 3)
    before = model(prompt, return_hidden=True)
    assert model.drafting.lm_head is None
    assert arrays_equal(model.draft_logits(hidden), model.logits(hidden))
    cheapen_drafts(model, tokenizer, DEMO, 64, None, 4)
    assert model.drafting.lm_head.ids.size == 64
    # The drafts' output layer is no parameter.
    assert arrays_equal(model.parameters(), other.parameters())
    names = [[(path, type(m).__name__) for path, m in m.named_modules()] for m in (model, other)]
    assert names[0] == names[1]
    cheapen_drafts(model, tokenizer, DEMO, 64, 4, 4)
    assert arrays_equal(model(prompt, return_hidden=True), before)


# The ids


def test_special_and_stop_tokens_are_included(tmp_path):
    """Of a checkpoint (special tokens 0, 1, 2) with two added tokens, one of them special, and two stop tokens."""
    folder, always = copied(tmp_path), {0, 1, 2, 7, 4000, 4001, 4095}
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    form = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    by_id = {i: token for token, i in tokenizer["model"]["vocab"].items()}
    for i, special in ((4000, False), (4095, True)):
        tokenizer["added_tokens"].append({"id": i, "content": by_id[i], "special": special, **form})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 4001]}))

    model, tokenizer = mlx_mtp.load(str(folder), draft_vocab=100)
    assert {7, 4001} <= set(tokenizer.eos_token_ids)
    assert always_in(tokenizer, 4096) == always
    assert model.drafting.lm_head.ids.tolist() == [*range(97), 4000, 4001, 4095]
    assert model.drafting.lm_head.ids.dtype == mx.uint32
    for size in (len(always), len(always) + 1, 4096):
        ids = ids_of(folder, draft_vocab=size)
        assert (len(ids), always - {*ids}) == (size, set())
    with pytest.raises(ValueError, match="its 7 special and stop tokens are always included"):
        ids_of(folder, draft_vocab=len(always) - 1)
    for given in ([9, 3, 3, 50], (9, 3, 50), mx.array([9, 3, 50]), np.array([50, 9, 3])):
        assert ids_of(folder, draft_vocab=given) == sorted({*always, 3, 9, 50})


def test_finds_the_list_beside_the_checkpoint(tmp_path):
    folder, other = copied(tmp_path), tmp_path / "other.json"
    for file, ids in ((folder / LIST_FILE, [5, 9]), (other, [6])):
        file.write_text(json.dumps({"vocab_size": 4096, "ids": ids}))
    expected = [(None, [0, 1, 2, 5, 9]), (0, None), (4, [0, 1, 2, 3]), ([4], [0, 1, 2, 4])]
    for given, ids in [*expected, (other, [0, 1, 2, 6]), (str(other), [0, 1, 2, 6])]:
        assert ids_of(folder, draft_vocab=given) == ids
    plain, _ = mlx_mtp.load(str(folder), mtp=False)
    assert type(plain).__module__ == "mlx_lm.models.qwen3_5"


# The corpus


@pytest.fixture
def words(tmp_path):
    """A checkpoint whose tokens are words: <|endoftext|> 0, then a to j, 1 to 10."""
    folder = copied(tmp_path, "moe35")
    vocab = {"<|endoftext|>": 0, **{w: i for i, w in enumerate("abcdefghij", 1)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="j"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_ranks_a_corpus_by_frequency(words, tmp_path, capsys):
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    one.write_text("g g g c\nc h h b\n")
    two.write_text("g h\nc b c")
    # g 4, c 4, h 3, b 2, the others 0: ties are in the order of the vocabulary.
    counts = count_tokens(mlx_lm.load(str(words), lazy=True)[1], [one, two])
    assert counts == {7: 4, 3: 4, 8: 3, 2: 2}
    assert rank(counts, 11) == [3, 7, 8, 2, 0, 1, 4, 5, 6, 9, 10]
    sizes = {1: ([0], "0.00%"), 2: ([0, 3], "30.77%"), 4: ([0, 3, 7, 8], "84.62%"), 6: ([0, 1, 2, 3, 7, 8], "100.00%")}
    for size, (ids, share) in sizes.items():
        assert (file := draft_vocab(str(words), [one, str(two)], size)) == words / LIST_FILE
        assert json.loads(file.read_text()) == {"vocab_size": 512, "ids": ids}
        assert f"{size} of 512 token ids, {share} of the 13 tokens of the corpus" in capsys.readouterr().out
        assert ids_of(words) == ids


def test_counts_a_long_text_in_chunks_of_lines(tmp_path, monkeypatch):
    text = "".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(50))
    (file := tmp_path / "text.py").write_text(text)

    class Characters:
        def encode(self, piece, **kwargs):
            pieces.append(piece)
            return [ord(c) for c in piece]

    for chunk, n_pieces in ((1 << 20, 1), (100, 15)):
        monkeypatch.setattr("mlx_mtp.draft_vocab.CHUNK", chunk)
        pieces = []
        assert count_tokens(Characters(), [file, file]) == Counter(map(ord, 2 * text))
        assert "".join(pieces) == 2 * text
        assert all(piece.endswith("\n") for piece in pieces)
        assert len(pieces) == pytest.approx(2 * n_pieces, abs=6)


def test_command_writes_the_list_that_load_uses(tmp_path, capsys):
    folder, corpus = copied(tmp_path), tmp_path / "corpus.py"
    before = {*folder.iterdir()}
    corpus.write_text("def read(path):\n    with open(path) as f:\n        return f.read()\n" * 2000)
    status, _, err = run_command(main, capsys, "--model", folder, "--corpus", corpus, "--size", 256)
    assert (status, err) == (0, "")
    model, tokenizer = mlx_mtp.load(str(folder))
    assert model.drafting.lm_head.ids.size == 256
    assert set(tokenizer.encode("    return f.read()")) <= set(model.drafting.lm_head.ids.tolist())
    assert {*folder.iterdir()} == before | {folder / LIST_FILE}


def test_failure_keeps_the_old_list(words, tmp_path, monkeypatch):
    good, bad = tmp_path / "good.txt", tmp_path / "bad.txt"
    good.write_text("a b")
    bad.write_bytes(b"a b \xff\xfe\n")
    file = draft_vocab(str(words), [good], 2)
    before, names = file.read_bytes(), sorted(words.iterdir())
    with pytest.raises(ValueError, match=r"bad\.txt is not UTF-8 text"):
        draft_vocab(str(words), [good, bad], 3)

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space left"):
        draft_vocab(str(words), [good], 3)
    assert (file.read_bytes(), sorted(words.iterdir())) == (before, names)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--corpus none.txt --size 5", "none.txt"),
        ("--corpus empty --size 5", "The corpus has no text"),
        ("--corpus good --size 0", "--size must be 1 or more, not 0"),
        ("--corpus good --size 513", "this model has 512, and its 1 special and stop tokens"),
        ("--corpus good --model empty", "empty"),
        ("--corpus good --size 2 --output no/folder/list.json", "no/folder"),
    ],
)
def test_bad_input_is_one_line(flags, message, words, tmp_path, monkeypatch, capsys):
    (tmp_path / "good").write_text("a b")
    (tmp_path / "empty").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert message in refusal(main, capsys, "--model", words, *flags.split())
    assert not (words / LIST_FILE).exists()


# Errors of load


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_vocab": 513}, "draft vocabulary of 513 token ids is not possible: this model has 512"),
        ({"draft_vocab": -1}, "draft vocabulary of -1 token ids is not possible"),
        *(({"draft_vocab": x}, "draft_vocab has no list of token ids") for x in (True, [], [1.5], [[1]])),
        ({"draft_vocab": [3, 512]}, "draft_vocab has the token id 512, and this model has 512"),
        ({"draft_vocab": [-3]}, "draft_vocab has the token id -3"),
        ({"draft_vocab": "none.json"}, "There is no draft vocabulary none.json: write it with `mlx_mtp draft_vocab"),
        ({"mtp_bits": 7}, "mtp_bits is 7; MLX quantizes to 2, 3, 4, 5, 6, 8 bits"),
        ({"draft_head_bits": 16}, "draft_head_bits is 16; MLX quantizes to"),
        *(({"mtp": False, n: 64}, "require the MTP head") for n in ("draft_vocab", "mtp_bits", "draft_head_bits")),
    ],
    ids=str,
)
def test_load_rejects_bad_arguments(options, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message) as error:
        load("next", **options)
    assert "\n" not in str(error.value)


def test_load_rejects_a_bad_list(tmp_path):
    folder = copied(tmp_path, "next")
    for text, message in [
        ("{", "is not a draft vocabulary: write it with"),
        ("[1]", "is not a draft vocabulary"),
        ('{"ids": [1]}', "is not a draft vocabulary"),
        ('{"ids": [1], "vocab_size": 9}', "is for a vocabulary of 9 ids, and this model has 512: write it with"),
        ('{"ids": 1, "vocab_size": 512}', "has no list of token ids"),
        ('{"ids": [true], "vocab_size": 512}', "has no list of token ids"),
        ('{"ids": [600], "vocab_size": 512}', "has the token id 600, and this model has 512"),
    ]:
        (folder / LIST_FILE).write_text(text)
        with pytest.raises(ValueError, match=message) as error:
            ids_of(folder)
        assert str(folder / LIST_FILE) in str(error.value)
        assert ids_of(folder, draft_vocab=0) is None


def test_load_rejects_mtp_bits_for_a_quantized_head(tmp_path):
    folder = converted(DATA / "dense", tmp_path / "model", quantize=True, mtp_bits=4, skip_check=True)
    with pytest.raises(ValueError, match="already quantized: mtp_bits requires one in 16 bits"):
        mlx_mtp.load(str(folder), mtp_bits=4)


# The command line


def test_flags_of_generate_keep_the_text(monkeypatch, capsys):
    loaded = []

    def load(*args, **kwargs):
        loaded.append(mlx_mtp.load(*args, **kwargs))
        return loaded[-1]

    common = ["--model", DATA / "dense", "--prompt", "def f(x):", "-m", 12, "--verbose", "False"]
    monkeypatch.setattr(generate, "load", load)
    plain = run_command(generate.main, capsys, *common)
    assert plain[1].strip()
    cheaper = ["--draft-vocab", "64", "--mtp-bits", "4", "--draft-head-bits", "4"]
    for flags in ([], cheaper):
        assert run_command(generate.main, capsys, *common, "--mtp", *flags) == plain
    model = loaded[-1][0]
    assert model.drafting.lm_head.ids.tolist() == list(range(64))
    assert (model.drafting.lm_head.layers[0].bits, model.mtp.layers[0].mlp.up_proj.bits) == (4, 4)
    for flags in (["--draft-vocab", "64"], ["--mtp-bits", "4"], ["--mtp", "--draft-vocab", "none.json"]):
        assert refusal(generate.main, capsys, *common, *flags)


@pytest.mark.parametrize("sampled", [False, True])
def test_drafts_come_from_the_vocabulary_and_the_text(sampled):
    model, n, drafted = tiny_model("qwen3_5"), 12, []
    prompt = mx.array([3, 21, 4, 1, 30])
    model.drafting.lm_head = DraftLMHead(model.output_layer, list(range(n)))
    assert model.draft_logits(mx.zeros((1, 1, 64))).shape == (1, 1, n)

    class Watched:
        def __getattr__(self, name):
            return getattr(model, name)

        def __call__(self, inputs, **kwargs):
            drafted.extend(inputs[0, 1:].tolist())
            return model(inputs, **kwargs)

    mx.random.seed(1)
    options = {"sampler": make_sampler(temp=1.0) if sampled else None, "num_draft_tokens": 3, "prefill_step_size": 1}
    tokens = [token for token, *_ in mtp_generate_step(prompt, Watched(), max_tokens=40, **options)]
    assert drafted
    assert set(drafted) <= {*range(n), *prompt.tolist(), *tokens}
    assert max(drafted) >= n
    if not sampled:
        assert tokens == plain(prompt, model, max_tokens=40)
