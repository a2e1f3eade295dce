"""The chat page at ``/``: HTML, CSS and JavaScript modules in ``page/``, served without a build step.

``main.js`` connects the other modules:

- ``api.js`` sends requests and reads streams; ``answer.js`` collects an answer, its figures and the messages of a request.
- ``turns.js`` shows questions and answers; ``markdown.js`` renders text.
- ``composer.js`` is the field for a question; ``settings.js`` has the other fields of a request.
- ``chats.js`` lists the chats; ``store.js`` keeps them in the browser.
"""

from pathlib import Path

from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

FOLDER = Path(__file__).parent.parent / "page"
# Scripts, styles and requests of this server only. Text becomes HTML only through DOMPurify.
POLICY = (
    "default-src 'none'; connect-src 'self'; img-src 'self' data:; script-src 'self'; style-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify"
)
HEADERS = {
    "Cache-Control": "no-cache",  # an update changes the files at the same URLs
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def page_response() -> Response:
    """The page itself."""
    return FileResponse(FOLDER / "page.html", headers=HEADERS)


class PageFiles(StaticFiles):
    """The page's style and scripts."""

    def __init__(self) -> None:
        super().__init__(directory=FOLDER)

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response
