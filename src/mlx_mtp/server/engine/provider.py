"""The models that a server may load, and the loaded one."""

import gc
import logging
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.server import ModelDescription

from ...checkpoint.config import context_length_of
from ...checkpoint.generation_config import sampling_defaults
from ...checkpoint.load import load
from ..options import Options
from ..request import ApiError, ModelKey
from .encode import BoundedTokenizer

MAX_TOKENIZERS = 8
DEFAULT = "default_model"  # mlx-lm's name for the model of --model


class ModelProvider:
    """Loads one of the served models at a time, with its MTP head if the server drafts.

    Tokenizers stay loaded, so that a prompt can be tokenized while another model is loaded.
    """

    def __init__(self, options: Options):
        self.options = options
        self.default: ModelKey = options.model, options.adapter_path
        folder = Path(options.model)
        self.name = options.served_model_name or (folder.resolve().name if folder.is_dir() else options.model)
        self.served = [self.name, *options.serve_model]
        self.key: ModelKey | None = None  # the loaded model's
        self.model: Any = None
        self.tokenizer: Any = None
        self.tokenizers: dict[ModelKey, BoundedTokenizer] = {}

    def resolve(self, asked: ModelDescription) -> ModelKey:
        """The model of a request, or an ApiError. If only one model is served, any name refers to it."""
        options, name = self.options, asked.model
        adapter = None if asked.adapter == DEFAULT else asked.adapter
        if asked.draft != DEFAULT:
            message = "draft_model is not supported: the draft models of mlx-lm run in mlx_lm.server."
            raise ApiError(400, message, param="draft_model")
        if options.allow_any_model:
            return self.default if name in (DEFAULT, self.name) else (name, adapter)
        if adapter is not None:
            raise ApiError(400, "adapters requires a server started with --allow-any-model.", param="adapters")
        if name in options.serve_model:
            return name, None
        if options.serve_model and name not in (DEFAULT, options.model, self.name):
            message = f"The model {name!r} is not served here; GET /v1/models lists the served models."
            raise ApiError(404, message, param="model", code="model_not_found")
        return self.default

    def find(self, name: str) -> tuple[str, BoundedTokenizer | None]:
        """The path or repo of the model with this name, and its tokenizer if loaded."""
        key = self.resolve(ModelDescription(name, DEFAULT, None))
        return key[0], self.tokenizers.get(key)

    def load(self, key: ModelKey) -> None:
        """Replace the loaded model."""
        if key == self.key:
            return
        self.reset()
        gc.collect()
        mx.clear_cache()  # returns the old weights to the system
        path, adapter_path = key
        self.model, self.tokenizer = load(path, adapter_path=adapter_path, **self.options.load)
        if self.options.use_default_chat_template and self.tokenizer.chat_template is None:
            self.tokenizer.chat_template = self.tokenizer.default_chat_template
        self.key = key
        context_length = context_length_of(vars(self.model.args))
        vision = self.model.vision if self.model.ranks is None else None
        sampling = sampling_defaults(path, self.options.sampling, self.model.ranks)
        logging.info(f"Default sampling: {sampling}")
        self.tokenizers.pop(key, None)
        self.tokenizers[key] = BoundedTokenizer(self.tokenizer, context_length, vision, sampling)
        if len(self.tokenizers) > MAX_TOKENIZERS:
            self.tokenizers.pop(next(iter(self.tokenizers)))

    def reset(self) -> None:
        """Drop the model."""
        self.key = self.model = self.tokenizer = None
