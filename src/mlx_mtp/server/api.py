"""The HTTP side: mlx-lm's handler behind a check of who asks and of what is asked, with errors in OpenAI's form."""

import hmac
import io
import json
import logging
import math
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

from huggingface_hub import CacheNotFound, scan_cache_dir
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from jsonschema.validators import extend
from mlx_lm import server as stock
from prometheus_client import CONTENT_TYPE_LATEST

from ..decoding.depth import MAX_DRAFT_TOKENS
from .engine import ApiError, Request, ResponseGenerator

MAX_BODY = 16 << 20  # bytes
MAX_DRAINED = 256 << 20  # of a body that is too large, so that its sender reads the answer

STRING: dict[str, Any] = {"type": "string"}
BOOLEAN: dict[str, Any] = {"type": "boolean"}
TEXT = {"anyOf": [STRING, {"type": "array", "items": {"$ref": "#/$defs/text_part"}}]}


def _number(minimum: float, maximum: float) -> dict[str, Any]:
    return {"type": "number", "minimum": minimum, "maximum": maximum}


def _integer(minimum: int, maximum: int = 2**31) -> dict[str, Any]:
    return {"type": "integer", "minimum": minimum, "maximum": maximum}


FIELDS: dict[str, Any] = {
    "model": STRING,
    "messages": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/message"}},
    "prompt": {"type": "string", "minLength": 1},
    "stream": BOOLEAN,
    "stream_options": {"type": "object", "properties": {"include_usage": BOOLEAN}},
    "max_tokens": _integer(1),
    "max_completion_tokens": _integer(1),
    "n": {"const": 1},
    "temperature": _number(0, 100),
    "top_p": _number(0, 1),
    "top_k": _integer(0),
    "min_p": _number(0, 1),
    "repetition_penalty": _number(0, 100),
    "repetition_context_size": _integer(0),
    "presence_penalty": _number(-100, 100),
    "presence_context_size": _integer(0),
    "frequency_penalty": _number(-100, 100),
    "frequency_context_size": _integer(0),
    "xtc_probability": _number(0, 1),
    "xtc_threshold": _number(0, 0.5),
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": _number(-100, 100),
    },
    "logprobs": BOOLEAN,
    "top_logprobs": _integer(0, 11),
    "seed": _integer(0, 2**64 - 1),
    "stop": {"anyOf": [STRING, {"type": "array", "items": STRING, "maxItems": 64}]},
    "tools": {"type": "array", "items": {"$ref": "#/$defs/tool"}},
    "role_mapping": {"type": "object", "additionalProperties": STRING},
    "chat_template_kwargs": {"type": "object"},
    "adapters": STRING,
    "draft_model": STRING,
    "num_draft_tokens": {"anyOf": [{"const": "auto"}, _integer(0, MAX_DRAFT_TOKENS)]},
}
SCHEMA = {
    "type": "object",
    "properties": FIELDS,
    "$defs": {
        "text_part": {
            "type": "object",
            "properties": {"type": {"const": "text"}, "text": STRING},
            "required": ["type", "text"],
        },
        "message": {
            "type": "object",
            "properties": {
                "role": STRING,
                "content": {"anyOf": [*TEXT["anyOf"], {"type": "null"}]},
                "tool_calls": {"type": "array", "items": {"$ref": "#/$defs/tool"}},
            },
            "required": ["role"],
        },
        "tool": {"type": "object", "properties": {"function": {"type": "object"}}, "required": ["function"]},
    },
}
# To Python True is an integer, and to JSON Schema 1.0.
_CHECKER = Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, x: type(x) is int)
BODY = extend(Draft202012Validator, type_checker=_CHECKER)(SCHEMA)


def parse(raw: bytes) -> dict[str, Any]:
    """The body of a request, checked, without the fields that are null.

    Raises:
        ApiError: What is wrong with it.
    """

    def finite(text: str) -> float:
        if not math.isfinite(x := float(text)):
            raise ValueError(f"{text} is not a finite number")
        return x

    try:
        body = json.loads(raw, parse_float=finite, parse_constant=finite)
    except (ValueError, RecursionError) as e:
        raise ApiError(400, f"Invalid JSON in request body: {e}") from e
    if not isinstance(body, dict):
        raise ApiError(400, "Request should be a JSON dictionary")
    body = {name: value for name, value in body.items() if value is not None}
    error = best_match(BODY.iter_errors(body))
    if error is not None:
        where = error.json_path.removeprefix("$.")
        param = str(error.absolute_path[0]) if error.absolute_path else None
        raise ApiError(400, f"{where}: {error.message}"[:500], param=param)
    for name, value in body.items():
        if FIELDS.get(name, {}).get("type") == "number":
            body[name] = float(value)
    if "stream_options" in body:
        body["stream_options"] = {"include_usage": False, **body["stream_options"]}
    return body


class APIHandler(stock.APIHandler):
    """mlx-lm's handler. A request of any kind ends in an answer, unless its client has hung up."""

    default_request_version = "HTTP/1.0"  # so that an error has a status line, whatever the request was
    timeout = 300  # seconds for a client to send or to take some bytes
    response_generator: ResponseGenerator
    server: "Server"

    started = False  # the answer has left
    streaming = False
    asked: Request | None = None
    logit_bias: dict[Any, float] | None
    _headers_buffer: list[bytes]

    def do_POST(self) -> None:
        self._answer(self._complete)

    def do_GET(self) -> None:
        self._answer(self._get)

    def _answer(self, answer) -> None:
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
        raw = self._read_body()
        body = parse(raw)
        needed = "prompt" if self.path == "/v1/completions" else "messages"
        if needed not in body:
            raise ApiError(400, f"Request did not contain {'a prompt' if needed == 'prompt' else needed}", param=needed)
        # mlx-lm's handler reads the body anew.
        raw = json.dumps(body).encode()
        self.rfile = io.BytesIO(raw)
        self.headers.replace_header("Content-Length", str(len(raw)))
        self.streaming = body.get("stream", False)
        super().do_POST()

    def _get(self) -> None:
        if self.path == "/health":
            self.handle_health_check()
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
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if key is not None and not hmac.compare_digest(given.encode(), key.encode()):
            raise ApiError(401, "The API key is missing or wrong: send it as Authorization: Bearer KEY.")

    def _read_body(self) -> bytes:
        length = self.headers.get("Content-Length")
        if length is None:
            raise ApiError(411, "Content-Length header is required")
        if not (length.isascii() and length.isdigit()):
            raise ApiError(400, "Invalid Content-Length header")
        n = int(length)
        if n > MAX_BODY:
            n = min(n, MAX_DRAINED)
            while n > 0 and (chunk := self.rfile.read(min(n, 1 << 16))):
                n -= len(chunk)
            raise ApiError(413, f"The body is larger than {MAX_BODY} bytes.")
        raw = self.rfile.read(n)
        if len(raw) < n:
            raise ApiError(400, "The body is shorter than its Content-Length.")
        return raw

    def validate_model_parameters(self) -> None:
        """The body has been checked; this is the rest of mlx-lm's own check."""
        if self.logit_bias is not None:
            self.logit_bias = {int(token): value for token, value in self.logit_bias.items()}

    def handle_chat_completions(self) -> Request:
        return self._request(super().handle_chat_completions())

    def handle_text_completions(self) -> Request:
        return self._request(super().handle_text_completions())

    def _request(self, request: stock.CompletionRequest) -> Request:
        self.asked = Request(**vars(request), connection=self.connection)
        return self.asked

    def generate_response(self, *args, **kwargs) -> dict:
        return self._with_details(super().generate_response(*args, **kwargs))

    def completion_usage_response(self, *args, **kwargs) -> dict:
        return self._with_details(super().completion_usage_response(*args, **kwargs))

    def _with_details(self, response: dict) -> dict:
        if "usage" in response and self.response_generator.cli_args.mtp:
            assert self.asked is not None
            response["usage"]["completion_tokens_details"] = {
                "accepted_prediction_tokens": self.asked.n_accepted,
                "rejected_prediction_tokens": sum(self.asked.counts.drafted) - self.asked.n_accepted,
            }
        return response

    def handle_models_request(self) -> None:
        """The models that a request may name; where that is any, those that have been downloaded, too."""
        names = self.response_generator.model_provider.served[:]
        if self.response_generator.cli_args.allow_any_model:
            with suppress(CacheNotFound):
                names += sorted(repo.repo_id for repo in scan_cache_dir().repos if repo.repo_type == "model")
        models = [{"id": name, "object": "model", "created": self.created, "owned_by": "mlx_mtp"} for name in names]
        name = unquote(self.path.removeprefix("/v1/models").removeprefix("/"))
        if not name:
            self._send(200, json.dumps({"object": "list", "data": models}).encode())
            return
        for model in models:
            if model["id"].strip("/") == name.strip("/"):
                self._send(200, json.dumps(model).encode())
                return
        raise ApiError(404, f"The model {name!r} is not served here.", param="model", code="model_not_found")

    def send_error(self, code, message=None, explain=None) -> None:
        """Python's own errors, of requests that it cannot read."""
        self._send_error(ApiError(int(code), str(message or explain or "Bad request")))

    def _send_error(self, error: ApiError) -> None:
        types = {401: "authentication_error", 404: "not_found_error"}
        kind = "server_error" if error.status >= 500 else types.get(error.status, "invalid_request_error")
        content = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
        body = json.dumps({"error": content}).encode()
        self.close_connection = True
        try:
            if not self.started:
                self._headers_buffer = []  # of an answer that was begun
                self._send(error.status, body)
            elif self.streaming:
                self.wfile.write(b"data: " + body + b"\n\ndata: [DONE]\n\n")
        except (ConnectionError, TimeoutError):
            logging.info("The client has hung up.")

    def _send(self, status: int, body: bytes, content_type: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self._set_cors_headers()
        self.end_headers()
        self.wfile.write(body)

    def _set_cors_headers(self) -> None:
        if hasattr(self, "headers"):  # which a request that cannot be read has not
            super()._set_cors_headers()

    def send_response(self, code, message=None) -> None:
        self.status = int(code)
        super().send_response(code, message)

    def end_headers(self) -> None:
        super().end_headers()
        self.started = True
        self.response_generator.metrics.requests.labels(self.status).inc()


class Server(ThreadingHTTPServer):
    """A thread for each connection; those that are answering can be waited for."""

    def __init__(self, *args, api_key: str | None = None, **kwargs):
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

    def handle_error(self, request, client_address) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, (ConnectionError, TimeoutError)):
            logging.info(f"A connection broke off: {error}")
        else:
            logging.exception("A connection failed.")

    def wait(self, seconds: float) -> None:
        """Until all answers have left, at most so long."""
        deadline = time.monotonic() + seconds
        for thread in [*self.threads]:
            thread.join(max(0.0, deadline - time.monotonic()))
