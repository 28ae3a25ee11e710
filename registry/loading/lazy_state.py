"""A stored state as a mapping whose values are read at their first access."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from holdfast.registry.errors import NotFound
from holdfast.registry.values.suggest import near


class LazyState(Mapping[str, Any]):
    """A state, or a dict in it, that loads each value at its first access, verified, and keeps it.

    Args:
        ref: The state, for errors.
        names: The keys of the mapping.
        load: Returns the state with the value at one path alone, in the dicts that lead to it.
        below: The path of the dict; `None` for the whole state.
        depth: The number of dicts that lead to the dict at this path.
    """

    def __init__(
        self,
        ref: str,
        names: Sequence[str],
        load: Callable[[str], Any],
        below: str | None = None,
        depth: int = 0,
    ) -> None:
        self._ref, self._names, self._load = ref, tuple(names), load
        self._below, self._depth = below, depth
        self._loaded: dict[str, Any] = {}

    def __repr__(self) -> str:
        loaded = ", ".join(self._loaded) or "nothing"
        return f"<LazyState {self._ref}: {loaded} loaded of {', '.join(self._names)}>"

    def __getitem__(self, name: str) -> Any:
        """Return a component; it is read at the first access.

        Raises:
            NotFound: There is no such component.
            IntegrityError: An object is damaged or missing.
        """
        if name not in self._loaded:
            if self._below is None:
                self._loaded[name] = self._load(name)[name]
            else:
                self._loaded[name] = self._load_below(name)
        return self._loaded[name]

    def _load_below(self, name: str) -> Any:
        if name not in self._names:
            raise NotFound(
                "nothing at this path",
                where=f"{self._ref}: {self._below}/{name}",
                expected=", ".join(self._names),
                hint=near(name, self._names),
            )
        value = self._load(f"{self._below}/{name}")
        for _ in range(self._depth + 1):
            (value,) = value.values()  # a path leaves one value in each dict
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)

    def __len__(self) -> int:
        return len(self._names)
