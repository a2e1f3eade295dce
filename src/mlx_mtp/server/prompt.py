"""A tokenizer with a limit: a prompt beyond the model's context is refused before all of it is tokenized."""

from typing import Any

from mlx_lm import server as stock

from ..images.vision import Vision
from .images import MARKED_IMAGES
from .request import ApiError

CHARS = 4  # per token: a text that fits the context is seldom longer
PIECE = 1 << 16  # characters
SLACK = 16  # tokens that a cut between two pieces may add


class BoundedTokenizer:
    """mlx-lm's tokenizer, as far as prompts are concerned.

    Args:
        tokenizer (TokenizerWrapper): mlx-lm's.
        context_length (int, optional): The model's maximum number of tokens. ``None`` if its config does not say.
        vision (Vision, optional): What it reads images with. Default: ``None``, it takes none.
    """

    def __init__(self, tokenizer: Any, context_length: int | None, vision: Vision | None = None):
        self.tokenizer = tokenizer
        self.context_length, self.vision = context_length, vision
        self.n_ids = 1 + max(tokenizer.get_vocab().values())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        """The tokens of a text. What stands for an image is ``MARKED_IMAGES.mark``, and not a placeholder that the text quotes.

        Raises:
            ApiError: The text does not fit the context.
        """
        self._check_length(text)
        return MARKED_IMAGES.encode(self.tokenizer, text, **kwargs)

    def apply_chat_template(self, messages: list[Any], tokenize: bool = True, **kwargs: Any) -> str | list[int]:
        text: str = self.tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def _check_length(self, text: str) -> None:
        """Count a long text's tokens piece by piece until they exceed the context."""
        most = self.context_length
        if most is None or len(text) <= CHARS * most:
            return
        n = 0
        for i in range(0, len(text), PIECE):
            n += len(self.tokenizer.encode(text[i : i + PIECE], add_special_tokens=False)) - SLACK
            if n > most:
                message = f"This model's maximum context length is {most} tokens, but the prompt has more."
                raise ApiError(400, message, code="context_length_exceeded")

    def check(self, n_prompt: int, args: stock.GenerationArguments, default_max_tokens: int, param: str) -> None:
        """Check a request against the model, and shorten the server's own limit on tokens where the context ends.

        Args:
            n_prompt (int): The prompt's number of tokens.
            args (GenerationArguments): mlx-lm's; ``max_tokens`` may be lowered.
            default_max_tokens (int): The server's limit, for a request without its own.
            param (str): The field with the prompt.

        Raises:
            ApiError: The prompt or a field does not fit the model.
        """
        if n_prompt == 0:
            raise ApiError(400, "The prompt is empty.", param=param)
        most = self.context_length
        if most is not None and n_prompt + args.max_tokens > most:
            if n_prompt >= most or args.max_tokens != default_max_tokens:
                raise ApiError(
                    400,
                    f"This model's maximum context length is {most} tokens, but the request has {n_prompt} in its prompt "
                    f"and asks for {args.max_tokens} more.",
                    param="max_tokens" if n_prompt < most else param,
                    code="context_length_exceeded",
                )
            args.max_tokens = most - n_prompt
        if args.sampling.top_k >= self.n_ids:
            raise ApiError(400, f"top_k must be below the vocabulary's size of {self.n_ids}.", param="top_k")
        if any(token >= self.n_ids for token in args.logits.logit_bias or ()):
            message = f"logit_bias names a token beyond the vocabulary of {self.n_ids}."
            raise ApiError(400, message, param="logit_bias")
