"""A release as plain files of safetensors, in a folder or bucket, for loaders that stream them.

Such loaders list `*.safetensors`, so a folder must not be named to anybody before it is whole. Each
release has a folder of its own, `RUN/VERSION/REVISION`, which is never written again once the last
file, `MARKER`, is there. It names all others with their digests. `SIGNATURE` proves who exported
them, to users of OpenSSF's model-signing; it covers the marker too.
"""

from __future__ import annotations

import hashlib
import json
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from holdfast.backends.fsspec.files import Files
from holdfast.registry.curation import Release
from holdfast.registry.errors import Conflict, Damaged
from holdfast.registry.hub.views import ViewOptions, check_weights, view_of
from holdfast.registry.loading import Joined

if TYPE_CHECKING:  # an extra has it
    from holdfast.registry.history import SigningKey

#: The last file of a folder.
MARKER = "holdfast.json"
_FORMAT = "holdfast.export/1"
#: A signature as OpenSSF's model-signing 1.0 writes it: a bundle of Sigstore by a key.
SIGNATURE = "model.sig"
_IN_TOTO = "application/vnd.in-toto+json"
#: Bytes that are read and sent together.
_PART_BYTES = 8 * 2**20


class ExportedFiles(NamedTuple):
    """A release as plain files."""

    url: str  # the folder
    files: int  # number of the files, without the marker
    size_bytes: int  # bytes of them
    is_new: bool  # whether this call has written them


def export_release(
    release: Release, to: Files, options: ViewOptions, key: SigningKey | None = None
) -> ExportedFiles:
    """Write a release as files, read them again, and mark the folder as whole.

    With a `key` of ECDSA the digests of all files are signed, as they come from the registry, also
    of a folder that was exported before.
    """
    view = view_of(release, options)
    check_weights(view)
    folder = f"{release.run_id}/{release.version}/{view.revision}"
    # A state that was pushed from such a folder has the marker of another one.
    files = {name: file for name, file in view.files.items() if name != MARKER}
    sizes = {name: file.size for name, file in files.items()}
    there = to.sizes(folder)
    is_new = MARKER not in there
    if is_new:
        _check(there, sizes, f"{to.url}/{folder}", is_whole=False)
        digests = _write(files, to, folder)
    elif key is not None:
        digests = {name: _digest(file.stream(_PART_BYTES)) for name, file in files.items()}
    if is_new or key is not None:
        marker = _marker(release, sizes, digests)
        if key is not None:
            _sign(release, {**digests, MARKER: _digest([marker])}, to, folder, key, there)
        if is_new:
            to.write(f"{folder}/{MARKER}", [marker])
        there = to.sizes(folder)
    _check(there, {**sizes, MARKER: there.get(MARKER, 0)}, f"{to.url}/{folder}", is_whole=True)
    return ExportedFiles(f"{to.url}/{folder}", len(sizes), sum(sizes.values()), is_new)


def _write(files: Mapping[str, Joined], to: Files, folder: str) -> dict[str, str]:
    """Write the files, and read them again; return their digests."""
    digests = {}
    for name, file in files.items():
        sent = hashlib.sha256()
        to.write(f"{folder}/{name}", _hashed(file.stream(_PART_BYTES), sent))
        digests[name] = sent.hexdigest()
    for name, digest in digests.items():
        found = _digest(to.read(f"{folder}/{name}"))
        if found != digest:
            raise Damaged(
                "a file has other bytes than were sent",
                where=f"{to.url}/{folder}/{name}",
                expected=digest,
                found=found,
                hint="Export it again: without its marker the folder is written again.",
            )
    return digests


def _marker(release: Release, sizes: Mapping[str, int], digests: Mapping[str, str]) -> bytes:
    files = {name: {"size_bytes": sizes[name], "sha256": one} for name, one in digests.items()}
    said = {"format": _FORMAT, "ref": release.ref, "id": str(release.digest), "files": files}
    return json.dumps(said, indent=2, sort_keys=True).encode() + b"\n"


def _sign(
    release: Release,
    digests: Mapping[str, str],
    to: Files,
    folder: str,
    key: SigningKey,
    there: Mapping[str, int],
) -> None:
    """Put the signature beside the files, unless this key has signed them before."""
    root = _digest(bytes.fromhex(digests[name]) for name in sorted(digests))
    rules = {"method": "files", "hash_type": "sha256", "allow_symlinks": False}
    files = [
        {"name": name, "algorithm": "sha256", "digest": digests[name]} for name in sorted(digests)
    ]
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": release.ref, "digest": {"sha256": root}}],
        "predicateType": "https://model_signing/signature/v1.0",
        "predicate": {"serialization": {**rules, "ignore_paths": [SIGNATURE]}, "resources": files},
    }
    payload = json.dumps(statement, sort_keys=True).encode()
    # What DSSE signs: the type and the payload, each with its length.
    message = b"DSSEv1 %d %s %d %s" % (len(_IN_TOTO), _IN_TOTO.encode(), len(payload), payload)
    if MARKER in there and SIGNATURE in there:
        _check_signed(
            b"".join(to.read(f"{folder}/{SIGNATURE}")), message, key, f"{to.url}/{folder}"
        )
        return
    bundle = {
        "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
        "verificationMaterial": {
            "publicKey": {"hint": _digest([key.public.pem])},
            "tlogEntries": [],
        },
        "dsseEnvelope": {
            "payload": b64encode(payload).decode(),
            "payloadType": _IN_TOTO,
            "signatures": [{"sig": b64encode(key.sign(message)).decode(), "keyid": ""}],
        },
    }
    to.write(f"{folder}/{SIGNATURE}", [json.dumps(bundle, indent=2).encode() + b"\n"])


def _check_signed(data: bytes, message: bytes, key: SigningKey, where: str) -> None:
    with suppress(ValueError, LookupError, TypeError, RecursionError):
        signature = b64decode(json.loads(data)["dsseEnvelope"]["signatures"][0]["sig"])
        if key.public.has_signed(message, signature):
            return
    raise Conflict(
        "the folder has another signature",
        where=f"{where}/{SIGNATURE}",
        expected="one by this key, of these files",
        hint="Find out who put it there. Move it away, and export again, to sign with this key.",
    )


def _digest(parts: Iterable[bytes]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()


def _hashed(parts: Iterable[bytes], sent: hashlib._Hash) -> Iterator[bytes]:
    for part in parts:
        sent.update(part)
        yield part


def _check(there: dict[str, int], wanted: dict[str, int], where: str, *, is_whole: bool) -> None:
    """Refuse a folder with files that are not ours, or, if it is whole, of another size."""
    wrong = sorted(there.keys() - wanted.keys() - {SIGNATURE})
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
