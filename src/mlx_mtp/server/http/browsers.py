"""Protection against other web pages: a browser sends the requests of any page, even to servers on its own machine."""

from collections.abc import Callable, Collection
from ipaddress import ip_address
from socket import gethostname
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ..request import ApiError

ANY = "*"
LOCAL_PAGES = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:[0-9]+)?"


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
