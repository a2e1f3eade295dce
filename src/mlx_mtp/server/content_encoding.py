"""Compressed bodies of requests, decoded piece by piece as they arrive."""

import asyncio
import sys
import zlib
from collections.abc import AsyncIterator, Callable
from typing import Any

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

from .request import ApiError

PIECE = 1 << 20  # bytes that are decoded at a time, so that a small body never becomes a large one in memory
MAX_STREAMS = 1000  # in a body, one after the other: beginning one takes longer than decoding some bytes
WINDOW = {int(zstd.DecompressionParameter.window_log_max): 23}  # 8 MiB, as RFC 9659 limits zstd in HTTP
CODINGS: dict[str, Callable[[bytes], Any]] = {  # a decoder for a stream that begins with these bytes
    "gzip": lambda data: zlib.decompressobj(16 + zlib.MAX_WBITS),
    # Some clients leave out zlib's header, whose first byte ends in 8.
    "deflate": lambda data: zlib.decompressobj(zlib.MAX_WBITS if data[0] & 15 == 8 else -zlib.MAX_WBITS),
    "zstd": lambda data: zstd.ZstdDecompressor(options=WINDOW),
}
ACCEPTED = ", ".join(CODINGS)


async def decoded(chunks: AsyncIterator[bytes], encoding: str) -> AsyncIterator[bytes]:
    """Yield a body of this Content-Encoding in pieces. An ApiError: 415 for an unknown one, 400 for data that is not in it."""
    names = [name for x in encoding.split(",") if (name := x.strip().lower()) not in ("", "identity")]
    coding, stream, n = ", ".join(names).removeprefix("x-"), None, 0
    if coding and coding not in CODINGS:
        raise ApiError(415, f"Content-Encoding: {encoding[:100]} is not supported: send {ACCEPTED} or none.")
    async for data in chunks:
        if not coding:
            yield data
        has_more = bool(coding and data)
        while has_more:
            if stream is None or stream.eof:
                stream, n = CODINGS[coding](data), n + 1
            try:
                piece = stream.decompress(data, PIECE)
            except (zlib.error, zstd.ZstdError) as e:
                raise ApiError(400, f"The body is not valid {coding}: {e}.") from e
            # zlib returns the bytes that it has not read yet, zstd keeps them.
            data = stream.unused_data if stream.eof else getattr(stream, "unconsumed_tail", b"")
            has_more = bool(data) or (len(piece) == PIECE and not stream.eof)
            yield piece
            if has_more:
                await asyncio.sleep(0)  # other requests go on
        if n > MAX_STREAMS:
            raise ApiError(413, f"The body is more than {MAX_STREAMS:,} streams of {coding}: send one.")
    if stream is not None and not stream.eof:
        raise ApiError(400, f"The body ends before its {coding} does.")
