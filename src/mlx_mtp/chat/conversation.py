"""A conversation: its messages, its prompt cache, and the tokens that the next turn adds."""

import argparse
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_lm.models import cache as stock
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..caches.prompt_cache import make_prompt_cache, n_tokens
from ..cli.arguments import asks_for_drafts, sampler_of
from ..cli.display import paint, prompt_progress
from ..generate.stream import GenerationResponse, stream_generate
from ..images.open import open_image
from ..images.processor import PLACEHOLDER
from ..images.prompt import vision_of
from ..prompt_store import PromptStore
from .messages import Message

if TYPE_CHECKING:
    from PIL.Image import Image


class Conversation:
    """One prompt cache, or a prompt store, holds all turns, so that each processes only its new tokens.

    Args:
        model (nn.Module): A model of ``mlx_mtp.load``.
        tokenizer (TokenizerWrapper): Its tokenizer.
        args (argparse.Namespace): The flags of ``mlx_mtp.chat``.
        store (PromptStore, optional): Holds the turns. Default: ``None``, a prompt cache.

    Attributes:
        messages (List[Message]): The questions and the answers.
        system_prompt (str, optional): The text before them.
        attached (List[str]): The files of images for the next question.
        thinking (bool): Whether the model thinks before it answers.

    Raises:
        ValueError: ``--thinking`` is given, and the chat template has no such switch.
    """

    def __init__(
        self, model: Any, tokenizer: TokenizerWrapper, args: argparse.Namespace, store: PromptStore | None = None
    ):
        self.model, self.tokenizer, self.args, self.store = model, tokenizer, args, store
        self.ranks = getattr(model, "ranks", None)  # a model of plain mlx-lm has none
        self.system_prompt: str | None = args.system_prompt
        self.reset()
        self.thinking: bool = tokenizer.has_thinking
        if args.thinking is not None:
            self.think(args.thinking == "on")

    def reset(self) -> None:
        """Forget all messages, but for the system prompt."""
        self.messages: list[Message] = []
        self.attached: list[str] = []
        self.turn = 0
        self._rewind()

    def _rewind(self) -> None:
        """Let the next turn process all messages."""
        self.cache: list[Any] | None
        if self.store is not None:
            self.cache = None
        elif asks_for_drafts(self.args) or self.args.images:
            self.cache = make_prompt_cache(self.model)
        else:
            self.cache = stock.make_prompt_cache(self.model, self.args.max_kv_size)
        self.n_rendered = 0  # messages that the cache holds
        self.text: list[int] = []  # the turns before, where a store holds them
        self.is_cut = False  # the last answer has not said that it ends
        self.unread: list[int] = []  # the rest of a question, where Ctrl-C came before the answer
        self.shown: list[Image] = []  # in the turns before, where a store holds them

    def restore(self, messages: Sequence[Message]) -> None:
        """Go on from other messages, which the next turn processes.

        Raises:
            OSError, ValueError: An image cannot be read, or the model takes none; the conversation stays as it is.
        """
        files = [file for message in messages for file in message.images]
        if files:
            vision_of(self.model)
        for file in files:
            open_image(Path(file))
        self.reset()
        self.messages = [message for message in messages if message.role != "system"]
        self.system_prompt = next((message.content for message in messages if message.role == "system"), None)

    def instruct(self, system_prompt: str) -> None:
        """Set the system prompt. The next turn processes all messages again, behind it."""
        self.system_prompt = system_prompt
        self._rewind()

    def attach(self, file: str) -> None:
        """Show a picture with the next question.

        Raises:
            FileNotFoundError, ValueError: There is no such picture, or the model takes none.
        """
        vision_of(self.model)
        path = Path(file).expanduser()
        open_image(path)
        self.attached.append(str(path.absolute()))

    def think(self, thinking: bool) -> None:
        """Let the model think before the answers that follow, or not."""
        question = [Message("user", "a")]
        if self._render(question, True) == self._render(question, False):
            raise ValueError(f"The chat template of {self.args.model} has no switch for thinking.")
        self.thinking = thinking

    @property
    def transcript(self) -> list[Message]:
        """The system prompt, if there is one, and the messages."""
        system = [] if self.system_prompt is None else [Message("system", self.system_prompt)]
        return [*system, *self.messages]

    def answer(self, query: str, show: Callable[[str], None]) -> GenerationResponse | None:
        """
        Generate an answer. Ctrl-C ends it, and what was generated stays in the conversation.

        Args:
            query (str): The user's message.
            show (Callable[[str], None]): Is called with each piece of the answer.

        Returns:
            Optional[GenerationResponse]: The last one, with the figures; ``None`` if Ctrl-C came before the first token.

        Raises:
            OSError, ValueError: An image cannot be read. The question is then forgotten.
        """
        question = Message("user", query, self.attached)
        new = [*self.messages[self.n_rendered :], question]
        images = [open_image(Path(file)) for message in new for file in message.images]
        prompt = self.unread + self._encode(new)
        self.messages.append(question)
        self.attached, self.unread, self.n_rendered = [], [], len(self.messages)
        before, response, tokens, pieces = self._n_cached(), None, [], []
        self.is_cut, text = True, [*self.text, *prompt]
        try:
            with prompt_progress() as progress:
                options = self._options() | {"images": [*self.shown, *images], "prompt_progress_callback": progress}
                with closing(stream_generate(self.model, self.tokenizer, text, **options)) as responses:
                    for response in responses:
                        tokens.append(response.token)
                        pieces.append(response.text)
                        show(paint(response.text, response.source) if self.args.show_drafts else response.text)
        except KeyboardInterrupt:
            if self.ranks is not None:
                raise  # the other ranks are somewhere else
            if response is None and images:
                self._rewind()  # a cache that ends within an image cannot be gone on from
                return None
            if response is None:
                self.unread = prompt[self._n_cached() - before :]
        except ValueError:
            self.messages.pop()
            self._rewind()
            raise
        if response is not None:
            self.messages.append(Message("assistant", "".join(pieces)))
            self.n_rendered += 1
            if self.store is not None:
                self.text, self.shown = text + tokens, [*self.shown, *images]
        self.is_cut = response is None or response.finish_reason != "stop"
        self.turn += 1
        return response

    def _n_cached(self) -> int:
        """The tokens in the prompt cache."""
        return 0 if self.cache is None else n_tokens(self.cache)

    def _options(self) -> dict[str, Any]:
        names = ("max_tokens", "prefill_step_size", "num_draft_tokens", "copy_drafts", "draft_p_min")
        options = {name: getattr(self.args, name) for name in names}
        return options | {
            "mtp": bool(self.args.mtp),
            "sampler": sampler_of(self.args, self.tokenizer, self.turn),
            "prompt_cache": self.cache,
            "prompt_store": self.store,
        }

    def _encode(self, new: Sequence[Message]) -> list[int]:
        """The tokens that messages add, through the chat template if there is one."""
        if not self.tokenizer.has_chat_template:
            text = "".join(f"{PLACEHOLDER * len(message.images)}{message.content}\n" for message in new)
            tokens: list[int] = self.tokenizer.encode(text)
            return tokens
        end = [self.tokenizer.eos_token_id] if self.is_cut else []
        return end + self.tokenizer.encode(self._render(new, self.thinking), add_special_tokens=False)

    def _render(self, new: Sequence[Message], thinking: bool) -> str:
        if not self.tokenizer.has_chat_template:
            return ""
        messages = [{"role": m.role, "content": PLACEHOLDER * len(m.images) + m.content} for m in new]
        if self.system_prompt is not None and self.n_rendered == 0:
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        text: str = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, enable_thinking=thinking
        )
        return text
