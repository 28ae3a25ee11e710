"""Features of Thalia's files alone: precision, levels, deltas, single regions, other versions.

`BrainCheckpoint` offers them under the names that Thalia's own class has.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, Final, Literal

from holdfast.registry import formats, pytree
from holdfast.registry.errors import InvalidInput, UnsupportedFormat
from holdfast.registry.formats.content import Content, MemoryContent, StoredContent, with_torch
from holdfast.registry.formats.source import limited, sha256_of, stable, within
from holdfast.registry.formats.state_file import FileState, WrittenFile
from holdfast.registry.formats.target import check_target, new_file
from holdfast.registry.formats.thalia import container, delta, delta_writing, framing, writing
from holdfast.registry.formats.thalia.framing import path_of, read_header, read_index
from holdfast.registry.formats.thalia.precision import PrecisionPolicy, converted, named, widened
from holdfast.registry.formats.thalia.writing import Options
from holdfast.registry.loading import LazyState, Stored, check_device
from holdfast.registry.values import unknown

_LOGGER = logging.getLogger("holdfast")
_VERSIONS: Final = {"0.1": (0, 1), "0.2": (0, 2)}

PathLike = str | os.PathLike[str]


def save(
    path: PathLike,
    state: object,
    metadata: Mapping[str, Any] | None = None,
    *,
    compression: Literal["zstd", "lz4", "none"] | None = None,
    level: int | None = None,
    precision: str | PrecisionPolicy | None = None,
    force: bool = False,
) -> WrittenFile:
    """Write a state to a file.

    Args:
        path: The file. `.thalia.zst` and `.thalia.lz4` are compressed.
        state: A checkpoint or another stored state, or a state in memory, with `regions` by name;
            also `pathways`, `config`, `theta`, `scheduler`, `trial_state`, `training_steps`, and
            `metadata`. A dataclass is kept under the name of its adapter, or of its class.
        metadata: More metadata of the file, such as `{"experiment": "language"}`. The meta of a
            checkpoint, its phase (`current_stage`), metrics and time are in the file in any case.
        compression: The compression, if the name is not to decide.
        level: 1 to 22 for zstd (3 without it), 1 to 12 for lz4.
        precision: `fp32`, `fp16`, `mixed`, or a policy: floating-point tensors are converted by
            the classes of their names. Without it no tensor is.
        force: Whether to replace an existing file.

    Raises:
        IncompatibleState: The state has no regions, or a value that the format cannot keep.
        InvalidInput: The file exists, an option is wrong, or a number is too large for float16.
        IntegrityError: An object in the registry is damaged; nothing was written.
    """
    path = Path(path)
    check_target(path, force=force)
    options = Options(compression, level, _label(precision))
    plain, known = _plain(state, path)
    narrowed = converted(plain, named(precision))
    known |= metadata or {}
    return writing.write(path, narrowed, metadata=known, force=force, options=options)


def load(
    path: PathLike,
    *,
    regions: Iterable[str] | None = None,
    widen: bool = True,
    portable: bool = False,
    max_bytes: int | None = None,
) -> FileState:
    """Read a file as Thalia's own program does.

    Args:
        path: The file; for a delta its base is read too.
        regions: Names of the wanted regions; pathways are left out then. Without it, everything.
        widen: Whether floating-point tensors become float32 if a precision policy changed them.
            `holdfast.formats.read` keeps the types of the file.
        portable: As for `holdfast.formats.read`.
        max_bytes: As for `holdfast.formats.read`; 10 GiB without it.

    Raises:
        NotFound: There is no such region.
        InvalidInput: The file breaks a rule of the format.
    """
    path = Path(path)
    wanted = None if regions is None else list(regions)
    with limited(max_bytes), within(path), framing.opened(path) as body:
        if body.is_delta:
            found = delta.read(body, path)
        elif container.is_of_document(body) or wanted is None:
            found = container.read_any(body)
        else:
            found = container.read(body, only=lambda one: one.name in wanted and not one.is_pathway)
    state: Any = found.state
    if wanted is not None:
        for name in wanted:
            if name not in state["regions"]:
                raise unknown("no such region", path, name, state["regions"])
        state = {
            **state,
            "regions": {name: state["regions"][name] for name in wanted},
            "pathways": {},
        }
    if widen:
        state = _widened(state, found.metadata)
    return FileState(
        state if portable else with_torch(state), found.format, found.size_bytes, found.metadata
    )


def _widened(state: Any, metadata: Mapping[str, Any] | None) -> Any:
    """Return a state of a file in float32 if a policy narrowed it."""
    policy = (metadata or {}).get("precision_policy", "fp32")
    return state if policy == "fp32" else widened(state)


def _below(path: Path, base: Path) -> str:
    """Return the name of the base of a delta, relative to the folder of the delta."""
    folder, real = path.parent.resolve(), base.resolve()
    if not real.is_relative_to(folder):
        raise InvalidInput(
            "the base of a delta is a file in the folder of the delta, or below",
            where=base,
            expected=f"a file in {folder}",
            hint="Copy the base beside the delta.",
        )
    return real.relative_to(folder).as_posix()


def save_delta(
    path: PathLike,
    state: object,
    base: PathLike,
    metadata: Mapping[str, Any] | None = None,
    *,
    threshold: float = 1e-5,
    compression: Literal["zstd", "lz4", "none"] | None = None,
    level: int | None = None,
    precision: str | PrecisionPolicy | None = None,
    force: bool = False,
) -> WrittenFile:
    """Write the difference of a state to a base file.

    A weight of which less than 5 % changed is stored as coordinates and differences. Floating-point
    numbers do not add up exactly, so such a delta is close to the state and not equal to it;
    `threshold=0` stores those weights whole whose differences would not give every bit.

    Args:
        path: The file.
        state: As for `save`.
        base: The file that it builds upon, in the folder of `path` or below: a full one or a delta.
            It must never change.
        metadata: As for `save`.
        threshold: Elements that changed by no more than this keep the value of the base.
        compression: As for `save`.
        level: As for `save`.
        precision: As for `save`; it narrows what the delta holds: differences, and tensors that
            are stored whole. What did not change keeps the precision of the base.
        force: As for `save`.

    Raises:
        IncompatibleState: A delta cannot say the difference: a region was removed, or something
            other than weights and states changed.
        InvalidInput: As for `save`; or the base is no file of Thalia, or the threshold is negative.
    """
    path, base = Path(path), Path(base)
    check_target(path, force=force)
    if not threshold >= 0:
        raise InvalidInput("not a threshold", expected="a number from 0", found=threshold)
    compress = Options(compression, level).compressor(path)
    plain, known = _plain(state, path)
    known |= metadata or {}
    writing.check_components(plain)
    narrowed = converted(plain, named(precision))
    base_name = _below(path, base)
    with stable(base) as file:  # the state and the digest are of one file, or nothing is written
        before: Any = load(base, widen=False, portable=True).state
        digest, base_step = sha256_of(file), _delta_step(base)
    changes = delta_writing.changes(plain, narrowed, before, threshold)
    step = writing.count(plain.get("training_steps"))
    info = {
        "base_checkpoint": base_name,
        "base_hash": digest.hex(),
        "base_step": base_step,
        "current_step": step,
        "threshold": threshold,
    }
    merged = writing.merged_metadata(
        {"metadata": plain.get("metadata", {})}, known, _label(precision)
    )
    data = delta_writing.encode(
        changes,
        {**writing.kept(merged), "delta_info": info},
        base_digest=digest,
        base_step=base_step,
        step=step,
    )
    with new_file(path, len(data), force=force) as file:
        if compress is None:
            file.write(data)
        else:
            compress(BytesIO(data), file)
        size = file.tell()
    return WrittenFile(path, container.FORMAT, size)


def migrate(
    source: PathLike, target: PathLike, version: str, *, force: bool = False
) -> WrittenFile:
    """Write a file again in another version of the format.

    From 0.1 to 0.2 nothing is lost. From 0.2 to 0.1 the document's rule is followed: 0.1 has
    neither sparse tensors nor half precision nor compression, so tensors become dense float32, the
    target must not be compressed, and a warning says that precision marks are dropped.

    Args:
        source: The file.
        target: The new file.
        version: `0.1` or `0.2`.
        force: Whether to replace an existing file.

    Raises:
        UnsupportedFormat: There is no such version, or the source has another major version.
        InvalidInput: The source breaks a rule of the format, or 0.1 is to be compressed.
    """
    source, target = Path(source), Path(target)
    check_target(target, force=force)
    wanted = _VERSIONS.get(version)
    if wanted is None:
        raise UnsupportedFormat(
            "no such version to migrate to",
            where=target,
            expected=", ".join(_VERSIONS),
            found=version,
            hint="Another major version needs the program that made it.",
        )
    found = load(source, widen=False, portable=True)
    state: Any = found.state
    if wanted == (0, 1):
        if target.name.lower().endswith((".zst", ".lz4")):
            raise InvalidInput("version 0.1 has no compression", where=target)
        policy = (found.metadata or {}).get("precision_policy", "fp32")
        _LOGGER.warning(
            "%s: version 0.1 keeps neither sparse tensors nor half precision: written as dense "
            "float32 (precision policy was %s)",
            target,
            policy,
        )
        state = widened(state)
        options = Options("none", precision="fp32", version=wanted, sparse=False)
    else:
        options = Options(version=wanted)
    return writing.write(target, state, metadata=None, force=force, options=options)


def _plain(state: object, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a state with tensors as bytes, and the metadata of a checkpoint."""
    content: Content
    if isinstance(state, Stored):
        content = StoredContent(state, None)
    else:
        flat = pytree.flatten(state, writing.ClassEncoder)
        content = MemoryContent(flat, None, f"the state for {path.name}")
    return writing.plain(content), writing.described(content)


def _label(precision: str | PrecisionPolicy | None) -> str | None:
    return str(precision) if precision is not None else None


def _delta_step(path: Path) -> int:
    """Return the step of a base that is a delta; 0 of a full file, as the programs write it."""
    with framing.opened(path) as body:
        return delta.parse(body).step if body.is_delta else 0


class BrainState(dict[str, Any]):
    """A brain from a file: its state as a dict, whose regions are also an attribute."""

    @property
    def regions(self) -> Mapping[str, Any]:
        """The regions by name; of a lazy load each is read at its first access, and kept."""
        found: Mapping[str, Any] = self["regions"]
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the state as a plain dict, as `Run.save` takes it; this reads what is not read."""
        return {key: dict(one) if isinstance(one, LazyState) else one for key, one in self.items()}


class BrainCheckpoint:
    """The calls of Thalia's own class `BrainCheckpoint`, under its names.

    A brain is an object with `get_full_state()`, a state in memory, or a checkpoint. Files are
    replaced, each at once. All else is as `save`, `save_delta` and `load` of this module say it.
    """

    @staticmethod
    def save(
        brain: object,
        path: PathLike,
        metadata: Mapping[str, Any] | None = None,
        *,
        compression: Literal["zstd", "lz4", "none"] | bool | None = None,
        compression_level: int | None = None,
        precision_policy: str | PrecisionPolicy | None = None,
        include_homeostatic: bool = True,
    ) -> WrittenFile:
        """Write a brain.

        Args:
            brain: The brain.
            path: The file.
            metadata: More metadata of the file.
            compression: `zstd` or `lz4`; `None` or a truth value: the name decides.
            compression_level: 1 to 22 for zstd, 1 to 12 for lz4.
            precision_policy: `fp32`, `fp16`, `mixed`, or a `PrecisionPolicy`.
            include_homeostatic: Whether to write the parts of regions whose names begin with
                `homeosta`.

        Raises:
            IncompatibleState: As for `save`.
            InvalidInput: As for `save`.
        """
        options = _given(compression, compression_level, precision_policy)
        return save(path, _state_of(brain, homeostatic=include_homeostatic), metadata, **options)

    @staticmethod
    def save_delta(
        brain: object,
        path: PathLike,
        base_checkpoint: PathLike,
        threshold: float = 1e-5,
        *,
        metadata: Mapping[str, Any] | None = None,
        precision_policy: str | PrecisionPolicy | None = None,
        compression: Literal["zstd", "lz4", "none"] | bool | None = None,
        compression_level: int | None = None,
    ) -> WrittenFile:
        """Write the difference of a brain to a file.

        Args:
            brain: The brain.
            path: The file.
            base_checkpoint: The file that it builds upon, full or a delta.
            threshold: Elements that changed by no more keep their value; 0 keeps every bit.
            metadata: As for `save`, like all that follow.
            precision_policy: Of what the delta holds.
            compression: As for `save`.
            compression_level: As for `save`.

        Raises:
            InvalidInput: As for `save`, or the base is no file of Thalia beside the delta.
        """
        options = _given(compression, compression_level, precision_policy)
        options["threshold"] = threshold
        return save_delta(path, _state_of(brain), base_checkpoint, metadata, **options)

    @staticmethod
    def load(
        path: PathLike,
        device: object = "cpu",
        regions: Iterable[str] | None = None,
        *,
        lazy: bool = False,
    ) -> BrainState:
        """Read a brain; `brain.load_full_state` of the program takes the result.

        Args:
            path: The file; of a delta its bases are read too.
            device: Where its tensors go, as `torch.device` or its name.
            regions: Names of the wanted regions.
            lazy: Whether the other regions, and the pathways, are read at their first access. The
                checksum of the file is then compared at each. A delta is read at once.

        Raises:
            NotFound: There is no such region.
            InvalidInput: The file breaks a rule of the format, it changed since a lazy load, or
                there is no such device.
        """
        check_device(device)
        with within(Path(path)):
            is_lazy = lazy and framing.kind_of(Path(path)) == "full"
        if is_lazy:
            return _lazily(Path(path), list(regions or ()), device)
        found = load(path, regions=regions, portable=True)
        return BrainState(with_torch(found.state, device))

    @staticmethod
    def info(path: PathLike) -> dict[str, Any]:
        """Return the metadata and the numbers of the header: `total_neurons`, `training_steps`.

        Raises:
            InvalidInput: It is no file of Thalia.
        """
        found = formats.inspect(path, format=container.FORMAT)
        return {**(found.metadata or {}), **(found.header or {}), "metadata": found.metadata}

    @staticmethod
    def validate(path: PathLike) -> tuple[bool, list[str]]:
        """Return whether a file is sound, and every problem of it, each a line of text.

        Raises:
            InvalidInput: There is no such file.
        """
        problems = formats.validate(path, format=container.FORMAT)
        return not problems, problems


def _given(compression: object, level: int | None, precision: object) -> dict[str, Any]:
    kind = None if isinstance(compression, bool) else compression
    return {"compression": kind, "level": level, "precision": precision, "force": True}


def _lazily(path: Path, wanted: Sequence[str], device: object) -> BrainState:
    """Return a brain of which only some regions are read."""

    def stamp() -> tuple[int, ...]:
        seen = path.stat()
        return seen.st_size, seen.st_mtime_ns, seen.st_ino

    def read_part(place: str) -> Any:
        kind, _, name = place.partition("/")
        if stamp() != seen:
            raise InvalidInput("the file changed since the brain was loaded", where=path)
        with within(path), framing.opened(path) as body:
            one = container.read(body, only=lambda entry: path_of(entry) == place)
        state = with_torch(_widened(one.state, one.metadata), device)
        return {kind: {name: state[kind][name]}}

    seen = stamp()
    with within(path), framing.opened(path) as body:
        if container.is_of_document(body):
            return BrainState(with_torch(container.read_any(body).state, device))
        state: Any = container.read(body, only=lambda _: False).state
        entries = [path_of(entry).partition("/") for entry in read_index(body, read_header(body))]
    for kind in ("regions", "pathways"):
        names = [name for one, _, name in entries if one == kind]
        state[kind] = LazyState(str(path), names, read_part, kind, 1)
    for name in wanted:
        _ = state["regions"][name]
    return BrainState(state)


def _state_of(brain: Any, *, homeostatic: bool = True) -> Any:
    state = brain.get_full_state() if hasattr(brain, "get_full_state") else brain
    if homeostatic:
        return state
    whole = state.load() if isinstance(state, Stored) else dict(state)
    kept = {
        name: {key: one for key, one in part.items() if not key.startswith("homeosta")}
        for name, part in whole["regions"].items()
    }
    return {**whole, "regions": kept}
