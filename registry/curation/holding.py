"""Hold checkpoints and runs until a date, and end a hold early."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from holdfast.registry.curation.dropping import check_may_collect
from holdfast.registry.curation.pins import kept
from holdfast.registry.errors import Conflict, Hint, InvalidInput, NotFound
from holdfast.registry.history import format_time, hold_in_words, own_time_ms
from holdfast.registry.history.actions import Action, RemoveHold, SetHold
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.writing import Committer


def hold(committer: Committer, n: int | None, until: datetime, reason: str, where: str) -> None:
    """Hold a checkpoint by its commit number, or the whole run, until a time."""
    if not isinstance(until, datetime) or until.tzinfo is None:
        raise InvalidInput(
            "a hold ends at a time with a time zone",
            where=where,
            expected="such as 2027-01-31 00:00:00+00:00",
            found=repr(until),
        )
    until_ms = int(until.timestamp() * 1000)
    if until_ms <= own_time_ms():
        raise InvalidInput("a hold ends in the future", where=where, found=format_time(until_ms))

    def compose(run: RunManifest) -> Sequence[Action] | None:
        if n is not None:
            kept(run, n, where)
        before = run.hold(n)
        if before is not None and before.until_ms > until_ms:
            raise Conflict(
                "it is held for longer already",
                where=where,
                expected=f"a time after {format_time(before.until_ms)}",
                found=format_time(until_ms),
                hint=Hint(
                    "`run.retention.unhold` ends that hold; then hold it again.",
                    "`holdfast hold --off` ends that hold; then hold it again.",
                ),
            )
        if before is not None and (before.until_ms, before.reason) == (until_ms, reason):
            return None
        return [SetHold(checkpoint=n, until_ms=until_ms, reason=reason)]

    committer.commit(compose)


def unhold(committer: Committer, n: int | None, reason: str, where: str) -> None:
    """End a hold; it takes the rights of a collector."""
    check_may_collect(
        committer.store, "The hold stays. To end it early takes the rights of a collector."
    )

    def compose(run: RunManifest) -> Sequence[Action]:
        if run.hold(n) is None:
            others = [hold_in_words(one) for one in run.holds or ()]
            raise NotFound("there is no such hold", where=where, found=", ".join(others) or "none")
        return [RemoveHold(checkpoint=n, reason=reason)]

    committer.log.refresh()
    committer.commit(compose)
