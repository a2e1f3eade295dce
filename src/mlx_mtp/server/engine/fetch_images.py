"""Images of requests: data URLs and, if the server allows it, files of a folder and URLs of some hosts."""

from pathlib import Path
from urllib.error import URLError
from urllib.parse import unquote, urlsplit
from urllib.request import HTTPRedirectHandler, build_opener
from urllib.request import Request as URLRequest

from ...images.open import MAX_BYTES, decode_url
from ..options import Options
from ..request import ApiError, Request

TIMEOUT = 30.0  # seconds for each read from a host
MAX_PIXELS = 1 << 28  # of all images of a request; 22 photos of 12 megapixels


def fetch_all(request: Request, flags: Options) -> list[bytes]:
    """Fetch the images of a request, and drop their URLs.

    Raises:
        ApiError: The client has disconnected.
        ValueError: An image is invalid or not allowed, or the images are too large.
    """
    images: list[bytes] = []
    left = MAX_BYTES
    for i, url in enumerate(request.images, 1):
        check_client(request)
        images.append(fetch(url, f"Image {i}", flags))
        left -= len(images[-1])
        if left < 0 and i > 1:
            raise ValueError(
                f"The images up to number {i} have more than {MAX_BYTES:,} bytes: send fewer or smaller ones."
            )
    request.images = []
    return images


def check_client(request: Request) -> None:
    """Raise an ApiError if the client has disconnected."""
    if request.is_gone:
        raise ApiError(400, "The client has disconnected.")


def fetch(url: str, name: str, flags: Options) -> bytes:
    """The bytes of an image, at most one more than ``open_image`` accepts; ``name`` is its name in errors.

    Raises:
        ValueError: The image is invalid or not allowed.
    """
    scheme = url.partition(":")[0].lower()
    if scheme == "data":
        return decode_url(url, name)
    if scheme in ("http", "https"):
        return _download(url, name, flags.allowed_media_domains)
    if scheme == "file":
        return _read(Path(unquote(urlsplit(url).path)), name, flags.allowed_local_media_path)
    raise ValueError(f"{name} must be a data URL (data:image/png;base64,...), not {url[:20]!r}.")


def _read(file: Path, name: str, folder: str | None) -> bytes:
    if folder is None:
        raise ValueError(f"{name} is a file: start the server with --allowed-local-media-path, or send a data URL.")
    file = file.resolve()  # first: links may lead out of the folder
    if not file.is_relative_to(Path(folder).resolve()) or not file.is_file():
        raise ValueError(f"{name} is not a file in the folder of --allowed-local-media-path.")
    with file.open("rb") as f:
        return f.read(MAX_BYTES + 1)


def _download(url: str, name: str, hosts: list[str]) -> bytes:
    _check_host(url, name, hosts)
    try:
        with build_opener(_Redirects(name, hosts)).open(URLRequest(url), timeout=TIMEOUT) as response:
            data: bytes = response.read(MAX_BYTES + 1)
            return data
    except (OSError, URLError) as e:
        raise ValueError(f"{name} cannot be downloaded: {e}.") from e


class _Redirects(HTTPRedirectHandler):
    """Follows redirects to allowed hosts only."""

    def __init__(self, name: str, hosts: list[str]):
        self.name, self.hosts = name, hosts

    def redirect_request(self, req, fp, code, msg, headers, newurl):  # type: ignore[no-untyped-def]
        _check_host(newurl, self.name, self.hosts)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _check_host(url: str, name: str, hosts: list[str]) -> None:
    host = urlsplit(url).hostname
    if urlsplit(url).scheme not in ("http", "https") or host not in hosts:
        raise ValueError(
            f"{name} is at {host}: start the server with --allowed-media-domains {host}, or send a data URL."
        )
