"""Read a whole file: header, metadata, regions and pathways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from holdfast.registry.formats.state_file import FileReport, FileState, TensorHeader
from holdfast.registry.formats.thalia import document
from holdfast.registry.formats.thalia.framing import (
    HEADER_BYTES,
    Body,
    Entry,
    Header,
    check_header,
    is_document,
    path_of,
    read_header,
    read_index,
)
from holdfast.registry.formats.thalia.tensors import (
    filled,
    head_of,
    read_json,
    read_tensor,
    references,
)
from holdfast.registry.pytree import Trail

FORMAT: Final = "thalia"
#: Parts of a state that a file keeps in its metadata.
ASIDE: Final = ("config", "theta", "scheduler", "trial_state", "training_steps")


def read_any(body: Body) -> FileState:
    """Read a file of either layout."""
    return document.read(body, FORMAT) if is_of_document(body) else read(body)


def inspect_any(body: Body) -> FileReport:
    """Describe a file of either layout."""
    return document.inspect(body, FORMAT) if is_of_document(body) else inspect(body)


def is_of_document(body: Body) -> bool:
    """Return whether a file has the layout of the document."""
    return is_document(body.read(0, HEADER_BYTES, "the header"))


def read(body: Body, *, only: Callable[[Entry], bool] | None = None) -> FileState:
    """Read a file of the real layout as a state, or some regions and pathways of it."""
    header, metadata, parts = parse(body, only)
    for entry, value in parts:
        for name, reference in references(value, trail_of(body, entry)):
            body.budget.take(head_of(body, reference, name).nbytes)

    def tensor(reference: dict[str, Any], where: Trail) -> Any:
        return read_tensor(body, head_of(body, reference, where), where)

    state: dict[str, Any] = {"regions": {}, "pathways": {}}
    for entry, value in parts:
        kind = "pathways" if entry.is_pathway else "regions"
        state[kind][entry.name] = filled(value, trail_of(body, entry), tensor)
    for key in ASIDE:
        if key in metadata:
            state[key] = metadata[key]
    state.setdefault("training_steps", header.training_steps)
    state["metadata"] = {key: item for key, item in metadata.items() if key not in ASIDE}
    return FileState(state, FORMAT, body.file_bytes, metadata)


def trail_of(body: Body, entry: Entry) -> Trail:
    """Return the path of a region or pathway, to which those of its parts are added."""
    return Trail(path_of(entry), None, body.budget)


def inspect(body: Body) -> FileReport:
    """Describe a file of the real layout."""
    header, metadata, parts = parse(body)
    tensors = {}
    for entry, value in parts:
        for name, reference in references(value, trail_of(body, entry)):
            head = head_of(body, reference, name)
            tensors[str(name)] = TensorHeader(head.dtype, head.shape)
    tensors = dict(sorted(tensors.items()))
    return FileReport(FORMAT, body.file_bytes, tensors, metadata, header.totals())


def parse(
    body: Body, only: Callable[[Entry], bool] | None = None
) -> tuple[Header, dict[str, Any], list[tuple[Entry, dict[str, Any]]]]:
    """Return the header, the metadata, and the JSON of each region."""
    header = read_header(body)
    check_header(header, body.where)
    metadata = read_json(body, header.metadata_offset, header.metadata_length, "the metadata")
    entries = {(entry.name, entry.is_pathway): entry for entry in read_index(body, header)}
    parts = [
        (entry, read_json(body, entry.offset, entry.length, path_of(entry)))
        for entry in entries.values()
        if only is None or only(entry)
    ]
    return header, metadata, parts
