"""What a layout says about a folder: the files that a run has there, and what files there mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from holdfast.registry.layouts.contents import RunContents
from holdfast.registry.loading.stored import Stored
from holdfast.registry.spec import RunSpec

# Out of a run


@dataclass(frozen=True, slots=True)
class StateFile:
    """A file, or a folder of one format, that holds a state.

    Attributes:
        path: Its name, relative to the folder.
        source: The stored state.
        format: The name of its format.
        key: Equal for equal content: a file with this key need not be written again.
        only: The components; all without it.
        state: Returns the state to write instead of `source`.
        sidecar: Whether a `.sha256` file goes with it.
    """

    path: str
    source: Stored
    format: str
    key: str
    only: tuple[str, ...] | None = None
    state: Callable[[], object] | None = None
    sidecar: bool = False


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

Kind = Literal["checkpoint", "gate", "artifact", "release", "latest release", "stream"]


@dataclass(frozen=True, slots=True)
class Found:
    """A file of a folder that means something.

    Attributes:
        path: Its name, relative to the folder.
        kind: What it becomes.
        name: Name of a gate, artifact or stream, or version of a release.
        phase: Phase of a checkpoint.
        step: Step of a checkpoint by the file's name; `None` if the name does not say it.
        tier: Retention class of a checkpoint.
        format: The name of its format; for streams `json` or `jsonl`.
        companions: Files that belong to a checkpoint, by the name of the companion.
        beside: Another file that belongs to it: the model card, metadata.
        noted: What the meta of the checkpoint keeps about it, besides name and digest.
    """

    path: str
    kind: Kind
    format: str
    name: str = ""
    phase: str | None = None
    step: int | None = None
    tier: str | None = None
    companions: Mapping[str, str] = field(default_factory=dict)
    beside: str | None = None
    noted: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reading:
    """A state of a file as it is to be saved.

    Attributes:
        state: The state.
        step: Its step; `None` if nothing says it: it follows those that the run has.
        warnings: What is odd about it.
        phase: Its phase, if only its content says it.
    """

    state: Any
    step: int | None
    warnings: tuple[str, ...] = ()
    phase: str | None = None


class Layout(Protocol):
    """The functions that the module of each layout offers."""

    #: Whether its files have `.sha256` sidecars.
    SIDECARS: bool
    #: Whether other files may belong to a checkpoint, which programs write after it.
    COMPANIONS: bool

    def spec(self) -> RunSpec:
        """Return the specification of a run that an import creates: its preset."""

    def entries(self, run: RunContents) -> Iterable[Entry]:
        """Yield the files of a run, links after the files to which they point."""

    def find(self, files: Mapping[str, str | None]) -> Iterable[Found]:
        """Yield what files mean, in the order in which they are to be saved.

        Args:
            files: The names of all files, with the target of a symlink.
        """

    def reading(self, found: Found, path: Path, options: Mapping[str, Any]) -> Reading:
        """Read the file of a checkpoint."""

    def is_complete(self, path: Path) -> bool | None:
        """Return whether a file is complete; `None` if its content cannot tell."""
