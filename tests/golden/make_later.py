"""How the golden lines of actions that came after replay version 2 were made."""

from __future__ import annotations

from holdfast.registry.history.actions import Action, Commit, RemoveTag, Thin, Thinning
from holdfast.registry.values import Digest

#: Each later action once, in the order in which they came.
ACTIONS: tuple[Action, ...] = (
    RemoveTag(name="keeper"),
    Thin(thinnings=(Thinning(checkpoint=3, keep=("model",), reason="not among last 3"),)),
)


def lines() -> list[bytes]:
    """Return a commit with each action."""
    return [
        Commit(
            run="golden",
            n=n,
            prev=Digest.of(b"golden %d" % n),
            time_ms=1_700_000_000_000 + n,
            author="golden@host",
            write="0" * 31 + str(n),
            actions=(action,),
        ).encode()
        for n, action in enumerate(ACTIONS, start=1)
    ]
