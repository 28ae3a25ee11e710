"""One numbered file of a run's log."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from holdfast.registry.history.actions import Commit, Line, decode_line, line_digest
from holdfast.registry.objects import join_lines, split_lines
from holdfast.registry.values import Digest


@dataclass(frozen=True, slots=True)
class Slot:
    """One numbered file of a run's log."""

    number: int  # its number in the log, dense from 0
    data: bytes
    lines: tuple[tuple[bytes, Line], ...]  # its lines, each with its exact bytes

    @classmethod
    def build(cls, number: int, lines: Sequence[Line | bytes]) -> Slot:
        """Assemble a slot from records, or from lines that are copied byte for byte."""
        encoded = [line if isinstance(line, bytes) else line.encode() for line in lines]
        return cls.decode(number, join_lines(encoded), where=f"slot {number}")

    @classmethod
    def decode(cls, number: int, data: bytes, *, where: str) -> Slot:
        """Verify and parse a file."""
        lines = split_lines(data, where=where)
        return cls(number, data, tuple((line, decode_line(line, where=where)) for line in lines))

    @property
    def commits(self) -> tuple[tuple[bytes, Commit], ...]:
        """The commit lines, each with its exact bytes."""
        return tuple((raw, line) for raw, line in self.lines if isinstance(line, Commit))


def link_after(slots: Iterable[Slot], commits: int) -> Digest | None:
    """Return the digest of the last of a number of commits, from some slots of the log."""
    for slot in slots:
        for raw, commit in slot.commits:
            if commit.n == commits - 1:
                return line_digest(raw)
            if commit.n == commits:
                return commit.prev
    return None
