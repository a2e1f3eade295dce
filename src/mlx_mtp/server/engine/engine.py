"""The generation thread, one loop over the waiting and the running requests, and its clients."""

import _thread
import logging
import math
import os
import sys
import time
import zlib
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from queue import Empty, Queue
from threading import Thread, Timer
from typing import Any

import mlx.core as mx

from ...core.batch.generator import PromptResponse, Response
from ...core.distributed import LOST, Ranks, differing_ranks, is_loss
from ...errors import MTPError, NotANumberError, advice, is_device_error, is_mendable, is_out_of_memory
from ...memory import size
from ...text.answer import Reasoning
from ...text.detokenizer import next_text
from ...text.grammar import llguidance_tokenizer
from ..request import LOADING, NO_MEMORY, STARTED, ApiError, Delta, Metrics, Request, Waiting
from .admission import Admission

STOP = 30.0  # seconds for the last step of running requests, and to write the prompt cache
IDLE = 0.1  # seconds that an idle server waits for a request before it checks for other changes
EVERY = 4  # turns between two exchanges while tokens are generated: one waits for the pass in flight
WARM_EVERY = 1.0  # seconds between two operations of an idle server with --keep-warm
REST_AFTER = 100  # exchanges without a request, about ten seconds, until a rank sleeps between two exchanges
REST = 0.08  # seconds of that sleep; the exchanges of an idle server are 0.1 s apart
# The requests that arrived, in order, and the numbers of those whose clients have disconnected.
Changes = tuple[list[Request], set[int]]
ALONE = 10.0  # seconds that a failed rank waits for the others to fail as well


class Engine:
    """Generates answers to requests, as many at a time as ``Admission`` admits, in the order of arrival."""

    def __init__(self, admission: Admission, metrics: Metrics, ranks: Ranks | None):
        self.admission = admission
        self.metrics = metrics
        self.ranks = ranks
        self.clients = clients = Clients(ranks)
        self.waiting: deque[Request] = deque()  # in order
        self.running: dict[int, Request] = {}  # requests by their uid in the batch generator
        self.loaded: Future[None] = Future()  # done when the default model is loaded, or with the error of loading it
        self.stops_at: float | None = None  # when to stop waiting for the thread
        self.error: BaseException | None = None  # the error that ended the thread
        self.n_failures = 0  # of the GPU since the last answer
        self.last_active = self.warmed = time.monotonic()  # the last request, and the last operation without one
        metrics["queue_length"].set_function(lambda: clients.arriving.qsize() + len(self.waiting) + admission.n_waiting)
        metrics["requests_in_flight"].set_function(lambda: len(self.running) - admission.n_waiting)
        self.thread = Thread(target=self._run)
        self.thread.start()

    # Other threads

    @property
    def is_alive(self) -> bool:
        return self.thread.is_alive() and self.error is None

    def stop_and_join(self) -> bool:
        """End the open answers and the thread, for at most ``STOP`` seconds. Return whether the thread has ended."""
        self.clients.is_stopping = True
        self.stops_at = self.stops_at or time.monotonic() + STOP
        self.thread.join(max(self.stops_at - time.monotonic(), 0))
        return not self.thread.is_alive()

    # The generation thread

    def _run(self) -> None:
        try:
            seed_equally(self.ranks)
            self.admission.open(self.admission.models.options.model)
        except BaseException as e:
            self.loaded.set_exception(e)
            self.admission.end()
            return
        self.loaded.set_result(None)
        try:
            self._generate()
            self._end()
        except BaseException as e:
            if is_loss(e):
                logging.error(LOST)
            elif not is_device_error(e):
                logging.exception("The generation thread has failed.")
            self.error = e
            self.clients.fail((*self.running.values(), *self.waiting), f"The server is stopping: {e}")
        if (self.ranks is None or self.ranks.rank == 0) and not self.clients.is_stopping:
            _thread.interrupt_main()  # the main thread serves HTTP

    def _generate(self) -> None:
        running = self.running
        while (changes := self.clients.changes([*self.waiting, *running.values()], not running)) is not None:
            arrived, gone = changes
            self.waiting += arrived
            try:
                self._drop(gone)
                while self.waiting and self.admission.fits(self.waiting[0], running.values()):
                    self._begin(self.waiting.popleft())
                if running:
                    self._keep_within_memory()
                if running:  # not all ended for memory
                    self._advance()
                if running or arrived:
                    self.last_active = time.monotonic()
                else:
                    self.warmed = rest(self.admission, time.monotonic() - self.last_active, self.warmed)
            except Exception as e:
                self._recover(e)

    def _recover(self, error: Exception) -> None:
        """End the running requests after an error. Later requests use a new batch generator."""
        if is_loss(error):
            raise error
        self._count_failure(error)
        logging.error("Generation failed.", exc_info=error)
        for uid in [*self.running]:
            self._leave(uid).send(_failure(f"Generation failed: {error}", error))
        reseed(self.ranks)  # an error in a compiled function invalidates the random state
        self.admission.restart()

    def _count_failure(self, error: Exception) -> None:
        """Raise the GPU's second error in a row, unless a plain pass of one token works after it.

        MLX may refuse passes until the process ends.
        """
        self.n_failures += is_device_error(error)
        if self.n_failures > 1:
            try:
                run_token(self.admission.models.model)
            except RuntimeError:
                raise error from None
            self.n_failures = 1

    def _keep_within_memory(self) -> None:
        """End the newest requests if a step needs more memory than can be freed otherwise."""
        admission = self.admission
        lack = admission.lack()
        while lack > 0 and self.running:
            uid, request = next(reversed(self.running.items()))
            admission.batch.remove([uid])
            lack -= admission.held_by(request)
            message = (
                f"The answer was stopped after {request.n_tokens} tokens: the server has reached its memory limit of "
                f"{size(admission.account.limit)}. Try again later, or start it with a larger --max-memory."
            )
            self._leave(uid).send(ApiError(507, message, code=NO_MEMORY))

    def _drop(self, gone: set[int]) -> None:
        for request in [request for request in self.waiting if request.number in gone]:
            self.waiting.remove(request)
            request.send(ApiError(400, "The client has disconnected."))
        for uid in [uid for uid, request in self.running.items() if request.number in gone]:
            self._finish(uid)

    def _begin(self, request: Request) -> None:
        try:
            try:
                if self.admission.batch is None or self.admission.models.key != request.key:
                    request.send(LOADING)
                    self.admission.open(request.key)
            except Exception as e:
                if not is_mendable(e):
                    raise
                logging.exception("A model could not be loaded.")
                message = f"The model could not be loaded: {e}"
                raise ApiError(404, message, param="model", code="model_not_found") from e
            if not request.encoded.tokens:  # it waited for the model's tokenizer
                request.send(None)
                return
            uid = self.admission.begin(request, request.encoded)
        except ApiError as e:
            request.send(e)
            return
        except Exception as e:
            request.send(_failure(f"The request failed before generation: {e}", e))
            if is_device_error(e):
                raise
            logging.exception("A request failed before generation.")
            return
        request.send(STARTED)
        self.running[uid] = request
        self.metrics["prompt_tokens"].inc(request.n_prompt)
        self.metrics["cached_prompt_tokens"].inc(request.n_cached)
        self.admission.make_room()

    def _advance(self, finish_reason: str | None = None) -> None:
        """Run a step of the batch generator. A ``finish_reason`` ends each answer with its next token."""
        prefilled, generated = self.admission.batch.next()
        if n_requests := len({response.uid for response in generated}):
            self.metrics["steps"].labels(n_requests).inc()
        self.clients.after_step(prefilled, generated)
        for progress in prefilled:
            request = self.running[progress.uid]
            request.send(Waiting(*progress.progress))
            if progress.end_of_segment and not progress.end_of_prompt and request.encoded.cuts:
                prompt_cache, tokens = self.admission.batch.extract_cache([progress.uid])[progress.uid]
                request.encoded.cuts.pop(0)
                self.admission.keep(request, prompt_cache, tokens)
        last = {r.uid: r for r in generated if r.finish_reason is not None}
        for response in generated:
            if response.uid in self.running:  # a stop word may have ended it within the step
                self._answer(response, last.get(response.uid), finish_reason)

    def _answer(self, response: Response, last: Response | None, finish_reason: str | None) -> None:
        """Send a token to the client; ``last`` is the sequence's last response, if it ends in this step."""
        uid = response.uid
        request = self.running[response.uid]
        metrics = self.metrics
        if response.error is not None:
            failure = _failure(f"Generation failed: {response.error}", response.error)
            if failure.status >= 500:
                logging.error("Generation failed.", exc_info=response.error)
            self._leave(uid).send(failure)
            self._count_failure(response.error)
            return
        if request.n_tokens == 0:
            metrics["time_to_first_token_seconds"].observe(time.perf_counter() - request.arrived)
        metrics["generated_tokens"].inc()
        delta = make_delta(request, response, response.finish_reason or finish_reason)
        if request.args.logprobs:
            delta = _with_logprobs(delta, response, request.args.top_logprobs, self.admission.models.tokenizer)
        request.send(delta)
        if delta.finish_reason is not None:
            self._finish(uid, last)

    def _finish(self, uid: int, last: Response | None = None) -> None:
        """End a request and keep its cache for the next turn. Without a ``last`` response, remove it from the batch."""
        if last is None:
            prompt_cache, tokens = self.admission.batch.remove([uid], return_prompt_caches=True)[uid]
        else:
            prompt_cache = last.prompt_cache
            tokens = last.all_tokens
        request = self._leave(uid)
        request.send(None)
        self.admission.keep(request, prompt_cache, tokens)
        self.n_failures = 0

    def _leave(self, uid: int) -> Request:
        """Take a request out of the running ones, however it ends, and count its drafts."""
        request = self.running.pop(uid)
        request.counts.retract(request.counts.n_accepted - request.n_accepted)  # behind a stop word
        self.metrics.finish(request.counts)
        return request

    def _end(self) -> None:
        for uid in [uid for uid, request in self.running.items() if request.n_tokens == 0]:
            self.admission.batch.remove([uid])
            self.waiting.append(self.running.pop(uid))
        try:
            while self.running:
                self._advance("length")
        except Exception:
            logging.exception("Generation failed.")
        self.clients.fail((*self.running.values(), *self.waiting), "The server is stopping.")
        self.admission.end()


def rest(admission: Admission, seconds: float, warmed: float) -> float:
    """Keep the weights of a server without a request for so long warm, or free them, as the flags say.

    Return when they were last used.
    """
    options = admission.options
    now = time.monotonic()
    if admission.batch is None:
        return warmed
    if options.unload_after is not None and seconds >= 60 * options.unload_after:
        admission.close()
        admission.models.reset()
        admission.account.release()
        logging.info(f"The model is unloaded after {options.unload_after:g} minutes without a request.")
    elif seconds < options.keep_warm and now > warmed + WARM_EVERY:
        mx.eval(mx.zeros(1) + 1)
        return now
    return warmed


def _failure(message: str, error: Exception) -> ApiError:
    """The error of a request: status 507 if the system is out of memory, 400 if the client can mend it, otherwise 500."""
    if (remedy := advice(error)) is not None:
        message = f"{message.rstrip('.')}. {remedy}"
    if is_out_of_memory(error):
        return ApiError(507, message, code=NO_MEMORY)
    is_clients = isinstance(error, MTPError) and not isinstance(error, NotANumberError)
    return ApiError(400 if is_clients else 500, message)


def make_delta(request: Request, response: Response, finish_reason: str | None) -> Delta:
    """Add a token to the request's answer; ``finish_reason`` is "stop" or "length" for the last token."""
    request.n_tokens += 1
    request.n_accepted += response.from_draft
    text = next_text(request.detokenizer, response.token, finish_reason)
    events, finish_reason = request.answer.step(text, finish_reason)
    if any(isinstance(event, Reasoning) for event in events):  # a whole answer's may wait
        request.n_reasoning = request.n_tokens
    source = response.counts.source if response.from_draft else "model"
    return Delta(events, response.token, finish_reason, request.answer.stop_word, source)


def run_token(model: Any) -> None:
    """Run a plain pass of one token, which shows whether the device works."""
    mx.eval(model(mx.zeros((1, 1), mx.uint32)))


def _with_logprobs(delta: Delta, response: Response, n: int, tokenizer: Any) -> Delta:
    """Add the log probability of the token, and the n likeliest tokens at its position that the grammar allows."""
    logprobs: Any = response.logprobs
    tokens = mx.argpartition(-logprobs, kth=n - 1)[:n] if n > 0 else mx.zeros(0, mx.int32)
    tokens = mx.concatenate([mx.array([delta.token]), tokens.astype(mx.int32)])  # [1 + n]
    ids: Any = tokens.tolist()
    decode = llguidance_tokenizer(tokenizer).decode_bytes  # without a byte 0xFF at the beginning, which no UTF-8 has
    own, *top = ((decode([i]) or b"\xff", value) for i, value in zip(ids, logprobs[tokens].tolist()))
    likeliest = sorted((t for t in top if t[1] > -math.inf), key=lambda t: -t[1])
    return replace(delta, logprobs=[own, *likeliest])


class Clients:
    """The requests of clients, and their disconnects. Of several ranks, rank 0 broadcasts its own: each rank runs the whole
    engine, and the same steps.
    """

    def __init__(self, ranks: Ranks | None = None):
        self.ranks = ranks
        self.arriving: Queue[Request] = Queue()
        self.is_stopping = False
        # Of several ranks
        self.n_turns = 0  # since the last exchange
        self.n_idle = 0  # exchanges since the last request
        self.checksum = 0  # a checksum of the generated tokens

    def look(self, known: Iterable[Request], wait: bool) -> Changes:
        arrived: list[Request] = []
        with suppress(Empty):
            arrived.append(self.arriving.get(block=wait, timeout=IDLE))
            while True:
                arrived.append(self.arriving.get_nowait())
        return arrived, {request.number for request in (*known, *arrived) if request.is_gone}

    def fail(self, known: Iterable[Request], message: str) -> None:
        """End these requests, and those that have arrived, as the server stops."""
        arrived, _ = self.look((), wait=False)
        for request in (*known, *arrived):
            request.send(ApiError(503, message))

    def changes(self, known: Iterable[Request], is_idle: bool) -> Changes | None:
        """The changes since the last step, ``known`` the requests before it; ``None`` when the server stops."""
        if (ranks := self.ranks) is None:
            return None if self.is_stopping else self.look(known, wait=is_idle)
        self.n_turns += 1
        if not is_idle and self.n_turns < EVERY:
            return [], set()
        self.n_turns = 0
        self.n_idle = self.n_idle + 1 if is_idle else 0
        mine: Changes = [], set()
        if ranks.rank == 0:
            mine = self.look(known, wait=is_idle)
        elif self.n_idle > REST_AFTER:
            time.sleep(REST)  # MLX's ring waits in a busy loop
        numbers = mx.array([[any(mine), self.is_stopping, self.checksum]], mx.uint32)
        sent: Any = mx.distributed.all_gather(numbers, group=ranks.group).tolist()  # [R, 3]
        has_changes, stop, checksum = zip(*sent)
        if others := differing_ranks(checksum):
            raise RuntimeError(f"{others} have generated other tokens than rank 0.")
        if any(stop):
            return None
        shared = ranks.broadcast(mine) if has_changes[0] else mine
        return mine if ranks.rank == 0 else shared

    def after_step(self, prefilled: list[PromptResponse], generated: list[Response]) -> None:
        """Call after each step of the batch generator, with its responses."""
        if self.ranks is None:
            return
        if prefilled:
            self.n_turns = EVERY  # prefilling took long
        for uid, token in [(r.uid, "prefilled") for r in prefilled] + [(r.uid, r.token) for r in generated]:
            self.checksum = zlib.crc32(f"{uid} {token} ".encode(), self.checksum)


def seed_equally(ranks: Ranks | None) -> None:
    """Seed all ranks with rank 0's random seed. A server in one process keeps MLX's random state."""
    if ranks is not None:
        mx.random.seed(ranks.broadcast(time.time_ns()))


def reseed(ranks: Ranks | None) -> None:
    """Seed MLX again after a failure. A rank ends its process if the others have not failed."""
    if ranks is None:
        mx.random.seed(time.time_ns())
        return

    def end() -> None:
        error = f"Rank {ranks.rank} has failed, but the other ranks have not."
        print(f"mlx_mtp server: error: {error}", file=sys.__stderr__, flush=True)
        os._exit(1)

    alone = Timer(ALONE, end)
    alone.daemon = True
    alone.start()
    seed_equally(ranks)
    alone.cancel()
