"""The health of a registry."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.registry.journal.settings import choose_journal
from holdfast.registry.maintenance.findings import Finding, VerifyReport
from holdfast.registry.ui.queries.health import (
    HealthView,
    JournalView,
    Mirror,
    check,
    health_view,
    journal_view,
    mirror_view,
    shown_findings,
)
from holdfast.registry.ui.queries.trouble import Trouble, tried
from holdfast.registry.ui.source import Source
from holdfast.registry.ui.views.view import Asked, Shown, View


@dataclass(frozen=True, slots=True)
class HealthPage:
    """What the page of the health shows.

    Attributes:
        health: The epoch, the writers and what is damaged.
        journal: The journal of this machine; `None` if none is named.
        report: The verification that was asked for.
        findings: Its findings, errors first.
        mirrors: The mirrors, compared by the newest runs, where that was asked for.
        mirror_urls: Where the mirrors are.
    """

    health: HealthView
    journal: JournalView | None
    report: VerifyReport | None
    findings: tuple[Finding, ...]
    mirrors: tuple[Mirror, ...]
    mirror_urls: tuple[str, ...]


def _ask(source: Source, asked: Asked) -> Shown:
    troubles: list[Trouble] = []
    # An answer in part is asked for again at once, and a verification should not be.
    is_long = asked.text("verify") or asked.text("mirrors")
    health = health_view(source, within_s=None if is_long else asked.within_s)
    if health.epoch.trouble is not None:
        troubles.append(health.epoch.trouble)
    journal = choose_journal(None)
    report = tried(lambda: check(source), troubles) if asked.text("verify") else None
    page = HealthPage(
        health,
        None if journal is None else journal_view(source, journal),
        report,
        () if report is None else shown_findings(report),
        tuple(mirror_view(source, one) for one in source.mirrors) if asked.text("mirrors") else (),
        tuple(one.registry.url for one in source.mirrors),
    )
    return Shown("Health", page, tuple(troubles), is_partial=health.pending > 0)


VIEW = View("health", "Health", "/health", "health.html", _ask, place="registry")
