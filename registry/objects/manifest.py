"""The manifest `holdfast.checkpoint/1`: WHAT a state is.

It has the skeleton and the tensors (dtype, shape, chunk digests) of each component. A component's
digest is the SHA-256 of its canonical JSON. The state's id is the digest of the manifest in which
each component is replaced by its digest. A manifest names no location, run, step or time, so equal
states have equal ids everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import Any, NamedTuple

from holdfast.registry.errors import IntegrityError, InvalidInput, Malformed, UnsupportedFormat
from holdfast.registry.objects.chunking import GRID
from holdfast.registry.objects.framing import content_bytes, unwrap_frame, wrap_frame
from holdfast.registry.objects.tensor_entry import (
    TensorEntry,
    parse_entry,
    parse_form,
    with_chunks,
    with_data,
    with_digests,
    with_list,
)
from holdfast.registry.values import (
    DIGEST_BYTES,
    Digest,
    HexDigests,
    canonical,
    check_json,
    collector_paused,
    taking_turns,
)

# Find the parts of a manifest in its canonical text, without parsing the digests of chunks.


# A quote within a string has a backslash before it, so these texts occur in no string.
_PART = re.compile(rb'\[("(?:[^"\\]|\\.)*+"),(\{"grid":"rows/1","skeleton":)')
_TENSORS = b',"tensors":['
_CLOSING = re.compile(rb'\],"format":"holdfast\.checkpoint/1","kind":("[a-z]+")\}\Z')
#: A tensor and the comma after it: the digest of its only chunk, or its inline bytes, before the
#: JSON of its other fields; or the text of any other entry.
_ENTRY = re.compile(
    rb'(?:\{(?:"chunks":\["([0-9a-f]{64})"\]|"data":"([^"\\]*+)"),("dtype":[^{}]*+\})'
    rb"|(\{[^{}]*+\}))(?:,|\Z)"
)
_OTHER_ENTRY = re.compile(
    rb'\{"chunks":\[([0-9a-f",]*+)\],("dtype":[^{}]*+\})'
    rb'|\{("dtype":"[^"\\]*+"),"list":"([^"\\]*+)"(,[^{}]*+\})'
)
#: Lengths of what `_ENTRY` matches beside its groups.
_AROUND_DIGEST, _AROUND_DATA, _AROUND_OTHER = 16, 12, 1


class OtherSpelling(Exception):
    """No writer spells a manifest so."""


class PartText(NamedTuple):
    """A component in the text of its manifest."""

    name: bytes  # the JSON of its name
    skeleton: bytes  # the JSON of its skeleton
    encoded: bytes  # the JSON of the whole component
    tensors: tuple[int, int]  # where its tensors begin and end in that


def split(content: bytes) -> tuple[bytes, list[PartText]]:
    """Return the JSON of the kind, and the components."""
    at = _after(content, 0, b'{"components":[')
    parts: list[PartText] = []
    has_more = False
    while found := _PART.match(content, at):
        begin, inner = found.start(2), found.end()
        cut = content.find(_TENSORS, inner)
        if cut < 0:
            raise OtherSpelling
        start = end = cut + len(_TENSORS)
        if not content.startswith(b"]", start):
            end = content.find(b"]}]", start) + 2  # the last tensor's shape ends there
        at = _after(content, end, b"]}]")
        span = start - begin, end - begin
        parts.append(PartText(found[1], content[inner:cut], content[begin : at - 1], span))
        has_more = content.startswith(b",", at)
        at += has_more
        if not has_more:
            break
    closing = _CLOSING.match(content, at)
    if closing is None or has_more:
        raise OtherSpelling
    return closing[1], parts


def _after(content: bytes, at: int, expected: bytes) -> int:
    """Return the end of a text that must be at a position."""
    if not content.startswith(expected, at):
        raise OtherSpelling
    return at + len(expected)


FORMAT = "holdfast.checkpoint/1"


class Component(NamedTuple):
    """A top-level key of a state."""

    #: The values, with an index into `tensors` for each tensor (`holdfast.registry.pytree`).
    skeleton: canonical.Json
    tensors: tuple[TensorEntry, ...]  # the tensors, in order of their index
    digest: Digest  # SHA-256 of `encoded`
    encoded: bytes  # the component's canonical JSON

    @classmethod
    def build(
        cls,
        skeleton: canonical.Json,
        tensors: Sequence[TensorEntry],
        encoded_skeleton: bytes | None = None,
    ) -> Component:
        """Make a component and hash it."""
        encoded = b'{"grid":%b,"skeleton":%b,"tensors":[%b]}' % (
            canonical.encode(GRID),
            encoded_skeleton or canonical.encode(skeleton),
            ",".join([tensor.encode() for tensor in tensors]).encode("ascii"),
        )
        return cls(skeleton, tuple(tensors), Digest.of(encoded), encoded)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, equal ones counted each time."""
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True)
class Manifest:
    """The content of a state."""

    kind: str  # `dict` or `odict`: the type of the state itself
    components: Mapping[str, Component]  # the components by name, in the order of the state's keys

    @cached_property
    def digest(self) -> Digest:
        """The state's id."""
        named = [[name, component.digest.hex()] for name, component in self.components.items()]
        return Digest.of(
            canonical.encode({"format": FORMAT, "kind": self.kind, "components": named})
        )

    def part(self, names: Sequence[str] | None) -> Manifest:
        """Return the state with some components alone, under the id of the whole; `None`: all.

        It describes what is left of a thinned state, and is never encoded.
        """
        if names is None:
            return self
        if not set(names) <= self.components.keys():
            raise Malformed(
                "a placement covers components that its manifest does not have",
                where=self.digest.short,
                expected=", ".join(self.components),
                found=", ".join(names),
            )
        part = Manifest(self.kind, {n: one for n, one in self.components.items() if n in names})
        part.__dict__["digest"] = self.digest
        return part

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
                lengths.setdefault(tensor.chunk_list, tensor.grid.count * DIGEST_BYTES)
            elif len(tensor.chunks) == 1:  # as nearly always
                lengths.setdefault(tensor.chunks[0], tensor.nbytes)
            elif tensor.chunks:
                for digest, length in zip(tensor.chunks, tensor.grid.sizes(), strict=True):
                    lengths.setdefault(digest, length)
        return lengths

    @cached_property
    def chunk_lists(self) -> Mapping[Digest, TensorEntry]:
        """Stored digest lists by their digest, each with a tensor that names it."""
        return {t.chunk_list: t for t in self.tensors() if t.chunk_list is not None}

    def _named(self) -> list[Sequence[Digest]]:
        """Return the chunks of each tensor, or its list."""
        return [t.chunks if t.chunk_list is None else (t.chunk_list,) for t in self.tensors()]

    def named(self) -> Iterator[Digest]:
        """Yield the chunks and lists that the manifest itself names, in order, equal ones too."""
        return chain.from_iterable(self._named())

    @cached_property
    def named_count(self) -> int:
        """The number of chunks and lists that it names; equal ones count each time."""
        return sum(map(len, self._named()))

    @cached_property
    def first_named(self) -> Mapping[Digest, int]:
        """By the first chunk or the list of each tensor, how many of `named` come before it."""
        starts = accumulate(map(len, self._named()), initial=0)
        return {some[0]: start for some, start in zip(self._named(), starts, strict=False) if some}

    def distinct_chunks(self, lists: Mapping[Digest, bytes]) -> list[Digest]:
        """Return every distinct chunk, in the order of a placement's rows."""
        members = (one.chunk_digests(lists) for one in self.chunk_lists.values())
        return [*dict.fromkeys(chain(self.named(), *members))]

    def all_chunks(self, lists: Mapping[Digest, bytes]) -> dict[Digest, int]:
        """Return every distinct chunk and its raw length, in the order of a placement's rows."""
        lengths = dict(self.direct_chunks)
        for tensor in self.chunk_lists.values():
            members = zip(tensor.chunk_digests(lists), tensor.grid.sizes(), strict=True)
            for member, length in members:
                lengths.setdefault(member, length)
        return lengths

    def encode(self) -> bytes:
        """Return the file."""
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
        """Verify and parse a file."""
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
        """Parse a text in full, to raise its first error."""
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
    """Return the component that has a text."""
    skeleton = canonical.decode(part.skeleton, where=where)
    entries = tuple(_entries(part, forms, where))
    return Component(skeleton, entries, Digest.of(part.encoded), part.encoded)


def _entries(part: PartText, forms: dict[bytes, TensorEntry], where: str) -> Iterator[TensorEntry]:
    """Yield the tensors of a text; their columns are read, for there may be a hundred thousand."""
    at, end = part.tensors
    rows = _ENTRY.findall(part.encoded, at, end)
    digests, data, texts, others = zip(*rows, strict=True) if rows else ((),) * 4
    chunked, other = len(rows) - digests.count(b""), len(rows) - others.count(b"")
    around = chunked * _AROUND_DIGEST + other * _AROUND_OTHER
    around += (len(rows) - chunked - other) * _AROUND_DATA
    if sum(map(len, chain(digests, data, texts, others))) + around != end - at + bool(rows):
        raise OtherSpelling  # something stands between them
    for text in {*texts} - {b"", *forms}:
        forms[text] = _form(text, where)
    of_chunks = [forms[text] for text, digest in zip(texts, digests, strict=True) if digest]
    named = bytes.fromhex(b"".join(digests).decode("ascii"))
    with_one_chunk = with_digests(of_chunks, Digest.each(named))
    inline: dict[tuple[bytes, bytes], TensorEntry] = {}  # many steps of an optimizer are equal
    for digest, given, text, whole in rows:
        if digest:
            yield next(with_one_chunk)
        elif whole:
            at = part.encoded.index(whole, at)
            yield _other_entry(part.encoded, at, forms, where)
        else:
            if (text, given) not in inline:
                inline[text, given] = with_data(forms[text], given.decode("ascii"))
            yield inline[text, given]


def _other_entry(
    content: bytes, at: int, forms: dict[bytes, TensorEntry], where: str
) -> TensorEntry:
    """Return the entry of a tensor of several chunks, or of one that names a list."""
    found = _OTHER_ENTRY.match(content, at)
    if found is None:
        raise OtherSpelling
    _, form, dtype, listed, rest = found.groups()
    text = form or dtype + rest
    one = forms.get(text) or forms.setdefault(text, _form(text, where))
    if form is None:
        return with_list(one, listed.decode("ascii"))
    return with_chunks(one, HexDigests(content, *found.span(1)))


def _form(text: bytes, where: str) -> TensorEntry:
    """Return the entry of a tensor without its bytes."""
    body = canonical.decode(b"{" + text, where=where)
    if not {"dtype", "shape"} <= set(body) <= {"dtype", "shape", "original"}:
        raise ValueError(f"a tensor has keys {sorted(body)}")
    return parse_form(body)


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
        # In place, since a second list would double the memory.
        entries[index] = parse_entry(entry)
    return Component(body["skeleton"], tuple(entries), Digest.of(encoded), encoded)
