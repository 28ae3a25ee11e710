"""The side of every other rank: it does what rank 0 says, and learns how the save ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.registry.collective import agreement
from holdfast.registry.collective.agreement import RankPart
from holdfast.registry.collective.group import LinksBroken
from holdfast.registry.collective.leading import Plans
from holdfast.registry.collective.outcome import find_write
from holdfast.registry.collective.part import PartOrder, write_part
from holdfast.registry.collective.plan import Part
from holdfast.registry.collective.talk import Calls, Talk
from holdfast.registry.collective.wire import broken, rebuild
from holdfast.registry.errors import RankFailed
from holdfast.registry.training.save_request import SaveRequest
from holdfast.registry.writing.committer import Committer


class Following:
    """One save as a rank above 0 takes part in it.

    Args:
        committer: Of this rank's handle; it chooses keys, and commits nothing.
        calls: The calls of the ranks.
        talk: This call.
        plans: What this rank remembers.
        parts: The states as this rank has them.
        request: The arguments of the save.
    """

    def __init__(
        self,
        committer: Committer,
        calls: Calls,
        talk: Talk,
        plans: Plans,
        parts: Mapping[str, RankPart],
        request: SaveRequest,
    ) -> None:
        self._committer, self._calls, self._talk = committer, calls, talk
        self._plans, self._parts, self._request = plans, parts, request
        # The write and the first slot that it can be in, once rank 0 has all to commit.
        self._reported: tuple[str, int] | None = None

    def follow(self) -> int:
        """Take part until the save has ended; return the number of its checkpoint.

        Raises:
            RankFailed: Rank 0 was not heard of in time, or the outcome is unknown.
            RegistryError: A rank has failed; its error.
        """
        plans = self._plans.keys(self._parts)
        self._talk.report(agreement.greeting(self._request, self._parts, plans))
        while True:
            try:
                header, _ = self._talk.hear("leading the save")
            except RankFailed as error:
                return self._look_for_it(error)
            if header["kind"] == "outcome":
                if header["failure"] is not None:
                    raise rebuild(header["failure"])
                return int(header["n"])
            self._obey(header)

    def _obey(self, order: Mapping[str, Any]) -> None:
        name, talk = order["state"], self._talk
        if order["kind"] == "explain":
            talk.report(agreement.explanation(self._parts, name, order["component"]))
        elif order["kind"] == "layout":
            talk.report(agreement.layout_of(self._parts, name))
        else:
            _, columns = talk.hear_own("leading the save")
            self._calls.links = order["links"]
            try:
                talk.report(self._store(name, order, columns))
            except LinksBroken as error:
                self._calls.group.break_links(self._calls.links)
                talk.report(broken(error, self._calls.group.rank))
                return
            self._reported = order["write"], order["began"]

    def _store(self, name: str, order: Mapping[str, Any], columns: Sequence[memoryview]) -> bytes:
        known, *tables = columns
        layout = self._parts[name].layout
        if tables:
            key = agreement.layout_digest(layout), order["plan"]
            self._plans.parts[name] = (*key, Part.decode(tables))
        told = PartOrder(order["links"], order["codec"], order["watched"], order["epoch"], known)
        committer, group = self._committer, self._calls.group
        part = self._plans.part(name)
        return write_part(committer.store, committer.writer, group, layout, part, told).encode()

    def _look_for_it(self, error: RankFailed) -> int:
        """Look into the log for the outcome (CS5)."""
        if self._reported is None:
            raise error
        log = self._committer.log
        write, began = self._reported
        run = log.refresh()
        found = find_write(log.fetch(range(began, run.next_slot)), write)
        if found is not None:
            return found
        unknown = RankFailed(
            "the outcome of the save is unknown: rank 0 had all to commit it, and fell silent",
            where="rank 0",
            found=error.found,
            hint="It may still become visible. Saving the same state again is safe.",
        )
        unknown.rank = 0
        raise unknown from error
