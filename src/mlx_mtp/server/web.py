"""The chat page at ``/``, and protection against other web pages.

The page's HTML, CSS and JavaScript modules in ``page/`` are served without a build step; ``main.js`` connects them:

- ``api.js`` sends requests and reads streams; ``answer.js`` collects an answer, its figures and the messages of a request.
- ``turns.js`` shows questions and answers; ``markdown.js`` renders text.
- ``composer.js`` is the field for a question; ``settings.js`` has the other fields of a request.
- ``chats.js`` lists the chats; ``store.js`` keeps them in the browser.

A browser sends the requests of any page, even to servers on its own machine: those of other pages are refused.
"""

from collections.abc import Callable, Collection
from ipaddress import ip_address
from pathlib import Path
from socket import gethostname
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from .request import ApiError

FOLDER = Path(__file__).parent / "page"
# Scripts, styles and requests of this server only. Text becomes HTML only through DOMPurify.
POLICY = (
    "default-src 'none'; connect-src 'self'; img-src 'self' data:; script-src 'self'; style-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify"
)
PAGE_HEADERS = {
    "Cache-Control": "no-cache",  # an update changes the files at the same URLs
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
ANY = "*"
LOCAL_PAGES = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:[0-9]+)?"


def page_response() -> Response:
    """The page itself."""
    return FileResponse(FOLDER / "page.html", headers=PAGE_HEADERS)


class PageFiles(StaticFiles):
    """The page's style and scripts."""

    def __init__(self) -> None:
        super().__init__(directory=FOLDER)

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(PAGE_HEADERS)
        return response


class Browsers(CORSMiddleware):
    """Refuses requests with other host names and requests of other web pages; answers CORS for allowed pages.

    A page's domain may resolve to this machine's address (DNS rebinding): a browser then treats the server as the page's own.
    Such requests have the domain in ``Host``, which must be an IP address, ``localhost``, this machine's name or one of
    ``names``.

    Args:
        app (ASGIApp): The wrapped application.
        names (Collection[str]): Names of the server; ``*`` allows all.
        origins (Collection[str], optional): Pages that may use the server besides its own; ``*`` allows all. Default:
          ``None``, pages of ``localhost``.
        refuse (Callable): Makes the response to a refused request.
    """

    def __init__(
        self,
        app: ASGIApp,
        names: Collection[str],
        origins: Collection[str] | None,
        refuse: Callable[[Request, ApiError], Response],
    ):
        pages = LOCAL_PAGES if origins is None else None
        super().__init__(app, origins or (), allow_methods=("*",), allow_headers=("*",), allow_origin_regex=pages)
        self.names = {name.lower() for name in ("localhost", gethostname(), *names)}
        self.refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._error(Headers(scope=scope)) if scope["type"] == "http" else None
        answer = super().__call__ if error is None else self.refuse(Request(scope), error)
        await answer(scope, receive, send)

    def _error(self, headers: Headers) -> ApiError | None:
        host, origin = headers.get("host"), headers.get("origin")
        if host is not None and ANY not in self.names and not self._is_ours(host):
            fix = f"start the server with --allowed-hosts {host.partition(':')[0][:100]}"
            return ApiError(403, f"The server is not known by the name {host[:100]!r}: {fix}.")
        is_own = origin is not None and origin.partition("://")[2] == host
        if origin is not None and not is_own and not self.is_allowed_origin(origin):
            fix = f"start the server with --allowed-origins {origin[:100]}"
            return ApiError(403, f"Pages of {origin[:100]!r} may not use the server: {fix}.")
        return None

    def _is_ours(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:  # unbalanced brackets
            return False
        return name.removesuffix(".") in self.names or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
