"""The requests that the clients make, as values, and the JSON that answers them.

A path is read as it was sent: a ref such as `phase2/best` arrives as `phase2%2Fbest`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote

from holdfast.registry.hub.views import View

Kind = Literal["file", "info", "tree", "paths-info"]
_REPO = r"/(?P<repo>[^/]+(?:/[^/]+)?)"
#: No ref is one of the verbs: that is then a run of that name, in a project.
_REF = r"/(?P<revision>(?!(?:revision|tree|paths-info|resolve)(?:/|$))[^/]+)"
_FORMS: Mapping[Kind, re.Pattern[str]] = {
    "info": re.compile(rf"/api/models{_REPO}(?:/revision{_REF})?"),
    "tree": re.compile(rf"/api/models{_REPO}/tree{_REF}(?:/(?P<path>.*))?"),
    "paths-info": re.compile(rf"/api/models{_REPO}/paths-info{_REF}"),
    "file": re.compile(rf"(?!/api/models/){_REPO}/resolve{_REF}/(?P<path>.+)"),
}


class Asked(NamedTuple):
    """A request for a repository."""

    kind: Kind
    repo: str  # `RUN` or `PROJECT/RUN`
    revision: str = "main"
    path: str = ""  # of a file, or of a folder that is listed


def asked(raw_path: bytes) -> Asked | None:
    """Return the request that a path stands for; `None` if no client asks so."""
    try:
        path = raw_path.decode("ascii")
        for kind, form in _FORMS.items():
            if found := form.fullmatch(path):
                given = [one for one in found.groupdict().items() if one[1]]
                return Asked(kind, **{name: unquote(one, errors="strict") for name, one in given})
    except UnicodeDecodeError:
        return None
    return None


def info(repo: str, view: View) -> dict[str, Any]:
    """Return the description of a repository at a revision."""
    is_adapter = "adapter_config.json" in view.files
    library = "peft" if is_adapter else "transformers" if "config.json" in view.files else None
    return {
        "id": repo,
        "modelId": repo,
        "sha": view.revision,
        "private": True,
        "gated": False,
        "disabled": False,
        "tags": [],
        "library_name": library,
        "siblings": [{"rfilename": name, **_blob(view, name)} for name in view.files],
    }


def tree(view: View, folder: str, *, recursive: bool) -> list[dict[str, Any]] | None:
    """Return the entries of a folder; `None` if there is no such folder."""
    prefix = f"{folder}/" if folder else ""
    below = [name for name in view.files if name.startswith(prefix)]
    if not below and folder:
        return None
    files, folders = [], dict[str, None]()
    for name in below:
        steps = name.removeprefix(prefix).split("/")
        inner = ["/".join(steps[: number + 1]) for number in range(len(steps) - 1)]
        folders |= dict.fromkeys(prefix + one for one in (inner if recursive else inner[:1]))
        if recursive or not inner:
            files.append(name)
    return [_folder(view, one) for one in folders] + [_file(view, one) for one in files]


def paths_info(view: View, paths: Sequence[str]) -> list[dict[str, Any]]:
    """Return the entries of paths; those that name nothing are absent."""
    found = []
    folders = {name[:at] for name in view.files for at, char in enumerate(name) if char == "/"}
    for path in dict.fromkeys(one.strip("/") for one in paths):
        if path in view.files:
            found.append(_file(view, path))
        elif path in folders:
            found.append(_folder(view, path))
    return found


def _file(view: View, name: str) -> dict[str, Any]:
    blob = _blob(view, name)
    return {"type": "file", "path": name, "oid": blob.pop("blobId"), **blob}


def _folder(view: View, path: str) -> dict[str, Any]:
    return {"type": "directory", "path": path, "size": 0, "oid": _oid(view, f"{path}/")}


def _blob(view: View, name: str) -> dict[str, Any]:
    """Return size and id of a file; a SHA-256 only where one was recorded."""
    size = view.files[name].size
    found: dict[str, Any] = {"size": size, "blobId": _oid(view, name)}
    if name in view.recorded:
        oid = view.recorded[name]
        # Clients build the one from `sha256`, the other from `oid`.
        found["lfs"] = {"oid": oid, "sha256": oid, "size": size, "pointerSize": 0}
    return found


def _oid(view: View, name: str) -> str:
    return hashlib.sha256(f"{view.revision}/{name}".encode()).hexdigest()[:40]


def byte_range(header: str | None, size: int) -> tuple[int, int] | None:
    """Return the first byte of a range and the one after its last; the whole file without one.

    A header that is no single range of bytes is ignored, as HTTP has it; `None` is a range outside
    of the file.
    """
    unit, equals, text = (header or "").partition("=")
    first, dash, last = text.strip().partition("-")
    is_range = equals and dash and unit.strip().lower() == "bytes" and (first or last)
    if not is_range or not all(one.isascii() and one.isdigit() for one in (first, last) if one):
        return 0, size
    # Numbers of any length are legal; 19 digits are past the end of every file.
    begin, end = (int(one.lstrip("0")[:19] or 0) for one in (first, last))
    if not first:
        start, stop = max(0, size - end), size
    else:
        start, stop = begin, min(size, end + 1) if last else size
        if last and end < start:
            return 0, size
    return (start, stop) if start < stop else None


def unmet(headers: Mapping[str, str], etag: str) -> int | None:
    """Return the status of a request whose condition forbids the file; `None` if none does."""
    wanted, known = (
        None if name not in headers else {one.strip() for one in headers[name].split(",")}
        for name in ("if-match", "if-none-match")
    )
    if wanted is not None and not wanted & {"*", etag}:
        return 412
    if known is not None and known & {"*", etag, f"W/{etag}"}:
        return 304
    return None


def headers_of(view: View, name: str) -> Mapping[str, str]:
    """Return the headers of a file, whatever part of it is answered."""
    etag = view.etag(name)
    return {
        "etag": f'"{etag}"',
        "x-repo-commit": view.revision,
        "x-linked-size": str(view.files[name].size),
        "x-linked-etag": f'"{etag}"',
        "accept-ranges": "bytes",
        "content-type": "application/octet-stream",
        "content-disposition": "attachment",
        "cache-control": "private, no-cache",
        "x-content-type-options": "nosniff",
    }
