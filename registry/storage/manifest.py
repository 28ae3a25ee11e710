"""The manifest `holdfast.checkpoint/1`: WHAT a state is.

It has the skeleton and the tensors (dtype, shape, chunk digests) of each component. A component's
digest is the SHA-256 of its canonical JSON. The state's id is the digest of the manifest in which
each component is replaced by its digest. A manifest names no location, run, step or time, so equal
states have equal ids everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from holdfast.registry.errors import (
    IntegrityError,
    InvalidInput,
    Malformed,
    UnsupportedFormat,
)
from holdfast.registry.storage.chunking import GRID
from holdfast.registry.storage.framing import content_bytes, unwrap_frame, wrap_frame
from holdfast.registry.storage.manifest_text import OtherSpelling, PartText, split
from holdfast.registry.storage.tensor_entry import (
    TensorEntry,
    parse_entry,
    parse_form,
    with_chunks,
    with_data,
    with_list,
)
from holdfast.registry.values import canonical
from holdfast.registry.values.digest import DIGEST_BYTES, Digest, HexDigests
from holdfast.registry.values.gc_pause import collector_paused
from holdfast.registry.values.parse_limits import check_json, taking_turns

FORMAT = "holdfast.checkpoint/1"


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
                lengths.setdefault(tensor.chunk_list, tensor.grid.count * DIGEST_BYTES)
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
            one = forms[form] = parse_form(body)
        if span is not None:
            entries.append(with_chunks(one, HexDigests(part.encoded, *span)))
        elif data is not None:
            entries.append(with_data(one, data.decode("ascii")))
        else:
            entries.append(with_list(one, (listed or b"").decode("ascii")))
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
        # In place, since a second list would double the memory.
        entries[index] = parse_entry(entry)
    return Component(body["skeleton"], tuple(entries), Digest.of(encoded), encoded)
