"""`state.pt`: the archive that torch writes for a state, with chunks in place of its data.

torch pickles the state with placeholders for its tensors and skips their bytes. Everything else of
the archive is recorded, so the file consists of known bytes and of tensors. The placeholders are
views of an empty sparse file that nobody reads: they take neither memory nor disk.
"""

from __future__ import annotations

import io
import mmap
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

import torch

from holdfast.registry.errors import IncompatibleState
from holdfast.registry.formats.torch import without_versions
from holdfast.registry.objects import TensorEntry

#: A stand-in has room for its number and is a multiple of every element.
_STAND_IN_BYTES = 16
_ALIGNED_BYTES = 64


def archive_parts(
    ref: str, tensors: Sequence[TensorEntry], build: Callable[[Sequence[object]], Any]
) -> list[bytes | TensorEntry]:
    """Return the parts of the archive of a state: known bytes, and the tensors between them."""

    def written(tensors: Sequence[object]) -> Any:
        return without_versions(build(tensors))

    order = _order(ref, written([_stand_in(n, one.dtype) for n, one in enumerate(tensors)]))
    record: Any = _Recorder()
    with torch.serialization.skip_data():
        torch.save(written(_placeholders(tensors)), record)
    wanted = [tensors[number] for number in order if tensors[number].nbytes]
    parts: list[bytes | TensorEntry] = record.filled(wanted)
    return parts


def _order(ref: str, state: Any) -> list[int]:
    """Return the numbers of stand-ins in the order in which torch writes their data."""
    file = io.BytesIO()
    try:
        torch.save(state, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:  # any error means that nobody could load the file
        raise IncompatibleState(
            "a torch file of this state could only be loaded by running code",
            where=ref,
            expected="tensors and plain values",
            found=str(error).split("\n")[0],
        ) from error
    with zipfile.ZipFile(file) as archive:
        names = [name for name in archive.namelist() if "/data/" in name]
        return [int.from_bytes(archive.read(name)[:8], "little") for name in names]


def _stand_in(number: int, dtype: str) -> torch.Tensor:
    """Return a small tensor of an element type whose bytes are its number."""
    data = bytearray(number.to_bytes(_STAND_IN_BYTES, "little"))
    return torch.frombuffer(data, dtype=torch.uint8).view(getattr(torch, dtype))


def _placeholders(tensors: Sequence[TensorEntry]) -> list[object]:
    """Return tensors of the right types and shapes, without data."""
    offsets = [0]
    for one in tensors:
        offsets.append(offsets[-1] + -(-one.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES)
    with tempfile.TemporaryFile() as file:
        file.truncate(max(offsets[-1], 1))
        memory = mmap.mmap(file.fileno(), 0)  # closed with its last view
    return [_placeholder(memory, at, one) for at, one in zip(offsets, tensors, strict=False)]


def _placeholder(memory: mmap.mmap, offset: int, entry: TensorEntry) -> torch.Tensor:
    dtype = getattr(torch, entry.dtype)
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=dtype, device="cpu")
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=entry.nbytes, offset=offset)
    return flat.view(dtype).reshape(entry.shape)


class _Recorder(io.RawIOBase):
    """A file that keeps what is written to it, and the gaps that are skipped."""

    def __init__(self) -> None:
        super().__init__()
        self._written: list[bytes | int] = []
        self._position = 0

    def writable(self) -> bool:
        """Return true."""
        return True

    def seekable(self) -> bool:
        """Return true: torch skips data by a seek."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def write(self, data: Any) -> int:
        """Keep a copy of the bytes."""
        self._written.append(bytes(data))
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Skip bytes forward."""
        if whence != io.SEEK_CUR or offset < 0:
            raise io.UnsupportedOperation("only forward")
        self._written.append(offset)
        self._position += offset
        return self._position

    def filled(self, tensors: Sequence[TensorEntry]) -> list[bytes | TensorEntry]:
        """Return the written parts, with tensors in the gaps."""
        gaps = [one for one in self._written if isinstance(one, int)]
        if gaps != [one.nbytes for one in tensors]:
            raise IncompatibleState(
                "this version of torch writes archives in another way",
                found=torch.__version__,
                hint="Use the .safetensors files, or `holdfast pull`.",
            )
        parts: list[bytes | TensorEntry] = []
        known: list[bytes] = []
        rest = iter(tensors)
        for one in self._written:
            if isinstance(one, bytes):
                known.append(one)
            else:
                parts += [b"".join(known), next(rest)]
                known = []
        return [*parts, b"".join(known)]
