"""The work of a night in one call: prune, collect, repack, verify a share, sync mirrors.

Each step is the call of that name, and fails alone. Specified in docs/spec.md, section 47.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from holdfast.backends.wrappers import Metered
from holdfast.registry.errors import IntegrityError, InvalidInput, RegistryError
from holdfast.registry.face.factory import open  # noqa: A004
from holdfast.registry.face.registry import Registry
from holdfast.registry.face.syncing import sync
from holdfast.registry.history import has_policies
from holdfast.registry.store import Progress
from holdfast.registry.values import HERE, InvalidRecord, Record, markup, seconds, size

#: Packs of which at least this share is dead are rewritten: more is freed then than is moved.
_MIN_DEAD = 0.5
_DAY_MS = 86_400_000
_MOST_DAYS = 28  # the notes of a pass are used for 30 days
_NOT_DUE_DAYS = 1 / 24  # a share that is due for less is left to the next call

Counts = dict[str, int | float]
State = Literal["done", "part", "left", "failed"]


class _Over(Exception):
    """The time or the requests of the call are used up: the step at work ends here."""


@dataclass(frozen=True, slots=True)
class CareStep:
    """One step of a care.

    Attributes:
        name: `prune`, `gc`, `repack`, `verify`, or `mirror` with its URL.
        state: `done`; `part` or `left` where a bound was reached in it or before it; `failed`.
        counts: Its figures, such as `evicted` and `freed_bytes`; empty where it did not end.
        errors: One line for each thing that failed.
        exit_code: 0, or the exit status of the first failure; 6 for any damage.
        took_s: Seconds.
    """

    name: str
    state: State
    counts: Mapping[str, int | float]
    errors: tuple[str, ...]
    exit_code: int
    took_s: float


@dataclass(frozen=True, slots=True)
class CareReport:
    """The report of a care.

    Attributes:
        steps: In their order; none where another care of this machine was at work.
    """

    steps: tuple[CareStep, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing failed and no damage was found."""
        return self.exit_code == 0

    @property
    def exit_code(self) -> int:
        """The exit status: 6 for damage, else that of the first step that failed, else 0."""
        return _worst(one.exit_code for one in self.steps)

    def _repr_html_(self) -> str:
        return markup.safely("Care", self._html)

    def _html(self) -> str:
        rows = [(one.name, one.state, said(one)) for one in self.steps]
        table = markup.Rows(("step", "state", "what"), rows, len(rows), "steps")
        return markup.describe("Care", "ok" if self.ok else "failed", {}, table)


def said(step: CareStep) -> str:
    """Return the result of a step in a few words."""
    if step.state == "left":
        return "left to the next call"
    parts = [_figure(name, value) for name, value in step.counts.items() if value]
    parts += ["goes on in the next call"] * (step.state == "part")
    return ", ".join(parts) or "nothing"


def _figure(name: str, value: float) -> str:
    words = name.replace("_", " ")
    if name.endswith("_bytes"):
        return f"{size(int(value))} {words.removesuffix(' bytes')}"
    if name.endswith("_share"):
        return f"{value:.1%} {words.removesuffix(' share')}"
    return f"{value:,} {words}"


def care(
    registry: str | os.PathLike[str] | Registry,
    *,
    for_s: float | None = None,
    most_requests: int | None = None,
    read_all_in_days: float = _MOST_DAYS,
    mirrors: Iterable[str | os.PathLike[str] | Registry] = (),
    progress: Progress | None = None,
) -> CareReport:
    """Do what a registry needs each night: prune, collect, repack, verify a share, sync mirrors.

    It may be called as often as one likes, beside writers and beside other calls. A failure of one
    step does not keep the others from their work.

    Args:
        registry: To care for, or its URL.
        for_s: Seconds after which the step at work ends after its next object, and the others are
            left to the next call. Default: no limit.
        most_requests: Requests to this registry after which the same happens. Default: no limit.
        read_all_in_days: Within how many days every byte is read and hashed once, above 0 and at
            most 28; each call reads the share that is due.
        mirrors: Registries, or their URLs, that are brought up to date at the end.
        progress: Called with the number of bytes that the step at work has handled.

    Raises:
        InvalidInput: A time or a number is out of range.
        NotFound: There is no registry at the URL.
        ReadOnlyStore: The registry was opened for reading.
    """
    if not 0 < read_all_in_days <= _MOST_DAYS:
        raise InvalidInput(
            "not a number of days in which to read everything",
            expected=f"above 0 and at most {_MOST_DAYS}",
            found=read_all_in_days,
        )
    if for_s is not None:
        seconds(for_s, "for_s")
    if most_requests is not None and not most_requests > 0:
        raise InvalidInput("not a number of requests", expected="above 0", found=most_requests)
    with ExitStack() as stack:
        if not isinstance(registry, Registry):
            registry = stack.enter_context(open(registry))
        heads = registry.handle.store.heads
        alone = nullcontext(True) if heads is None else heads.alone(".care")
        if not stack.enter_context(alone):
            return CareReport(())
        meter = None
        if most_requests is not None:
            store, plain = registry.handle.store, registry.handle.store.backend
            store.backend = meter = Metered(plain)
            stack.callback(setattr, store, "backend", plain)
        night = _Night(registry, for_s, progress, meter, most_requests or 0)
        works: list[tuple[str, Callable[[], Counts]]] = [
            ("prune", night.prune),
            ("gc", night.collect),
            ("repack", night.repack),
            ("verify", partial(night.verify, read_all_in_days)),
        ]
        for number, mirror in enumerate(mirrors, 1):
            url = mirror.url if isinstance(mirror, Registry) else os.fspath(mirror)
            works.append((f"mirror {url}", partial(night.copy, mirror, number)))
        return CareReport(tuple(night.step(name, work) for name, work in works))


class _Cared(Record):
    """How far earlier cares came; a file of this machine beside the heads."""

    format: Literal["holdfast.cared/1"] = "holdfast.cared/1"
    registry: str
    pruned: str = ""  # the run at which pruning ended
    read_ms: int | None = None  # when a share of the bytes was read last, by this machine's clock


class _Night:
    """One care: its registry, its bounds, and what failed in the step at work."""

    def __init__(
        self,
        registry: Registry,
        for_s: float | None,
        progress: Progress | None,
        meter: Metered | None,
        most_requests: int,
    ) -> None:
        self._registry = registry
        self._heads = registry.handle.store.heads
        self._ends_s = None if for_s is None else time.monotonic() + for_s
        self._meter, self._most_requests = meter, most_requests
        self._progress = progress
        self._failed: list[tuple[int, str]] = []
        self._cared = self._read_cared()

    def step(self, name: str, work: Callable[[], Counts]) -> CareStep:
        """Do a step, unless a bound was reached before it."""
        self._failed, began_s = [], time.monotonic()
        state: State = "left"
        counts = Counts()
        try:
            self._check_bounds()
            state = "part"
            counts, state = work(), "done"
        except _Over:
            pass
        except RegistryError as error:
            self._fail(error)
        if state == "done" and not self._failed:
            HERE.put("care_timestamp_seconds", time.time(), step=name.partition(" ")[0])
        codes = [code for code, _ in self._failed]
        return CareStep(
            name,
            "failed" if codes else state,
            counts,
            tuple(text for _, text in self._failed),
            _worst(codes),
            time.monotonic() - began_s,
        )

    def prune(self) -> Counts:
        """Prune every run by its own policy, beginning after the run where the last care ended."""
        names, counts = self._registry.run_names(), Counts(runs=0, evicted=0, thinned=0)
        at = sum(name <= self._cared.pruned for name in names)
        last = self._cared.pruned
        try:
            for name in (*names[at:], *names[:at]):
                self._check_bounds()
                try:
                    self._prune(name, counts)
                except RegistryError as error:
                    self._fail(error)
                last = name
            last = ""
        finally:
            self._keep_cared(self._cared.changed(pruned=last))
        return counts

    def _prune(self, name: str, counts: Counts) -> None:
        with closing(self._registry.run(name)) as run:
            found = run.handle.log.run
            if found.dropped is None and has_policies(found.spec):
                plan = run.retention.prune()
                counts["runs"] += 1
                counts["evicted"] += len(plan.evicted)
                counts["thinned"] += len(plan.thinned)

    def collect(self) -> Counts:
        """Collect, with the grace of a day."""
        report = self._registry.gc(progress=self._advance)
        HERE.put("dead_bytes", report.recent.size_bytes)
        HERE.add("freed_bytes_total", report.freed_bytes)
        return Counts(deleted=report.deleted.objects, freed_bytes=report.freed_bytes)

    def repack(self) -> Counts:
        """Rewrite the packs that are mostly dead."""
        report = self._registry.repack(min_dead=_MIN_DEAD, progress=self._advance)
        HERE.add("dead_bytes", report.freed_bytes)
        return Counts(
            rewritten=len(report.rewritten),
            written=report.packs_written,
            left_to_gc_bytes=report.freed_bytes,
        )

    def verify(self, days: float) -> Counts:
        """Check the structure, and read the share of the bytes that is due."""
        now_ms, last_ms = int(time.time() * 1000), self._cared.read_ms
        # A time that is yet to come says that a clock was wrong.
        is_known = last_ms is not None and last_ms <= now_ms
        due_days = (now_ms - (last_ms or 0)) / _DAY_MS if is_known else 1.0
        if due_days < _NOT_DUE_DAYS:
            report = self._registry.verify(since_last=True, progress=self._advance)
        else:
            notes = None if self._heads is None else self._heads.path(".pass")
            share = min(1.0, due_days / days)
            check = partial(
                self._registry.verify, sample=share, since_last=True, progress=self._advance
            )
            try:
                report = check(resume=notes)
            except InvalidInput:  # what earlier nights noted is damaged, or cannot be written to
                with suppress(OSError):
                    Path(notes or "").unlink()
                report = check()
            self._keep_cared(self._cared.changed(read_ms=now_ms))
        # Damage that an earlier night read stands until a check looks there again.
        damage = [one for one in (*report.findings, *report.standing) if one.severity == "error"]
        for one in damage:
            self._failed.append((IntegrityError.exit_code, f"{one.where}: {one.message}"))
        HERE.put("damaged_findings", len(damage))
        if not damage:
            HERE.put("verified_timestamp_seconds", time.time())
        counts = Counts(checkpoints=report.checkpoints, read_bytes=report.bytes_checked)
        if (data := report.data) is not None and self._heads is not None:
            read = data.bytes_read + data.bytes_noted
            counts["of_this_pass_share"] = read / max(1, data.pack_bytes)
        return counts

    def copy(self, mirror: str | os.PathLike[str] | Registry, number: int) -> Counts:
        """Bring a mirror up to date."""
        report = sync(self._registry, mirror, progress=self._advance)
        HERE.put("mirror_synced_timestamp_seconds", time.time(), mirror=number)
        copied = [one for one in report.runs if one.commits]
        commits = sum(one.commits for one in copied)
        return Counts(runs=len(copied), commits=commits, sent_bytes=report.bytes_copied)

    def _check_bounds(self) -> None:
        if self._ends_s is not None and time.monotonic() >= self._ends_s:
            raise _Over
        if self._meter is not None and self._meter.snapshot().requests >= self._most_requests:
            raise _Over

    def _advance(self, done: int) -> None:
        if self._progress is not None:
            self._progress(done)
        self._check_bounds()

    def _fail(self, error: RegistryError) -> None:
        HERE.fail(error, "care")
        self._failed.append((error.exit_code, str(error)))

    def _read_cared(self) -> _Cared:
        """Return how far earlier cares came; a file that cannot be read is as good as none."""
        registry, kept = self._registry.handle.store.config.id, None
        with suppress(InvalidRecord, ValueError, RecursionError):
            data = None if self._heads is None else self._heads.kept(".cared")
            kept = None if data is None else _Cared.of(json.loads(data))
        return kept if kept and kept.registry == registry else _Cared(registry=registry)

    def _keep_cared(self, now: _Cared) -> None:
        self._cared = now
        if self._heads is not None:
            self._heads.keep(".cared", json.dumps(now.to_json()).encode())


def _worst(codes: Iterable[int]) -> int:
    """Return the exit status of several failures: that of damage, else the first, else 0."""
    found = [code for code in codes if code]
    return IntegrityError.exit_code if IntegrityError.exit_code in found else (*found, 0)[0]
