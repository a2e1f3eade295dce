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
from http.server import ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

from huggingface_hub import CacheNotFound, scan_cache_dir
from mlx_lm import server as stock
from prometheus_client import CONTENT_TYPE_LATEST

from .. import cli
from .body import parse
from .engine import ResponseGenerator
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
        given = re.sub("^bearer +", "", self.headers.get("Authorization", ""), flags=re.IGNORECASE)
        if key is not None and not hmac.compare_digest(given.encode(), key.encode()):
            raise ApiError(401, "The API key is missing or wrong: send it as Authorization: Bearer KEY.")

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

    def _begin_stream(self) -> None:
        """Send the headers of a streamed answer, unless they have been: mlx-lm does so once generation begins."""
        self._set_stream_headers()
        self.end_headers()

    def _set_stream_headers(self, status_code: int = 200) -> None:
        if not self.started:
            super()._set_stream_headers(status_code)

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
        if self.started:
            return
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
