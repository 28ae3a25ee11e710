"""All problems of a file: every check of a reader, and those that a reader skips."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.registry.errors import RegistryError
from holdfast.registry.formats.state_file import Faults, problem
from holdfast.registry.formats.thalia import container, delta, framing
from holdfast.registry.formats.thalia.framing import Body
from holdfast.registry.formats.thalia.header import (
    Entry,
    check_header,
    read_header,
    read_index,
    repeated,
)
from holdfast.registry.formats.thalia.regions import head_of, read_json, references
from holdfast.registry.formats.thalia.tensors import read_tensor
from holdfast.registry.pytree import Trail


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
    """Return every problem of a file."""
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
