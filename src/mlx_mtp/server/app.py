"""The HTTP application: its routes, the bodies of requests, the API key, errors, the chat page, other web pages."""

import asyncio
import gzip
import hmac
import json
import logging
import math
import re
import sys
import zlib
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache, partial
from io import BytesIO
from ipaddress import ip_address
from pathlib import Path
from socket import gethostname
from typing import Any
from urllib.parse import quote, unquote

from fastapi import Depends, FastAPI
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic_core import from_json
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .._version import __version__
from ..checkpoint import DEMO, DEMO_NOTE
from ..core.drafts.sources import SOURCES
from ..errors import MTPError
from ..text.schema import Json
from . import DEFAULT
from .api.common import Body, new_id
from .api.completions import ChatBody, CompletionBody
from .api.messages import MessagesBody
from .api.responses import ResponsesBody
from .api.stored import StoredResponses
from .engine.models import cached_models
from .frontend import FIGURES, Frontend, GeneratedResponse, in_thread, watched
from .request import ApiError, Request, Waiting, as_api_error

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

MAX_STREAMS = 1000  # in a body, one after the other: beginning one takes longer than decoding some bytes
# The first bytes of a stream of gzip, of a frame of zstd, and of one that is skipped.
BEGINNINGS = b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd", b"\x2a\x4d\x18"
WINDOW = {int(zstd.DecompressionParameter.window_log_max): 23}  # 8 MiB, as RFC 9659 limits zstd in HTTP
MAX_BODY = 64 << 20  # bytes: a conversation with a few pictures
# Parsing and validation take microseconds for an object and less for other values, and block all threads. Brackets, braces and
# commas in strings count as well; a million tokens rarely have as many.
MAX_OBJECTS = 100_000  # brackets and braces
MAX_VALUES = 300_000  # commas: a prompt may be 262,144 numbers of tokens
# Messages, tools and their parts: validation takes 10 microseconds for each, and blocks all threads as well.
MAX_PARTS = 10_000
LISTS = "messages", "input", "system", "tools", "content", "tool_calls", "summary", "output"  # of parts
LARGE_BODY = 1 << 16  # bytes; a larger or encoded body is parsed in a thread of its own
BODY_TIMEOUT = 300.0  # seconds that a client may take to send a body

# The chat page
FOLDER = Path(__file__).parent / "page"
PAGE_HEADERS = {
    "Cache-Control": "no-cache",  # an update changes the files at the same URLs
    # Scripts, styles and requests of this server only. Text becomes HTML only through DOMPurify.
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; img-src 'self' data:; script-src 'self'; "
    "style-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
# The host of a request: an address in brackets, or a name, and the port
HOST = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([^][\s:/?#@\\]+))(?::[0-9]{0,5})?")
OPEN = "/", "/health", "/page/sources.json"  # paths that need no API key
IDS = "x-request-id", "request-id"  # the headers with a request's id, OpenAI's and Anthropic's
LOCAL_PAGES = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:[0-9]+)?"
APIS: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatBody,
    "/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
}


def make_app(frontend: Frontend) -> FastAPI:
    options = frontend.options
    endpoints = Endpoints(frontend)
    errors = dict.fromkeys((ApiError, MTPError, HTTPException), error_response)
    common: dict[str, Any] = {"dependencies": [Depends(endpoints.authorize)], "exception_handlers": errors}
    common |= {"docs_url": None, "redoc_url": None, "redirect_slashes": False}  # these pages load from a CDN
    app = FastAPI(title="mlx_mtp", version=__version__, **common)
    posts = {path: (api, endpoints.generate(api)) for path, api in APIS.items()}
    posts["/v1/messages/count_tokens"] = MessagesBody, endpoints.count(MessagesBody, {})
    counted = {"object": "response.input_tokens"}
    posts["/v1/responses/input_tokens"] = ResponsesBody, endpoints.count(ResponsesBody, counted)
    for path, (api, post) in posts.items():  # it reads the body itself, to limit its size before its JSON is parsed
        name = path.strip("/").replace("/", "_")
        app.add_api_route(path, post, methods=["POST"], openapi_extra=described(api), operation_id=name)
    gets: dict[str, Callable[..., Any]] = {
        "/": endpoints.root,
        "/health": endpoints.health,
        "/metrics": endpoints.metrics,
        "/v1/models": endpoints.models,
        "/v1/models/{name:path}": endpoints.model,
        "/v1/responses/{id}": endpoints.response,
        "/v1/responses/{id}/input_items": endpoints.input_items,
    }
    app.add_api_route(
        "/v1/responses/{id}", endpoints.delete_response, methods=["DELETE"], operation_id="delete_response"
    )
    for path, get in gets.items():
        app.add_api_route(path, get, methods=["GET"], operation_id=get.__name__)
        app.add_api_route(path, get, methods=["HEAD"], include_in_schema=False)
    if not options.no_ui:
        app.add_api_route("/page/sources.json", lambda: SOURCES, include_in_schema=False)
        app.mount("/page", StaticFiles(directory=FOLDER))
    # Within the next two: the framework's own layer for errors that nobody expects is around all others.
    app.add_middleware(ExceptionMiddleware, handlers={Exception: error_response})
    app.add_middleware(Browsers, names=[options.host, *options.allowed_hosts], origins=options.allowed_origins)
    app.add_middleware(counting, frontend=frontend)
    return app


@cache
def described(api: type[Body]) -> dict[str, Any]:
    """The body of an API's requests, for OpenAPI."""
    schema = api.model_json_schema(ref_template="#/components/schemas/{model}")
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


class Endpoints:
    def __init__(self, frontend: Frontend):
        self.frontend, self.responses = frontend, StoredResponses(frontend.options.response_memory)

    async def authorize(self, http: HTTPRequest) -> None:
        bearer = re.sub("^bearer +", "", http.headers.get("Authorization", ""), flags=re.IGNORECASE)
        given = bearer, http.headers.get("x-api-key", "")
        http.state.key = bearer or given[1]  # of whose responses a request may be about, also where none is required
        key = self.frontend.options.api_key
        if key is None or http.scope["path"] in OPEN:  # not that of its URL, which has the client's Host
            return
        if not any(hmac.compare_digest(k.encode(), key.encode()) for k in given):
            message = "The API key is missing or wrong: send it as Authorization: Bearer KEY or x-api-key: KEY."
            raise ApiError(401, message)

    def generate(self, api: type[Body]) -> Callable[[HTTPRequest], Awaitable[Response]]:
        async def endpoint(http: HTTPRequest) -> Response:
            body, request = await self._read(http, api)
            max_queue = self.frontend.options.max_queue
            waiting = self.frontend.waiting
            if max_queue is not None and len(waiting) >= max_queue:
                raise ApiError(429, f"{max_queue} requests are waiting: try again later.", code="rate_limit_exceeded")
            waiting[request.number] = Waiting(0, 0)
            writer = api.writer(body)
            if isinstance(body, ResponsesBody) and body.store:
                writer.keep = partial(self.responses.keep, http.state.key)
            return GeneratedResponse(self.frontend, request.choices(body.prompts), writer, body.stream)

        return endpoint

    def count(self, api: type[Body], kind: Json) -> Callable[[HTTPRequest], Awaitable[Response]]:
        async def endpoint(http: HTTPRequest) -> Response:
            _, request = await self._read(http, api)
            async with watched([request], http.receive):
                return JSONResponse({**kind, "input_tokens": await self.frontend.count_tokens(request)})

        return endpoint

    async def _read(self, http: HTTPRequest, api: type[Body]) -> tuple[Any, Request]:
        """The body and the request in it; an ApiError if it is too large, slow, incomplete or invalid."""
        raw = bytearray()
        encoding = ",".join(http.headers.getlist("Content-Encoding"))
        try:
            async with asyncio.timeout(BODY_TIMEOUT):
                async for piece in http.stream():  # to its end: a client reads the answer after it has sent all
                    raw += piece[: MAX_BODY + 1 - len(raw)]
        except TimeoutError as e:
            raise ApiError(408, f"The body did not arrive within {BODY_TIMEOUT:.0f} seconds.") from e
        except ClientDisconnect as e:
            raise ApiError(400, "The body is shorter than its Content-Length.") from e

        def parse() -> tuple[Any, Request]:
            content = parse_json(decoded(raw, encoding))
            if recalls:
                content = self.responses.recall(http.state.key, content)
            return api.read_request(content, self.frontend.options)

        recalls = api is ResponsesBody  # items that may be large
        return parse() if len(raw) <= LARGE_BODY and not (encoding or recalls) else await in_thread(parse)

    async def root(self) -> Response:
        if self.frontend.options.no_ui:
            return JSONResponse({"name": "mlx_mtp", "version": __version__})
        return FileResponse(FOLDER / "page.html")

    async def health(self) -> Response:
        is_healthy = self.frontend.engine.is_alive
        content = {"status": "ok" if is_healthy else "unavailable", "loaded": self.frontend.models.key is not None}
        prompts = [
            {"processed": w.n_read, "total": w.n_prompt} for w in self.frontend.waiting.values() if w.n_prompt > 0
        ]
        return JSONResponse(content | ({"prompts": prompts} if prompts else {}), 200 if is_healthy else 503)

    async def metrics(self) -> Response:
        return Response(generate_latest(self.frontend.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def models(self) -> Response:
        names = await self._names()
        page = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return JSONResponse({"object": "list", "data": [self._describe(name) for name in names], **page})

    async def model(self, name: str) -> Response:
        wanted = unquote(name).strip("/")
        for known in (DEFAULT, self.frontend.options.model, *await self._names()):
            if known.strip("/") == wanted:
                return JSONResponse(self._describe(known))
        raise ApiError(404, f"The model {wanted!r} is not served here.", param="model", code="model_not_found")

    async def response(self, http: HTTPRequest, id: str) -> Response:
        if http.query_params.get("stream") == "true":
            raise ApiError(400, "stream: a stored response is sent as a whole.", param="stream")
        _, content = self.responses.get((http.state.key, id))
        return Response(content, media_type="application/json")

    async def delete_response(self, http: HTTPRequest, id: str) -> Response:
        self.responses.delete((http.state.key, id))
        return JSONResponse({"id": id, "object": "response", "deleted": True})

    async def input_items(self, http: HTTPRequest, id: str) -> Response:
        order = http.query_params.get("order", "desc")
        return JSONResponse(await in_thread(self.responses.list_items, (http.state.key, id), order))

    async def _names(self) -> list[str]:
        models = self.frontend.models
        return [*models.served, *(await in_thread(cached_models) if self.frontend.options.allow_any_model else [])]

    def _describe(self, name: str) -> Json:
        created = self.frontend.created
        path = self.frontend.models.resolve(name)
        about = {"id": name, "object": "model", "created": created, "owned_by": "mlx_mtp"}
        about |= {"type": "model", "display_name": name, "lifecycle": "active"}
        about["instance"] = self.frontend.options.instance  # by which ``mlx_mtp launch`` finds it again
        about |= {"created_at": datetime.fromtimestamp(created, UTC).isoformat()}
        about |= dict.fromkeys(("max_model_len", "max_input_tokens"))
        if path == str(DEMO):
            about["description"] = DEMO_NOTE  # a field of OpenRouter
        if (tokenizer := self.frontend.models.tokenizers.get(path)) is not None:
            about |= {"max_model_len": tokenizer.context_length, "max_input_tokens": tokenizer.max_tokens}
            about |= {"has_chat_template": tokenizer.has_chat_template, "takes_images": tokenizer.vision is not None}
        return about


def decoded(raw: bytes | bytearray, encoding: str) -> bytes | bytearray:
    """A body of this Content-Encoding. An ApiError: 415 for an unknown one, 400 for data not in it, 413 for too much."""
    names = [name for x in encoding.split(",") if (name := x.strip().lower()) not in ("", "identity")]
    coding = ", ".join(names).removeprefix("x-")
    body = raw
    if coding and coding not in CODINGS:
        raise ApiError(415, f"Content-Encoding: {encoding[:100]} is not supported: send {ACCEPTED} or none.")
    if coding and 0 < len(raw) <= MAX_BODY:
        if sum(map(raw.count, BEGINNINGS)) > MAX_STREAMS:  # by chance, a body has some of them
            raise ApiError(413, f"The body is more than {MAX_STREAMS:,} streams of {coding}: send one.")
        try:
            body = CODINGS[coding](raw)
        except (OSError, EOFError, zlib.error, zstd.ZstdError) as e:
            raise ApiError(400, f"The body is not valid {coding}: {e}.") from e
    if len(body) > MAX_BODY:
        raise ApiError(413, f"The body is larger than {MAX_BODY} bytes.")
    return body


def _inflate(raw: bytes | bytearray) -> bytes:
    # Some clients leave out zlib's header, whose first byte ends in 8.
    stream = zlib.decompressobj(zlib.MAX_WBITS if raw[0] & 15 == 8 else -zlib.MAX_WBITS)
    body = stream.decompress(raw, MAX_BODY + 1)
    if len(body) <= MAX_BODY and (not stream.eof or stream.unused_data):
        raise ApiError(400, "The body is not valid deflate: it has no end, or more behind it.")
    return body


CODINGS: dict[str, Callable[[bytes | bytearray], bytes]] = {  # each decodes at most a byte more than a body may have
    "gzip": lambda raw: gzip.GzipFile(fileobj=BytesIO(raw)).read(MAX_BODY + 1),
    "deflate": _inflate,
    "zstd": lambda raw: zstd.ZstdFile(BytesIO(raw), options=WINDOW).read(MAX_BODY + 1),
}
ACCEPTED = ", ".join(CODINGS)
# The headers of errors, by status
HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 415: {"Accept-Encoding": ACCEPTED}, 429: {"Retry-After": "2"}}


def parse_json(raw: bytes | bytearray) -> Json:
    """The fields of a body that are not null; an ApiError if it is no JSON object, or has too many values."""
    if raw.count(b"[") + raw.count(b"{") > MAX_OBJECTS or raw.count(b",") > MAX_VALUES:
        allowed = f"{MAX_OBJECTS:,} opening brackets and braces, or {MAX_VALUES:,} commas"
        raise ApiError(413, f"The body has more than {allowed}: make it smaller.")
    try:
        body = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        try:  # with U+FFFD for half a character, as of an emoji that a client has cut in two
            text = json.dumps(json.loads(raw), ensure_ascii=False).encode("utf-16-le", "surrogatepass")
            body = from_json(text.decode("utf-16-le", "replace"), allow_inf_nan=False)
        except (ValueError, RecursionError):
            raise ApiError(400, f"Invalid JSON in request body: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(400, "Request should be a JSON dictionary")
    n = 0
    parts = [body]
    while parts:
        part = parts.pop()
        for found in (part[name] for name in LISTS if isinstance(part.get(name), list)):
            n += len(found)
            if n > MAX_PARTS:
                raise ApiError(413, f"The body has more than {MAX_PARTS:,} messages, tools and parts: make it smaller.")
            parts += [x for x in found if isinstance(x, dict)]
    for name, field in body.items():
        if _has_infinity(field):  # as which numbers too large for a float are parsed
            raise ApiError(400, f"{name[:100]!r} has a number that is too large.", param=name[:100])
    return {name: value for name, value in body.items() if value is not None}


def _has_infinity(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(_has_infinity, value.values() if isinstance(value, dict) else value))
    return isinstance(value, float) and math.isinf(value)


def counting(app: ASGIApp, frontend: Frontend) -> ASGIApp:
    """Count responses by status, log each request in one line, give each an id, and add the headers of the page's files."""

    async def counted(scope: Scope, receive: Receive, send: Send) -> None:
        status = "no response"
        path = scope.get("path", "")
        id = new_id("req")

        async def count(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
                frontend.metrics["requests"].labels(message["status"]).inc()
                MutableHeaders(scope=message).update(dict.fromkeys(IDS, id))
                if scope["path"] == "/" or scope["path"].startswith("/page/"):
                    MutableHeaders(scope=message).update(PAGE_HEADERS)
            with suppress(OSError):  # a client that has gone, which ``watched`` is told; any other error is one of ours
                await send(message)

        if scope["type"] != "http":
            return await app(scope, receive, send)
        scope["path"] = re.sub("/+", "/", path).rstrip("/") or "/"  # as it stands in a base URL, or is joined to one
        try:
            await app(scope, receive, count)
        finally:
            client = (scope.get("client") or ("unknown",))[0]
            line = f'{client} - "{scope["method"]} {quote(path)}" {status} {id}'  # a path may have line breaks
            # Open pages ask for the health every two seconds.
            level = logging.DEBUG if scope["path"] == "/health" else logging.INFO
            logging.log(level, ": ".join([line, *scope.get(FIGURES, ())]))

    return counted


async def error_response(http: HTTPRequest, error: Exception) -> Response:
    """An error in the format of the path's API. On a shared path, a header identifies Anthropic's clients."""
    if isinstance(error, HTTPException):  # of the framework, such as for an unknown path or a wrong method
        message = f"There is no {http.url.path} here." if error.status_code == 404 else str(error.detail)
        error = ApiError(error.status_code, message)
    error = as_api_error(error)
    theirs = http.url.path.startswith("/v1/messages") or "anthropic-version" in http.headers
    api = APIS.get(http.url.path, MessagesBody if theirs else ChatBody)
    return JSONResponse(api.error_content(error), error.status, HEADERS.get(error.status))


class Browsers(CORSMiddleware):
    """Refuses requests of web pages other than its own and those of ``origins``, and requests to hosts other than ``names``: a
    page's domain may resolve to this machine's address (DNS rebinding). Answers CORS. ``*`` allows all.
    """

    def __init__(self, app: ASGIApp, names: Collection[str], origins: Collection[str] | None):
        pages = LOCAL_PAGES if origins is None else None
        super().__init__(
            app,
            allow_origins=origins or (),
            allow_methods=("*",),
            allow_headers=("*",),
            allow_origin_regex=pages,
            allow_private_network=True,
            expose_headers=(*IDS, "retry-after"),
        )
        self.names = {name.lower() for name in ("localhost", gethostname(), *names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._error(Headers(scope=scope)) if scope["type"] == "http" else None
        answer = super().__call__ if error is None else await error_response(HTTPRequest(scope), error)
        await answer(scope, receive, send)

    def _error(self, headers: Headers) -> ApiError | None:
        host = headers.get("host")
        if host is not None and "*" not in self.names and not self._is_ours(host):
            fix = f"start the server with --allowed-hosts {host.partition(':')[0][:100]}"
            return ApiError(403, f"The server is not known by the name {host[:100]!r}: {fix}.")
        for origin in headers.getlist("origin"):
            if origin.partition("://")[2] != host and not self.is_allowed_origin(origin):
                fix = f"start the server with --allowed-origins {origin[:100]}"
                return ApiError(403, f"Pages of {origin[:100]!r} may not use the server: {fix}.")
        return None

    def _is_ours(self, host: str) -> bool:
        parts = HOST.fullmatch(host.lower())
        name = parts[1] or parts[2] if parts else ""
        try:
            return name.removesuffix(".") in self.names or bool(ip_address(name))
        except ValueError:
            return False
