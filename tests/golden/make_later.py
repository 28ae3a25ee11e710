"""How the golden lines of actions that came after replay version 2 were made."""

from __future__ import annotations

from holdfast.registry.history.actions import (
    Action,
    Commit,
    CreateRun,
    EnterPhase,
    HideRun,
    RaiseVersion,
    RemoveHold,
    RemoveTag,
    SetHold,
    SetLabels,
    SetNote,
    Thin,
    Thinning,
    UndropRun,
)
from holdfast.registry.values import Digest

#: Each later action once, in the order in which they came.
ACTIONS: tuple[Action, ...] = (
    RemoveTag(name="keeper"),
    Thin(thinnings=(Thinning(checkpoint=3, keep=("model",), reason="not among last 3"),)),
    HideRun(reason="a mistake"),
    UndropRun(),
    RaiseVersion(version=2),
    SetHold(checkpoint=3, until_ms=1_800_000_000_000, reason="an audit"),
    RemoveHold(checkpoint=3, reason="the audit is over"),
    SetNote(checkpoint=3, text="the one of the paper\n\u00fcber alles"),
    SetNote(text=""),
    SetLabels(labels=("prod", "sweep:3")),
    SetLabels(labels=()),
)


#: The first commit of a run that has fields which came later.
OWNED = Commit(
    run="golden",
    n=0,
    time_ms=1_700_000_000_000,
    author="golden@host",
    write="0" * 32,
    actions=(
        CreateRun(
            config_hash=Digest.of(b"golden"),
            seed="0" * 16,
            environment={},
            owner="ana@corp",
            project="vision/det",
            labels=("prod", "sweep:3"),
        ),
    ),
)

#: The same with a field that came after those.
PLANNED = Commit(
    run="golden",
    n=0,
    time_ms=1_700_000_000_000,
    author="golden@host",
    write="0" * 32,
    actions=(
        CreateRun(
            config_hash=Digest.of(b"golden"), seed="0" * 16, environment={}, total_steps=90_000
        ),
    ),
)

#: A pivot with the fields that came later.
PIVOTED = Commit(
    run="golden",
    n=7,
    prev=Digest.of(b"golden 7"),
    time_ms=1_700_000_000_000,
    author="golden@host",
    write="0" * 32,
    actions=(
        EnterPhase(
            from_phase="main",
            to_phase="main",
            source="latest",
            manifest=Digest.of(b"golden"),
            name="polish",
            config={"d": [["floor", 1]]},
            meta={"d": [["why", "samples repeat"]]},
        ),
    ),
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
            write=f"{n:032d}",
            actions=(action,),
        ).encode()
        for n, action in enumerate(ACTIONS, start=1)
    ]
