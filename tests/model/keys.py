"""Keys `<file>.<generation>`, and sets of them as the bits of a number."""

from __future__ import annotations

from collections.abc import Iterator


class Keys:
    """The keys of a model.

    Args:
        files: How many files there are; each stands for a manifest, a placement or a pack.
        epochs: Generations run from 0 to this.

    Attributes:
        words: For each set of keys that was ever asked for, how a trace calls it: `a.0 b.1`.
    """

    def __init__(self, files: int, epochs: int) -> None:
        self._files = files
        self._width = epochs + 1
        self.words = _Words(self._width)

    def key(self, file: int, generation: int) -> int:
        """Return a key, as a set of one."""
        return 1 << (file * self._width + generation)

    def of_file(self, file: int) -> int:
        """Return every key of a file."""
        return ((1 << self._width) - 1) << (file * self._width)

    def up_to(self, generation: int) -> int:
        """Return every key of a generation up to this one."""
        found = 0
        for file in range(self._files):
            for one in range(generation + 1):
                found |= self.key(file, one)
        return found


class _Words(dict[int, str]):
    def __init__(self, width: int) -> None:
        super().__init__()
        self._width = width

    def __missing__(self, keys: int) -> str:
        numbers = [divmod(key.bit_length() - 1, self._width) for key in single(keys)]
        words = [f"{'abcdef'[file]}.{generation}" for file, generation in numbers]
        self[keys] = " ".join(words) or "nothing"
        return self[keys]


def single(keys: int) -> Iterator[int]:
    """Yield the members of a set, as sets of one."""
    while keys:
        yield keys & -keys
        keys &= keys - 1


def subsets(keys: int) -> Iterator[int]:
    """Yield every subset of a set but the empty one."""
    subset = keys
    while subset:
        yield subset
        subset = (subset - 1) & keys
