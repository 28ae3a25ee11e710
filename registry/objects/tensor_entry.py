"""A tensor in a manifest: its type, its shape, and the digests of its bytes."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import repeat
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple, Self

from holdfast.registry.errors import Malformed
from holdfast.registry.objects.chunking import INLINE_BYTES, Grid, grid
from holdfast.registry.values import DIGEST_BYTES, ITEM_SIZES, Digest, canonical

#: A tensor of more chunks names a stored list of their digests.
LIST_THRESHOLD = 256
_MAX_AXES = 64
#: The element types that can be stored with less precision, and the types they are stored in.
ORIGINAL_DTYPES = frozenset({"float32", "float64"})
NARROW_DTYPES = frozenset({"float16", "bfloat16"})


class NarrowedDtype(str):
    """The name of the narrower element type that a tensor is stored in."""

    __slots__ = ("original",)
    original: str  # the wider type, which the tensor's entry records

    def __new__(cls, dtype: str, original: str) -> Self:
        """Return the name with the original type."""
        made = super().__new__(cls, dtype)
        made.original = original
        return made


class _Fields(NamedTuple):
    dtype: str  # name in `holdfast.registry.values.dtypes`; a `NarrowedDtype` sets `original` too
    shape: tuple[int, ...]  # axis lengths
    inline: bytes | None  # the bytes themselves, for at most `INLINE_BYTES`
    chunks: Sequence[Digest]  # digests of the chunks of `grid`, in order
    #: Digest of a stored chunk that holds the digests, 32 bytes each.
    chunk_list: Digest | None
    #: The wider element type that it had before it lost precision; `None` if it is stored
    #: unchanged.
    original: str | None


class TensorEntry(_Fields):
    """One tensor of a component; its bytes are in one of `inline`, `chunks` and `chunk_list`.

    A model has thousands of them, so they are made column by column: see `with_digests`.
    """

    __slots__ = ()

    def __new__(
        cls,
        dtype: str,
        shape: tuple[int, ...],
        inline: bytes | None = None,
        chunks: Sequence[Digest] = (),
        chunk_list: Digest | None = None,
        original: str | None = None,
    ) -> Self:
        """Make an entry of a type, or of a `NarrowedDtype`, and of one form of its bytes."""
        if isinstance(dtype, NarrowedDtype):
            original, dtype = dtype.original, str(dtype)
        return tuple.__new__(cls, (dtype, shape, inline, chunks, chunk_list, original))

    @property
    def grid(self) -> Grid:
        """How the tensor is cut."""
        return grid(self.dtype, self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return prod(self.shape) * ITEM_SIZES[self.dtype]

    def chunk_digests(self, lists: Mapping[Digest, bytes]) -> Sequence[Digest]:
        """Return the digests of its chunks, in the order of its grid; none if it is inline.

        `lists` has the bytes of stored digest lists; its own is among them, if it has one.
        """
        if self.chunk_list is None:
            return self.chunks
        return tuple(Digest.each(self.digest_bytes(lists)))

    def digest_bytes(self, lists: Mapping[Digest, bytes]) -> bytes:
        """Return the digests of the chunks as bytes, 32 for each."""
        if self.chunk_list is None:
            return b"".join(self.chunks)
        return check_list(lists[self.chunk_list], self.grid.count, where=self.chunk_list)

    @property
    def content(self) -> Digest:
        """Digest of dtype, shape and bytes together; `original` does not count."""
        entry = self.to_json()
        entry.pop("original", None)
        return Digest.of(canonical.encode(entry))

    def encode(self) -> str:
        """Return the canonical JSON of the entry; a model has thousands of one form."""
        dtype, shape, inline, chunks, chunk_list, original = self
        if inline is not None:
            data = binascii.b2a_base64(inline, newline=False).decode("ascii")
            return f'{{"data":"{data}",{_form_text(dtype, shape, original)}'
        if chunk_list is None and chunks:
            digests = '","'.join([digest.hex() for digest in chunks])
            return f'{{"chunks":["{digests}"],{_form_text(dtype, shape, original)}'
        return canonical.encode(self.to_json()).decode()

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the manifest as JSON."""
        entry: dict[str, Any] = {"dtype": self.dtype, "shape": list(self.shape)}
        if self.original is not None:
            entry["original"] = self.original
        if self.inline is not None:
            entry["data"] = base64.b64encode(self.inline).decode("ascii")
        elif self.chunk_list is not None:
            entry["list"] = self.chunk_list.hex()
        else:
            entry["chunks"] = [digest.hex() for digest in self.chunks]
        return entry


@lru_cache(maxsize=4096)
def _form_text(dtype: str, shape: tuple[int, ...], original: str | None) -> str:
    """Return the end of the canonical JSON of entries of this form, after their bytes."""
    text = canonical.encode(TensorEntry(dtype, shape, original=original).to_json()).decode()
    return text.removeprefix('{"chunks":[],')


def check_list(data: bytes, count: int, *, where: object) -> bytes:
    """Return a stored digest list, which must be of `count` chunks."""
    if len(data) != count * DIGEST_BYTES:
        raise Malformed(
            "digest list does not cover its tensor",
            where=where,
            expected=f"{count * DIGEST_BYTES} bytes",
            found=f"{len(data)} bytes",
        )
    return data


def parse_entry(entry: Any) -> TensorEntry:
    """Return the tensor of an entry in JSON."""
    form = parse_form(entry)
    names = set(entry) - {"dtype", "shape", "original"}
    if names == {"data"}:
        return with_data(form, entry["data"])
    if names == {"list"}:
        return with_list(form, entry["list"])
    if names != {"chunks"}:
        raise ValueError(f"a tensor has keys {sorted(entry)}")
    if len(entry["chunks"]) != form.grid.count:  # before digests are made
        raise _uncovered(form, len(entry["chunks"]))
    return with_chunks(form, tuple(Digest.each_from_hex(entry["chunks"])))


def parse_form(entry: Any) -> TensorEntry:
    """Return the entry of a tensor without its bytes: type and shape, which are checked."""
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    if dtype not in ITEM_SIZES:
        raise ValueError(f"unknown dtype {dtype!r}")
    if len(shape) > _MAX_AXES or any(type(axis) is not int or axis < 0 for axis in shape):
        raise ValueError(f"not a shape: {shape[:8]}")
    dtype, shape = _one_of_equal(dtype, shape)
    cut = grid(dtype, shape)
    if cut.nbytes >= 2**63:
        raise ValueError(f"shape {shape} is beyond 2^63 bytes")
    original = _original(entry, cut.nbytes) if "original" in entry else None
    return TensorEntry(dtype, shape, original=original)


def with_digests(forms: Sequence[TensorEntry], digests: Iterable[Digest]) -> Iterator[TensorEntry]:
    """Return an entry of each form with the digest of its only chunk, in order."""
    for form in {id(one): one for one in forms}.values():  # a few dozen
        with_chunks(form, (Digest.of(b""),))  # checks it
    columns = (map(attrgetter(name), forms) for name in ("dtype", "shape", "original"))
    dtypes, shapes, originals = columns
    none: repeat[Any] = repeat(None)
    fields = zip(dtypes, shapes, none, zip(digests), none, originals)  # noqa: B905
    made: Any = partial(tuple.__new__, TensorEntry)
    return map(made, fields)


def with_data(form: TensorEntry, text: str) -> TensorEntry:
    """Return an entry with its inline bytes, given in base64."""
    inline, cut = _inline(text), form.grid
    if len(inline) != cut.nbytes or len(inline) > INLINE_BYTES:
        raise ValueError(f"{len(inline)} inline bytes for shape {form.shape} of {form.dtype}")
    return TensorEntry(form.dtype, form.shape, inline=inline, original=form.original)


def with_list(form: TensorEntry, text: object) -> TensorEntry:
    """Return an entry with the list of its digests, given by the digest of the list."""
    if form.grid.count <= LIST_THRESHOLD:
        raise ValueError(f"a digest list for only {form.grid.count} chunks")
    listed = Digest.from_hex(text)
    return TensorEntry(form.dtype, form.shape, chunk_list=listed, original=form.original)


def with_chunks(form: TensorEntry, chunks: Sequence[Digest]) -> TensorEntry:
    """Return an entry with the digests of its chunks."""
    cut = form.grid
    if len(chunks) != cut.count or cut.nbytes <= INLINE_BYTES:
        raise _uncovered(form, len(chunks))
    return TensorEntry(form.dtype, form.shape, chunks=chunks, original=form.original)


def _uncovered(form: TensorEntry, chunks: int) -> ValueError:
    return ValueError(f"{chunks} chunks do not cover shape {form.shape} of {form.dtype}")


# A model has thousands of tensors and a few dozen shapes.
@lru_cache(maxsize=4096)
def _one_of_equal(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return the same objects for all tensors of equal type and shape."""
    return dtype, shape


def _original(entry: Any, nbytes: int) -> str:
    """Return the original element type of a tensor; its bytes in that type must be below 2^63."""
    original, dtype = entry["original"], entry["dtype"]
    if original not in ORIGINAL_DTYPES or dtype not in NARROW_DTYPES:
        raise ValueError(f"{dtype} cannot replace {original!r}")
    if nbytes // ITEM_SIZES[dtype] * ITEM_SIZES[original] >= 2**63:
        raise ValueError(f"shape {entry['shape']} of {original} is beyond 2^63 bytes")
    return str(original)


def _inline(text: str) -> bytes:
    try:
        data = binascii.a2b_base64(text, strict_mode=True)
    except binascii.Error as error:
        raise ValueError(f"inline data is not base64: {error}") from error
    if binascii.b2a_base64(data, newline=False).decode("ascii") != text:
        raise ValueError("inline data has bits after its end")
    return data
