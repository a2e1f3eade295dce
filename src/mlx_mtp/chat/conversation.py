"""A conversation: its messages, its prompt cache, and the new tokens of the next turn."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_lm.models import cache as stock
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..cli.display import paint, prompt_progress
from ..cli.flags import sampler_of, text_options
from ..core.caches.prompt_cache import make_prompt_cache, n_tokens
from ..core.models.mixin import MTPModel
from ..errors import MTPError, as_mtp_error
from ..generate.stream import GenerationResponse, stream_generate
from ..images.open import open_image
from ..images.prompt import vision_of
from ..images.vision import PLACEHOLDER
from ..prompt_store import PromptStore

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass
class Message:
    role: str  # "system", "user" or "assistant"
    content: str
    images: list[str] = field(default_factory=list)  # the files of the images before the text


class Conversation:
    """A conversation whose prompt cache or prompt store has all turns, so that each turn prefills only new tokens."""

    def __init__(self, args: Namespace, model: Any, tokenizer: TokenizerWrapper, store: PromptStore | None = None):
        self.args, self.model, self.tokenizer, self.store = args, model, tokenizer, store
        self.ranks = getattr(model, "ranks", None)  # missing in models of plain mlx-lm
        self.system_prompt: str | None = args.system_prompt
        self.thinking: bool = tokenizer.has_thinking  # whether the model thinks before it answers
        self.reset()
        if args.thinking is not None:
            self.think(args.thinking == "on")

    def reset(self) -> None:
        self.messages: list[Message] = []  # the questions and the answers
        self.attached: list[str] = []  # the files of images for the next question
        self.turn = 0
        self._rewind()

    def _rewind(self) -> None:
        """Make the next turn prefill all messages."""
        model: Any = self.model
        self.cache: list[Any] | None = None
        if self.store is None:
            is_ours = isinstance(model, MTPModel)  # with a prompt cache that also has the head's part
            self.cache = make_prompt_cache(model) if is_ours else stock.make_prompt_cache(model, self.args.max_kv_size)
        self.n_rendered = 0  # messages that the cache holds
        # The tokens before the next prompt that the cache lacks: with a store, the earlier turns.
        self.text: list[int] = []
        self.is_cut = False  # the last answer has no end marker
        self.shown: list[Image] = []  # in the earlier turns, with a store

    def instruct(self, system_prompt: str) -> None:
        self.system_prompt = system_prompt
        self._rewind()

    def attach(self, file: str) -> None:
        vision_of(self.model)
        path = Path(file).expanduser()
        open_image(path)
        self.attached.append(str(path.absolute()))

    def think(self, thinking: bool) -> None:
        question = [Message("user", "a")]
        if self._render(question, True) == self._render(question, False):
            raise MTPError(f"The chat template of {self.args.model} has no switch for thinking.")
        self.thinking = thinking

    def answer(self, query: str, show: Callable[[str], None]) -> GenerationResponse | None:
        """Generate an answer, show each piece, and return the last response; ``None`` after Ctrl-C before the first token."""
        question = Message("user", query, self.attached)
        new = [*self.messages[self.n_rendered :], question]
        images = [open_image(Path(file)) for message in new for file in message.images]
        prompt = self._encode(new)
        self.messages.append(question)
        self.attached, self.n_rendered = [], len(self.messages)
        response, tokens, pieces = None, [], []
        self.is_cut, text = True, [*self.text, *prompt]
        n_before = n_tokens(self.cache or [])
        try:
            with prompt_progress() as progress:
                responses = stream_generate(
                    self.model,
                    self.tokenizer,
                    text,
                    mtp=self.args.mtp,
                    options=text_options(self.args),
                    prefill_step_size=self.args.prefill_step_size,
                    sampler=sampler_of(self.args, self.tokenizer, self.turn),
                    prompt_cache=self.cache,
                    prompt_store=self.store,
                    images=[*self.shown, *images],
                    prompt_progress_callback=progress,
                )
                with closing(responses):
                    for response in responses:
                        tokens.append(response.token)
                        pieces.append(response.text)
                        show(paint(response.text, response.source) if self.args.show_drafts else response.text)
        except KeyboardInterrupt:
            if self.ranks is not None:
                raise  # the other ranks are at another point
            if response is None:
                if self.store is None and not images and isinstance(self.model, MTPModel):
                    self.text = text[n_tokens(self.cache or []) - n_before :]  # the next turn prefills the rest
                else:
                    self._rewind()  # the next turn prefills all messages, or what the store lacks of them
                return None
        except Exception:
            self.messages.pop()
            self._rewind()
            raise
        if response is not None:
            self.messages.append(Message("assistant", "".join(pieces)))
            self.n_rendered += 1
            self.text = []
            if self.store is not None:
                self.text, self.shown = text + tokens, [*self.shown, *images]
        self.is_cut = response is None or response.finish_reason != "stop"
        self.turn += 1
        return response

    def _encode(self, new: Sequence[Message]) -> list[int]:
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
        with as_mtp_error(f"The chat template of {self.args.model} cannot be rendered"):
            text: str = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False, enable_thinking=thinking
            )
        return text
