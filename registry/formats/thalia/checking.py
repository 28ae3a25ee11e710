"""All problems of a file: every check that reading makes, and what reading passes over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.registry.errors import RegistryError
from holdfast.registry.formats.state_file import problem
from holdfast.registry.formats.thalia import container, delta, framing
from holdfast.registry.formats.thalia.framing import Body
from holdfast.registry.formats.thalia.header import (
    check_header,
    path_of,
    read_header,
    read_index,
    repeated,
)
from holdfast.registry.formats.thalia.regions import head_of, read_json, references
from holdfast.registry.formats.thalia.tensors import read_tensor


class _Problems(list[str]):
    """Problems that were found."""

    def attempt(self, step: Callable[[], Any]) -> Any:
        """Return the result of a check; note why it failed, and return `None`, if it does."""
        try:
            return step()
        except RegistryError as error:
            self.append(problem(error))
            return None


def validate(path: Path) -> list[str]:
    """Return every problem of a file."""
    found = _Problems()
    try:
        with framing.opened(path, tolerant=True) as body:
            if body.is_delta:
                _check_delta(body, path, found)
            elif container.is_of_document(body):
                body.faults = []
                found.attempt(lambda: container.read_any(body))
                found += map(problem, body.faults)
            else:
                _check(body, found)
        if body.problem is not None:
            found.insert(0, f"{path}: {body.problem}")
    except RegistryError as error:
        found.append(problem(error))
    return list(found)


def _check_delta(body: Body, path: Path, found: _Problems) -> None:
    parsed = found.attempt(lambda: delta.parse(body))
    if parsed is None:
        return
    found += delta.problems(parsed, path)
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
        found.append(
            f"{body.where}: header and metadata have different training steps: "
            f"{header.training_steps} and {steps}"
        )
    entries = found.attempt(lambda: read_index(body, header)) or []
    found += [f"{body.where}: two entries are named {name}" for name in repeated(entries)]
    for entry in entries:
        _check_region(body, path_of(entry), entry.offset, entry.length, found)


def _check_region(body: Body, where: str, offset: int, length: int, found: _Problems) -> None:
    value = found.attempt(lambda: read_json(body, offset, length, where))
    for name, reference in found.attempt(lambda: list(references(value, where))) or []:
        found.attempt(lambda: _check_tensor(body, reference, name))  # noqa: B023 - called at once


def _check_tensor(body: Body, reference: dict[str, Any], name: str) -> None:
    head = head_of(body, reference, name)
    body.taken = 0  # each tensor is checked alone and not kept
    body.take(head.nbytes)
    read_tensor(body, head, name)
