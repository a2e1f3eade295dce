"""A conversation: its prompt cache, and the tokens that the next turn adds."""

import argparse
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_lm.models import cache as stock
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..caches.prompt_cache import make_prompt_cache, n_tokens
from ..cli.arguments import asks_for_drafts, sampler_of
from ..generate.colors import paint
from ..generate.stream import GenerationResponse, stream_generate
from ..images.open import open_image
from ..images.processor import PLACEHOLDER
from ..images.prompt import vision_of
from ..prompt_store import PromptStore

if TYPE_CHECKING:
    from PIL.Image import Image


class Conversation:
    """One prompt cache, or a prompt store, holds all turns, so that each reads only its new tokens.

    Args:
        model (nn.Module): A model of ``mlx_mtp.load``.
        tokenizer (TokenizerWrapper): Its tokenizer.
        args (argparse.Namespace): The flags of ``mlx_mtp.chat``.
        store (PromptStore, optional): Holds the turns. Default: ``None``, a prompt cache.

    Raises:
        ValueError: ``--thinking`` is given, and the chat template has no such switch.
    """

    def __init__(
        self, model: Any, tokenizer: TokenizerWrapper, args: argparse.Namespace, store: PromptStore | None = None
    ):
        self.model, self.tokenizer, self.args, self.store = model, tokenizer, args, store
        self.ranks = getattr(model, "ranks", None)  # a model of plain mlx-lm has none
        self.thinking: bool = tokenizer.has_thinking
        if args.thinking is not None:
            self.think(args.thinking == "on")
        self.reset()

    def reset(self) -> None:
        """Forget all turns."""
        self.cache: list[Any] | None
        if self.store is not None:
            self.cache = None
        elif asks_for_drafts(self.args) or self.args.images:
            self.cache = make_prompt_cache(self.model)
        else:
            self.cache = stock.make_prompt_cache(self.model, self.args.max_kv_size)
        self.text: list[int] = []  # the turns before, where a store holds them
        self.turn = 0
        self.is_cut = False  # the last answer has not said that it ends
        self.unread: list[int] = []  # the rest of a question, where Ctrl-C came before the answer
        self.attached: list[Image] = []  # for the next question
        self.shown: list[Image] = []  # in the turns before, where a store holds them

    def attach(self, file: str) -> None:
        """Show a picture with the next question.

        Raises:
            FileNotFoundError, ValueError: There is no such picture, or the model takes none.
        """
        vision_of(self.model)
        self.attached.append(open_image(Path(file).expanduser()))

    def think(self, thinking: bool) -> None:
        """Let the model think before the answers that follow, or not."""
        if self._render("a", True) == self._render("a", False):
            raise ValueError(f"The chat template of {self.args.model} has no switch for thinking.")
        self.thinking = thinking

    def answer(self, query: str, show: Callable[[str], None]) -> GenerationResponse | None:
        """
        Generate an answer. Ctrl-C ends it, and what was generated stays in the conversation.

        Args:
            query (str): The user's message.
            show (Callable[[str], None]): Is called with each piece of the answer.

        Returns:
            Optional[GenerationResponse]: The last one, with the figures; ``None`` if Ctrl-C came before the first token. A chat
            whose pictures were then not read to the end begins anew.
        """
        attached, self.attached = self.attached, []
        prompt = self.unread + self._encode(PLACEHOLDER * len(attached) + query)
        before, response, said = self._n_read(), None, []
        self.unread, self.is_cut = [], True
        text = [*self.text, *prompt]
        try:
            options = self._options() | {"images": [*self.shown, *attached]}
            with closing(stream_generate(self.model, self.tokenizer, text, **options)) as responses:
                for response in responses:
                    said.append(response.token)
                    show(paint(response.text, response.source) if self.args.show_drafts else response.text)
        except KeyboardInterrupt:
            if self.ranks is not None:
                raise  # the other ranks are somewhere else
            if response is None and attached:
                self.reset()
                return None
            if response is None:
                self.unread = prompt[self._n_read() - before :]
        if self.store is not None and response is not None:
            self.text, self.shown = text + said, [*self.shown, *attached]
        self.is_cut = response is None or response.finish_reason != "stop"
        self.turn += 1
        return response

    def _n_read(self) -> int:
        """The tokens in the prompt cache."""
        return 0 if self.cache is None else n_tokens(self.cache)

    def _options(self) -> dict[str, Any]:
        names = ("max_tokens", "prefill_step_size", "num_draft_tokens", "copy_drafts", "draft_p_min")
        options = {name: getattr(self.args, name) for name in names}
        sampler = sampler_of(self.args, self.tokenizer, self.turn)
        return options | {
            "mtp": bool(self.args.mtp),
            "sampler": sampler,
            "prompt_cache": self.cache,
            "prompt_store": self.store,
        }

    def _encode(self, query: str) -> list[int]:
        """The tokens that a query adds, through the chat template if there is one."""
        if not self.tokenizer.has_chat_template:
            tokens: list[int] = self.tokenizer.encode(query + "\n")
            return tokens
        end = [self.tokenizer.eos_token_id] if self.is_cut else []
        return end + self.tokenizer.encode(self._render(query, self.thinking), add_special_tokens=False)

    def _render(self, query: str, thinking: bool) -> str:
        if not self.tokenizer.has_chat_template:
            return query
        messages = [{"role": "user", "content": query}]
        if self.args.system_prompt is not None and self.turn == 0:
            messages.insert(0, {"role": "system", "content": self.args.system_prompt})
        text: str = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, enable_thinking=thinking
        )
        return text
