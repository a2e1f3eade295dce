"""The HTTP side: mlx-lm's handler, with checks of the client and its request before it and OpenAI's error format."""

import hmac
import io
import json
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from http.server import ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

from huggingface_hub import CacheNotFound, scan_cache_dir
from mlx_lm import server as stock
from prometheus_client import CONTENT_TYPE_LATEST

from .. import cli
from .body import parse
from .chat_completions import Message, deltas
from .engine import ResponseGenerator
from .job import Step
from .request import ApiError, Request

MAX_BODY = 16 << 20  # bytes
MAX_DRAINED = 256 << 20  # bytes of a body that is too large, read so that the client gets to the answer


class APIHandler(stock.APIHandler):
    """mlx-lm's handler. It answers every request, unless the client has hung up."""

    default_request_version = "HTTP/1.0"  # errors have a status line, whatever the request was
    timeout = 300  # seconds that a client may take to send or receive some bytes
    path: str
    response_generator: ResponseGenerator
    server: "Server"

    started = False  # the headers have been sent
    streaming = False
    request_info: Request | None = None
    logit_bias: dict[Any, float] | None
    _headers_buffer: list[bytes]

    def do_POST(self) -> None:
        self._answer(self._complete)

    def do_GET(self) -> None:
        self._answer(self._get)

    do_HEAD = do_GET

    def _answer(self, answer: Callable[[], None]) -> None:
        self.path = self.path.partition("?")[0]
        with self.server.answering():
            try:
                answer()
            except ApiError as e:
                self._send_error(e)
            except (ConnectionError, TimeoutError):
                logging.info("The client has hung up.")
                self.close_connection = True
            except Exception as e:
                logging.exception("A request failed.")
                self._send_error(ApiError(500, f"The request failed: {e}"))

    def _complete(self) -> None:
        self._authorize()
        if self.path not in ("/v1/completions", "/v1/chat/completions", "/chat/completions"):
            raise ApiError(404, f"There is no {self.path} here.")
        body = parse(self._read_body())
        needed = "prompt" if self.path == "/v1/completions" else "messages"
        if needed not in body:
            raise ApiError(400, f"Request did not contain {'a prompt' if needed == 'prompt' else needed}", param=needed)
        # mlx-lm's do_POST reads and parses the body itself and turns its 25 fields into attributes. Handing it the checked
        # body as bytes copies none of that and takes milliseconds.
        raw = json.dumps(body).encode()
        self.rfile = io.BytesIO(raw)
        self.headers.replace_header("Content-Length", str(len(raw)))
        self.streaming = body.get("stream", False)
        self.copy_drafts = body.get("copy_drafts", self.response_generator.cli_args.copy_drafts)
        super().do_POST()

    def _get(self) -> None:
        if self.path == "/health":
            is_healthy = self.response_generator.is_healthy
            self._send_json({"status": "ok" if is_healthy else "unavailable"}, 200 if is_healthy else 503)
            return
        self._authorize()
        if self.path == "/metrics":
            self._send(200, self.response_generator.metrics.text(), CONTENT_TYPE_LATEST)
        elif self.path == "/v1/models" or self.path.startswith("/v1/models/"):
            self.handle_models_request()
        else:
            raise ApiError(404, f"There is no {self.path} here.")

    def _authorize(self) -> None:
        key = self.server.api_key
        bearer = re.sub("^bearer +", "", self.headers.get("Authorization", ""), flags=re.IGNORECASE)
        given = (bearer, self.headers.get("x-api-key", ""))
        if key is not None and not any(hmac.compare_digest(k.encode(), key.encode()) for k in given):
            raise ApiError(
                401, "The API key is missing or wrong: send it as Authorization: Bearer KEY or x-api-key: KEY."
            )

    def _read_body(self) -> bytes:
        n = self._content_length()
        if n > MAX_BODY:
            n = min(n, MAX_DRAINED)
            while n > 0 and (chunk := self.rfile.read(min(n, 1 << 16))):
                n -= len(chunk)
            raise ApiError(413, f"The body is larger than {MAX_BODY} bytes.")
        raw: bytes = self.rfile.read(n)
        if len(raw) < n:
            raise ApiError(400, "The body is shorter than its Content-Length.")
        return raw

    def _content_length(self) -> int:
        lengths = set(self.headers.get_all("Content-Length", []))
        if not lengths:
            raise ApiError(411, "Content-Length header is required")
        if len(lengths) > 1 or "Transfer-Encoding" in self.headers:
            raise ApiError(
                400, "The request has contradictory lengths: send one Content-Length and no Transfer-Encoding."
            )
        (length,) = lengths
        if not re.fullmatch("[0-9]+", length):
            raise ApiError(400, "Invalid Content-Length header")
        return int(length) if len(length) < 20 else MAX_DRAINED

    def validate_model_parameters(self) -> None:
        """mlx-lm's check, of which only this is left: ``parse`` has checked the body."""
        if self.logit_bias is not None:
            self.logit_bias = {int(token): value for token, value in self.logit_bias.items()}

    def handle_chat_completions(self) -> Request:
        return self._request(super().handle_chat_completions())

    def handle_text_completions(self) -> Request:
        return self._request(super().handle_text_completions())

    def _request(self, request: stock.CompletionRequest) -> Request:
        self.request_info = Request(**vars(request), connection=self.connection, copy_drafts=self.copy_drafts)
        if self.streaming:
            self.request_info.begin = self._begin_stream
        return self.request_info

    def handle_completion(self, request: stock.CompletionRequest, stop_words: list[str]) -> None:
        """mlx-lm's method, with the answer as events: its own parses tool calls, and loses those that it cannot parse."""
        ctx, steps = self.response_generator.generate(request, self._arguments(stop_words), self._keep_alive)
        try:
            if self.stream:
                self._begin_stream()
                self._stream(ctx, steps)
            else:
                self._send_json(self._whole_answer(ctx, [*steps]))
        finally:
            ctx.stop()

    def _arguments(self, stop_words: list[str]) -> stock.GenerationArguments:
        """What mlx-lm's ``do_POST`` has read."""
        model = stock.ModelDescription(self.requested_model, self.requested_draft_model, self.adapter)
        parts = {"model": model, "stop_words": stop_words}
        for name, cls in (("sampling", stock.SamplingArguments), ("logits", stock.LogitsProcessorArguments)):
            parts[name] = cls(**{f.name: getattr(self, f.name) for f in fields(cls)})
        others = [f.name for f in fields(stock.GenerationArguments) if f.name not in parts]
        return stock.GenerationArguments(**parts, **{name: getattr(self, name) for name in others})

    def _keep_alive(self, n_read: int, n_prompt: int) -> None:
        logging.info(f"Prompt processing progress: {n_read}/{n_prompt}")
        if self.stream:
            self.wfile.write(f": keepalive {n_read}/{n_prompt}\n\n".encode())

    def _stream(self, ctx: stock.GenerationContext, steps: Iterator[Step]) -> None:
        n_tokens, finish_reason = 0, "stop"
        for step in steps:
            n_tokens += 1
            for delta in deltas(step.events):
                self._send_chunk(self.generate_response(finish_reason=None, **delta))
            finish_reason = step.finish_reason or finish_reason
        self._send_chunk(self.generate_response("", finish_reason))
        if self.stream_options is not None and self.stream_options["include_usage"]:
            self._send_chunk(self.completion_usage_response(len(ctx.prompt), n_tokens, ctx.prompt_cache_count))
        self.wfile.write(b"data: [DONE]\n\n")

    def _send_chunk(self, content: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(content)}\n\n".encode())

    def _whole_answer(self, ctx: stock.GenerationContext, steps: list[Step]) -> dict[str, Any]:
        message = Message()
        for step in steps:
            message.add(step.events)
        return self.generate_response(
            message.text,
            steps[-1].finish_reason if steps else "stop",
            len(ctx.prompt),
            len(steps),
            ctx.prompt_cache_count,
            token_logprobs=[step.logprob for step in steps] if self.logprobs else [],
            top_tokens=[step.top_tokens for step in steps] if self.top_logprobs > 0 else [],
            tokens=[step.token for step in steps],
            reasoning_text=message.reasoning,
            tool_calls=message.tool_calls,
        )

    def _begin_stream(self) -> None:
        """Send the headers of a streamed answer, unless they have been."""
        if not self.started:
            self._set_stream_headers(200)
            self.end_headers()

    def generate_response(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self._with_details(super().generate_response(*args, **kwargs))

    def completion_usage_response(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self._with_details(super().completion_usage_response(*args, **kwargs))

    def _with_details(self, response: dict[str, Any]) -> dict[str, Any]:
        if "usage" in response and cli.drafts(self.response_generator.cli_args):
            request = self.request_info
            assert request is not None
            counts = request.counts
            response["usage"]["completion_tokens_details"] = {
                "accepted_prediction_tokens": request.n_accepted,
                "rejected_prediction_tokens": sum(counts.drafted) + sum(counts.copied) - request.n_accepted,
                "copied_tokens": sum(counts.copied),
                "accepted_copied_tokens": sum(counts.copies_accepted),
            }
        return response

    def handle_models_request(self) -> None:
        """List the models that a request may name; if that is any, also those that have been downloaded."""
        names = self.response_generator.model_provider.served[:]
        if self.response_generator.cli_args.allow_any_model:
            with suppress(CacheNotFound):
                names += sorted(repo.repo_id for repo in scan_cache_dir().repos if repo.repo_type == "model")

        def describe(name: str) -> dict[str, Any]:
            return {"id": name, "object": "model", "created": self.created, "owned_by": "mlx_mtp"}

        wanted = unquote(self.path.removeprefix("/v1/models").removeprefix("/"))
        if not wanted:
            self._send_json({"object": "list", "data": [describe(name) for name in names]})
            return
        for name in ("default_model", *names):
            if name.strip("/") == wanted.strip("/"):
                self._send_json(describe(name))
                return
        raise ApiError(404, f"The model {wanted!r} is not served here.", param="model", code="model_not_found")

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Python's own errors, for requests that it cannot read."""
        self._send_error(ApiError(int(code), str(message or explain or "Bad request")))

    def _send_error(self, error: ApiError) -> None:
        types = {401: "authentication_error", 404: "not_found_error"}
        kind = "server_error" if error.status >= 500 else types.get(error.status, "invalid_request_error")
        content = {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}
        self.close_connection = True
        try:
            if not self.started:
                self._headers_buffer = []  # drop the headers of an unfinished answer
                self._send_json(content, error.status)
            elif self.streaming:
                self.wfile.write(b"data: " + json.dumps(content).encode() + b"\n\ndata: [DONE]\n\n")
        except (ConnectionError, TimeoutError):
            logging.info("The client has hung up.")

    def _send_json(self, content: dict[str, Any], status: int = 200) -> None:
        self._send(status, json.dumps(content).encode(), "application/json")

    def _send(self, status: int, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self._set_cors_headers()
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _set_cors_headers(self) -> None:
        if hasattr(self, "headers"):  # a request that cannot be read has none
            super()._set_cors_headers()

    def send_response(self, code: int, message: str | None = None) -> None:
        self.status = int(code)
        self.request_version = "HTTP/1.0"  # what claims to be HTTP/0.9 would get no status line
        super().send_response(code, message)

    def end_headers(self) -> None:
        super().end_headers()
        self.started = True
        self.response_generator.metrics.requests.labels(self.status).inc()


class Server(ThreadingHTTPServer):
    """A thread for each connection; ``wait`` joins those that are answering."""

    request_queue_size = 1024  # connections that wait to be accepted; socketserver's default of 5 resets the others

    def __init__(self, *args: Any, api_key: str | None = None, **kwargs: Any):
        self.api_key = api_key
        self.threads: set[threading.Thread] = set()
        super().__init__(*args, **kwargs)

    @contextmanager
    def answering(self) -> Iterator[None]:
        thread = threading.current_thread()
        self.threads.add(thread)
        try:
            yield
        finally:
            self.threads.discard(thread)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, (ConnectionError, TimeoutError)):
            logging.info(f"The connection was lost: {error}")
        else:
            logging.exception("A connection failed.")

    def wait(self, seconds: float) -> None:
        """Wait until all answers have been sent, for at most this time."""
        deadline = time.monotonic() + seconds
        for thread in [*self.threads]:
            thread.join(max(0.0, deadline - time.monotonic()))
