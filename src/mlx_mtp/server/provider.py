"""Which models a server may load, and the one that it has loaded."""

import argparse
import gc
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx_lm import server as stock

from .. import cli
from ..checkpoint.load import load
from ..models.mixin import MTPMixin
from .prompt import BoundedTokenizer
from .request import ApiError

MAX_TOKENIZERS = 8
ModelKey = tuple[str, str | None, str | None]  # paths or repos of the model, its adapters and its draft model


class ModelProvider(stock.ModelProvider):
    """Loads models with their MTP heads, one at a time, and only those that the operator serves.

    The tokenizers of models that were loaded before are kept, so that a prompt can be tokenized at any time.
    """

    def __init__(self, cli_args: argparse.Namespace):
        super().__init__(cli_args)
        self.served = [cli_args.served_model_name or cli_args.model, *cli_args.serve_model]
        self.tokenizers: dict[ModelKey, BoundedTokenizer] = {}

    def resolve(self, model: stock.ModelDescription) -> stock.ModelDescription:
        """The model that a request means. Where only one is served it is that one, whatever name the client has for it.

        Raises:
            ApiError: A request may not name this model.
        """
        args = self.cli_args
        if args.allow_any_model:
            return replace(model, model="default_model") if model.model == args.served_model_name else model
        for param, value in (("adapters", model.adapter), ("draft_model", model.draft)):
            if value not in (None, "default_model"):
                raise ApiError(400, f"{param} requires a server started with --allow-any-model.", param=param)
        if model.model in args.serve_model:
            return model
        if args.serve_model and model.model not in ("default_model", args.model, args.served_model_name):
            message = f"The model {model.model!r} is not served here; GET /v1/models lists those that are."
            raise ApiError(404, message, param="model", code="model_not_found")
        return replace(model, model="default_model")

    @property
    def context_lengths(self) -> dict[str, int | None]:
        """Of the models that were loaded, by path or repo."""
        return {key[0]: tokenizer.context_length for key, tokenizer in self.tokenizers.items()}

    def key_of(self, model: stock.ModelDescription) -> ModelKey:
        """What ``load`` loads for this description."""
        return (
            self._model_map.get(model.model, model.model),
            self._adapter_map.get(model.model, model.adapter),
            self._draft_model_map.get(model.draft, model.draft),
        )

    def _load(self, model_path: str, adapter_path: str | None = None, draft_model_path: str | None = None) -> None:
        if cli.drafts(self.cli_args) or self.is_distributed:
            self._load_ours(model_path, adapter_path, draft_model_path)
        else:
            super()._load(model_path, adapter_path, draft_model_path)
        args = vars(self.model.args)
        context_length = args.get("text_config", args).get("max_position_embeddings")
        self.tokenizers.pop(self.model_key, None)
        vision = self.model.vision if isinstance(self.model, MTPMixin) and not self.is_distributed else None
        self.tokenizers[self.model_key] = BoundedTokenizer(self.tokenizer, context_length, vision)
        if len(self.tokenizers) > MAX_TOKENIZERS:
            self.tokenizers.pop(next(iter(self.tokenizers)))

    def _load_ours(self, model_path: str, adapter_path: str | None, draft_model_path: str | None) -> None:
        if draft_model_path is not None:
            raise ValueError("A draft model and --mtp or --copy-drafts cannot draft together: choose one of them.")
        self.reset()
        gc.collect()
        mx.clear_cache()
        options: dict[str, Any] = cli.options(self.cli_args)
        self.model, self.tokenizer = load(
            model_path,
            adapter_path=adapter_path,
            tokenizer_config=self._tokenizer_config,
            trust_remote_code=self.cli_args.trust_remote_code,
            mtp=cli.head(self.cli_args),
            copy_drafts=cli.copies(self.cli_args),
            **options,
            **cli.groups(self.cli_args),
        )
        if self.cli_args.use_default_chat_template and self.tokenizer.chat_template is None:
            self.tokenizer.chat_template = self.tokenizer.default_chat_template
        self.is_batchable = True
        self.model_key = (model_path, adapter_path, draft_model_path)
