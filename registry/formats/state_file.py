"""The values that all formats share: the state of a file, the report of a write, a description."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from holdfast.registry.errors import InvalidInput, RegistryError
from holdfast.registry.pytree import FlatState, flatten

#: Maximum number of faults of a file to show, and of characters of each.
_MOST_FAULTS: Final = 1000
_LINE: Final = 2000


@dataclass(frozen=True, slots=True)
class FileState:
    """A file as a state.

    Attributes:
        state: The state for `Run.save`. It is flat if it was read with `portable=True` and the file
            marks tensors as saved with less precision, which a tensor itself cannot say.
        format: The format that the file was read as; `opaque` files are not parsed.
        size_bytes: Size of the file.
        metadata: The file's own metadata, if its format has any and the file too.
    """

    state: dict[str, Any] | FlatState
    format: str
    size_bytes: int
    metadata: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file that was written.

    Attributes:
        path: Its path.
        format: Its format.
        size_bytes: Its size.
    """

    path: Path
    format: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A tensor as the header of a file describes it.

    Attributes:
        dtype: Name of its element type; a type that cannot be stored keeps the file's own name.
        shape: Lengths of the axes, in elements.
    """

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FileReport:
    """A description of a file, made without reading the data of its tensors.

    Attributes:
        format: Its format.
        size_bytes: Its size.
        tensors: Its tensors by path, as `Checkpoint.tensors` spells the paths once it is stored.
        metadata: The file's own metadata, if its format has any and the file too.
        header: What a binary header says of the whole, such as `total_neurons` of a `.thalia` file;
            `None` of formats without one.
    """

    format: str
    size_bytes: int
    tensors: Mapping[str, TensorHeader] = field(default_factory=dict)
    metadata: Mapping[str, Any] | None = None
    header: Mapping[str, Any] | None = None


class Faults:
    """The faults of a file as lines of text: the first ones, and how many more there are.

    A `with` block notes the `InvalidInput` that it raises, and the program goes on behind it.
    """

    def __init__(self, *, raises: bool = False) -> None:
        self._raises = raises
        self._lines: list[str] = []
        self._more = 0

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if self._raises or not isinstance(error, InvalidInput):
            return False
        self.note(problem(error))
        return True

    def __bool__(self) -> bool:
        return bool(self._lines)

    def note(self, line: str) -> None:
        """Note a fault as a line of text: an error would keep all that its frames hold."""
        if len(self._lines) < _MOST_FAULTS:
            self._lines.append(line[:_LINE])
        else:
            self._more += 1

    @property
    def lines(self) -> list[str]:
        """Each fault once, in their order."""
        more = [f"... and {self._more:,} more"] if self._more else []
        return [*dict.fromkeys(self._lines), *more]


#: Notes nothing: the first error is raised.
RAISED: Final = Faults(raises=True)


def problems(read: Callable[[Path], FileState], path: Path) -> list[str]:
    """Return the fault of reading or storing a file, as the only line of a list; or no line.

    A sound file may hold what no state can, such as keys at its top that are no strings.
    """
    try:
        flatten(read(path).state)
    except InvalidInput as error:
        return [problem(error)]
    return []


def problem(error: RegistryError) -> str:
    """Return an error as a line of text."""
    return " ".join(str(error).split())
