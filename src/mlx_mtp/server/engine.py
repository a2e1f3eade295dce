"""What a server loads and generates: mlx-lm's ``ModelProvider`` and ``ResponseGenerator``, with the MTP head."""

import gc
import logging
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, Queue
from typing import Any

import mlx.core as mx
from mlx_lm import server as stock
from mlx_lm.models.cache import LRUPromptCache

from .. import cli
from ..checkpoint.load import load
from ..decoding import sampling
from ..decoding.pace import DraftCounts
from .batch import Event, Progress, Scheduler, Sequence, Token
from .metrics import Metrics


class ApiError(BaseException):
    """An answer in OpenAI's error form. Not an ``Exception``, since mlx-lm's handler answers those in a form of its own."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code


@dataclass
class Request(stock.CompletionRequest):
    """mlx-lm's, who asks, and what has become of it."""

    connection: socket.socket
    arrived: float = field(default_factory=time.perf_counter)
    n_tokens: int = 0
    n_accepted: int = 0  # of its tokens, those that were drafted
    counts: DraftCounts = field(default_factory=DraftCounts)

    def is_gone(self) -> bool:
        """Whether the client has hung up."""
        try:
            poll = select.poll()
            poll.register(self.connection, select.POLLIN)
            return bool(poll.poll(0)) and self.connection.recv(1, socket.MSG_PEEK) == b""
        except (OSError, ValueError):
            return True


class ModelProvider(stock.ModelProvider):
    """Loads models with their head, one at a time, and only those that the operator serves."""

    def __init__(self, cli_args):
        super().__init__(cli_args)
        self.served = [cli_args.model, *cli_args.serve_model]

    def check(self, model: str, adapter: str | None, draft_model: str) -> None:
        """
        Raises:
            ApiError: A request may not name these.
        """
        if self.cli_args.allow_any_model:
            return
        if model not in ("default_model", *self.served):
            message = f"The model {model!r} is not served here; GET /v1/models lists those that are."
            raise ApiError(404, message, param="model", code="model_not_found")
        for param, value in (("adapters", adapter), ("draft_model", draft_model)):
            if value not in (None, "default_model"):
                raise ApiError(400, f"{param} can be named only where the server allows any model.", param=param)

    def _load(self, model_path, adapter_path=None, draft_model_path=None):
        if self.cli_args.mtp:
            self._load_with_head(model_path, adapter_path, draft_model_path)
        else:
            super()._load(model_path, adapter_path, draft_model_path)
        args = vars(self.model.args)
        self.context_length = args.get("text_config", args).get("max_position_embeddings")  # None where it is not said
        self.vocab_size = 1 + max(self.tokenizer.get_vocab().values())

    def _load_with_head(self, model_path, adapter_path, draft_model_path):
        if draft_model_path is not None:
            raise ValueError("A draft model and the MTP head cannot draft together: leave out one of them.")
        self.reset()
        gc.collect()
        mx.clear_cache()
        self.model, self.tokenizer = load(
            model_path,
            adapter_path=adapter_path,
            tokenizer_config=self._tokenizer_config,
            trust_remote_code=self.cli_args.trust_remote_code,
            **cli.options(self.cli_args),
        )
        if self.cli_args.use_default_chat_template and self.tokenizer.chat_template is None:
            self.tokenizer.chat_template = self.tokenizer.default_chat_template
        self.is_batchable = True
        self.model_key = (model_path, adapter_path, draft_model_path)


@dataclass
class Job:
    """A request that is being generated."""

    queue: Queue
    request: Request
    args: stock.GenerationArguments
    ctx: stock.GenerationContext
    detokenizer: Any
    segment_types: list[str]  # of the segments whose end is still to come, the last first
    tail: str = ""  # of the text, where a stop word may have begun
    first_token: float | None = None  # when it came


class ResponseGenerator(stock.ResponseGenerator):
    """mlx-lm's thread that generates, with another loop.

    It takes requests in their order. Those that can be generated together are: of the same model, without a seed that counts
    (random numbers are the process's), without quantized keys and values. An error ends the requests that are being generated
    together, never the thread.
    """

    def __init__(self, model_provider: ModelProvider, prompt_cache: LRUPromptCache, metrics: Metrics):
        self.metrics = metrics
        self.waiting: deque[tuple[Queue, Request, stock.GenerationArguments]] = deque()
        self.jobs: dict[Sequence, Job] = {}
        self.scheduler: Scheduler
        self.scheduled_model: stock.ModelDescription | None = None  # that of the scheduler
        self.is_exclusive = False  # the one job is to remain alone
        self.loaded: Future[None] = Future()  # the default model; or why not
        metrics.watch_queue(lambda: self.requests.qsize() + len(self.waiting))
        super().__init__(model_provider, prompt_cache)

    def generate(
        self,
        request: Request,
        generation_args: stock.GenerationArguments,
        progress_callback: Callable[[int, int], None] | None = None,
    ):
        """As mlx-lm's; but what goes wrong is an ``ApiError``."""
        queue: Queue = Queue()

        def received() -> Generator[Any, None, None]:
            while True:
                try:
                    response = self._await_response(queue)
                except RuntimeError as e:
                    raise ApiError(503, f"The server is stopping: {e}.") from e
                if response is None:
                    return
                if isinstance(response, Exception):  # of mlx-lm's part
                    raise ApiError(400, str(response)) from response
                if isinstance(response, ApiError):
                    raise response
                yield response

        def responses():
            for response in incoming:
                if not isinstance(response, tuple):
                    yield response
                elif progress_callback is not None:
                    progress_callback(*response)

        model = generation_args.model
        self.model_provider.check(model.model, model.adapter, model.draft)
        self.requests.put((queue, request, generation_args))
        incoming = received()
        return next(incoming), responses()

    def _generate(self) -> None:
        try:
            self.model_provider.load_default()
            self.loaded.set_result(None)
        except BaseException as e:
            self.loaded.set_exception(e)
            return
        while not self._stop:
            self._receive()
            self._drop_abandoned()
            while self.waiting and self._fits(self.waiting[0]):
                self._admit(*self.waiting.popleft())
            if self.jobs:
                self._step()
        self._end()

    def _receive(self) -> None:
        try:
            self.waiting.append(self.requests.get(block=not self.jobs, timeout=0.1))
            while True:
                self.waiting.append(self.requests.get_nowait())
        except Empty:
            pass

    def _drop_abandoned(self) -> None:
        for entry in [entry for entry in self.waiting if entry[1].is_gone()]:
            self.waiting.remove(entry)
            entry[0].put(ApiError(400, "The client has hung up."))
        for sequence, job in [*self.jobs.items()]:
            if job.ctx._should_stop or job.request.is_gone():
                self.scheduler.remove(sequence)
                self._finish(sequence)

    def _is_exclusive(self, args: stock.GenerationArguments) -> bool:
        return self.cli_args.kv_bits is not None or (args.seed is not None and args.sampling.temperature > 0)

    def _fits(self, entry) -> bool:
        """Whether a request can be begun now."""
        args = entry[2]
        if not self.jobs:
            return True
        return args.model == self.scheduled_model and not self.is_exclusive and not self._is_exclusive(args)

    def _admit(self, queue: Queue, request: Request, args: stock.GenerationArguments) -> None:
        try:
            self._load(args.model)
            provider = self.model_provider
            self.is_exclusive = self._is_exclusive(args)
            if provider.draft_model is not None or not (
                provider.is_batchable and (self.cli_args.mtp or not self.is_exclusive)
            ):
                self._serve_single((queue, request, args), mx.default_stream(mx.default_device()))
                return
            sequence, job = self._prepare(queue, request, args)
        except ApiError as e:
            queue.put(e)
            return
        except Exception as e:
            logging.exception("A request could not be begun.")
            queue.put(ApiError(500, f"The request could not be begun: {e}"))
            return
        queue.put(job.ctx)
        self.metrics.prompt_tokens.inc(len(job.ctx.prompt))
        self.metrics.cached_prompt_tokens.inc(job.ctx.prompt_cache_count)
        self.metrics.cache_hits.inc(job.ctx.prompt_cache_count > 0)
        self.jobs[sequence] = job
        self.metrics.in_flight.set(len(self.jobs))
        self.scheduler.add(sequence)
        if (most := self.cli_args.prompt_cache_bytes) is not None:
            self.prompt_cache.trim_to(n_bytes=most - self.scheduler.nbytes)

    def _load(self, model: stock.ModelDescription) -> None:
        if model == self.scheduled_model:
            return
        self._close_scheduler()
        try:
            self.model_provider.load(model.model, model.adapter, model.draft)
        except Exception as e:
            logging.exception("A model could not be loaded.")
            raise ApiError(404, f"The model could not be loaded: {e}", param="model", code="model_not_found") from e
        self.scheduled_model = model
        self._open_scheduler()

    def _open_scheduler(self) -> None:
        args = self.cli_args
        self.scheduler = Scheduler(
            self.model_provider.model,
            mtp=args.mtp,
            on_switch=lambda to: self.metrics.mode_switches.labels(to).inc(),
            kv_options={
                "kv_bits": args.kv_bits,
                "kv_group_size": args.kv_group_size,
                "quantized_kv_start": args.quantized_kv_start,
            },
            stream=mx.default_stream(mx.default_device()),
            completion_batch_size=args.decode_concurrency,
            prefill_batch_size=args.prompt_concurrency,
            prefill_step_size=args.prefill_step_size,
        )

    def _close_scheduler(self) -> None:
        if self.scheduled_model is not None:
            self.scheduler.close()
            del self.scheduler
            self.scheduled_model = None

    def _prepare(self, queue: Queue, request: Request, args: stock.GenerationArguments) -> tuple[Sequence, Job]:
        provider = self.model_provider
        tokenizer = provider.tokenizer
        try:
            prompt, segments, segment_types, initial_state, _ = self._tokenize(tokenizer, request, args)
        except Exception as e:
            raise ApiError(400, f"The prompt could not be made of the request: {e}") from e
        param = "messages" if request.request_type == "chat" else "prompt"
        if not prompt:
            raise ApiError(400, "The prompt is empty.", param=param)
        most, max_tokens = provider.context_length, args.max_tokens
        if most is not None and len(prompt) + max_tokens > most:
            if len(prompt) >= most or max_tokens != self.cli_args.max_tokens:
                raise ApiError(
                    400,
                    f"This model's maximum context length is {most} tokens, but the request has {len(prompt)} in its prompt "
                    f"and asks for {max_tokens} more.",
                    param="max_tokens" if len(prompt) < most else param,
                    code="context_length_exceeded",
                )
            max_tokens = most - len(prompt)  # it was the server's own limit, for which nobody has asked
        vocab_size = provider.vocab_size
        if args.sampling.top_k >= vocab_size:
            raise ApiError(400, f"top_k must be below the vocabulary's size of {vocab_size}.", param="top_k")
        if any(not 0 <= token < vocab_size for token in args.logits.logit_bias or ()):
            raise ApiError(400, f"logit_bias names a token beyond the vocabulary of {vocab_size}.", param="logit_bias")

        self._log_cache_stats()
        # At least one token is left, from which generation begins.
        cache, rest = self.prompt_cache.fetch_nearest_cache(provider.model_key, prompt[:-1])
        n_cached = len(prompt) - 1 - len(rest)
        n = n_cached
        while n > 0:
            if n >= len(segments[0]):
                n -= len(segments.pop(0))
                segment_types.pop(0)
            else:
                segments[0], n = segments[0][n:], 0

        if args.seed is not None and args.sampling.temperature > 0:
            mx.random.seed(args.seed)
            sampler = stock._make_sampler(args, tokenizer)  # whose tokens do not hang on what was drafted
        else:
            sampler = _make_sampler(args, tokenizer)
        end_of_text, _ = self._make_state_machine(provider.model_key, tokenizer, [])
        _, text_sm = self._make_state_machine(provider.model_key, tokenizer, args.stop_words)
        ctx = stock.GenerationContext(
            has_tool_calling=tokenizer.has_tool_calling,
            has_thinking=tokenizer.has_thinking,
            tool_parser=tokenizer.tool_parser,
            text_sm=text_sm,
            initial_state=initial_state,
            prompt=prompt,
            prompt_cache_count=n_cached,
        )
        sequence = Sequence(
            segments,
            max_tokens,
            sampler,
            stock._make_logits_processors(args),
            end_of_text.matcher(),
            self.scheduler.make_cache() if cache is None else cache,
            prompt[:n_cached],
            args.num_draft_tokens,
            request.counts,
        )
        return sequence, Job(queue, request, args, ctx, tokenizer.detokenizer, segment_types[::-1])

    def _step(self) -> None:
        try:
            for event in self.scheduler.next():
                self._handle(event)
        except Exception as e:
            logging.exception("Generation failed.")
            self._fail(ApiError(500, f"Generation failed: {e}"))
            mx.random.seed(time.time_ns())  # what fails in a compiled function leaves a random state that is none
            self._open_scheduler()

    def _fail(self, error: ApiError) -> None:
        for job in self.jobs.values():
            job.queue.put(error)
        self.jobs.clear()
        self.metrics.in_flight.set(0)

    def _handle(self, event: Event) -> None:
        job = self.jobs[event.sequence]
        if isinstance(event, Progress):
            n_cached = job.ctx.prompt_cache_count
            job.queue.put((event.n_tokens - n_cached, len(job.ctx.prompt) - n_cached))
            if event.prompt_cache is not None and event.key is not None and job.segment_types:
                self._keep(event.key, event.prompt_cache, job.segment_types.pop())
            return
        if self._respond(job, event, event.finish_reason):
            self.scheduler.remove(event.sequence)
            self._finish(event.sequence)

    def _respond(self, job: Job, event: Token, finish_reason: str | None) -> bool:
        """Hand a token to the client -> whether it is the last."""
        request, args, detokenizer = job.request, job.args, job.detokenizer
        if job.first_token is None:
            job.first_token = time.perf_counter()
            self.metrics.first_token.observe(job.first_token - request.arrived)
        request.n_tokens += 1
        request.n_accepted += event.from_draft
        self.metrics.generated_tokens.inc()
        self.metrics.depth.set(request.counts.depth if len(self.jobs) == 1 else 0)
        if finish_reason != "stop":  # the end of the text is no text
            detokenizer.add_token(event.token)
        if finish_reason is not None:
            detokenizer.finalize()
        text = detokenizer.last_segment
        if (cut := _to_stop_word(job.tail, text, args.stop_words)) is not None:
            text, finish_reason = cut, "stop"
        job.tail = (job.tail + text)[-max([1, *map(len, args.stop_words)]) :]
        job.queue.put(
            stock.Response(
                text,
                event.token,
                event.logprobs[event.token].item() if args.logprobs else 0.0,
                # Where a response ends without a reason, the handler says "stop"; with "stop" it drops this last text.
                None if finish_reason == "stop" else finish_reason,
                stock._format_top_logprobs(event.logprobs, args.top_logprobs, self.model_provider.tokenizer),
            )
        )
        return finish_reason is not None

    def _finish(self, sequence: Sequence) -> None:
        """The end of a request whose sequence is no longer scheduled: its cache is kept for the next turn."""
        job = self.jobs.pop(sequence)
        job.queue.put(None)
        self._keep(sequence.tokens, sequence.prompt_cache, "assistant")
        self.metrics.in_flight.set(len(self.jobs))
        self.metrics.add_drafts(sequence.counts)
        if job.first_token is not None and job.request.n_tokens > 1:
            self.metrics.rate.observe((job.request.n_tokens - 1) / (time.perf_counter() - job.first_token))

    def _keep(self, tokens: list[int], prompt_cache: list[Any], cache_type: str) -> None:
        if tokens:
            self.prompt_cache.insert_cache(self.model_provider.model_key, tokens, prompt_cache, cache_type=cache_type)

    def _end(self) -> None:
        """End every request: one that has begun with a last token."""
        stopping = ApiError(503, "The server is stopping.")
        self._receive()
        for queue, *_ in self.waiting:
            queue.put(stopping)
        for sequence, job in [*self.jobs.items()]:
            if job.first_token is None:
                job.queue.put(stopping)
                self.scheduler.remove(sequence)
                del self.jobs[sequence]
        try:
            while self.jobs:
                for event in self.scheduler.next():
                    if isinstance(event, Token):
                        self._respond(self.jobs[event.sequence], event, event.finish_reason or "length")
                        self.scheduler.remove(event.sequence)
                        self._finish(event.sequence)
        except Exception:
            logging.exception("Generation failed.")
            self._fail(stopping)
        # In this thread, whose streams the arrays are of; and the streams' own threads must not outlast it.
        self._close_scheduler()
        self.model_provider.reset()
        del self.prompt_cache
        gc.collect()
        mx.clear_streams()


def _to_stop_word(tail: str, text: str, words: list[str]) -> str | None:
    """What comes after ``tail``, up to the end of the first stop word; ``None`` where there is none.

    By the text: mlx-lm's own way, by the tokens of the word alone, misses one that is tokenized otherwise in the text.
    """
    both = tail + text
    ends = [both.index(word) + len(word) for word in words if word and word in both]
    return text[: min(ends) - len(tail)] if ends else None


def _make_sampler(args: stock.GenerationArguments, tokenizer):
    """mlx-lm's, for rejection sampling."""
    s = args.sampling
    return sampling.make_sampler(
        s.temperature,
        s.top_p,
        s.min_p,
        top_k=s.top_k,
        xtc_probability=s.xtc_probability,
        xtc_threshold=s.xtc_threshold,
        xtc_special_tokens=tokenizer.encode("\n") + list(tokenizer.eos_token_ids),
    )
