"""The manifest `holdfast.checkpoint/1`: WHAT a state is.

It has the skeleton and the tensors (dtype, shape, chunk digests) of each component. A component's
digest is the SHA-256 of its canonical JSON. The state's id is the digest of the manifest in which
each component is replaced by its digest. A manifest names no location, run, step or time, so equal
states have equal ids everywhere.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any, Self

from holdfast.registry.errors import (
    IntegrityError,
    InvalidInput,
    Malformed,
    UnsupportedFormat,
)
from holdfast.registry.storage.chunking import GRID, INLINE_BYTES, Grid, grid
from holdfast.registry.storage.framing import content_bytes, unwrap_frame, wrap_frame
from holdfast.registry.storage.manifest_text import OtherSpelling, PartText, split
from holdfast.registry.values import canonical
from holdfast.registry.values.digest import Digest, HexDigests
from holdfast.registry.values.dtypes import ITEM_SIZES
from holdfast.registry.values.gc_pause import collector_paused
from holdfast.registry.values.parse_limits import check_json, taking_turns

FORMAT = "holdfast.checkpoint/1"
#: A tensor of more chunks names a stored list of their digests.
LIST_THRESHOLD = 256
_DIGEST_BYTES = 32
_MAX_AXES = 64
#: The element types that can be stored with less precision, and the types they are stored in.
ORIGINAL_DTYPES = frozenset({"float32", "float64"})
NARROW_DTYPES = frozenset({"float16", "bfloat16"})


class NarrowedDtype(str):
    """The name of the narrower element type that a tensor is stored in.

    Attributes:
        original: The wider type, which the tensor's entry records.
    """

    __slots__ = ("original",)
    original: str

    def __new__(cls, dtype: str, original: str) -> Self:
        """Return the name with the original type."""
        made = super().__new__(cls, dtype)
        made.original = original
        return made


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a component; its bytes are in one of `inline`, `chunks` and `chunk_list`.

    Attributes:
        dtype: Name in `holdfast.registry.values.dtypes`; a `NarrowedDtype` sets `original` too.
        shape: Axis lengths.
        inline: The bytes themselves, for at most `INLINE_BYTES`.
        chunks: Digests of the chunks of `grid`, in order.
        chunk_list: Digest of a stored chunk that holds the digests, 32 bytes each.
        original: The wider element type that it had before it lost precision; `None` if it is
            stored unchanged.
    """

    dtype: str
    shape: tuple[int, ...]
    inline: bytes | None = None
    chunks: Sequence[Digest] = ()
    chunk_list: Digest | None = None
    original: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.dtype, NarrowedDtype):
            object.__setattr__(self, "original", self.dtype.original)
            object.__setattr__(self, "dtype", str(self.dtype))

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

        Args:
            lists: The bytes of stored digest lists; its own is among them, if it has one.

        Raises:
            Malformed: The list does not cover the tensor.
        """
        if self.chunk_list is None:
            return self.chunks
        return tuple(Digest.each(self.digest_bytes(lists)))

    def digest_bytes(self, lists: Mapping[Digest, bytes]) -> bytes:
        """Return what `chunk_digests` does, 32 bytes for each.

        Raises:
            Malformed: The list does not cover the tensor.
        """
        if self.chunk_list is None:
            return b"".join(self.chunks)
        return check_list(lists[self.chunk_list], self.grid.count, where=self.chunk_list)

    @property
    def content(self) -> Digest:
        """Digest of dtype, shape and bytes together; `original` does not count."""
        entry = self.to_json()
        entry.pop("original", None)
        return Digest.of(canonical.encode(entry))

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


@dataclass(frozen=True, slots=True)
class Component:
    """A top-level key of a state.

    Attributes:
        skeleton: The values, with an index into `tensors` for each tensor
            (`holdfast.registry.pytree`).
        tensors: The tensors, in order of their index.
        digest: SHA-256 of `encoded`.
        encoded: The component's canonical JSON.
    """

    skeleton: canonical.Json
    tensors: tuple[TensorEntry, ...]
    digest: Digest
    encoded: bytes

    @classmethod
    def build(
        cls,
        skeleton: canonical.Json,
        tensors: Sequence[TensorEntry],
        encoded_skeleton: bytes | None = None,
    ) -> Component:
        """Make a component and hash it.

        Args:
            skeleton: Its skeleton.
            tensors: Its tensors.
            encoded_skeleton: The canonical JSON of the skeleton, if the caller has it.
        """
        encoded = b'{"grid":%b,"skeleton":%b,"tensors":%b}' % (
            canonical.encode(GRID),
            encoded_skeleton or canonical.encode(skeleton),
            canonical.encode([tensor.to_json() for tensor in tensors]),
        )
        return cls(skeleton, tuple(tensors), Digest.of(encoded), encoded)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, equal ones counted each time."""
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True)
class Manifest:
    """The content of a state.

    Attributes:
        kind: `dict` or `odict`: the type of the state itself.
        components: The components by name, in the order of the state's keys.
    """

    kind: str
    components: Mapping[str, Component]

    @cached_property
    def digest(self) -> Digest:
        """The state's id."""
        named = [[name, component.digest.hex()] for name, component in self.components.items()]
        return Digest.of(
            canonical.encode({"format": FORMAT, "kind": self.kind, "components": named})
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, equal ones counted each time."""
        return sum(component.nbytes for component in self.components.values())

    @cached_property
    def content_bytes(self) -> int:
        """Length of its canonical JSON without names and braces."""
        return sum(len(component.encoded) for component in self.components.values())

    def tensors(self) -> Iterator[TensorEntry]:
        """Yield every tensor in manifest order."""
        for component in self.components.values():
            yield from component.tensors

    @cached_property
    def direct_chunks(self) -> Mapping[Digest, int]:
        """Distinct chunks that the manifest itself names, in order, with their raw lengths.

        Digest lists are among them; the chunks that the lists name come after them in a placement.
        """
        lengths: dict[Digest, int] = {}
        for tensor in self.tensors():
            if tensor.chunk_list is not None:
                lengths.setdefault(tensor.chunk_list, tensor.grid.count * _DIGEST_BYTES)
            elif tensor.chunks:
                for digest, length in zip(tensor.chunks, tensor.grid.sizes(), strict=True):
                    lengths.setdefault(digest, length)
        return lengths

    @cached_property
    def chunk_lists(self) -> Mapping[Digest, TensorEntry]:
        """Stored digest lists by their digest, each with a tensor that names it."""
        return {t.chunk_list: t for t in self.tensors() if t.chunk_list is not None}

    @cached_property
    def first_named(self) -> tuple[Mapping[Digest, int], int]:
        """By the first chunk or the list of each tensor, how many chunks and lists come before it.

        Equal ones count each time here; the number of all of them comes second.
        """
        first, total = {}, 0
        for tensor in self.tensors():
            if tensor.chunk_list is not None:
                first[tensor.chunk_list] = total
                total += 1
            elif tensor.chunks:
                first[tensor.chunks[0]] = total
                total += len(tensor.chunks)
        return first, total

    def all_chunks(self, lists: Mapping[Digest, bytes]) -> dict[Digest, int]:
        """Return every distinct chunk and its raw length, in the order of a placement's rows.

        Args:
            lists: The bytes of each stored digest list.
        """
        lengths = dict(self.direct_chunks)
        for tensor in self.chunk_lists.values():
            members = zip(tensor.chunk_digests(lists), tensor.grid.sizes(), strict=True)
            for member, length in members:
                lengths.setdefault(member, length)
        return lengths

    def encode(self) -> bytes:
        """Return the file.

        Raises:
            InvalidInput: Reading it would take more memory than allowed.
        """
        content = b"".join(self._content())
        check_json(content, where=f"manifest {self.digest.short}", kind=InvalidInput)
        return wrap_frame(content)

    def _content(self) -> Iterator[bytes]:
        """Yield the canonical JSON of the manifest in parts."""
        before = b'{"components":[['
        for name, component in self.components.items():
            yield before + canonical.encode(name) + b","
            yield component.encoded
            before = b"],["
        named = canonical.encode(FORMAT), canonical.encode(self.kind)
        yield b'%b],"format":%b,"kind":%b}' % (b"]" if self.components else before[:-1], *named)

    @classmethod
    def decode(cls, data: bytes, expected: Digest, *, where: str) -> Manifest:
        """Verify and parse a file.

        Raises:
            Damaged: Its bytes do not match its closing digest.
            Malformed: A rule of the format is broken, or it is another checkpoint's manifest.
            BeyondLimit: It would take too much memory.
            UnsupportedFormat: This version does not know its format.
        """
        with taking_turns(content_bytes(data)), collector_paused():
            content = unwrap_frame(data, where=where)
            check_json(content, where=where)
            manifest = cls._spelled(content, where) or cls._parse(content, where)
        if manifest.digest != expected:
            raise Malformed(
                "another checkpoint's manifest",
                where=where,
                expected=expected,
                found=manifest.digest,
            )
        return manifest

    @classmethod
    def _spelled(cls, content: bytes, where: str) -> Manifest | None:
        """Read a text as a writer spells it; `None` for every other one."""
        try:
            kind, parts = split(content)
            forms: dict[bytes, TensorEntry] = {}
            found = {
                str(canonical.decode(part.name, where=where)): _of_text(part, forms, where)
                for part in parts
            }
            if len(found) == len(parts) and kind in (b'"dict"', b'"odict"'):
                return cls(kind[1:-1].decode("ascii"), found)
        except (OtherSpelling, IntegrityError, KeyError, TypeError, ValueError):
            pass
        return None

    @classmethod
    def _parse(cls, content: bytes, where: str) -> Manifest:
        """Parse a text in full, and tell what is wrong with it."""
        body = canonical.parse(content, where=where)
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            found = body.get("format") if isinstance(body, dict) else type(body).__name__
            raise UnsupportedFormat(
                "unknown manifest format", where=where, expected=FORMAT, found=found
            )
        with _rules(where):
            if set(body) != {"format", "kind", "components"} or body["kind"] not in (
                "dict",
                "odict",
            ):
                raise ValueError("wrong keys")
            components = {_name(name): _component(part) for name, part in body["components"]}
            if len(components) != len(body["components"]):
                raise ValueError("a component occurs twice")
            manifest = cls(body["kind"], components)
            _check_canonical(content, manifest._content(), where)
            return manifest
        raise AssertionError  # `_rules` lets no error pass


def _check_canonical(content: bytes, parts: Iterator[bytes], where: str) -> None:
    """Compare a content with its expected parts without joining them, since they may be long."""
    end = 0
    for part in parts:
        canonical.check(content[end : end + len(part)], part, where=where)
        end += len(part)
    canonical.check(content[end:], b"", where=where)


def check_list(data: bytes, count: int, *, where: object) -> bytes:
    """Return a stored digest list, which must be of `count` chunks.

    Raises:
        Malformed: It is not `32 * count` bytes long.
    """
    if len(data) != count * _DIGEST_BYTES:
        raise Malformed(
            "digest list does not cover its tensor",
            where=where,
            expected=f"{count * _DIGEST_BYTES} bytes",
            found=f"{len(data)} bytes",
        )
    return data


class _rules:  # noqa: N801 - reads as a statement
    """Turn every error that a hostile body can cause into `Malformed`."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (KeyError, TypeError, ValueError, AttributeError, OverflowError)):
            raise Malformed("breaks the manifest format", where=self.where, found=error) from error


def _name(name: object) -> str:
    if type(name) is not str:
        raise ValueError(f"a component is named {name!r}")
    return name


def _of_text(part: PartText, forms: dict[bytes, TensorEntry], where: str) -> Component:
    """Return the component that has a text.

    Args:
        part: The text.
        forms: By its JSON, an entry of each form that was met; new ones are added.
        where: The manifest.

    Raises:
        ValueError: It breaks a rule of the format.
    """
    skeleton = canonical.decode(part.skeleton, where=where)
    entries = []
    for form, span, data, listed in part.tensors:
        one = forms.get(form)
        if one is None:
            body = canonical.decode(b"{" + form, where=where)
            if not {"dtype", "shape"} <= set(body) <= {"dtype", "shape", "original"}:
                raise ValueError(f"a tensor has keys {sorted(body)}")
            one = forms[form] = _form(body)
        if span is not None:
            entries.append(_with_chunks(one, HexDigests(part.encoded, *span)))
        elif data is not None:
            entries.append(_with_data(one, data.decode("ascii")))
        else:
            entries.append(_with_list(one, (listed or b"").decode("ascii")))
    return Component(skeleton, tuple(entries), Digest.of(part.encoded), part.encoded)


def _component(body: Any) -> Component:
    if set(body) != {"grid", "skeleton", "tensors"}:
        raise ValueError(f"a component has keys {sorted(body)}")
    if body["grid"] != GRID:
        raise ValueError(f"unknown grid {body['grid']!r}")
    encoded = canonical.encode(body)
    entries = body["tensors"]
    if type(entries) is not list:
        raise ValueError("tensors are not a list")
    for index, entry in enumerate(entries):
        entries[index] = _tensor(entry)  # in place, since a second list would double the memory
    return Component(body["skeleton"], tuple(entries), Digest.of(encoded), encoded)


def _tensor(entry: Any) -> TensorEntry:
    form = _form(entry)
    fields = set(entry) - {"dtype", "shape", "original"}
    if fields == {"data"}:
        return _with_data(form, entry["data"])
    if fields == {"list"}:
        return _with_list(form, entry["list"])
    if fields != {"chunks"}:
        raise ValueError(f"a tensor has keys {sorted(entry)}")
    if len(entry["chunks"]) != form.grid.count:  # before digests are made
        raise _uncovered(form, len(entry["chunks"]))
    return _with_chunks(form, tuple(Digest.each_from_hex(entry["chunks"])))


def _form(entry: Any) -> TensorEntry:
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


def _with_data(form: TensorEntry, text: str) -> TensorEntry:
    inline, cut = _inline(text), form.grid
    if len(inline) != cut.nbytes or len(inline) > INLINE_BYTES:
        raise ValueError(f"{len(inline)} inline bytes for shape {form.shape} of {form.dtype}")
    return TensorEntry(form.dtype, form.shape, inline=inline, original=form.original)


def _with_list(form: TensorEntry, text: object) -> TensorEntry:
    if form.grid.count <= LIST_THRESHOLD:
        raise ValueError(f"a digest list for only {form.grid.count} chunks")
    listed = Digest.from_hex(text)
    return TensorEntry(form.dtype, form.shape, chunk_list=listed, original=form.original)


def _with_chunks(form: TensorEntry, chunks: Sequence[Digest]) -> TensorEntry:
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
