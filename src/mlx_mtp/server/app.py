"""The HTTP side: routes, checks of the client, limits of the body, streams."""

import asyncio
import hmac
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from types import ModuleType
from typing import Any, NamedTuple
from urllib.parse import unquote

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from huggingface_hub import CacheNotFound, scan_cache_dir
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .._version import __version__
from ..checkpoint.load import DEMO
from .api import chat_completions, completions, messages, responses
from .api.body import MAX_BODY, Body, Json, parse_json
from .api.writer import Usage, Writer
from .browsers import ANY, Browsers
from .choices import choices_of, generate
from .engine.delta import Delta
from .engine.frontend import Frontend, in_thread
from .page_files import PageFiles, page_response
from .request import ApiError, Request, Waiting

MAX_BODIES = 16 * MAX_BODY  # bytes of all bodies that arrive or are parsed at a time
LARGE_BODY = 1 << 20  # bytes, from which on a body is parsed in a thread of its own
MAX_DRAINED = 256 << 20  # bytes of a body that is too large, read so that the client gets to the answer
HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "2"}}  # of errors; seconds, where too many wait
BODY_TIMEOUT = 300.0  # seconds that a client may take to send it


class API(NamedTuple):
    """What answers the requests to a path.

    Args:
        module (ModuleType): Has ``read_request`` and ``error_content``.
        body (type): The request's body.
        writer (type): Makes the answer.
        needs (str): The field that a body must have.
    """

    module: ModuleType
    body: type[Body]
    writer: Callable[[Any], Writer]
    needs: str


CHAT = API(chat_completions, chat_completions.ChatBody, chat_completions.ChatWriter, "messages")
RESPONSES = API(responses, responses.ResponsesBody, responses.ResponsesWriter, "input")
MESSAGES = API(messages, messages.MessagesBody, messages.MessagesWriter, "messages")
APIS = {
    "/v1/chat/completions": CHAT,
    "/chat/completions": CHAT,
    "/v1/completions": API(completions, completions.CompletionBody, completions.CompletionWriter, "prompt"),
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
}
COUNT_TOKENS, COUNT_INPUT_TOKENS = "/v1/messages/count_tokens", "/v1/responses/input_tokens"


def make_app(
    frontend: Frontend, api_key: str | None, origins: Sequence[str] | None, hosts: Sequence[str] = (ANY,)
) -> FastAPI:
    """The application that answers HTTP requests.

    Args:
        frontend (Frontend): What generates.
        api_key (str, optional): What clients must know.
        origins (Sequence[str], optional): Of web pages that may use the server, as ``--allowed-origins`` has them.
        hosts (Sequence[str]): Names of the server, as ``--allowed-hosts`` has them. Default: any.
    """
    app = FastAPI(title="mlx_mtp", version=__version__, docs_url=None, redoc_url=None)  # those load scripts from a CDN
    endpoints = Endpoints(frontend, api_key)
    for path, api in APIS.items():
        _add(app, path, "POST", endpoints.generate(api), api.body)
    _add(app, COUNT_TOKENS, "POST", endpoints.count_tokens, messages.MessagesBody)
    _add(app, COUNT_INPUT_TOKENS, "POST", endpoints.count_input_tokens, responses.ResponsesBody)
    for path, get in (
        ("/", endpoints.root),
        ("/health", endpoints.health),
        ("/metrics", endpoints.metrics),
        ("/v1/models", endpoints.models),
        ("/v1/models/{name:path}", endpoints.model),
    ):
        for method in ("GET", "HEAD"):
            is_listed = method == "GET"  # a description has an operation's name once
            app.add_api_route(
                path, get, methods=[method], response_model=None, operation_id=get.__name__, include_in_schema=is_listed
            )
    if not frontend.options.no_ui:
        app.mount("/page", PageFiles())
    app.add_exception_handler(ApiError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(Exception, _answer_failure)
    app.add_middleware(Browsers, names=hosts, origins=origins, refuse=_error_response)
    app.add_middleware(Counting, frontend=frontend)
    return app


def _add(app: FastAPI, path: str, method: str, endpoint: Callable[..., Awaitable[Response]], body: type[Body]) -> None:
    """A route whose body the endpoint reads itself: the limits on it come before its JSON."""
    schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
    content = {"application/json": {"schema": schema}}
    name = path.strip("/").replace("/", "_")
    extra = {"requestBody": {"required": True, "content": content}}
    app.add_api_route(
        path, endpoint, methods=[method], response_model=None, openapi_extra=extra, operation_id=name, name=name
    )


class Endpoints:
    """What answers the requests."""

    def __init__(self, frontend: Frontend, api_key: str | None):
        self.frontend, self.api_key = frontend, api_key
        self.waiting: set[int] = set()  # the numbers of requests that have no first token
        self.n_bytes = 0  # of the bodies that arrive or are parsed
        self.parsing = asyncio.Lock()  # of large bodies: one at a time, so that the event loop runs between two

    def generate(self, api: API) -> Callable[[HTTPRequest], Awaitable[Response]]:
        async def endpoint(http: HTTPRequest) -> Response:
            body, request = await self._read(http, api)
            most = self.frontend.options.max_queue
            if most is not None and len(self.waiting) >= most:
                raise ApiError(429, f"{most} requests are waiting: try again later.", code="rate_limit_exceeded")
            self.waiting.add(request.number)
            choices = choices_of(request)
            return Answer(self.frontend, choices, api.writer(body), body.stream, api.module.error_content, self.waiting)

        return endpoint

    async def count_tokens(self, http: HTTPRequest) -> Response:
        _, request = await self._read(http, MESSAGES)
        async with watched([request], http.receive):
            return JSONResponse({"input_tokens": await self.frontend.count_tokens(request)})

    async def count_input_tokens(self, http: HTTPRequest) -> Response:
        _, request = await self._read(http, RESPONSES)
        async with watched([request], http.receive):
            n = await self.frontend.count_tokens(request)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": n})

    async def _read(self, http: HTTPRequest, api: API) -> tuple[Any, Request]:
        self._authorize(http)
        raw = bytearray()
        try:
            await self._receive(http, raw)
            if len(raw) <= LARGE_BODY:
                return self._parse(raw, api)
            async with self.parsing:
                return await in_thread(self._parse, raw, api)
        finally:
            self.n_bytes -= len(raw)
            raw.clear()  # also where an error has it

    async def _receive(self, http: HTTPRequest, raw: bytearray) -> None:
        """Read a body to the end of ``raw``."""
        n = 0
        try:
            async with asyncio.timeout(BODY_TIMEOUT):
                async for chunk in http.stream():
                    n += len(chunk)
                    if n <= MAX_BODY:
                        self._make_room(len(chunk))
                        raw += chunk
                    elif n > MAX_DRAINED:
                        break
        except TimeoutError as e:
            raise ApiError(408, f"The body did not arrive within {BODY_TIMEOUT:.0f} seconds.") from e
        except ClientDisconnect as e:
            raise ApiError(400, "The body is shorter than its Content-Length.") from e
        if n > MAX_BODY:
            raise ApiError(413, f"The body is larger than {MAX_BODY} bytes.")

    def _make_room(self, n: int) -> None:
        if self.n_bytes + n > MAX_BODIES:
            raise ApiError(429, "Too many large bodies arrive at a time: try again later.", code="rate_limit_exceeded")
        self.n_bytes += n

    def _parse(self, raw: bytearray, api: API) -> tuple[Any, Request]:
        content = parse_json(raw)
        if api.needs not in content:
            needed = "a prompt" if api.needs == "prompt" else api.needs
            raise ApiError(400, f"Request did not contain {needed}", param=api.needs)
        options = self.frontend.options
        body, request, request.args = api.module.read_request(content, options)
        request.copy_drafts = options.copy_drafts if body.copy_drafts is None else body.copy_drafts
        return body, request

    async def root(self) -> Response:
        """The page to chat, or where there is none, what this is."""
        if self.frontend.options.no_ui:
            return JSONResponse({"name": "mlx_mtp", "version": __version__})
        return page_response()

    async def health(self) -> Response:
        is_healthy = self.frontend.is_healthy
        return JSONResponse({"status": "ok" if is_healthy else "unavailable"}, 200 if is_healthy else 503)

    async def metrics(self, http: HTTPRequest) -> Response:
        self._authorize(http)
        return Response(self.frontend.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def models(self, http: HTTPRequest) -> Response:
        """List the models that a request may name; if that is any, also those that have been downloaded."""
        self._authorize(http)
        names = self._names()
        page = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return JSONResponse({"object": "list", "data": [self._describe(name) for name in names], **page})

    async def model(self, http: HTTPRequest, name: str) -> Response:
        self._authorize(http)
        wanted = unquote(name).strip("/")
        for known in ("default_model", *self._names()):
            if known.strip("/") == wanted:
                return JSONResponse(self._describe(known))
        raise ApiError(404, f"The model {wanted!r} is not served here.", param="model", code="model_not_found")

    def _names(self) -> list[str]:
        names = self.frontend.models.served[:]
        if self.frontend.options.allow_any_model:
            with suppress(CacheNotFound):
                names += sorted(repo.repo_id for repo in scan_cache_dir().repos if repo.repo_type == "model")
        return names

    def _describe(self, name: str) -> Json:
        """As OpenAI's clients read it, and vLLM's; and as Anthropic's."""
        created, (path, tokenizer) = self.frontend.created, self.frontend.models.find(name)
        length = None if tokenizer is None else tokenizer.context_length
        theirs = {"type": "model", "display_name": name, "lifecycle": "active", "max_input_tokens": length}
        theirs["created_at"] = datetime.fromtimestamp(created, UTC).isoformat()
        if path == str(DEMO):
            theirs["description"] = "Demo model: completes Python only"  # as OpenRouter's list has it
        ours = {"id": name, "object": "model", "created": created, "owned_by": "mlx_mtp", "max_model_len": length}
        ours["has_chat_template"] = None if tokenizer is None else tokenizer.has_chat_template
        return ours | theirs

    def _authorize(self, http: HTTPRequest) -> None:
        key = self.api_key
        bearer = re.sub("^bearer +", "", http.headers.get("Authorization", ""), flags=re.IGNORECASE)
        given = (bearer, http.headers.get("x-api-key", ""))
        if key is not None and not any(hmac.compare_digest(k.encode(), key.encode()) for k in given):
            raise ApiError(
                401, "The API key is missing or wrong: send it as Authorization: Bearer KEY or x-api-key: KEY."
            )


@asynccontextmanager
async def watched(requests: Sequence[Request], receive: Receive) -> AsyncIterator[None]:
    """Note in the requests of a client when it hangs up; behind it nobody wants more, whatever has ended it."""

    def leave() -> None:
        for request in requests:
            request.is_gone = True

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        leave()

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        leave()
        task.cancel()


class Answer(Response):
    """What a request's steps become, as a stream or whole. The request ends where its client hangs up.

    Args:
        frontend (Frontend): What generates.
        choices (List[Request]): The answers that it asks for, as ``choices_of`` has them.
        writer (Writer): The API's.
        is_stream (bool): Whether the client wants a stream.
        error_content (Callable): Makes the API's form of an error.
        waiting (Set[int]): Has the number of the first one's request until its first token.
    """

    def __init__(
        self,
        frontend: Frontend,
        choices: list[Request],
        writer: Writer,
        is_stream: bool,
        error_content: Callable[[ApiError], Json],
        waiting: set[int],
    ):
        super().__init__()
        self.waiting = waiting
        self.frontend, self.choices = frontend, choices
        self.writer, self.is_stream, self.error_content = writer, is_stream, error_content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with watched(self.choices, receive):
                await (self._stream(send) if self.is_stream else self._send_whole(scope, receive, send))
        except OSError:
            logging.info("The client has hung up.")
        finally:
            self.waiting.discard(self.choices[0].number)

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        async for _ in self._pieces():
            pass
        await JSONResponse(self.writer.whole(self._usage()))(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        has_begun = False
        try:
            async for piece in self._pieces():
                if not has_begun:
                    await _begin_stream(send)
                    has_begun = True
                if piece:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            last = self.writer.end(self._usage())
        except ApiError as e:
            if not has_begun:
                raise
            last = self.writer.failed(e)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _pieces(self) -> AsyncIterator[bytes]:
        """What each step adds to a stream."""
        has_begun = False
        async for i, item in generate(self.frontend, self.choices):
            if isinstance(item, Waiting):
                yield self.writer.waiting(item.n_read, item.n_prompt)
            elif isinstance(item, Delta):
                self.waiting.discard(self.choices[0].number)
                yield self.writer.add(item, i)
            elif not has_begun:
                has_begun = True
                yield self.writer.begin(self._usage())

    def _usage(self) -> Usage:
        read = self.choices[:: self.choices[0].n]  # the first one to each prompt
        return Usage(
            n_prompt=sum(request.n_prompt for request in read),
            n_cached=sum(request.n_cached for request in read),
            n_generated=sum(request.n_tokens for request in self.choices),
            n_accepted=sum(request.n_accepted for request in self.choices),
            drafts=[request.counts for request in self.choices] if self.frontend.options.drafts else None,
        )


async def _begin_stream(send: Send) -> None:
    headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


class Counting:
    """Counts answers by their status."""

    def __init__(self, app: ASGIApp, frontend: Frontend):
        self.app, self.frontend = app, frontend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def count(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.frontend.metrics.requests.labels(message["status"]).inc()
            await send(message)

        await self.app(scope, receive, count if scope["type"] == "http" else send)


def _error_response(http: HTTPRequest, error: ApiError) -> Response:
    """In the form of the API that was asked; on a path that several share, a header tells Anthropic's clients."""
    theirs = http.url.path.startswith("/v1/messages") or "anthropic-version" in http.headers
    api = APIS.get(http.url.path, MESSAGES if theirs else CHAT)
    return JSONResponse(api.module.error_content(error), error.status, HEADERS.get(error.status))


async def _answer_error(http: HTTPRequest, error: Any) -> Response:
    return _error_response(http, error)


async def _answer_http_error(http: HTTPRequest, error: Any) -> Response:
    """Those of the framework: there is no such path, or it takes another method."""
    message = f"There is no {http.url.path} here." if error.status_code == 404 else str(error.detail)
    return _error_response(http, ApiError(error.status_code, message))


async def _answer_failure(http: HTTPRequest, error: Exception) -> Response:
    logging.error("A request failed.", exc_info=error)
    return _error_response(http, ApiError(500, f"The request failed: {error}"))
