"""The numbers of evicted checkpoints and pool entries: all that a compact run keeps of them.

A number is a bit, so that a run of a hundred thousand saves takes a few kilobytes for them. The
records are in the log; `holdfast.registry.history.log` reads them when a rule or a caller needs
one.
"""

from collections.abc import Iterable, Iterator
from typing import Annotated

from holdfast.registry.values import Metrics, Name, PhaseName, Record, Spelled

#: Larger numbers in a file are refused: they would only take memory.
_MOST_BITS = 2**27
#: Phase and tier of an evicted checkpoint.
Class = tuple[str, str | None]


class NeedsHistory(Exception):
    """The record of an evicted checkpoint is needed, and a compact run does not have it."""


def _bits(value: object) -> object:
    if not isinstance(value, str):
        return value
    start, colon, digits = value.partition(":")
    if not colon:
        raise ValueError("bits are a number, a colon and hexadecimal digits")
    if len(start) > 9 or int(start) > _MOST_BITS:
        raise ValueError(f"bits beyond {_MOST_BITS}")
    found = int(digits, 16) << int(start)
    if _shown(found) != value:
        raise ValueError("bits in a spelling that is not canonical")
    return found


def _shown(bits: int) -> str:
    start = max(0, (bits & -bits).bit_length() - 1)
    return f"{start}:{bits >> start:x}"


#: A set of numbers, as the bits of an integer. In JSON: the least number, a colon, and the bits
#: from that number on in hexadecimal digits.
Bits = Annotated[int, Spelled(_bits, _shown)]


def pack_bits(numbers: Iterable[int]) -> int:
    """Return the integer whose bits are these numbers."""
    known = list(numbers)
    octets = bytearray(max(known, default=-1) // 8 + 1)
    for number in known:
        octets[number >> 3] |= 1 << (number & 7)
    return int.from_bytes(octets, "little")


def has_bit(bits: int, number: int) -> bool:
    """Return whether a number is in the set."""
    return number >= 0 and bits >> number & 1 == 1


class EvictedClass(Record):
    """The evicted checkpoints of a phase and tier."""

    phase: PhaseName
    tier: Name | None = None
    line: Bits = 0  # commit numbers of the checkpoints on the current line of training
    behind: Bits = 0  # commit numbers of the superseded checkpoints


class EvictedRating(Record):
    """The newest rated checkpoint among the evicted ones of the current line of training."""

    n: int  # its commit number
    metrics: Metrics  # the two metrics that the pool's ratings come from


class EvictedNumbers(Record):
    """The evicted checkpoints and pool entries of a run, by number."""

    #: The evicted checkpoints, by phase and tier, sorted by these names.
    checkpoints: tuple[EvictedClass, ...] = ()
    versions: Bits = 0  # the evicted entries of the pool
    #: The newest rating among evicted checkpoints of the current line of training.
    rating: EvictedRating | None = None

    def has(self, n: int) -> bool:
        """Return whether the checkpoint of a commit was evicted."""
        return any(has_bit(one.line, n) or has_bit(one.behind, n) for one in self.checkpoints)

    def is_behind(self, n: int) -> bool:
        """Return whether the checkpoint of a commit was evicted and is superseded."""
        return any(has_bit(one.behind, n) for one in self.checkpoints)

    def on_line(self, phase: str, tier: str | None) -> int:
        """Return the evicted checkpoints of a phase and tier on the current line, as bits."""
        for one in self.checkpoints:
            if (one.phase, one.tier) == (phase, tier):
                return one.line
        return 0

    @property
    def count(self) -> int:
        """How many checkpoints were evicted."""
        return sum(one.line.bit_count() + one.behind.bit_count() for one in self.checkpoints)

    @property
    def superseded(self) -> int:
        """How many evicted checkpoints are superseded."""
        return sum(one.behind.bit_count() for one in self.checkpoints)


class EvictedDraft:
    """A mutable `EvictedNumbers`."""

    def __init__(self, evicted: EvictedNumbers) -> None:
        self._base = evicted
        self._changed = False
        self._lines: dict[Class, int] = {
            (one.phase, one.tier): one.line for one in evicted.checkpoints
        }
        self._behind: dict[Class, int] = {
            (one.phase, one.tier): one.behind for one in evicted.checkpoints
        }
        self._versions = evicted.versions
        self._rating = evicted.rating

    def has(self, n: int) -> bool:
        """Return whether the checkpoint of a commit was evicted."""
        return any(has_bit(bits, n) for bits in (*self._lines.values(), *self._behind.values()))

    def has_version(self, version: int) -> bool:
        """Return whether an entry of the pool was evicted."""
        return has_bit(self._versions, version)

    def add(self, n: int, of: Class, *, superseded: bool) -> None:
        """Add an evicted checkpoint."""
        self._lines.setdefault(of, 0)
        self._behind.setdefault(of, 0)
        into = self._behind if superseded else self._lines
        into[of] |= 1 << n
        self._changed = True

    def add_version(self, version: int) -> None:
        """Add an evicted entry of the pool."""
        self._versions |= 1 << version
        self._changed = True

    def rate(self, n: int, metrics: Metrics) -> None:
        """Note the rating of an evicted checkpoint of the current line."""
        if self._rating is None or self._rating.n < n:
            self._rating = EvictedRating(n=n, metrics=metrics)
            self._changed = True

    def report(self, n: int, tier: str | None, *, rates: bool) -> None:
        """Apply metrics that an evicted checkpoint got late, and its new tier."""
        for of in self._lines:
            on_line, behind = has_bit(self._lines[of], n), has_bit(self._behind[of], n)
            if not on_line and not behind:
                continue
            if rates and on_line and (self._rating is None or self._rating.n <= n):
                raise NeedsHistory
            if tier is not None and tier != of[1]:
                bits = self._lines if on_line else self._behind
                bits[of] ^= 1 << n
                self.add(n, (of[0], tier), superseded=behind)
            return

    def rewind(self, kept: int) -> None:
        """Supersede the evicted checkpoints after a commit."""
        if self._rating is not None and self._rating.n > kept:
            raise NeedsHistory
        for of, bits in self._lines.items():
            later = bits >> kept + 1 << kept + 1
            if later:
                self._lines[of] = bits ^ later
                self._behind[of] |= later
                self._changed = True

    def freeze(self) -> EvictedNumbers:
        """Return the frozen value."""
        if not self._changed:
            return self._base
        order = sorted(self._lines, key=lambda of: (of[0], of[1] or ""))
        return EvictedNumbers.unchecked(
            checkpoints=tuple(
                EvictedClass.unchecked(
                    phase=of[0], tier=of[1], line=self._lines[of], behind=self._behind[of]
                )
                for of in order
                if self._lines[of] or self._behind[of]
            ),
            versions=self._versions,
            rating=self._rating,
        )


def classes(members: Iterable[tuple[int, Class, bool]]) -> Iterator[EvictedClass]:
    """Group evicted checkpoints by class, each given as number, class and superseded or not."""
    found: dict[Class, tuple[list[int], list[int]]] = {}
    for n, of, superseded in members:
        found.setdefault(of, ([], []))[superseded].append(n)
    for of in sorted(found, key=lambda of: (of[0], of[1] or "")):
        line, behind = found[of]
        yield EvictedClass.unchecked(
            phase=of[0], tier=of[1], line=pack_bits(line), behind=pack_bits(behind)
        )
