"""Files of Thalia: `.thalia`, also compressed, deltas, and the layout that its document describes.

The state that is read has the components `regions` and `pathways`, and those that the file keeps in
its metadata: `config`, `theta`, `scheduler`, `trial_state`, `training_steps`. All other metadata is
`metadata`, and also the file's own metadata. Tensors have the types of the file.

- `brain`: features of these files alone: precision, compression levels, deltas, single regions.
- `framing`: open a file, undo its compression, and check its checksum; the 256 bytes at its
  beginning, and the index of regions.
- `tensors`: one tensor, dense or sparse; the JSON of a region, in which tensors are references.
- `container`: read a whole file; `writing`: write one.
- `document`: the layout of the document; no program wrote it.
- `delta`: the difference to a base file, and chains of them; `delta_writing`: write one.
- `precision`: which tensors a policy narrows.

The programs that write these files changed the frame of compressed files once, and the document
differs from both. All three are told apart by content.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from holdfast.registry.errors import RegistryError
from holdfast.registry.formats.content import Content
from holdfast.registry.formats.state_file import Faults, FileReport, FileState, WrittenFile, problem
from holdfast.registry.formats.thalia import container, delta, framing, writing
from holdfast.registry.formats.thalia.brain import (
    BrainCheckpoint,
    BrainState,
    load,
    migrate,
    save,
    save_delta,
)
from holdfast.registry.formats.thalia.framing import (
    Body,
    Entry,
    check_header,
    read_header,
    read_index,
    repeated,
)
from holdfast.registry.formats.thalia.precision import POLICIES, PrecisionPolicy
from holdfast.registry.formats.thalia.tensors import head_of, read_json, read_tensor, references
from holdfast.registry.pytree import Trail


def detect(path: Path) -> bool:
    """Return whether a file begins as one of Thalia's files, once it is decompressed."""
    return framing.kind_of(path) is not None


def read(path: Path) -> FileState:
    """Read a file; for a delta also its base, the very file that the delta was made from."""
    with framing.opened(path) as body:
        if body.is_delta:
            return delta.read(body, path)
        return container.read_any(body)


def inspect(path: Path) -> FileReport:
    """Describe a file from its header, index and JSON; its checksum is not compared.

    The index is at the end, so a compressed file is decompressed, and a delta is read as a whole.
    """
    with framing.opened(path, verify=False) as body:
        if body.is_delta:
            return delta.inspect(body)
        return container.inspect_any(body)


def write(
    path: Path, content: Content, *, metadata: Mapping[str, Any] | None, force: bool
) -> WrittenFile:
    """Write a state; the name decides the compression: `.thalia`, `.thalia.zst`, `.thalia.lz4`."""
    state, options = writing.plain(content), writing.Options()
    known = {**writing.described(content), **(metadata or {})}
    return writing.write(path, state, metadata=known, force=force, options=options)


class _Problems(Faults):
    """Problems that were found, of whatever class."""

    def attempt(self, step: Callable[[], Any]) -> Any:
        """Return the result of a check; note why it failed, and return `None`, if it does."""
        try:
            return step()
        except RegistryError as error:
            self.note(problem(error))
            return None


def validate(path: Path) -> list[str]:
    """Return every problem of a file, each a line of text: also those that a reader skips."""
    found = _Problems()
    try:
        with framing.opened(path, tolerant=True) as body:
            if body.is_delta:
                _check_delta(body, path, found)
            elif container.is_of_document(body):
                body.faults = found
                found.attempt(lambda: container.read_any(body))
            else:
                _check(body, found)
        if body.problem is not None:
            return [f"{path}: {body.problem}", *found.lines]
    except RegistryError as error:
        found.note(problem(error))
    return found.lines


def _check_delta(body: Body, path: Path, found: _Problems) -> None:
    parsed = found.attempt(lambda: delta.parse(body))
    if parsed is None:
        return
    for line in delta.problems(parsed, path):
        found.note(line)
    found.attempt(lambda: delta.read(body, path))


def _check(body: Body, found: _Problems) -> None:
    header = found.attempt(lambda: read_header(body))
    if header is None:
        return
    found.attempt(lambda: check_header(header, body.where))
    metadata = found.attempt(
        lambda: read_json(body, header.metadata_offset, header.metadata_length, "the metadata")
    )
    steps = (metadata or {}).get("training_steps", header.training_steps)
    if steps != header.training_steps:
        found.note(
            f"{body.where}: header and metadata have different training steps: "
            f"{header.training_steps} and {steps}"
        )
    entries = found.attempt(lambda: read_index(body, header)) or []
    for name in repeated(entries):
        found.note(f"{body.where}: two entries are named {name}")
    for entry in entries:
        _check_region(body, entry, found)


def _check_region(body: Body, entry: Entry, found: _Problems) -> None:
    where = container.trail_of(body, entry)
    value = found.attempt(lambda: read_json(body, entry.offset, entry.length, str(where)))
    for name, reference in found.attempt(lambda: list(references(value, where))) or []:
        found.attempt(lambda: _check_tensor(body, reference, name))  # noqa: B023 - called at once


def _check_tensor(body: Body, reference: dict[str, Any], name: Trail) -> None:
    head = head_of(body, reference, name)
    body.budget.taken = 0  # each tensor is checked alone and not kept
    body.budget.take(head.nbytes)
    read_tensor(body, head, name)
