"""`run show`: a run, once or until it is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from shutil import get_terminal_size
from typing import Any

from holdfast.backends.escape import shown
from holdfast.registry.cli import options, output
from holdfast.registry.cli.command import Answer, command
from holdfast.registry.cli.listing import sparkline, there
from holdfast.registry.cli.opening import reads
from holdfast.registry.cli.options import flag
from holdfast.registry.cli.output import Part
from holdfast.registry.cli.presets import kept, tiers_text
from holdfast.registry.cli.run_listing import heard_of, run_json
from holdfast.registry.curation import STATUS_REASONS, progress_of, run_remarks
from holdfast.registry.face import Registry, Run
from holdfast.registry.history import RunLog, first_line, forks_of, in_words, refs_of
from holdfast.registry.layouts import follow_run
from holdfast.registry.loading.following import Patience
from holdfast.registry.saving.loop import LastHeard
from holdfast.registry.values import Digest

#: Parts of a run that are shown below a heading of their own.
_APART = ("config", "environment", "tags")
#: Fields on a screen, which has room for trends and commits below them, and the least commits.
_WATCHED = (
    "run",
    "status",
    "problem",
    "phase",
    "checkpoints",
    "latest",
    "best",
    "last_heard",
    "waited_share",
)
_LEAST = 3
#: Fields that only lists show like this.
_LISTED = ("status", "best_step")
#: Fields by metric; people are shown the metrics that have a best checkpoint.
_BESTS = ("best", "best_values", "best_steps")


@command(reads)
def show(
    opened: Registry,
    *,
    run: options.Run,
    follow: bool = flag("--follow", "Show it again whenever it changes, until it is over."),
    forks: bool = flag("--forks", "List its forks too: one request for each run."),
) -> Answer:
    """Show a run: its settings, and its state now."""
    found = opened.run(run)
    names = forks_of(opened.handle.store, run) if forks else None
    if follow:
        return _followed(opened, found, names)
    return Answer(lambda: run_json(found, names), lambda: _text(_for_people(found, names)))


def _heard_text(heard: LastHeard) -> str:
    when = output.time(heard.time_ms)
    if not heard.is_overdue or heard.interval_ms is None:
        return when
    every = output.duration(heard.interval_ms / 1000)
    return f"{when}, {output.age(heard.time_ms)} ago; overdue: it saved about every {every}"


def _for_people(run: Run, forks: list[str] | None) -> dict[str, Any]:
    shape, declared = run_json(run, forks), run.manifest.spec.phases
    phase = run.manifest.phase or (declared[0].name if declared else "")
    waited = shape["waited_share"]
    status = run.manifest.shown_status if run.manifest.dropped is None else "dropped"
    return {
        "run": run.id,
        "status": ": ".join(filter(None, (status, STATUS_REASONS.get(status)))),
        "problem": "; ".join(run_remarks(run.manifest)),
        "keeps": tiers_text(kept(run.manifest.spec.phase(phase))),
        **{name: value for name, value in shape.items() if name not in _LISTED},
        **{name: {m: v for m, v in shape[name].items() if v is not None} for name in _BESTS},
        "total_steps": progress_of(run.manifest) or shape["total_steps"],
        "created": output.time(run.manifest.created_ms),
        "last_heard": _heard_text(heard_of(run)),
        "waited_share": None
        if waited is None
        else f"{output.share(waited)} of the time, for saves",
        "failed_saves": shape["failed_saves"] or None,
    }


def _text(shape: dict[str, Any]) -> Iterator[Part]:
    if shape["reason"]:
        first, *frames = shape["reason"].splitlines()
        yield from (f"failed: {first}", *(f"  {line}" for line in frames), "")
    yield {name: _value_text(shape[name]) for name in shape if name not in (*_APART, "reason")}
    for name in _APART:
        if shape[name]:
            yield f"\n{name}"
            yield {f"  {key}": _value_text(value) for key, value in _items(shape[name])}


def _items(value: object) -> list[tuple[str, object]]:
    if isinstance(value, dict):
        return [(shown(key), item) for key, item in value.items()]
    return [("value", value)]


def _value_text(value: Any) -> object:
    match value:
        case Digest():
            return value.hex()
        case {"host": host, "since": since}:
            return f"{host} since {since}"
        case {"run": _, "commit": n, "ref": ref}:
            return f"{ref}, commit {n}"
        case [{"commit": _, "text": _}, *_]:
            noted = ((x["ref"] or f"commit {x['commit']}", first_line(x["text"])) for x in value)
            return "; ".join(f"{ref}: {shown(text)}" for ref, text in noted)
        case [{"until": _, "reason": _}, *_]:
            return "; ".join(f"{x['ref']} until {x['until']}: {shown(x['reason'])}" for x in value)
        case [{"phase": _, "from": _}, *_]:
            return ", ".join(_phase_text(phase) for phase in value)
        case [{"metric": _, "mode": _}, *_]:
            return ", ".join(f"{monitor['metric']}:{monitor['mode']}" for monitor in value)
        case [str(), *_]:
            return ", ".join(map(shown, value))
        case dict():
            return ", ".join(
                f"{shown(key)}: {shown(_value_text(item))}" for key, item in value.items()
            )
        case [] | None:
            return None
    return value


def _phase_text(phase: dict[str, Any]) -> str:
    if phase["pivot"] is not None:
        return f"pivot {phase['pivot']}{' (superseded)' * phase['superseded']}"
    if phase["from"] == phase["phase"]:
        return f"warm start from {phase['source']}"
    return f"{phase['from']} to {phase['phase']}{' (superseded)' * phase['superseded']}"


def _followed(opened: Registry, run: Run, forks: list[str] | None) -> Answer:
    """Return a run as an answer that is printed again whenever its log has grown."""
    log = _Log(opened, run)

    def text() -> Iterator[Part]:
        if output.is_terminal():
            _on_screen(run, forks, log)
            return
        log.added()  # from here on, each commit is printed
        yield from _text(_for_people(run, forks))
        for added in _looks(run, log.added):
            yield from added

    return Answer(lambda: _looks(run, lambda: run_json(run, forks)), text, is_live=True)


def _looks(run: Run, look: Callable[[], Any]) -> Iterator[Any]:
    return follow_run(run.handle.committer, look, Patience())


def _on_screen(run: Run, forks: list[str] | None, log: _Log) -> None:
    """Show the run at the same place of the terminal, with its trends and its newest commits."""
    from holdfast.registry.cli import terminal

    newest: list[str] = []

    def screen() -> list[str]:
        newest.extend(log.added())
        shape = _for_people(run, forks)
        head = {name: _value_text(shape[name]) for name in _WATCHED}
        above = [line for part in (head, "", _trends(run), "") for line in output.lines(part)]
        room = max(get_terminal_size().lines - len(above) - 1, _LEAST)
        return above + [line for text in newest[-room:] for line in output.lines(text)]

    with terminal.live() as show:
        for shown in _looks(run, screen):
            show(shown)


def _trends(run: Run) -> dict[str, object]:
    records = run.manifest.live()
    names = dict.fromkeys(name for one in records for name in one.metrics)
    series = {name: [one.metrics.get(name) for one in records] for name in names}
    return {
        name: f"{sparkline(values)}  {output.number(there(values)[-1])}"
        for name, values in series.items()
    }


class _Log:
    """The commits of a run in words, each once."""

    def __init__(self, opened: Registry, run: Run) -> None:
        self._log = RunLog(opened.handle.store, run.id)
        self._start = 0
        self._refs: dict[int, str] = {}

    def added(self) -> list[str]:
        """Return the commits since the last call."""
        found = []
        for slot in self._log.slots(self._start):
            self._start = slot.number + 1
            for _, commit in slot.commits:
                self._refs |= refs_of([commit])
                what = "; ".join(in_words(one, self._refs, commit.n) for one in commit.actions)
                found.append(f"{output.time(commit.time_ms)}  {what}")
        return found
