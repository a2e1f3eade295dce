"""A family of its own, of attention alone: mlx-lm's Qwen3 with a head of random weights. Nothing else names it."""

from dataclasses import dataclass

import mlx.core as mx
import mlx_lm
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import qwen3 as stock

from mlx_mtp import PromptStore, batch_generate, load, make_prompt_cache
from mlx_mtp.checkpoint.checks import self_test
from mlx_mtp.core import models
from mlx_mtp.core.layers.attention import AttentionLayer
from mlx_mtp.core.models.family import Family
from mlx_mtp.core.models.mixin import MTPTextModel
from mlx_mtp.fit.texts import Document, FitOptions
from mlx_mtp.fit.training import DraftLoss, make_trainable, record, train_head
from tests.support.checkpoints import write
from tests.support.decoding import PROMPT, mtp, plain
from tests.support.models import uncompiled
from tests.support.prompt_store import read


@dataclass
class ModelArgs(stock.ModelArgs):
    mtp_num_hidden_layers: int = 0


class Layer(AttentionLayer, stock.TransformerBlock):
    def __init__(self, args: ModelArgs, layer_idx: int):
        super().__init__(args)
        self.head_dim = args.head_dim


FAMILY = Family(text_args=ModelArgs, attention=Layer, no_images="A model of type qwen3 takes text only.")


class Model(MTPTextModel, stock.Model):
    family = FAMILY


CONFIG = {
    "model_type": "qwen3", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "rope_theta": 10000.0, "max_position_embeddings": 512,
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A checkpoint with a head and one without."""
    model = Model(ModelArgs.from_dict(CONFIG | {"mtp_num_hidden_layers": 1}))
    keys = iter(mx.random.split(mx.random.key(0), 100))
    noise = tree_map(lambda p: mx.random.normal(p.shape, key=next(keys)) * p.shape[-1] ** -0.3, model.parameters())
    weights = dict(tree_flatten(noise))
    folder = tmp_path_factory.mktemp("family")
    backbone = {name: w for name, w in weights.items() if not name.startswith("mtp.")}
    return write(folder / "whole", CONFIG, weights), write(folder / "headless", CONFIG, backbone)


@pytest.fixture
def loaded(folders, monkeypatch, equal_steps):
    monkeypatch.setitem(models.MODULES, "qwen3", __name__)
    return load(str(folders[0]))


def test_texts_are_those_of_mlx_lm(loaded, folders):
    """Alone, in rows, on a prompt cache and on a prompt store's."""
    model, tokenizer = loaded
    stock_model, _ = mlx_lm.load(str(folders[1]))
    text = plain(PROMPT, stock_model, max_tokens=24)
    for k in (0, 1, 3, "auto"):
        cache = make_prompt_cache(model)
        assert mtp(PROMPT, model, max_tokens=12, num_draft_tokens=k, prompt_cache=cache) == text[:12]
        assert mtp(text[12:13], model, max_tokens=11, num_draft_tokens=k, prompt_cache=cache) == text[13:]
    prompts = [PROMPT.tolist(), PROMPT.tolist()[:4]]
    both = batch_generate(model, tokenizer, prompts, max_tokens=12, num_draft_tokens=2, return_token_ids=True)
    assert both.token_ids == [text[:12], plain(prompts[1], stock_model, max_tokens=12)]
    store = PromptStore(model, 1 << 30)
    read(model, PROMPT.tolist(), (4, 8), store)
    stored, n, _ = store.fetch(PROMPT.tolist()[:-1])
    assert (n, mtp(PROMPT[n:], model, max_tokens=12, num_draft_tokens=3, prompt_cache=stored)) == (8, text[:12])


def test_the_device_is_tested(loaded):
    result = self_test.run(loaded[0])
    assert (result.wrong, result.recurrence, len(result.seconds) > 1) == ({}, {}, True)


def test_the_head_is_fitted(loaded, tmp_path):
    model, _ = loaded
    texts = [Document(str(i), [(7 * i + j) % 512 for j in range(24)], 4) for i in range(8)]
    parts = [record(model, part, tmp_path, str(len(part)), 4, 64) for part in (texts[:6], texts[6:])]
    make_trainable(model.mtp)
    loss = DraftLoss(model.model.embed_tokens, model.output_layer, 2)
    with uncompiled():
        best = train_head(model.mtp, loss, *parts, FitOptions(iters=8, learning_rate=1e-2, steps_per_eval=4))
    assert min(best.losses) < best.losses[0]


def test_a_checkpoint_without_a_head_loads_as_in_mlx_lm(loaded, folders, caplog):
    model, _ = load(str(folders[1]))
    assert "generates without drafts" in caplog.text
    assert plain(PROMPT, model, max_tokens=8) == mtp(PROMPT, loaded[0], max_tokens=8)
