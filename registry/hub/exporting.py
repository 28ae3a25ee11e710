"""A release as plain files of safetensors, in a folder or bucket, for loaders that stream them.

Such loaders list `*.safetensors`, so a folder must not be named to anybody before it is whole. Each
release has a folder of its own, `RUN/VERSION/REVISION`, which is never written again once the last
file, `MARKER`, is there. It names all others with their digests.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.backends.fsspec.files import Files
from holdfast.registry.curation import Release
from holdfast.registry.errors import Conflict, Damaged
from holdfast.registry.hub.views import View, ViewOptions, check_weights, view_of
from holdfast.registry.objects import RECENT_BYTES, RecentChunks

#: The last file of a folder.
MARKER = "holdfast.json"
_FORMAT = "holdfast.export/1"
#: Bytes that are read and sent together.
_PART_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class ExportedFiles:
    """A release as plain files."""

    url: str  # the folder
    files: int  # number of the files, without the marker
    size_bytes: int  # bytes of them
    is_new: bool  # whether this call has written them


def export_release(release: Release, to: Files, options: ViewOptions) -> ExportedFiles:
    """Write a release as files, read them again, and mark the folder as whole.

    Raises:
        IncompatibleState: It has no weights that a file of safetensors can hold.
        Conflict: The folder has other files than those of the release.
        Damaged: A file that was read again has other bytes than were sent.
        IntegrityError: An object of the registry is damaged or gone.
        StorageError: A file cannot be written or read.
    """
    view = view_of(release, options, RecentChunks(RECENT_BYTES))
    check_weights(view)
    folder = f"{release.run_id}/{release.version}/{view.revision}"
    sizes = {name: file.size for name, file in view.files.items()}
    there = to.sizes(folder)
    is_new = MARKER not in there
    if is_new:
        _check(there, sizes, f"{to.url}/{folder}", is_whole=False)
        _write(release, view, to, folder)
        there = to.sizes(folder)
    _check(there, {**sizes, MARKER: there.get(MARKER, 0)}, f"{to.url}/{folder}", is_whole=True)
    return ExportedFiles(f"{to.url}/{folder}", len(sizes), sum(sizes.values()), is_new)


def _write(release: Release, view: View, to: Files, folder: str) -> None:
    digests = {}
    for name, file in view.files.items():
        sent = hashlib.sha256()
        to.write(f"{folder}/{name}", _hashed(file.stream(_PART_BYTES), sent))
        digests[name] = sent.hexdigest()
    for name, digest in digests.items():
        found = hashlib.sha256()
        for part in to.read(f"{folder}/{name}"):
            found.update(part)
        if found.hexdigest() != digest:
            raise Damaged(
                "a file has other bytes than were sent",
                where=f"{to.url}/{folder}/{name}",
                expected=digest,
                found=found.hexdigest(),
                hint="Export it again: without its marker the folder is written again.",
            )
    files = {
        name: {"size_bytes": view.files[name].size, "sha256": one} for name, one in digests.items()
    }
    said = {"format": _FORMAT, "ref": release.ref, "id": str(release.digest), "files": files}
    to.write(f"{folder}/{MARKER}", [json.dumps(said, indent=2, sort_keys=True).encode() + b"\n"])


def _hashed(parts: Iterator[bytes], sent: hashlib._Hash) -> Iterator[bytes]:
    for part in parts:
        sent.update(part)
        yield part


def _check(there: dict[str, int], wanted: dict[str, int], where: str, *, is_whole: bool) -> None:
    """Refuse a folder with files that are not ours, or, if it is whole, of another size."""
    wrong = sorted(there.keys() - wanted.keys())
    if is_whole:
        wrong += sorted(name for name, size in wanted.items() if there.get(name) != size)
    if wrong:
        raise Conflict(
            "the folder of this release has other files",
            where=where,
            expected="only its own files",
            found=", ".join(wrong[:5]),
            hint="Loaders read every file there. Delete the folder, and export it again.",
        )
