"""Rules of writers into runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from holdfast import Storing
from holdfast.registry.curation.dropping import undrop
from holdfast.registry.errors import Conflict, Fenced
from holdfast.registry.face.run import Run
from holdfast.registry.objects.placement import NO_BASE
from holdfast.registry.spec import Phase, Pool, Retention, RunSpec, Stream
from holdfast.registry.spec.policies import Monitor
from tests.stateful import contents
from tests.stateful.base import RUNS, Base, Check, Misses, Stop, numbers, sides, states, stops
from tests.stateful.book import RunBook
from tests.stateful.contents import content, digest_of, entries, number_of
from tests.stateful.world import Process

_LOSS = Monitor(metric="loss", mode="min")
_PRESET = RunSpec(
    phases=(Phase(name="1", monitors=(_LOSS,), retention=Retention(last=1, best=1)),),
    inference=("model",),
    pool=Pool(phase="1", size=2, promote_on_save=True),
    streams=(
        Stream(name="loss", lifetime="forever"),
        Stream(name="bandit", lifetime="resettable"),
    ),
)
_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"monitor": _LOSS, "retention": Retention(last=1)},
    {"monitor": _LOSS, "retention": Retention(last=1, best=1)},
    {"preset": _PRESET},
    {"retention": Retention(last=1, then=("model",))},
)
_LIFETIMES = {"loss": "forever", "bandit": "resettable"}

kinds = st.sampled_from(range(len(_OPTIONS)))
names = st.sampled_from(("a", "b"))
streams = st.sampled_from(("loss", "bandit"))
steps = st.sampled_from(("next", "next", "next", "same", "far"))
beside = st.sets(st.sampled_from(("companion", "loss", "bandit", "metrics")))


class Writing(Base):
    """Saving, naming, evicting: everything that the trainer and other writers do."""

    @initialize(first=kinds, second=kinds, number=states)
    def begin(self, first: int, second: int, number: int) -> None:
        for name, kind in zip(RUNS[0], (first, second), strict=False):
            process = self.sides[0].processes[0]
            run = process.registry.create_run(name, seed=1, **_OPTIONS[kind])
            process.hold(run).save(content(number), step=1)
        self.read()

    def on_run(
        self,
        what: str,
        side: int,
        who: int,
        which: int,
        stop: Stop,
        work: Callable[[Run, RunBook], Check | None],
        *,
        misses: Misses = "never",
    ) -> None:
        """Let some process do something with its handle of some run, which may be long stale."""
        known, process = self.own_run(side, which), self.process(self.sides[side], who)
        if known is None or process is None:
            return

        def act() -> Check | None:
            try:
                return work(process.run(known.name), known)
            except Fenced:
                process.forget(known.name)  # as a job that gives up and is started again
                raise

        self.call(what, act, [process], stop, misses=misses)

    @rule(side=sides, who=numbers, kind=kinds, number=states, stop=stops)
    def create(self, side: int, who: int, kind: int, number: int, stop: Stop) -> None:
        process = self.process(self.sides[side], who)
        name = next((n for n in RUNS[side] if n not in self.sides[side].book.runs), None)
        if name is None or process is None:
            return
        number = self.content(side, number)

        def work() -> Check:
            run = process.hold(process.registry.create_run(name, seed=1, **_OPTIONS[kind]))
            return self._saved(run.save(content(number), step=1), side, number)

        self.call("create", work, [process], stop)

    @rule(
        side=sides,
        who=numbers,
        which=numbers,
        number=states,
        step=steps,
        beside=beside,
        push=st.booleans(),
        every=st.integers(1, 4),
        stop=stops,
    )
    def save(
        self,
        side: int,
        who: int,
        which: int,
        number: int,
        step: str,
        beside: set[str],
        push: bool,
        every: int,
        stop: Stop,
    ) -> None:
        number = self.content(side, number)

        def work(run: Run, known: RunBook) -> Check:
            at = known.next_step() + (5 if step == "far" else 0)
            live, chosen = known.live(), number
            if step == "same" and live:
                newest = live[max(live)]
                at, chosen = newest.step, number_of(newest.manifest)
            options: dict[str, Any] = {"streams": {}, "storing": Storing(keyframe_every=every)}
            if "companion" in beside:
                options["companions"] = {"reference": contents.companion(number)}
            if "metrics" in beside:
                options["metrics"] = {"loss": float(number)}
            for name in sorted(beside & _LIFETIMES.keys()):
                if name in known.streams or (known.spec and known.spec.streams):
                    begin = len(known.streams[name].entries) if name in known.streams else 0
                    options["streams"][name] = entries(begin, 12, 0)
            saved = (run.exchange.push if push else run.save)(content(chosen), step=at, **options)
            return self._saved(saved, side, chosen)

        self.on_run("save", side, who, which, stop, work)

    @rule(side=sides, which=numbers, number=states)
    def leave_orphan(self, side: int, which: int, number: int) -> None:
        """Die before the slot that would have named what was written."""
        known = self.own_run(side, which)
        if known is not None and known.commits and not known.is_dropped:
            run = Process(self.sides[side].shelf).run(known.name)
            run.handle.committer.writer.write_plain(content(number % contents.CONTENTS))

    def _saved(self, checkpoint: Any, side: int, number: int) -> Check:
        """Return a look at the model: it must know of the checkpoint that was acknowledged."""

        def check() -> None:
            known = self.sides[side].book.runs[checkpoint.run_id].checkpoints
            assert known[checkpoint.handle.n].manifest == digest_of(content, number)
            if any(row.base != NO_BASE for row in checkpoint.handle.reader.placement.rows):
                self.tally["delta: done"] += 1

        return check

    @rule(side=sides, who=numbers, which=numbers, back=numbers, number=states, stop=stops)
    def rewind_and_save(
        self, side: int, who: int, which: int, back: int, number: int, stop: Stop
    ) -> None:
        number = self.content(side, number)

        def work(run: Run, known: RunBook) -> Check:
            run.refresh()
            live = run.checkpoints()
            if not live:
                raise Conflict("nothing to restore")
            source = live[max(0, len(live) - 1 - back % 3)]
            restored = run.restore(at=source if back % 4 else None)
            assert restored is not None
            step = restored.checkpoint.step + 1
            saved = run.save(
                content(number), step=step, storing=Storing(keyframe_every=1 + back % 4)
            )
            return self._saved(saved, side, number)

        self.on_run("rewind and save", side, who, which, stop, work, misses="beside others")

    @rule(side=sides, who=numbers, which=numbers, of=numbers, name=names, stop=stops)
    def tag(self, side: int, who: int, which: int, of: int, name: str, stop: Stop) -> None:
        def work(run: Run, known: RunBook) -> None:
            run.pins.tags.set(name, self.checkpoint(run, of))

        self.on_run("tag", side, who, which, stop, work)

    @rule(side=sides, who=numbers, which=numbers, name=names, stop=stops)
    def untag(self, side: int, who: int, which: int, name: str, stop: Stop) -> None:
        self.on_run("untag", side, who, which, stop, lambda run, _: run.pins.tags.remove(name))

    @rule(side=sides, who=numbers, which=numbers, of=numbers, name=names, stop=stops)
    def gate(self, side: int, who: int, which: int, of: int, name: str, stop: Stop) -> None:
        def work(run: Run, known: RunBook) -> Check:
            gate = run.pins.gates.set(name, self.checkpoint(run, of))
            return lambda: self._named(known, "gate", name, gate.digest)

        self.on_run("gate", side, who, which, stop, work)

    @staticmethod
    def _named(known: RunBook, kind: str, name: str, digest: Any) -> None:
        """Check that a name that is given once is given."""
        assert known.pins[kind, name][0] == digest

    @rule(side=sides, who=numbers, which=numbers, number=numbers, name=names, stop=stops)
    def add_artifact(
        self, side: int, who: int, which: int, number: int, name: str, stop: Stop
    ) -> None:
        def work(run: Run, known: RunBook) -> Check:
            added = run.pins.artifacts.set(name, contents.artifact(number))
            return lambda: self._named(known, "artifact", name, added.digest)

        self.on_run("artifact", side, who, which, stop, work)

    @rule(
        side=sides,
        who=numbers,
        which=numbers,
        of=numbers,
        version=st.integers(0, 3),
        whole=st.booleans(),
        stop=stops,
    )
    def publish(
        self, side: int, who: int, which: int, of: int, version: int, whole: bool, stop: Stop
    ) -> None:
        def work(run: Run, known: RunBook) -> Check:
            name, checkpoint = f"1.{version}.0", self.checkpoint(run, of)
            card, only = contents.card(version), None if whole else ["model"]
            release = run.releases.publish(name, checkpoint, card=card, only=only)
            return lambda: self._named(known, "release", name, release.digest)

        self.on_run("publish", side, who, which, stop, work, misses="ever")

    @rule(side=sides, who=numbers, which=numbers, stop=stops)
    def point_back(self, side: int, who: int, which: int, stop: Stop) -> None:
        process, runs = self.process(self.sides[side], who), self.sides[side].book.runs
        published = [
            (name, version)
            for name in RUNS[side]
            if name in runs and not runs[name].is_dropped
            for kind, version in runs[name].pins
            if kind == "release"
        ]
        if not published or process is None:
            return
        name, version = self.pick(published, which)

        def work() -> None:
            process.run(name).releases.rollback(version, "as a rule says")

        self.call("point back", work, [process], stop)

    @rule(side=sides, who=numbers, which=numbers, of=numbers, frozen=st.booleans(), stop=stops)
    def promote(self, side: int, who: int, which: int, of: int, frozen: bool, stop: Stop) -> None:
        def work(run: Run, known: RunBook) -> None:
            run.pool.promote(self.checkpoint(run, of), frozen=frozen)

        self.on_run("promote", side, who, which, stop, work, misses="ever")

    @rule(
        side=sides,
        who=numbers,
        which=numbers,
        name=streams,
        count=st.sampled_from((1, 12)),
        kind=st.integers(0, 1),
        stop=stops,
    )
    def append(
        self, side: int, who: int, which: int, name: str, count: int, kind: int, stop: Stop
    ) -> None:
        def work(run: Run, known: RunBook) -> Check:
            before = known.streams.get(name)
            new = entries(len(before.entries) if before else 0, count, kind)
            reached = run.streams[name].append(new, lifetime=_LIFETIMES[name])

            def check() -> None:
                assert known.streams[name].entries[reached - count :] == new

            # If it was stopped after it had landed, it may be superseded by now.
            return check if stop is None else None

        self.on_run("append", side, who, which, stop, work)

    @rule(side=sides, who=numbers, which=numbers, stop=stops)
    def archive(self, side: int, who: int, which: int, stop: Stop) -> None:
        def work(run: Run, known: RunBook) -> None:
            archived = known.streams.get("bandit")
            run.streams["bandit"].archive(f"pivot{len(archived.archives) if archived else 0}")

        self.on_run("archive", side, who, which, stop, work)

    @rule(side=sides, who=numbers, which=numbers, of=numbers, value=numbers, stop=stops)
    def report(self, side: int, who: int, which: int, of: int, value: int, stop: Stop) -> None:
        def work(run: Run, known: RunBook) -> None:
            self.checkpoint(run, of).report({"loss": float(value)})

        self.on_run("report", side, who, which, stop, work)

    @rule(side=sides, who=numbers, which=numbers, last=st.integers(1, 2), stop=stops)
    def prune(self, side: int, who: int, which: int, last: int, stop: Stop) -> None:
        def work(run: Run, known: RunBook) -> None:
            run.retention.prune(Retention(last=last))

        self.on_run("prune", side, who, which, stop, work)

    @rule(
        side=sides,
        who=numbers,
        which=numbers,
        of=numbers,
        keep=st.sampled_from(("model", "optimizer")),
        stop=stops,
    )
    def thin(self, side: int, who: int, which: int, of: int, keep: str, stop: Stop) -> None:
        def work(run: Run, known: RunBook) -> Check:
            checkpoint = self.checkpoint(run, of)
            run.retention.thin(checkpoint, keep)

            def check() -> None:
                # If it was stopped after it had landed, it may be undone by now.
                parts = known.checkpoints[checkpoint.handle.n].parts
                assert parts == (keep,) or stop is not None

            return check

        self.on_run("thin", side, who, which, stop, work, misses="ever")

    @rule(
        side=sides,
        who=numbers,
        which=numbers,
        of=numbers,
        to=st.sampled_from(("ICE", "ICE", "COLD", None)),
        stop=stops,
    )
    def tier(self, side: int, who: int, which: int, of: int, to: str | None, stop: Stop) -> None:
        """Archive states, bring them back, or ask for archived ones."""
        known, process = self.own_run(side, which), self.process(self.sides[side], who)
        if known is None or process is None:
            return

        def work() -> None:
            run = process.run(known.name)
            ref = self.checkpoint(run, of).ref if of % 2 else run.id
            process.registry.tier([ref], to, restore_days=None if to else 1)

        self.call("tier", work, [process], stop, misses="beside others")

    @rule(side=sides, who=numbers, which=numbers, of=numbers, stop=stops)
    def undo(self, side: int, who: int, which: int, of: int, stop: Stop) -> None:
        def work(run: Run, known: RunBook) -> Check:
            gone = run.retention.evicted()
            back = run.retention.undo(*([self.pick(gone, of)] if of % 2 and gone else ()))
            known_again = [known.checkpoints[one.handle.n].manifest for one in back]
            assert known_again == [one.digest for one in back]
            return lambda: None

        self.on_run("undo", side, who, which, stop, work, misses="ever")

    @precondition(lambda self: len(self.sides[0].book.runs) > 2)
    @rule(side=sides, who=numbers, which=numbers, now=st.integers(0, 4), stop=stops)
    def drop(self, side: int, who: int, which: int, now: int, stop: Stop) -> None:
        def work(run: Run, known: RunBook) -> Check:
            run.retention.drop("as a rule says", now=not now)

            def check() -> None:
                # If it was stopped after it had landed, somebody may have undropped the run.
                assert known.is_dropped or stop is not None

            return check

        self.on_run("drop", side, who, which, stop, work)

    @rule(side=sides, who=numbers, which=numbers, stop=stops)
    def undrop(self, side: int, who: int, which: int, stop: Stop) -> None:
        dropped = [run for run in self.sides[side].book.runs.values() if run.is_dropped]
        process = self.process(self.sides[side], who)
        if dropped and process is not None:
            known = self.pick(dropped, which)
            mirror = Process(self.sides[1 - side].shelf)

            def work() -> None:
                there = mirror.registry.handle.store if known.is_freed else None
                undrop(process.run(known.name).handle.committer, there)

            what = "undrop from a mirror" if known.is_freed else "undrop"
            self.call(what, work, [process, mirror], stop, misses="ever")

    @rule(side=sides, who=numbers, which=numbers, of=numbers, stop=stops)
    def fork(self, side: int, who: int, which: int, of: int, stop: Stop) -> None:
        there = self.sides[side]
        process = self.process(there, who)
        name = next((n for n in RUNS[side] if n not in there.book.runs), None)
        if name is None or process is None:
            return
        sources = [run for run in there.book.runs.values() if run.live()]
        if not sources:
            return
        source = self.pick(sources, which)

        def work() -> None:
            checkpoint = self.checkpoint(process.run(source.name).refresh(), of)
            process.hold(process.registry.fork(checkpoint, name))

        self.call("fork", work, [process], stop, misses="beside others")

    @rule(side=sides, who=numbers, which=numbers)
    def reopen_run(self, side: int, who: int, which: int) -> None:
        known, process = self.own_run(side, which), self.process(self.sides[side], who)
        if known is not None and process is not None:
            process.forget(known.name)

    @rule(side=sides, who=numbers)
    def reopen(self, side: int, who: int) -> None:
        there = self.sides[side]
        process = self.process(there, who)
        if process is not None:
            process.registry.close()
            there.processes[there.processes.index(process)] = Process(there.shelf)
