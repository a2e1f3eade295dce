"""Copy tensors of a checkpoint into a file, in ranges, so that an interrupted copy can resume."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub.utils import TensorInfo
from tqdm import tqdm

from .reader import CheckpointReader, n_bytes

CHUNK_BYTES = 16 << 20  # per range request, which is repeated if it fails


def copy_tensors(
    original: CheckpointReader, tensors: Mapping[str, TensorInfo], file: Path, names: Mapping[str, str] | None = None
) -> None:
    """Write some tensors to a new safetensors file, reading no other bytes.

    The file appears when it is complete. Until then its bytes are in ``file`` with ``.part`` behind its name, and another
    call resumes there.

    Args:
        names (Dict[str, str], optional): The new name of each tensor. Default: ``None``, its own.
    """
    order = sorted(tensors, key=lambda name: (original.weight_map[name], tensors[name].data_offsets))
    header, n = {}, 0
    for name in order:
        t = tensors[name]
        stop = n + n_bytes(t)
        header[names[name] if names else name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": [n, stop]}
        n = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    head, part = struct.pack("<Q", len(text)) + text, file.with_name(file.name + ".part")
    done = _resume(part, head, n)
    with (
        part.open("ab") as f,
        tqdm(total=n, initial=done, desc="Reading", unit="B", unit_scale=True, disable=None) as bar,
    ):
        for source, start, stop in _runs(original, order, tensors):
            for begin in range(start + (skipped := min(done, stop - start)), stop, CHUNK_BYTES):
                f.write(data := original.read(source, begin, min(begin + CHUNK_BYTES, stop)))
                bar.update(len(data))
            done -= skipped
    part.replace(file)


def _runs(
    original: CheckpointReader, order: list[str], tensors: Mapping[str, TensorInfo]
) -> list[tuple[str, int, int]]:
    """The ranges to read, (file, start, stop), tensors that lie side by side joined into one."""
    runs: list[tuple[str, int, int]] = []
    data_start: dict[str, int] = {}  # of each file: offsets in a header count from its end
    for name in order:
        file = original.weight_map[name]
        if file not in data_start:
            data_start[file] = 8 + struct.unpack("<Q", original.read(file, 0, 8))[0]
        start, stop = (data_start[file] + offset for offset in tensors[name].data_offsets)
        if runs and (runs[-1][0], runs[-1][2]) == (file, start):
            runs[-1] = (file, runs[-1][1], stop)
        else:
            runs.append((file, start, stop))
    return runs


def _resume(part: Path, head: bytes, n: int) -> int:
    """Begin a file with these bytes, or keep up to n that another call has written behind them -> the bytes that are there."""
    if part.exists() and (done := part.stat().st_size - len(head)) <= n:
        with part.open("rb") as f:
            if f.read(len(head)) == head:
                return done
    part.write_bytes(head)
    return 0
