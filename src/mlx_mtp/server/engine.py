"""The thread that generates: mlx-lm's ``ResponseGenerator`` with the MTP head."""

import asyncio
import gc
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import Empty
from typing import Any, TypeVar

import mlx.core as mx
from mlx_lm import server as stock

from .. import cli
from ..decoding import sampling
from ..images.prompt import ImagePrompt, read_images
from ..prompt_store.memory import cache_budget, memory_left
from .answer import make_answer
from .batch import Event, Failure, Generation, NewToken, Progress, Scheduler
from .budget import make_processors
from .caches import Caches
from .form import make_form
from .images import MAX_PIXELS, check_client, fetch_all
from .job import Delta, Job, Likely, Outbox
from .memory import cache_bytes, check_fits
from .metrics import Metrics
from .prompt import BoundedTokenizer, check_continues
from .provider import ModelKey, ModelProvider
from .request import ApiError, Prompt, Request
from .text_tokens import Pieces

KEEP_ALIVE = 5.0  # seconds of waiting after which a client is told how far its prompt is read
POLL = 1.0  # seconds between two looks whether the generation thread lives
T = TypeVar("T")


class Mailbox:
    """Takes what the generation thread says to a request, for the event loop that it is made in."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[Any] = asyncio.Queue()

    def put(self, response: Any) -> None:
        with suppress(RuntimeError):  # the loop has been closed: nobody waits any more
            self.loop.call_soon_threadsafe(self.queue.put_nowait, response)

    async def get(self) -> Any:
        return await self.queue.get()


Entry = tuple[Outbox, Request, stock.GenerationArguments]


@dataclass(frozen=True)
class Waiting:
    """A client waits for its prompt to be read, of which so many tokens have been."""

    n_read: int
    n_prompt: int


async def in_thread(f: Callable[..., T], *args: Any) -> T:
    """Call a function that may take long in a thread that nobody waits for when the server ends."""
    future: Future[T] = Future()

    def run(future: Future[T]) -> None:
        try:
            future.set_result(f(*args))
        except BaseException as e:
            future.set_exception(e)
        finally:
            del (
                future
            )  # else an error, its traceback, this frame and the future are a cycle, and what it took stays for long

    threading.Thread(target=run, args=(future,), daemon=True).start()
    return await asyncio.wrap_future(future)


@dataclass
class Changes:
    """What clients have done. With what was generated, all that the next steps depend on.

    Args:
        arrived (List[Entry]): New requests, in order.
        gone (Set[int]): The numbers of requests whose clients have hung up, or do not want more.
    """

    arrived: list[Entry] = field(default_factory=list)
    gone: set[int] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.arrived or self.gone)


@dataclass
class SingleQueue:
    """Where the responses of mlx-lm's own loop go. It never asks whether the client is there: this ends it.

    Raises:
        ApiError: The client has hung up.
    """

    queue: Outbox
    request: Request

    def put(self, response: Any) -> None:
        if self.request.is_gone:
            raise ApiError(400, "The client has hung up.")
        self.queue.put(response)


class ResponseGenerator(stock.ResponseGenerator):
    """mlx-lm's generation thread with another loop.

    It takes requests in order and generates them together if it can: same model, no quantized cache, no seed of the global
    random state. An error ends the requests that are being generated, never the thread.

    Templates are rendered and prompts tokenized in threads of their own, so that no prompt delays other requests.
    """

    def __init__(self, model_provider: ModelProvider, caches: Caches, metrics: Metrics):
        self.caches, self.metrics = caches, metrics
        self.open: set[Mailbox] = set()  # where responses are awaited
        self.created = int(time.time())
        self.waiting: deque[Entry] = deque()
        self.jobs: dict[Generation, Job] = {}
        self.scheduler: Scheduler
        self.scheduled: ModelKey | None = None  # the scheduler's model
        self.caches_of: ModelKey | None = None  # the model that the prompt caches are of
        self.max_cache_bytes = 0  # of prompt caches, with that model
        self.memory_left = 0  # beside that model
        self.is_exclusive = False  # the one job must stay alone
        self.acceptance = model_provider.cli_args.acceptance
        self.error: BaseException | None = None  # what has ended the thread where several ranks run the model
        self.loaded: Future[None] = Future()  # the default model, or why it could not be loaded
        metrics.watch_queue(lambda: self.requests.qsize() + len(self.waiting))
        metrics.registry.register(caches)
        super().__init__(model_provider, caches.lru)

    # In the event loop, which serves the clients

    async def generate(
        self, request: Request, args: stock.GenerationArguments
    ) -> AsyncIterator[stock.GenerationContext | Waiting | Delta]:
        """What a request becomes: its context, its steps, and while it waits, every few seconds, how far its prompt is read.

        Raises:
            ApiError: It cannot be generated.
        """
        prompt = request.encoded = await self._encode_request(request, args)
        if self.cli_args.prompt_cache_dir is not None and prompt.pictured is None:
            # With images, the generation thread reads the files: their keys need the tower, which it alone runs.
            await in_thread(self.caches.load, self.model_provider.key_of(args.model), prompt.tokens)
        context = answer = None
        async for response in self._submit(request, args):
            if isinstance(response, stock.GenerationContext):
                context = response
            if not isinstance(response, stock.Response):
                yield response
                continue
            # Of mlx-lm's own loop, which does not look for stop words.
            if answer is None:
                assert context is not None
                tokenizer = self.model_provider.tokenizer
                answer = make_answer(tokenizer, context.text_sm, context.initial_state, request, args.stop_words)
            events, finish_reason = answer.step(response.text, response.finish_reason)
            request.n_tokens += 1
            stop_word = answer.stop.found
            likely, top = _stock_likely(response, tokenizer) if args.logprobs else (None, [])
            yield Delta(events, response.token, finish_reason, stop_word, None, likely, top)
            if finish_reason is not None:
                return

    async def count_tokens(self, request: Request, args: stock.GenerationArguments) -> int:
        """The number of tokens of a request's prompt."""
        return len((await self._encode_request(request, args)).tokens)

    async def _encode_request(self, request: Request, args: stock.GenerationArguments) -> Prompt:
        provider = self.model_provider
        args.model = provider.resolve(args.model)
        tokenizer = provider.tokenizers.get(provider.key_of(args.model))
        if tokenizer is None:  # go through the queue once to load the model
            async for response in self._submit(request, args):
                if isinstance(response, BoundedTokenizer):
                    tokenizer = response
                    break
        assert tokenizer is not None
        return await in_thread(self._encode, tokenizer, request, args)

    async def _submit(self, request: Request, args: stock.GenerationArguments) -> AsyncIterator[Any]:
        """Queue a request -> what the generation thread answers."""
        mailbox = Mailbox()
        self.open.add(mailbox)
        try:
            self.requests.put((mailbox, request, args))
            while (response := await self._await(mailbox)) is not None:
                if isinstance(response, ApiError):
                    raise response
                if isinstance(response, Exception):  # from mlx-lm's methods
                    raise ApiError(400, str(response)) from response
                yield response
        finally:
            self.open.discard(mailbox)

    async def _await(self, mailbox: Mailbox) -> Any:
        """The next response; of those about the prompt's progress only one every few seconds."""
        progress, due = (0, 0), time.monotonic() + KEEP_ALIVE
        while True:
            is_alive = self.generation_available()
            try:
                async with asyncio.timeout(max(min(POLL, due - time.monotonic()), 0)):
                    response = await mailbox.get()
            except TimeoutError:
                if not is_alive:
                    raise ApiError(503, "The server is stopping.") from None
                response = progress
            if not isinstance(response, tuple):
                return response
            progress = response
            if time.monotonic() >= due:
                return Waiting(*progress)

    def fail_all(self, error: ApiError) -> None:
        """End all open answers; for any thread, whatever the generation thread is waiting for."""
        for mailbox in self.open.copy():
            mailbox.put(error)

    def _encode(self, tokenizer: BoundedTokenizer, request: Request, args: stock.GenerationArguments) -> Prompt:
        check_continues(tokenizer, request)
        try:
            tokens, segments, segment_types, initial_state, _ = super()._tokenize(tokenizer, request, args)
            pictured = self._read_images(tokenizer, request, tokens) if request.images else None
        except ApiError as e:
            e.param = request.param
            raise
        except Exception as e:
            raise ApiError(400, f"The prompt cannot be read: {e}", param=request.param) from e
        if pictured is not None:
            tokens, segments, segment_types = pictured.tokens, [pictured.tokens], ["assistant"]
        tokenizer.check(len(tokens), args, self.cli_args.max_tokens, request.param)
        make_form(
            tokenizer.tokenizer, request, initial_state == "reasoning"
        )  # compiled here, not in the generation thread
        return Prompt(tokens, segments, segment_types, initial_state, pictured=pictured)

    def _read_images(self, tokenizer: BoundedTokenizer, request: Request, tokens: list[int]) -> ImagePrompt:
        """
        Raises:
            ApiError: The model takes no images.
            ValueError: One of them cannot be read.
        """
        if tokenizer.vision is None:
            raise ApiError(400, "The model that is served takes no images: send text.", param=request.param)
        images, most = fetch_all(request, self.cli_args), tokenizer.context_length
        return read_images(tokenizer.vision, tokens, images, most, MAX_PIXELS, lambda: check_client(request))

    # In the generation thread

    def _tokenize(self, tokenizer: Any, request: Request, args: stock.GenerationArguments) -> tuple[Any, ...]:
        """For mlx-lm's ``_serve_single``."""
        prompt = request.encoded
        assert prompt is not None
        return prompt.tokens, prompt.segments, prompt.segment_types, prompt.initial_state, None

    def _generate(self) -> None:
        try:
            self.model_provider.load_default()
            self._open_caches()
            self.loaded.set_result(None)
        except BaseException as e:
            self.loaded.set_exception(e)
            self._let_go()
            return
        while (changes := self._changes()) is not None:
            self.waiting += changes.arrived
            self._drop(changes.gone)
            while self.waiting and self._fits(self.waiting[0]):
                self._admit(self.waiting.popleft())
            if self.jobs:
                self._step()
        self._end()

    def _changes(self) -> Changes | None:
        """What clients have done since the last step; ``None`` where the server ends."""
        return None if self._stop else self._look(wait=not self.jobs)

    def _look(self, wait: bool) -> Changes:
        arrived = self._receive(wait)
        gone = {request.number for _, request, _ in (*self.waiting, *arrived) if request.is_gone}
        jobs = self.jobs.values()
        return Changes(arrived, gone | {j.request.number for j in jobs if j.ctx._should_stop or j.request.is_gone})

    def _receive(self, wait: bool) -> list[Entry]:
        """New requests; where there is none, ``wait`` a tenth of a second for it."""
        arrived: list[Entry] = []
        with suppress(Empty):
            arrived.append(self.requests.get(block=wait, timeout=0.1))
            while True:
                arrived.append(self.requests.get_nowait())
        return arrived

    def _drop(self, gone: set[int]) -> None:
        """End requests that nobody waits for."""
        for entry in [entry for entry in self.waiting if entry[1].number in gone]:
            self.waiting.remove(entry)
            entry[0].put(ApiError(400, "The client has hung up."))
        for generation in [generation for generation, job in self.jobs.items() if job.request.number in gone]:
            self.scheduler.remove(generation)
            self._finish(generation)

    def _is_exclusive(self, args: stock.GenerationArguments) -> bool:
        """Whether a request must be generated alone."""
        return self.cli_args.kv_bits is not None or self._seeds_global_state(args)

    def _seeds_global_state(self, args: stock.GenerationArguments) -> bool:
        """MLX's random state is shared by all requests. Only a coupled sampler has a seed of its own."""
        is_seeded = args.seed is not None and args.sampling.temperature > 0
        return is_seeded and self.acceptance in ("rejection", "match")

    def _fits(self, entry: Entry) -> bool:
        """Whether a request can begin now."""
        _, _, args = entry
        if not self.jobs:
            return True
        is_same_model = self.model_provider.key_of(args.model) == self.scheduled
        if not is_same_model or self.is_exclusive or self._is_exclusive(args):
            return False
        running = sum(self._bytes_of(j.request) for j in self.jobs.values())
        return running + self._bytes_of(entry[1]) <= self.memory_left

    def _bytes_of(self, request: Request) -> int:
        """Of the caches of a request, as far as it has come."""
        n, flags = request.n_tokens + len(request.encoded.tokens if request.encoded else ()), self.cli_args
        return cache_bytes(self.model_provider.model, n, flags.kv_bits, flags.kv_group_size)

    def _admit(self, entry: Entry) -> None:
        queue, request, args = entry
        try:
            self._switch_to(args.model)
            if request.encoded is None:
                queue.put(self.model_provider.tokenizers[self.scheduled])
                return
            check_fits(len(request.encoded.tokens), self._bytes_of(request), self.memory_left, request.param)
            self.is_exclusive = self._is_exclusive(args)
            if self._is_single():
                _check_single(request)
                single = SingleQueue(queue, request), request, replace(args, stop_words=[])
                self._serve_single(single, mx.default_stream(mx.default_device()))
                self._make_room()
                return
            generation, job = self._prepare(queue, request, request.encoded, args)
        except ApiError as e:
            queue.put(e)
            return
        except Exception as e:
            logging.exception("A request failed before generation.")
            queue.put(ApiError(500, f"The request failed before generation: {e}"))
            return
        self._begin(generation, job)

    def _is_single(self) -> bool:
        """Whether mlx-lm's own loop generates the request: with a draft model, or alone without MTP."""
        provider = self.model_provider
        is_batched = provider.is_batchable and (cli.drafts(self.cli_args) or not self.is_exclusive)
        return provider.draft_model is not None or not is_batched

    def _begin(self, generation: Generation, job: Job) -> None:
        job.queue.put(job.ctx)
        self.metrics.prompt_tokens.inc(len(job.ctx.prompt))
        self.metrics.cached_prompt_tokens.inc(job.ctx.prompt_cache_count)
        self.metrics.cache_hits.inc(job.ctx.prompt_cache_count > 0)
        self.jobs[generation] = job
        self.metrics.in_flight.set(len(self.jobs))
        self.scheduler.add(generation)
        self._make_room()

    def _make_room(self) -> None:
        """Keep ``--prompt-cache-bytes``, those of the running requests included."""
        self.caches.trim_to(self.max_cache_bytes - self.scheduler.nbytes)

    def _switch_to(self, model: stock.ModelDescription) -> None:
        key = self.model_provider.key_of(model)
        if key == self.scheduled:
            return
        self._close_scheduler()
        try:
            self.model_provider.load(model.model, model.adapter, model.draft)
        except Exception as e:
            logging.exception("A model could not be loaded.")
            raise ApiError(404, f"The model could not be loaded: {e}", param="model", code="model_not_found") from e
        self.scheduled = key
        self._open_caches()
        self._open_scheduler()

    def _open_caches(self) -> None:
        """Those of the model that is loaded now."""
        provider = self.model_provider
        if self.caches_of == provider.model_key:
            return
        self.caches_of = provider.model_key
        self.max_cache_bytes, self.memory_left = self._max_cache_bytes(), self._memory_left()
        logging.info(f"Prompt caches may take {self.max_cache_bytes / 1e9:.1f} GB")
        self.caches.use(provider.model_key, provider.model, provider.tokenizer, self.max_cache_bytes)

    def _max_cache_bytes(self) -> int:
        if self.cli_args.prompt_cache_bytes is not None:
            return int(self.cli_args.prompt_cache_bytes)
        provider = self.model_provider
        return cache_budget(*(model for model in (provider.model, provider.draft_model) if model is not None))

    def _memory_left(self) -> int:
        provider = self.model_provider
        return memory_left(*(model for model in (provider.model, provider.draft_model) if model is not None))

    def _open_scheduler(self) -> None:
        args = self.cli_args
        self.scheduler = Scheduler(
            self.model_provider.model,
            mtp=cli.drafts(args),
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
            max_token_gap=args.max_token_gap,
            min_decode_share=args.min_decode_share,
        )

    def _close_scheduler(self) -> None:
        if self.scheduled is not None:
            self.scheduler.close()
            self.caches.release()
            self.caches_of = None
            del self.scheduler
            self.scheduled = None

    def _prepare(
        self, queue: Outbox, request: Request, prompt: Prompt, args: stock.GenerationArguments
    ) -> tuple[Generation, Job]:
        """What generates a request, and what answers it."""
        key, tokenizer = self.model_provider.model_key, self.model_provider.tokenizer
        self.caches.log()
        cache, n_cached = self.caches.fetch(prompt)
        end_of_text, text_sm = self._make_state_machine(key, tokenizer, [])
        answer = make_answer(tokenizer, text_sm, prompt.initial_state, request, args.stop_words)
        ctx = stock.GenerationContext(
            has_tool_calling=tokenizer.has_tool_calling,
            has_thinking=tokenizer.has_thinking,
            tool_parser=tokenizer.tool_parser,
            text_sm=text_sm,
            initial_state=prompt.initial_state,
            prompt=prompt.tokens,
            prompt_cache_count=n_cached,
        )
        generation = Generation(
            prompt.segments,
            args.max_tokens,
            self._make_sampler(args),
            make_processors(tokenizer, request, prompt, args),
            end_of_text.matcher(),
            self.scheduler.make_cache() if cache is None else cache,
            prompt.tokens[:n_cached],
            args.num_draft_tokens if self.cli_args.mtp else 0,
            request.counts,
            request.copy_drafts,
        )
        if prompt.pictured is not None:
            generation.embeddings = prompt.pictured.embed(self.model_provider.model, n_cached)
            generation.images = prompt.pictured.images
        return generation, Job(queue, request, args, ctx, answer, tokenizer, prompt.segment_types[::-1])

    def _make_sampler(self, args: stock.GenerationArguments) -> Any:
        tokenizer, s = self.model_provider.tokenizer, args.sampling
        seed = args.seed
        if self._seeds_global_state(args):
            mx.random.seed(seed)
            seed = None
        return sampling.make_sampler(
            s.temperature,
            s.top_p,
            s.min_p,
            top_k=s.top_k,
            xtc_probability=s.xtc_probability,
            xtc_threshold=s.xtc_threshold,
            xtc_special_tokens=tokenizer.encode("\n") + list(tokenizer.eos_token_ids),
            seed=seed,
            acceptance=self.acceptance,
        )

    def _step(self) -> None:
        try:
            with self.metrics.step([s.counts for s in self.jobs]):
                events = self.scheduler.next()
            for event in events:
                if event.generation in self.jobs:  # a step may go on behind a stop word
                    self._handle(event)
        except Exception as e:
            logging.exception("Generation failed.")
            self._fail(ApiError(500, f"Generation failed: {e}"))
            self._reseed()  # an error in a compiled function invalidates the random state
            self._open_scheduler()

    def _reseed(self) -> None:
        mx.random.seed(time.time_ns())

    def _fail(self, error: ApiError) -> None:
        for job in self.jobs.values():
            job.queue.put(error)
        self.jobs.clear()
        self.metrics.in_flight.set(0)

    def _handle(self, event: Event) -> None:
        job = self.jobs[event.generation]
        if isinstance(event, Progress):
            n_cached = job.ctx.prompt_cache_count
            job.queue.put((event.n_tokens - n_cached, len(job.ctx.prompt) - n_cached))
            if event.prompt_cache is not None and event.key is not None and job.segment_types:
                self._save(job, event.key, event.prompt_cache, job.segment_types.pop())
        elif isinstance(event, Failure):
            del self.jobs[event.generation]
            job.queue.put(ApiError(500, f"Generation failed: {event.error}"))
            self.metrics.in_flight.set(len(self.jobs))
        elif self._respond(job, event, event.finish_reason):
            self.scheduler.remove(event.generation)
            self._finish(event.generation)

    def _respond(self, job: Job, event: NewToken, finish_reason: str | None) -> bool:
        """Send a token to the client -> whether it is the last."""
        if job.first_token is None:
            job.first_token = time.perf_counter()
            self.metrics.first_token.observe(job.first_token - job.request.arrived)
        self.metrics.generated_tokens.inc()
        return job.respond(event, finish_reason)

    def _finish(self, generation: Generation) -> None:
        """End a request whose generation has left the scheduler, and save its cache for the next turn."""
        job = self.jobs.pop(generation)
        job.queue.put(None)
        self._save(job, generation.tokens, generation.prompt_cache, "assistant")
        self.metrics.in_flight.set(len(self.jobs))
        self.metrics.add_drafts(generation.counts)
        if (rate := job.tokens_per_second()) is not None:
            self.metrics.rate.observe(rate)

    def _save(self, job: Job, tokens: list[int], prompt_cache: list[Any], cache_type: str) -> None:
        if tokens:
            assert job.request.encoded is not None
            self.caches.insert(job.request.encoded, tokens, prompt_cache, cache_type)
            self._make_room()

    def _end(self) -> None:
        """End every request: those that have begun with one last token."""
        stopping = ApiError(503, "The server is stopping.")
        for queue, *_ in (*self.waiting, *self._receive(wait=False)):
            queue.put(stopping)
        for generation, job in [*self.jobs.items()]:
            if job.first_token is None:
                job.queue.put(stopping)
                self.scheduler.remove(generation)
                del self.jobs[generation]
        try:
            while self.jobs:
                for event in self.scheduler.next():
                    if isinstance(event, Failure):
                        self._handle(event)
                    elif isinstance(event, NewToken) and event.generation in self.jobs:
                        self._respond(self.jobs[event.generation], event, event.finish_reason or "length")
                        self.scheduler.remove(event.generation)
                        self._finish(event.generation)
        except Exception:
            logging.exception("Generation failed.")
            self._fail(stopping)
        self._close_scheduler()
        self.caches.close()
        self._let_go()

    def _let_go(self) -> None:
        """In the thread that owns the arrays' streams; the streams' threads must not outlast it."""
        self.model_provider.reset()
        del self.prompt_cache
        gc.collect()
        mx.clear_streams()


def _stock_likely(response: stock.Response, tokenizer: Any) -> tuple[Likely, list[Likely]]:
    """The token of mlx-lm's own loop, and the likeliest ones."""
    top = sorted(response.top_tokens, key=lambda t: -t["logprob"])
    own, *others = Pieces(tokenizer).of([response.token, *(t["id"] for t in top)])
    return Likely(own, response.logprob), [Likely(piece, t["logprob"]) for piece, t in zip(others, top)]


def _check_single(request: Request) -> None:
    """
    Raises:
        ApiError: mlx-lm's own loop cannot generate the request.
    """
    where = "is not supported with --draft-model, and without --mtp not with --kv-bits or a seed."
    if request.form is not None:
        raise ApiError(400, f"{request.form.param} {where}", param=request.form.param)
    if request.thinking.budget is not None:
        raise ApiError(400, f"A thinking budget {where}", param="thinking_budget")
