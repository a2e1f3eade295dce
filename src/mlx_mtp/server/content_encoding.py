"""Compressed bodies of requests, decoded piece by piece as they arrive."""

import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

from .request import ApiError

PIECE = 1 << 20  # bytes that are decoded at a time, so that a small body never becomes a large one in memory
MAX_STREAMS = 1000  # in a body: beginning one takes longer than decoding some bytes
WINDOW = {int(zstd.DecompressionParameter.window_log_max): 23}  # 8 MiB, as RFC 9659 limits zstd in HTTP


def _inflate(data: bytes) -> Any:
    """Some clients leave out the header of zlib, whose first byte ends in 8: no stream without it begins so."""
    return zlib.decompressobj(zlib.MAX_WBITS if data[0] & 15 == 8 else -zlib.MAX_WBITS)


CODINGS: dict[str, Callable[[bytes], Any]] = {  # a decoder for a stream that begins with these bytes
    "gzip": lambda data: zlib.decompressobj(16 + zlib.MAX_WBITS),
    "deflate": _inflate,
    "zstd": lambda data: zstd.ZstdDecompressor(options=WINDOW),
}
ACCEPTED = ", ".join(CODINGS)


class Decoder:
    """Decodes a body with this Content-Encoding. An ApiError: 415 for an unknown one, 400 for data that is not in it."""

    def __init__(self, encoding: str):
        names = [name for x in encoding.split(",") if (name := x.strip().lower()) not in ("", "identity")]
        self.coding = ", ".join(names).removeprefix("x-")
        if names and self.coding not in CODINGS:
            raise ApiError(415, f"Content-Encoding: {encoding[:100]} is not supported: send {ACCEPTED} or none.")
        self.stream: Any = None  # the decoder of zlib or zstd; a body may be several streams, one after the other
        self.n_streams = 0

    def add(self, data: bytes) -> Iterator[bytes]:
        """Yield the body in the next bytes, at most ``PIECE`` bytes at a time."""
        if not self.coding:
            yield data
        has_more = bool(self.coding and data)
        while has_more:
            if self.stream is None or self.stream.eof:
                self.stream, self.n_streams = CODINGS[self.coding](data), self.n_streams + 1
                if self.n_streams > MAX_STREAMS:
                    raise ApiError(413, f"The body is more than {MAX_STREAMS:,} streams of {self.coding}: send one.")
            try:
                piece = self.stream.decompress(data, PIECE)
            except (zlib.error, zstd.ZstdError) as e:
                raise ApiError(400, f"The body is not valid {self.coding}: {e}.") from e
            # zlib returns the bytes that it has not read yet, zstd keeps them.
            data = self.stream.unused_data if self.stream.eof else getattr(self.stream, "unconsumed_tail", b"")
            has_more = bool(data) or (len(piece) == PIECE and not self.stream.eof)
            yield piece

    def finish(self) -> None:
        if self.stream is not None and not self.stream.eof:
            raise ApiError(400, f"The body ends before its {self.coding} does.")
