"""The files of a stored state as a client of Hugging Face sees them, and their revision.

A view is composed when it is asked for: headers, indexes, configurations and the card are known
bytes; everything else is chunks of stored states. Making one reads no tensor data.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.backends.escape import quoted
from holdfast.registry import pytree
from holdfast.registry.curation import Release
from holdfast.registry.errors import IncompatibleState
from holdfast.registry.formats import OPAQUE, encode_header, json_file, named_tensors, opaque_name
from holdfast.registry.layouts import CONFIGS, METADATA, hub_folder
from holdfast.registry.loading import Chunks, Joined, StateHandle, Stored, is_tree
from holdfast.registry.objects import RECENT_BYTES, RecentChunks, TensorEntry
from holdfast.registry.values import Digest, abridged, canonical, check_path_names

#: Counts up when the same content gets other files: every revision then changes.
_VERSION = 1
#: Names of files that are offered: loaders parse them and run nothing in them.
_OFFERED = (
    *(".json", ".jsonl", ".jinja", ".md", ".model", ".safetensors", ".tiktoken", ".txt"),
    *("LICENSE", "NOTICE"),
)
CARD = "README.md"
#: The components that `holdfast push` makes of the files of a folder of Hugging Face.
_JSON, _FILES, _STATES = "json", "files", "states"
_METADATA = {"format": "pt"}
_Parts = Sequence[bytes | TensorEntry]


@dataclass(frozen=True, slots=True)
class ViewOptions:
    """Choices of the operator; other options give other revisions."""

    shard_bytes: int  # the most bytes of tensors in a file of weights; a larger tensor has its own
    artifacts: tuple[str, ...] = ("config", "tokenizer")  # those of the run whose files are added


@dataclass(frozen=True, slots=True)
class View:
    """The files of a stored state."""

    stored: Stored
    files: Mapping[str, Joined]  # the files by name, sorted
    recorded: Mapping[str, str]  # SHA-256 in hex of the files whose digest was stored with them
    revision: str  # 24 digits of the state's id, and 16 of a digest over everything else

    def etag(self, name: str) -> str:
        """Return the tag of a file: its recorded SHA-256, or else revision and name, hashed."""
        named = hashlib.sha256(name.encode()).hexdigest()[:16]
        return self.recorded.get(name, f"{self.revision}.{named}")


def view_of(stored: Stored, options: ViewOptions, recent: RecentChunks | None = None) -> View:
    """Return the view of a stored state.

    Its own files come first, then those of a release's checkpoint, then those of the artifacts; of
    a name that is there already, the first file stays.
    """
    made = _Composed(options.shard_bytes, recent or RecentChunks(RECENT_BYTES))
    made.add_state(stored)
    if isinstance(stored, Release):  # it may be weights alone
        source = stored.source_checkpoint()
        if source is not None and source.handle.record.evicted is None:
            made.add_configs(source)
    pins = stored.handle.log.run.pins_of("artifact")
    for pin in sorted(pins, key=lambda pin: pin.name):
        if pin.name in options.artifacts:
            handle = StateHandle(stored.handle.store, stored.handle.log, pin.manifest, pin.ref)
            made.add_state(Stored(handle))
    made.add_card(stored)
    files = {name: made.files[name] for name in sorted(made.files)}
    check_path_names(files, stored.ref)
    described = [
        [name, file.size, made.states[name].hex(), _known(file)] for name, file in files.items()
    ]
    digest = hashlib.sha256(canonical.encode([_VERSION, described])).hexdigest()
    return View(stored, files, made.recorded, f"{stored.digest.hex()[:24]}{digest[:16]}")


def check_weights(view: View, *, adapters: bool = True) -> None:
    """Refuse a view without weights, or with those of an adapter alone if none is wanted."""
    names = {name for name in view.files if name.endswith(".safetensors")}
    if not names or (not adapters and names == {hub_folder.WEIGHTS["adapter"]}):
        raise IncompatibleState(
            "an adapter is no model" if names else "no weights that a file of safetensors can hold",
            where=view.stored.ref,
            expected="one component of tensors by name, such as `model`",
            found=", ".join(view.stored.components),
        )


def _known(file: Joined) -> str:
    """Return the digest of the bytes of a file that are no chunks."""
    known = b"".join(part for part in file.parts if isinstance(part, bytes))
    return hashlib.sha256(known).hexdigest()


@dataclass(slots=True)
class _Composed:
    """The files of a view while it is made."""

    shard_bytes: int
    recent: RecentChunks
    files: dict[str, Joined] = field(default_factory=dict)
    states: dict[str, Digest] = field(default_factory=dict)  # the state that each file is of
    recorded: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)  # what the card names

    def add_state(self, stored: Stored) -> None:
        """Add all files of a stored state."""
        parts = stored.manifest.components
        if is_tree(parts):
            self._add_tree(stored)
        elif (name := opaque_name(stored)) is not None:
            self._add(name, stored, parts[OPAQUE].tensors)
        else:
            self._add_weights(stored)
            self.add_configs(stored)

    def add_card(self, stored: Stored) -> None:
        """Add a card that tells what this is, unless the state brings one."""
        rows: dict[str, object] = {"run": stored.run_id, "id": str(stored.digest)}
        own: dict[str, Any] = {}
        if isinstance(stored, Release):
            own = stored.card
            rows |= {"version": stored.version, **stored.metrics}
        if self.left_out:
            rows["not in these files"] = abridged(sorted(self.left_out), ", ", most=50)
        text = hub_folder.card_text(stored, own, rows)
        self._add(CARD, stored, [text.encode()])

    def _add(self, name: str, stored: Stored, parts: _Parts, sha256: str | None = None) -> None:
        if not name.endswith(_OFFERED):
            self.left_out.append(name)
        elif name not in self.files:
            chunks = Chunks(stored.ref, stored.handle.reader, self.recent)
            self.files[name] = Joined(parts, chunks)
            self.states[name] = stored.digest
            if sha256 is not None:
                self.recorded[name] = sha256

    # Weights

    def _add_weights(self, stored: Stored) -> None:
        parts = stored.manifest.components
        names = [name for name in hub_folder.WEIGHTS if name in parts]
        rest = [name for name in parts if name not in {*names, CONFIGS, METADATA, _JSON, _FILES}]
        if not names:  # the one component of named tensors is the model
            fitting = [name for name in rest if named_tensors(name, *_of(stored, name))[0]]
            names = fitting if len(fitting) == 1 else []
        self.left_out += [name for name in rest if name not in names]
        stored.handle.reader.check_held(names)
        for name in names:
            tensors, others = named_tensors(name, *_of(stored, name))
            self.left_out += [f"{name}/{other}" for other in others]
            file = hub_folder.WEIGHTS.get(name, hub_folder.WEIGHTS["model"])
            shards, about = self._shards(file, tensors), _metadata(stored, file)
            for path, some in shards.items():
                head, order = encode_header(some, about)
                self._add(path, stored, [head, *order])
            if len(shards) > 1:
                index = {
                    "metadata": {"total_size": sum(one.nbytes for one in tensors.values())},
                    "weight_map": {one: path for path, some in shards.items() for one in some},
                }
                data = json.dumps(index, indent=2, sort_keys=True, ensure_ascii=False).encode()
                self._add(f"{file}.index.json", stored, [data])

    def _shards(
        self, file: str, tensors: Mapping[str, TensorEntry]
    ) -> dict[str, dict[str, TensorEntry]]:
        """Return the tensors by file of weights; an adapter has always one."""
        shards, room = list[dict[str, TensorEntry]](), 0
        for name in sorted(tensors):
            size = tensors[name].nbytes
            if not shards or (size > room and file == hub_folder.WEIGHTS["model"]):
                shards.append({})
                room = self.shard_bytes
            shards[-1][name] = tensors[name]
            room -= size
        stem, of = file.removesuffix(".safetensors"), len(shards)
        names = [f"{stem}-{number:05d}-of-{of:05d}.safetensors" for number in range(1, of + 1)]
        return dict(zip(names if of > 1 else [file], shards, strict=False))

    # Everything else

    def add_configs(self, stored: Stored) -> None:
        """Add the configurations of a Trainer's checkpoint, or the files of a pushed folder."""
        parts = stored.manifest.components
        if CONFIGS in parts:
            for name, data in hub_folder.config_files(stored).items():
                self._add(name, stored, [data])
        found = _plain(stored, _JSON) if _JSON in parts else None
        if isinstance(found, dict):
            for name, value in found.items():
                if isinstance(name, str):
                    self._add(name, stored, [json_file(name, value)])
            for name, known in _files_of(stored).items():
                self._add(name, stored, known)
        elif _JSON in parts:  # of no folder
            self.left_out.append(_JSON)

    def _add_tree(self, stored: Stored) -> None:
        """Add the files of a folder; of each a digest is recorded."""
        found = _files_of(stored)
        skeleton, tensors = _of(stored, _STATES)
        for name, node in _pairs(skeleton):
            inner = dict(_pairs(node))
            named, others = named_tensors(name, inner.get("model"), tensors)
            if name.endswith(".safetensors") and not others:
                kept = pytree.unflatten_component(inner.get(METADATA, {"d": []}), ())
                head, order = encode_header(named, kept)
                found[name] = [head, *order]
        for name, info in stored.files().items():
            if name not in found:
                self.left_out.append(name)
                continue
            self._add(name, stored, found[name], info.sha256)
            if name in self.files and self.files[name].size != info.size_bytes:
                raise IncompatibleState(
                    "a file cannot be composed as it was pushed",
                    where=f"{stored.ref}: {name}",
                    expected=f"{info.size_bytes} bytes",
                    found=f"{self.files[name].size} bytes",
                )


def _of(stored: Stored, component: str) -> tuple[Any, Sequence[TensorEntry]]:
    part = stored.manifest.components.get(component)
    return (None, ()) if part is None else (part.skeleton, part.tensors)


def _files_of(stored: Stored) -> dict[str, _Parts]:
    """Return the files whose bytes were pushed unread."""
    skeleton, tensors = _of(stored, _FILES)
    return {name: [_bytes(node, tensors)] for name, node in _pairs(skeleton)}


def _pairs(skeleton: Any) -> list[tuple[str, Any]]:
    """Return the names and nodes of a dict in a skeleton."""
    pairs = skeleton["d"] if isinstance(skeleton, dict) and "d" in skeleton else []
    return [(name, node) for name, node in pairs if isinstance(name, str)]


def _bytes(node: Any, tensors: Sequence[TensorEntry]) -> bytes | TensorEntry:
    """Return the bytes of a file, which are an array where they are long."""
    match node:
        case {"B": int(index)} | {"n": int(index)}:
            return tensors[index]
        case {"b": _}:
            return bytes(pytree.unflatten_component(node, ()))
    raise IncompatibleState("not the bytes of a file", where=_FILES, found=quoted(node)[:100])


def _plain(stored: Stored, component: str) -> Any:
    return stored.handle.load(component, portable=True)[component]


def _metadata(stored: Stored, file: str) -> Mapping[str, str]:
    """Return the metadata of a file of weights: a pushed folder has them by file."""
    kept = _plain(stored, METADATA) if METADATA in stored.manifest.components else None
    kept = kept.get(file, kept) if isinstance(kept, dict) else None
    if isinstance(kept, dict) and all(
        isinstance(one, str) for pair in kept.items() for one in pair
    ):
        return kept or _METADATA
    return _METADATA
