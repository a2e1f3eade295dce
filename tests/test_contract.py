"""What the package relies on in mlx-lm. A failure here says what changed upstream: fix that first.

``test_layers.py`` compares the attention layer with mlx-lm's, and the rollback in ``test_prompt_cache.py`` the recurrent layer.
"""

import ast
import inspect
import re
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm import sample_utils, server, utils
from mlx_lm.models import cache, gated_delta, qwen3_5, qwen3_next
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import glm47, json_tools, qwen3_coder
from mlx_lm.tuner import callbacks, trainer
from tokenizers import Tokenizer

import mlx_mtp
from mlx_mtp.checkpoint import DEMO
from mlx_mtp.core.caches import rows

# As attributes of mlx_lm these two are functions.
convert, generate = sys.modules["mlx_lm.convert"], sys.modules["mlx_lm.generate"]

SIGNATURES = [
    (utils.load, "path_or_hf_repo tokenizer_config model_config adapter_path lazy return_config revision trust_remote_code"),
    (convert.convert, "hf_path mlx_path quantize q_group_size q_bits q_mode dtype upload_repo revision dequantize "
                      "quant_predicate trust_remote_code"),
    (generate.generate_step, "prompt model stream max_tokens sampler logits_processors max_kv_size prompt_cache "
                             "prefill_step_size kv_bits kv_group_size quantized_kv_start prompt_progress_callback "
                             "input_embeddings"),
    (generate.stream_generate, "model tokenizer prompt max_tokens draft_model stream kwargs"),
    (generate.generate, "model tokenizer prompt verbose kwargs"),
    (generate.maybe_quantize_kv_cache, "prompt_cache quantized_kv_start kv_group_size kv_bits"),
    (sample_utils.make_sampler, "temp top_p min_p min_tokens_to_keep top_k xtc_probability xtc_threshold "
                                "xtc_special_tokens"),
    (sample_utils.greedy_sampler, "logprobs"),
    (sample_utils.apply_xtc, "logits xtc_probability xtc_threshold xtc_special_tokens"),
    (gated_delta.gated_delta_kernel, "q k v g beta state mask"),
    (gated_delta.gated_delta_ops, "q k v g beta state mask"),
    (trainer.train, "model optimizer train_dataset val_dataset args loss iterate_batches training_callback"),
    (callbacks.TrainingCallback.on_val_loss_report, "self val_info"),
    (server.get_system_fingerprint, ""),
    (sample_utils.make_logits_processors, "logit_bias repetition_penalty repetition_context_size presence_penalty "
                                          "presence_context_size frequency_penalty frequency_context_size"),
    (qwen3_coder.parse_tool_call, "model_output tools"),
    (json_tools.parse_tool_call, "text tools"),
    (glm47.parse_tool_call, "text tools"),
    (generate.BatchGenerator.insert_segments, "self segments max_tokens caches all_tokens samplers logits_processors "
                                              "stop_sequences"),
    (generate.BatchGenerator.remove, "self uids return_prompt_caches"),
    (generate.BatchGenerator.extract_cache, "self uids"),
    (generate.BatchGenerator.next, "self"),
    (generate.BatchGenerator.stats, "self"),
    (generate.batch_generate, "model tokenizer prompts prompt_caches max_tokens verbose return_prompt_caches "
                              "return_token_ids return_logprobs kwargs"),
    (generate.StopSequences.__init__, "self stop_sequences"),
    (generate.StopSequences.Matcher.advance, "self token"),
    (qwen3_5.DecoderLayer, "args layer_idx"),
    (qwen3_next.Qwen3NextDecoderLayer, "args layer_idx"),
    (qwen3_5.TextModel.__call__, "self inputs cache input_embeddings"),
    (qwen3_5.Model.__call__, "self inputs cache input_embeddings"),
    (qwen3_next.Model.__call__, "self inputs cache"),
    (qwen3_5.GatedDeltaNet.__call__, "self inputs mask cache"),
    (qwen3_next.Qwen3NextGatedDeltaNet.__call__, "self inputs mask cache"),
    (qwen3_next.Qwen3NextAttention.__call__, "self x mask cache"),
    (qwen3_next.Qwen3NextGatedDeltaNet.fix_query_key_value_ordering, "self mixed_qkvz mixed_ba"),
    # Dataclasses, which have the fields that they are made of.
    (generate.GenerationResponse, "text token logprobs from_draft prompt_tokens prompt_tps generation_tokens "
                                  "generation_tps peak_memory finish_reason"),
    (server.GenerationArguments, "model sampling logits stop_words max_tokens num_draft_tokens logprobs top_logprobs "
                                 "seed chat_template_kwargs"),
    (server.LogitsProcessorArguments, "logit_bias repetition_penalty repetition_context_size presence_penalty "
                                      "presence_context_size frequency_penalty frequency_context_size"),
    (generate.GenerationBatch.Response, "uid token logprobs finish_reason prompt_cache all_tokens"),
    (generate.PromptProcessingBatch.Response, "uid progress end_of_segment end_of_prompt"),
    (generate.BatchResponse, "texts stats caches token_ids logprobs"),
    (generate.BatchCounters, "prompt_tokens prompt_time generation_tokens generation_steps decode_time"),
]  # fmt: skip


def test_signatures():
    for function, names in SIGNATURES:
        now = " ".join(inspect.signature(function).parameters)
        assert now == names, f"mlx-lm's {function.__module__}.{function.__qualname__} now takes ({now}), not ({names})"


def test_calls():
    """Each call of what our source imports from mlx-lm fits its parameters; ``SIGNATURES`` has the functions without a call."""
    known, functions = {function for function, _ in SIGNATURES}, set()
    for file in Path(mlx_mtp.__file__).parent.rglob("*.py"):
        nodes, names = [*ast.walk(ast.parse(file.read_text()))], {}
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mlx_lm"):
                exec(ast.unparse(node), names)
        functions.update(filter(inspect.isfunction, names.values()))
        for call in (node for node in nodes if isinstance(node, ast.Call)):
            name, keywords = ast.unparse(call.func), {k.arg: k for k in call.keywords}
            if name.partition(".")[0] in names and "(" not in name:
                known.add(function := eval(name, names))
                signature, has_more = inspect.signature(function), keywords.pop(None, None)
                try:
                    if has_more or any(isinstance(a, ast.Starred) for a in call.args):
                        signature.bind_partial(**keywords)
                    else:
                        signature.bind(*call.args, **keywords)
                except TypeError as e:
                    pytest.fail(f"{file}, line {call.lineno}: mlx-lm's {name} now takes {signature}: {e}")
    assert utils.load_model in functions
    bare = sorted(f.__qualname__ for f in functions - known)
    assert not bare, f"SIGNATURES does not say what is relied on of mlx-lm's {', '.join(bare)}"


def test_tokenizers(demo):
    _, tokenizer = demo
    for name in ["add_eos_token", "all_special_ids", "bos_token", "decode", "get_added_vocab", "has_chat_template"]:
        assert hasattr(tokenizer, name), f"mlx-lm's tokenizers have lost {name}"
    stops = set(tokenizer.eos_token_ids)
    wrapped = TokenizerWrapper(tokenizer._tokenizer, eos_token_ids=list(stops))
    wrapped.add_eos_token("7")
    assert set(wrapped.eos_token_ids) == stops | {7}, "mlx-lm's add_eos_token takes a token in another form"
    assert set(tokenizer.eos_token_ids) == stops, "mlx-lm's tokenizers share their stop tokens"
    detokenizer = tokenizer.detokenizer
    detokenizer.reset()
    text = ""
    for token in tokenizer.encode("def f(x):"):
        detokenizer.add_token(token)
        text += detokenizer.last_segment
    detokenizer.finalize()
    assert text + detokenizer.last_segment == "def f(x):", "mlx-lm's detokenizer gives its text in another way"


def test_the_demo_is_split_as_it_was_trained(demo):
    """transformers gives this model type Qwen's splitting, whatever tokenizer.json says."""
    trained = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    for text in (inspect.getsource(re), "x = 1234\n\n\n    # caf\u00e9, cafe\u0301's\r\n\t\treturn\n"):
        assert demo[1].encode(text) == trained.encode(text).ids


def test_constants():
    assert generate.DEFAULT_QUANTIZED_KV_START == 5000, "mlx-lm's quantized_kv_start has another default"
    chunk = inspect.signature(generate.generate_step).parameters["prefill_step_size"].default
    assert chunk == rows.EVERY, "mlx-lm quantizes keys and values after other chunks"
    assert "model*.safetensors" in utils.DEFAULT_ALLOW_PATTERNS, "mlx-lm downloads files of weights by another pattern"
    assert isinstance(generate.generation_stream, mx.Stream | mx.ThreadLocalStream), "mlx-lm generates on no stream"
    assert set(convert.MODEL_CONVERSION_DTYPES) == {"float16", "bfloat16", "float32"}, "mlx-lm casts to other dtypes"


def test_caches():
    arrays = cache.ArraysCache(size=2)
    assert arrays.cache == [None, None], "mlx-lm's ArraysCache keeps its arrays elsewhere than in .cache"
    assert arrays.state == ([None, None], None, None), "the state of mlx-lm's ArraysCache has another form"
    assert (arrays.lengths, arrays.left_padding) == (None, None), "mlx-lm's ArraysCache tells of padding in another way"
    assert not arrays.is_trimmable(), "mlx-lm's ArraysCache can now be trimmed"
    assert arrays.empty(), "mlx-lm's ArraysCache tells otherwise that it is empty"
    arrays[0], arrays[1] = mx.zeros((1, 3, 4)), mx.ones((1, 2))
    again = cache.ArraysCache.from_state(arrays.state)
    assert not again.empty(), "mlx-lm's ArraysCache tells otherwise that it is empty"
    assert mx.array_equal(again[1], arrays[1]), "mlx-lm's ArraysCache comes from its state in another way"
    keys = mx.zeros((1, 1, 5, 32))
    for kv in (cache.KVCache(), cache.QuantizedKVCache(group_size=32, bits=8)):
        kv.update_and_fetch(keys, keys)
        assert kv.trim(2) == 2, f"mlx-lm's {type(kv).__name__} is trimmed in another way"
        assert kv.offset == 3, f"mlx-lm's {type(kv).__name__} does not count its rows in .offset"
    assert (kv.group_size, kv.bits) == (32, 8), "mlx-lm's QuantizedKVCache has lost group_size or bits"
    assert hasattr(cache.KVCache(), "to_quantized"), "mlx-lm's KVCache is quantized in another way"
