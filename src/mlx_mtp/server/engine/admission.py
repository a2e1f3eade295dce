"""Admission of requests: the loaded model, its batch generator, and the memory that requests need."""

import logging
import math
from bisect import bisect_right
from collections.abc import Collection
from functools import lru_cache, partial
from typing import Any

import mlx.core as mx
from mlx_lm.generate import StopSequences, make_stop_sequences
from mlx_lm.sample_utils import LogitsProcessor, Sampler, make_logits_processors
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ...checkpoint.reader import CheckpointReader
from ...core.batch.generator import BatchGenerator
from ...core.caches.prompt_cache import PromptCache
from ...core.distributed import Ranks
from ...core.drafts.options import TextOptions
from ...core.layers.mtp import has_head
from ...core.sampling import sampler as sampling
from ...images.prompt import ImageEmbeddings
from ...memory import CACHE_SHARE, STEP, Account, Sizes, size, sizes_of
from ...text.answer import AnswerReader
from ...text.detokenizer import make_detokenizer
from ...text.formats import QWEN, format_of
from ..request import NO_MEMORY, ApiError, Options, Prompt, Request
from ..structured_output import make_output_grammar
from .models import ModelProvider, Stores, check_files

PATIENCE, PATIENCE_AT_LIMIT = 200, 2000  # characters of streamed text; a model whose reasoning is cut goes on with it
MAX_FORCED = 64  # tokens to end the reasoning: line breaks, the end of a code block, and the tag


class Admission:
    """Decides which requests may begin. Ranks do not consult the account: their free memory, and so decisions, may differ."""

    def __init__(self, options: Options, models: ModelProvider, caches: Stores, ranks: Ranks | None, account: Account):
        self.options = options
        self.models = models
        self.caches = caches
        self.ranks = ranks
        self.account = account
        self.batch: Any = None  # the BatchGenerator of the loaded model
        self.sizes: Sizes  # the loaded model's
        self.max_cache_bytes = 0  # the limit of all prompt caches

    def open(self, key: str) -> None:
        """Replace the loaded model, its caches and its batch generator. They stay if another one cannot be loaded."""
        if self.models.key not in (None, key):
            check_files(CheckpointReader(key, self.models.revisions.get(key)))
        self.close()
        self.models.load(key)
        model = self.models.model
        tokenizer = self.models.tokenizer
        given = self.options.prompt_cache_bytes
        self.sizes = sizes_of(model)
        self.account.expect_growth()
        own = int(CACHE_SHARE * self.caches.nbytes)  # of what is cached already
        self.max_cache_bytes = self.account.cache_budget + own if given is None else given
        logging.info(f"Prompt caches: up to {self.max_cache_bytes / 1e9:.1f} GB")
        self.caches.use(key, model, tokenizer, self.max_cache_bytes)
        self.stop_sequences = make_stop_sequences(tokenizer)
        self.restart()
        self.models.tokenizers[key].max_tokens = longest_text(self, self.models.tokenizers[key].context_length)

    def restart(self) -> None:
        self.batch = None  # this restores the wired limit
        options = self.options
        model = self.models.model
        if model is None:
            return  # the next request loads one
        drafts: dict[str, Any] = {} if has_head(model) else {"num_draft_tokens": 0, "copy_drafts": "auto"}
        self.batch = BatchGenerator(
            model,
            completion_batch_size=options.decode_concurrency,
            prefill_step_size=options.prefill_step_size,
            max_token_gap=options.max_token_gap,
            min_decode_share=options.min_decode_share,
            **vars(options.kv),
            stream=mx.default_stream(mx.default_device()),
            **drafts,
        )

    def close(self) -> None:
        """Drop the batch generator, whose memory the next model may need."""
        if self.batch is not None:
            self.batch.close()
            mx.synchronize()  # other ranks wait for this rank's part of a pass
            self.batch = None
            self.caches.store.model = None  # to free its weights for the next one

    def end(self) -> None:
        """Drop the model and its caches, and end the threads of its streams. Call in the thread that owns the streams."""
        self.close()
        self.caches.close()
        self.models.reset()
        mx.clear_streams()

    @property
    def n_waiting(self) -> int:
        """The admitted requests of whose prompts nothing is prefilled yet, in any thread."""
        batch = self.batch
        return 0 if batch is None else batch.n_waiting

    def fits(self, request: Request, running: Collection[Request]) -> bool:
        if not running or request.key != self.models.key:
            return not running
        return self.ranks is not None or self.need(request, running) <= self.free()

    def need(self, request: Request, running: Collection[Request] = ()) -> int:
        """The bytes that a request's prompt needs in addition to the running requests."""
        kinds: dict[Any, list[int]] = {}  # a batch pads those that are quantized and those that are not apart
        for r in (*running, request):
            n = r.n_prompt + r.n_tokens
            kinds.setdefault(tuple(self.options.kv.of_text(0, r.n_prompt).at(n).items()), []).append(n)
        caches = sum(self.sizes.caches_of_several(lengths, **dict(kind)) for kind, lengths in kinds.items())
        n = request.n_prompt
        sizes = self.sizes
        of_text = self.options.kv.of_text(0, n)
        kv = of_text.at(n)
        start = of_text.quantized_kv_start
        peak = sizes.chunk(min(n, self.options.prefill_step_size), n, kv.get("kv_bits"))
        if kv:  # where keys and values are quantized, they exist twice
            twice = sizes.caches(start) + sizes.caches(start, **kv) - sizes.state_bytes
            peak = max(peak, twice - sizes.caches(n, **kv))
        image_prompt = request.encoded.image_prompt
        tower = 0 if image_prompt is None else image_prompt.vision.unread_bytes
        return caches - self.batch.prompt_cache_nbytes + peak + tower

    def held_by(self, request: Request) -> int:
        n = request.n_prompt + request.n_tokens
        return self.sizes.caches(n, **self.options.kv.of_text(0, request.n_prompt).at(n))

    def free(self) -> int:
        """The free bytes, including MLX's buffers and the prompt caches of earlier requests, which can be freed."""
        return self.account.left + self.account.buffers + self.caches.nbytes

    def lack(self) -> int:
        """The bytes missing for the next step once MLX's buffers and the prompt caches of earlier requests are freed."""
        n, n_context = self.batch.next_chunk
        need = self.sizes.chunk(n, n_context, self.options.kv_bits)
        need += sum(self.sizes.caches(STEP, **kv.at(n)) - self.sizes.state_bytes for n, kv in self.batch.growing)
        if need <= self.account.left:
            return 0
        self.account.release()
        if (lack := need - self.account.left) > 0 and self.caches.nbytes > 0:
            self.caches.trim_to(max(self.caches.nbytes - lack, 0))
            self.account.release()
        return max(need - self.account.left, 0) if self.ranks is None else 0

    def begin(self, request: Request, prompt: Prompt) -> int:
        need = self.need(request)
        free = self.free()
        if self.ranks is None and len(self.batch) == 0 and need > free:
            message = (
                f"The prompt of {request.n_prompt} tokens needs {size(need)}, and {size(max(free, 0))} of the server's "
                f"{size(self.account.limit)} are free: shorten it, or start the server with a larger --max-memory."
            )
            raise ApiError(507, message, param=request.param, code=NO_MEMORY)
        args = request.args
        tokenizer = self.models.tokenizer
        image_prompt = prompt.image_prompt
        cache, n_cached = self.caches.fetch(prompt)
        request.detokenizer = make_detokenizer(tokenizer)
        request.begin_answer(tokenizer, _patience(tokenizer, request))
        stops = self.stop_sequences
        if request.stop_token_ids:
            stops = StopSequences([(token,) for token in (*tokenizer.eos_token_ids, *request.stop_token_ids)])
        options = TextOptions(
            max_tokens=args.max_tokens,
            sampler=self.make_sampler(request),
            logits_processors=_make_processors(tokenizer, request, prompt),
            stop_sequences=stops,
            num_draft_tokens=args.num_draft_tokens if self.models.has_head else 0,
            copy_drafts=request.copy_drafts if self.models.drafts else "off",
        )
        embeddings = image_prompt and ImageEmbeddings(image_prompt, self.models.model, n_cached)
        (uid,) = self.batch.insert_segments(
            segments=[prompt.segments],
            options=[options],
            caches=[None if cache is None else PromptCache(cache, len(self.models.model.layers))],
            all_tokens=[prompt.tokens[:n_cached]],
            counts=[request.counts],
            input_embeddings=[embeddings],
            images=[() if image_prompt is None else image_prompt.images],
        )
        return int(uid)

    def make_sampler(self, request: Request) -> Sampler:
        """Make the sampler of a request. With a seed, drafts are coupled, whatever ``--acceptance`` says."""
        tokenizer = self.models.tokenizer
        seed = request.args.seed
        return sampling.make_sampler(
            **request.args.sampling.arguments,
            xtc_special_tokens=tokenizer.encode("\n") + list(tokenizer.eos_token_ids),
            seed=seed,
            acceptance=self.options.acceptance if seed is None else None,
        )

    def keep(self, request: Request, prompt_cache: list[Any], tokens: list[int]) -> None:
        if tokens:
            self.caches.insert(request.encoded, tokens, prompt_cache)
            self.make_room()

    def make_room(self) -> None:
        """Evict snapshots until all caches, including those of running requests, fit into ``--prompt-cache-bytes``."""
        self.caches.trim_to(self.max_cache_bytes - self.batch.prompt_cache_nbytes)


def longest_text(admission: Admission, context: int | None) -> int | None:
    """The tokens of the longest text that memory has room for, up to the model's context."""

    def need(n: int) -> int:
        request = Request("text", "", [])
        request.encoded = Prompt([0] * n)
        return admission.need(request)

    if context is None or admission.ranks is not None:
        return context
    return bisect_right(range(1, context + 1), admission.free(), key=need)


def _make_processors(tokenizer: TokenizerWrapper, request: Request, prompt: Prompt) -> list[LogitsProcessor]:
    processors = make_penalties(request.args.logits, len(prompt.tokens))
    processors += make_output_grammar(tokenizer, request, prompt.in_reasoning)
    if request.min_tokens > 0:
        ends = [*tokenizer.eos_token_ids, *request.stop_token_ids]
        processors.append(partial(_allow_no_end, ends, len(prompt.tokens) + request.min_tokens))
    if (budget := request.reasoning_limit(tokenizer)) is not None:
        processors.append(make_budget(tokenizer, len(prompt.tokens), prompt.in_reasoning, budget))
    return processors


def _patience(tokenizer: TokenizerWrapper, request: Request) -> float | None:
    """The characters of text after reasoning that may wait, see ``AnswerReader``."""
    if (output := request.structured_output) is not None and output.is_required:
        return None
    if request.args.stop_words:  # they end the text at once
        return 0
    if not request.streams:
        return math.inf
    return PATIENCE if request.reasoning_limit(tokenizer) is None else PATIENCE_AT_LIMIT


def make_penalties(given: Any, n_prompt: int) -> list[LogitsProcessor]:
    """mlx-lm's. Without a context size, presence and frequency penalties count the answer's tokens alone, as OpenAI's."""
    own = {**vars(given)}
    kinds = [kind for kind in ("presence", "frequency") if own[f"{kind}_context_size"] is None]
    of_answer = {f"{kind}_penalty": own.pop(f"{kind}_penalty") for kind in kinds}
    processors: list[LogitsProcessor] = make_logits_processors(**own)
    sizes = dict.fromkeys(("presence_context_size", "frequency_context_size"), 2**31 - 1)
    counting = make_logits_processors(**of_answer, **sizes)
    return processors + [lambda tokens, logits, p=p: p(tokens[n_prompt:], logits) for p in counting]


def _allow_no_end(ends: list[int], n: int, tokens: mx.array, logits: mx.array) -> mx.array:
    """Exclude these tokens until a text has ``n`` tokens: tokens [N], logits [1, V]."""
    if tokens.size < n:
        logits[:, mx.array(sampling.known_ids(ends, logits), mx.uint32)] = -mx.inf
    return logits


def make_budget(tokenizer: Any, n_prompt: int, in_reasoning: bool | None, budget: int) -> LogitsProcessor:
    """A logits processor without a state that ends reasoning after ``budget`` tokens, as in the chat template."""
    breaks = (format_of(tokenizer) or QWEN).written.thought

    @lru_cache(maxsize=1)  # consecutive positions have the same reasoning
    def ending(thought: tuple[int, ...]) -> list[int]:
        """The tokens that end the reasoning after these; none if it has ended."""
        marks = tokenizer.think_start, tokenizer.think_end
        reader = AnswerReader(marks, in_reasoning, None)
        reader.add(tokenizer.decode([*thought]))
        text = reader.reasoning.closing(*breaks) if reader.in_reasoning else ""
        return list(tokenizer.encode(text, add_special_tokens=False))[:MAX_FORCED]

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        """tokens [N], logits [1, V]"""
        i = tokens.size - n_prompt - budget  # index of the ending's token
        if not 0 <= i < MAX_FORCED:
            return logits
        thought: Any = tokens[n_prompt : n_prompt + budget].tolist()
        end = ending(tuple(thought))
        if i >= len(end) or end[i] >= logits.shape[-1]:
            return logits
        return mx.where(mx.arange(logits.shape[-1]) == end[i], mx.zeros_like(logits), -mx.inf)

    return process
