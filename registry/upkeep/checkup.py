"""Check whether a registry can be used, here and now: its surroundings, its store and its clock.

It writes only scratch objects under `.probe/`, and a file without a name in the chunk cache.
"""

from __future__ import annotations

import os
import platform
import re
import secrets
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from holdfast.backends import (
    Backend,
    Location,
    ReadOnlyStore,
    StorageError,
    open_backend,
    parse,
    refuse_links,
)
from holdfast.backends.escape import printable, quoted
from holdfast.backends.local.mounts import ALLOW, file_system
from holdfast.backends.probe import probe_put_if_absent
from holdfast.registry.errors import AccessDenied, InvalidInput, RegistryError
from holdfast.registry.history import Epochs
from holdfast.registry.objects import FOLDERS, PROBES
from holdfast.registry.store import (
    FOLDER_VARIABLE,
    WRITER_VERSION,
    Address,
    ChunkCache,
    RegistryConfig,
    Store,
    read_config,
)
from holdfast.registry.values import counted, size

Status = Literal["ok", "warn", "fail"]

_LIBRARIES = (
    "holdfast-registry",
    "numpy",
    "torch",
    "safetensors",
    "boto3",
    "s3fs",
    "adlfs",
    "gcsfs",
)
#: S3 refuses requests that are off by a quarter of an hour.
_CLOCK_FAIL_S, _CLOCK_WARN_S = 900.0, 5.0
#: Paths, URLs, hosts, queries, addresses, and all that is long enough for a key.
_SHAPE = re.compile(
    r"\S*(?:[/\\@?&%~$]|=(?!1\b)|:\S|\w\.[^\W\d]\w|(?:\d+\.){3}\d)\S*|(?!HOLDFAST_)[\w+-]{20,}"
)
_FILE_SYSTEMS = (
    "taken: ext4, xfs, btrfs, zfs, tmpfs, overlay, apfs and other local ones; "
    f"with {ALLOW}=1: NFS, Lustre, GPFS, BeeGFS, CephFS, 9p, FUSE; "
    "refused: CIFS/SMB, FAT, exFAT (no hard links)"
)


@dataclass(frozen=True, slots=True)
class Check:
    """One line of `doctor`."""

    name: str
    status: Status  # `warn` does not keep anybody from working; `fail` does
    message: str  # the finding, with advice if something is wrong
    what: str = ""  # of an error: its class, and what it says before it names things

    def public(self, secrets: Iterable[str]) -> Check:
        """Return a copy for strangers: no secret, and nothing of the shape of a path or key."""
        text = self.what or self.message
        for one in sorted({*secrets}, key=len, reverse=True):
            text = re.sub(rf"(?<!\w){re.escape(one)}(?!\w)", "***", text)
        return replace(self, message=text if text == _FILE_SYSTEMS else _SHAPE.sub("***", text))


def secrets_of(address: Address, variables: Iterable[str] = ()) -> Iterator[str]:
    """Yield what `public` masks: the address and its parts, and what the environment says."""
    named = (*variables, FOLDER_VARIABLE, "HOME", "USER", "LOGNAME", "RANK", "WORLD_SIZE")
    given = [os.environ.get(one, "") for one in named if not os.environ.get(one, "").isdecimal()]
    options = (address.storage_options or {}).values()
    for text in (str(address.url), platform.node(), *given, *map(str, options)):
        for one in (text, printable(text), str(Path(text).absolute()), *re.split(r"[\W_]+", text)):
            if len(one) > 2:
                yield one


def checks(address: Address, variables: Iterable[str] = ()) -> Iterator[Check]:
    """Check a store and its surroundings; stop if nothing further can be checked."""
    location = parse(address.url)
    yield from _surroundings(variables)
    yield from _cache(is_used=address.is_remote())
    if location.scheme == "file":
        yield from _folder(location)
        if not _is_there(location.path):
            yield Check(
                "reach",
                "fail",
                f"{location.url}: no such folder; make a registry there"
                f" with `holdfast init {location.path}`",
            )
            return
    try:
        backend = address.open()
    except RegistryError as error:
        yield _failed("reach", error)
        return
    try:
        yield from _store(backend)
    finally:
        backend.close()


def _is_there(path: str) -> bool:
    """Return whether a folder is there, or may be: the store says what is refused."""
    try:
        return Path(path).is_dir()
    except PermissionError:
        return True


def _failed(name: str, error: RegistryError, status: Status = "fail", more: str = "") -> Check:
    what = f"{type(error).__name__}: {error.what}{more}"
    return Check(name, status, f"{error.cli_message}{more}", what)


# Around the store


def _surroundings(variables: Iterable[str]) -> Iterator[Check]:
    found = [f"{name} {_version(name)}" for name in _LIBRARIES]
    yield Check("versions", "ok", f"python {platform.python_version()}, {', '.join(found)}")
    ranks = {name: os.environ.get(name, "") for name in ("WORLD_SIZE", "RANK")}
    if ranks["WORLD_SIZE"] in ("", "0", "1"):
        yield Check("distributed", "ok", "one process: it may save")
    elif ranks["RANK"] in ("", "0"):
        yield Check("distributed", "ok", f"rank 0 of {ranks['WORLD_SIZE']}: it may save")
    else:
        message = (
            f"rank {ranks['RANK']} of {ranks['WORLD_SIZE']}: only rank 0 may save, all may load"
        )
        yield Check("distributed", "warn", message)
    named = [f"{name}={os.environ[name]}" for name in variables if os.environ.get(name)]
    yield Check("environment", "ok", ", ".join(named) or "none of its variables is set")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _cache(*, is_used: bool) -> Iterator[Check]:
    """Check the chunk cache that the environment names; only registries in buckets use it."""
    named = os.environ.get(FOLDER_VARIABLE)
    if not named:
        return
    try:
        cache = ChunkCache(named)
    except InvalidInput as error:
        yield _failed("cache", error, "fail" if is_used else "warn")
        return
    try:
        _try_folder(cache.path)
    except OSError as error:
        message = f"{FOLDER_VARIABLE}: no chunk can be kept in {cache.path}: {error.strerror}"
        advice = "loading continues without it; name a folder that you may write to"
        yield Check("cache", "warn", f"{message}; {advice}")
        return
    bound = f"{cache.path} may hold {size(cache.max_bytes)}"
    yield Check("cache", "ok", bound if is_used else f"{bound}, of registries in buckets")


def _try_folder(path: str) -> None:
    """Write a file without a name to a folder, or to the one in which it would be made."""
    found = Path(path)
    while not os.path.lexists(found):
        found = found.parent
    with tempfile.TemporaryFile(dir=found) as file:
        file.write(b"holdfast")


def _folder(location: Location) -> Iterator[Check]:
    folder = Path(location.path)
    while not os.path.isdir(folder):  # noqa: PTH112 - `is_dir` raises where nobody may look
        folder = folder.parent
    kind = file_system(str(folder))
    try:
        open_backend(location.path).close()
    except RegistryError as error:
        yield _failed("file system", error)
    else:
        asked = os.environ.get(ALLOW) == "1"
        message = f"{kind or 'unknown'}: may be used" + (f" ({ALLOW}=1)" if asked else "")
        yield Check("file system", "ok", message)
    yield Check("file systems", "ok", _FILE_SYSTEMS)


# The store


def _store(backend: Backend) -> Iterator[Check]:
    try:
        count = len(list(backend.list(delimiter=True)))
        yield Check("reach", "ok", backend.url)
        yield Check("list", "ok", f"{counted(count, 'name')} at the top")
    except StorageError as error:
        yield _failed("list", error, more=" (only with the right to list is 404 an answer)")
        return
    yield from _links(backend)
    yield from _config(backend)
    yield from _scratch(backend)


def _links(backend: Backend) -> Iterator[Check]:
    try:
        for folder in FOLDERS:
            refuse_links(backend, folder, delimiter=True)
    except StorageError as error:
        yield _failed("links", error)


def _config(backend: Backend) -> Iterator[Check]:
    try:
        config = read_config(backend)
        yield Check("read", "ok", "registry.json can be read")
        yield Check("registry", "ok", f"id {config.id}, format {config.format}")
        yield _probed(config)
        yield _writer_version(backend, config)
    except RegistryError as error:
        yield _failed("registry", error)


def _probed(config: RegistryConfig) -> Check:
    if config.race_probe == "passed":
        return Check("made", "ok", "its store passed the race probe when it was made")
    return Check("made", "warn", "made with --skip-race-probe: two writers may both win")


def _writer_version(backend: Backend, config: RegistryConfig) -> Check:
    store = Store(backend, config)
    epochs = Epochs(store)
    try:
        epoch = epochs.newest()
        moved_to = epochs.header(epoch).moved_to
        if moved_to is not None:
            where = f", and has moved to {quoted(moved_to)}" if moved_to else ""
            return Check("writer", "warn", f"the registry is frozen by epoch {epoch}{where}")
        epochs.require(epoch)
    finally:
        store.pools.close()
    needs = f"this Holdfast writes version {WRITER_VERSION}, the registry asks for"
    return Check("writer", "ok", f"{needs} {config.min_writer}; epoch {epoch}")


def _scratch(backend: Backend) -> Iterator[Check]:
    prefix = f"{PROBES}{secrets.token_hex(8)}"
    key = f"{prefix}/scratch"
    before_s = time.time()
    try:
        backend.put(key, b"holdfast")
        after_s = time.time()
        modified_s = backend.stat(key).modified_s
        backend.delete(key)
    except (AccessDenied, ReadOnlyStore) as error:
        yield _failed("write", error, "warn", " (reading works)")
        return
    except RegistryError as error:
        yield _failed("write", error)
        return
    yield Check("write", "ok", "an object was written and deleted again")
    yield _clock(before_s, modified_s, after_s)
    try:
        report = probe_put_if_absent(backend, f"{prefix}-race")
    except RegistryError as error:
        yield _failed("race", error)
    else:
        message = f"{report.writers} writers raced for {report.rounds} keys: one winner each"
        yield Check("race", "ok", f"{message} (finds races, cannot prove that there are none)")


def _clock(before_s: float, modified_s: float, after_s: float) -> Check:
    # Stores report whole seconds.
    off_s = max(before_s - 1 - modified_s, modified_s - after_s - 1, 0.0)
    side = "behind" if modified_s < before_s else "ahead"
    message = (
        f"the store's clock is {off_s:.0f} s {side}" if off_s >= 1 else "agrees with the store's"
    )
    status: Status = "ok"
    if off_s >= _CLOCK_WARN_S:
        status = "fail" if off_s >= _CLOCK_FAIL_S else "warn"
        message += "; set this machine's clock by NTP"
    return Check("clock", status, message)
