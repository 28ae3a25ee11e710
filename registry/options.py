"""Options of the public calls: which there are, said to whoever names another one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from registry.errors import InvalidInput
from registry.suggest import near


def check_options(given: Mapping[str, object], known: Iterable[str], call: str) -> None:
    """Refuse options that a call does not have: a misspelt one must not be passed over.

    Raises:
        InvalidInput: There is one; near names are suggested.
    """
    names = sorted(known)
    for name in given:
        if name not in names:
            raise InvalidInput(
                f"{call} has no option {name!r}",
                expected=f"any of {', '.join(names)}",
                hint=near(name, names),
            )
