"""The table of layouts: a new layout is one module of this room and one name here.

The module offers the functions of `Layout`: the files that a run has in a folder, and the meaning
of files found there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Literal, Protocol, cast

from holdfast.registry.curation.pool import ForeignEntry
from holdfast.registry.errors import InvalidInput
from holdfast.registry.layouts.contents import RunContents
from holdfast.registry.loading import Stored
from holdfast.registry.spec import Retention, RunSpec
from holdfast.registry.spec.presets import load_preset, preset_names
from holdfast.registry.values import near

# Out of a run
LAYOUTS: Final = ("hydra", "adr004", "andrea", "thalia", "cobre", "hf")
NAMES: Final = ", ".join(LAYOUTS)
OF_SYSTEMS: Final = ", ".join(name for name in LAYOUTS if name != "hf")


@dataclass(frozen=True, slots=True)
class StateFile:
    """A file, or a folder of one format, that holds a state."""

    path: str  # its name, relative to the folder
    source: Stored
    format: str  # the name of its format
    key: str  # equal for equal content: a file with this key need not be written again
    only: tuple[str, ...] | None = None  # the components; all without it
    state: Callable[[], object] | None = None  # returns the state to write instead of `source`
    sidecar: bool = False  # whether it has a `.sha256` file


@dataclass(frozen=True, slots=True)
class TextFile:
    """A small file: its name and its bytes."""

    path: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Link:
    """A relative symlink: its name, and the name of a file in the same folder."""

    path: str
    target: str


Entry = StateFile | TextFile | Link

# Into a run

Kind = Literal["checkpoint", "gate", "pool", "artifact", "release", "latest release", "stream"]


@dataclass(frozen=True, slots=True)
class Found:
    """A file of a folder, with its meaning."""

    path: str  # its name, relative to the folder
    kind: Kind  # what it becomes
    format: str  # the name of its format, by its content if empty; for streams `json` or `jsonl`
    name: str = ""  # name of a gate, artifact or stream, or version of a release or a pool's entry
    phase: str | None = None  # phase of a checkpoint
    #: Step of a checkpoint by the file's name; `None` if the name has none.
    step: int | None = None
    tier: str | None = None  # retention class of a checkpoint
    #: Files that belong to a checkpoint, by the name of the companion.
    companions: Mapping[str, str] = field(default_factory=dict)
    grows: bool = False  # whether a program appends to the file of an artifact
    beside: str | None = None  # another file that belongs to it: the model card, metadata
    #: Further notes about it for the checkpoint's meta, besides name and digest.
    noted: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reading:
    """A state of a file, to be saved."""

    state: Any
    step: int | None  # its step; `None` if unknown: the step after the run's newest
    warnings: tuple[str, ...] = ()  # oddities of the file
    phase: str | None = None  # its phase, if only its content has it
    #: Further notes for the checkpoint's meta, from the content of the file.
    noted: Mapping[str, object] = field(default_factory=dict)
    entry: ForeignEntry | None = None  # its entry, if it is a model of a pool
    meta: Mapping[str, Any] = field(default_factory=dict)  # the meta of its checkpoint
    metrics: Mapping[str, float] | None = None  # its metrics, if they are not in its state


class Layout(Protocol):
    """The functions that the module of each layout offers."""

    #: Whether its files have `.sha256` sidecars.
    SIDECARS: bool
    #: Whether programs write other files of a checkpoint after it.
    COMPANIONS: bool
    #: Whether entries of streams are committed with the checkpoints of their steps.
    STEPPED: bool

    def entries(self, run: RunContents) -> Iterable[Entry]:
        """Yield the files of a run, links after the files to which they point."""

    def find(self, files: Mapping[str, str | None]) -> Iterable[Found]:
        """Yield files with their meaning, in the order in which they are saved."""

    def reading(self, found: Found, path: Path, options: Mapping[str, Any]) -> Reading:
        """Read the file of a checkpoint."""

    def is_complete(self, path: Path) -> bool | None:
        """Return whether a file is complete; `None` if its content does not show that."""


def layout_named(name: str) -> Layout:
    """Return a layout."""
    if name not in LAYOUTS:
        raise InvalidInput("no such layout", where=name, expected=NAMES, hint=near(name, LAYOUTS))
    return cast("Layout", import_module(f"{__package__}.{name}"))


def import_spec(name: str) -> RunSpec:
    """Return the specification of a run that an import creates: the preset, but nothing is evicted.

    A folder may hold more checkpoints than its system would keep; an import must not lose them. One
    of a layout without a preset may hold any model.
    """
    layout_named(name)  # which says if there is none
    spec = load_preset(name) if name in preset_names() else RunSpec(name=name)
    keeps = Retention(all=True)
    phases = tuple(
        phase.changed(
            retention=None, tiers=tuple(tier.changed(retention=keeps) for tier in phase.tiers)
        )
        for phase in spec.phases
    )
    return spec.changed(phases=phases, retention=None)
