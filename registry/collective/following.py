"""The side of every other rank: it does what rank 0 says, and learns how the save ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.registry.collective import agreement
from holdfast.registry.collective.group import LinksBroken
from holdfast.registry.collective.outcome import find_write
from holdfast.registry.collective.part import PartOrder, write_part
from holdfast.registry.collective.plan import Part
from holdfast.registry.collective.side import Side
from holdfast.registry.collective.wire import broken
from holdfast.registry.errors import RankFailed


class Following(Side):
    """One save as a rank above 0 takes part in it; its committer commits nothing."""

    #: The write and the first slot that it can be in, once rank 0 has all to commit.
    _reported: tuple[str, int] | None = None

    def follow(self) -> int:
        """Take part until the save has ended; return the number of its checkpoint.

        Raises:
            RankFailed: Rank 0 was not heard of in time, or the outcome is unknown.
            RegistryError: A rank has failed; its error.
        """
        plans = self.plans.keys(self.parts)
        self.talk.report(agreement.greeting(self.request, self.parts, plans))
        while True:
            try:
                header, _ = self.talk.hear("leading the save")
            except RankFailed as error:
                return self._look_for_it(error)
            if header["kind"] == "outcome":
                if header["failure"] is not None:
                    raise self.talk.failed(header)
                return int(header["n"])
            self._obey(header)

    def _obey(self, order: Mapping[str, Any]) -> None:
        name, talk = order["state"], self.talk
        if order["kind"] == "explain":
            talk.report(agreement.explanation(self.parts, name, order["component"]))
        elif order["kind"] == "layout":
            talk.report(agreement.layout_of(self.parts, name))
        else:
            _, columns = talk.hear_own("leading the save")
            self.calls.links = order["links"]
            try:
                talk.report(self._store(name, order, columns))
            except LinksBroken as error:
                self.calls.group.break_links(self.calls.links)
                talk.report(broken(error, self.calls.group.rank))
                return
            self._reported = order["write"], order["began"]

    def _store(self, name: str, order: Mapping[str, Any], columns: Sequence[memoryview]) -> bytes:
        known, *tables = columns
        layout = self.parts[name].layout
        if tables:
            key = agreement.layout_digest(layout), order["plan"]
            self.plans.parts[name] = (*key, Part.decode(tables))
        told = PartOrder(order["links"], order["codec"], order["watched"], order["epoch"], known)
        committer, group = self.committer, self.calls.group
        part = self.plans.part(name)
        return write_part(committer.store, committer.writer, group, layout, part, told).encode()

    def _look_for_it(self, error: RankFailed) -> int:
        """Look into the log for the outcome (CS5)."""
        if self._reported is None:
            raise error
        log = self.committer.log
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
