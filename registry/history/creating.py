"""Create a run: make its commit 0, and compare an existing run with the given options."""

from __future__ import annotations

import logging
import os
import re
import secrets
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from holdfast.backends.escape import printable, quoted, shown
from holdfast.registry.errors import (
    AccessDenied,
    Conflict,
    Hint,
    IntegrityError,
    InvalidInput,
    StorageError,
    StoreUnavailable,
    UnsupportedFormat,
)
from holdfast.registry.history.actions import LABEL, MOST_LABELS, CreateRun, Line, Parent
from holdfast.registry.history.authorship import commit_line
from holdfast.registry.history.log import RunLog
from holdfast.registry.history.log_values import (
    check_phase,
    decode_plain,
    encode_plain,
    plain_digest,
)
from holdfast.registry.history.plain import ValueDiff, compare_configs
from holdfast.registry.history.replay import RunManifest, Slot
from holdfast.registry.history.slots import Look, list_runs
from holdfast.registry.objects import slot_key
from holdfast.registry.spec import Monitor, Retention, RunSpec
from holdfast.registry.spec.presets import Overrides, load_preset
from holdfast.registry.store import Store
from holdfast.registry.values import InvalidRecord, describe_environment

_LOGGER = logging.getLogger("holdfast")
_COLLISIONS = 100
#: Differences of two configurations that an error lists.
_SHOWN = 20
_SECRET = re.compile(
    r"(?i)(^|[^a-z])(pass(word|wd|phrase)?|secret|(api|access|private)[_-]?key|credentials?"
    r"|(auth|access|bearer|api|hf|wandb)[_-]?token)([^a-z]|$)"
)

Preset = str | os.PathLike[str] | RunSpec


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of a new run; see `Registry.create_run`."""

    preset: Preset | None = None
    overrides: Overrides | None = None
    config: object = None
    seed: int | None = None
    monitor: Monitor | Iterable[Monitor] | None = None
    retention: Retention | None = None
    input_hash: str | None = None
    owner: str | None = None
    project: str | None = None
    labels: Iterable[str] | None = None
    total_steps: int | None = None

    @property
    def compared(self) -> frozenset[str]:
        """The given fields that must equal those of an existing run, if its rules demand so."""
        given = {"config": self.config, "input_hash": self.input_hash}
        return frozenset(name for name, value in given.items() if value is not None)


class SecretWarning(UserWarning):
    """A configuration that will be in a log for ever looks as if it held a secret."""


def creation(options: RunOptions, parent: Parent | None = None) -> CreateRun:
    """Return the action of commit 0."""
    seed, input_hash = _seed(options.seed), _input_hash(options.input_hash)
    seed = secrets.randbits(64) if seed is None else seed
    monitors = _monitors(options.monitor)
    spec = _spec(options.preset, options.overrides, monitors, options.retention)
    encoded = encode_plain(options.config, "config")
    warn_of_secrets(options.config, stacklevel=4 if parent is None else 5)
    return CreateRun(
        config=encoded,
        config_hash=plain_digest(encoded),
        input_hash=input_hash,
        seed=f"{seed:016x}",
        environment=describe_environment(),
        monitors=() if spec else monitors,
        spec=spec,
        parent=parent,
        owner=_label(options.owner, "an owner"),
        project=_label(options.project, "a project"),
        labels=check_labels(options.labels),
        total_steps=_total_steps(options.total_steps),
    )


def forked(parent: RunManifest, origin: Parent, options: RunOptions) -> CreateRun:
    """Return the action of commit 0 of a fork; options that are not given are the parent's.

    It has an owner and labels of its own.
    """
    created = parent.created
    assert created is not None  # it has a checkpoint
    monitors = _monitors(options.monitor)
    is_own = options.preset is not None or bool(monitors) or options.retention is not None
    return creation(
        RunOptions(
            preset=options.preset if is_own else created.spec,
            overrides=options.overrides,
            config=decode_plain(parent.config_at(origin.commit))
            if options.config is None
            else options.config,
            seed=int(created.seed, 16) if options.seed is None else options.seed,
            monitor=monitors if is_own else created.monitors,
            retention=options.retention,
            input_hash=created.input_hash if options.input_hash is None else options.input_hash,
            owner=options.owner,
            project=created.project if options.project is None else options.project,
            labels=options.labels,
            total_steps=created.total_steps if options.total_steps is None else options.total_steps,
        ),
        origin,
    )


def begin(log: RunLog, action: CreateRun, look: Look | None = None) -> bool:
    """Put commit 0; return whether this call created the run, or found the same fork unfinished."""
    begun = False

    def compose(run: RunManifest) -> Sequence[Line] | None:
        nonlocal begun
        begun = run.commits == 0 or _is_unfinished(run, action)
        return [commit_line(run, [action])] if run.commits == 0 else None

    log.append(compose, look=look)
    return begun


def _is_unfinished(run: RunManifest, action: CreateRun) -> bool:
    """Return whether a run is this fork, interrupted before it got its parent's checkpoint.

    The number of its commits does not show that: a `with` block may have set its status since.
    """
    created = run.created
    mine = action.parent is not None and created is not None and created.parent == action.parent
    return mine and not run.has_checkpoints


def check_same(run: RunManifest, options: RunOptions) -> None:
    """Refuse to open a run that was created with other options.

    Another configuration is only a warning, unless the rules of the run say that it must match: it
    may hold values that differ at each start, such as a time.
    """
    _check_same_spec(run, options)
    created = run.created
    assert created is not None  # a run has its commit 0
    seed, input_hash = _seed(options.seed), _input_hash(options.input_hash)
    if seed is not None and seed != int(created.seed, 16):
        raise Conflict(
            "the run was created with another seed",
            where=run.run_id,
            expected=str(int(created.seed, 16)),
            found=str(seed),
            hint="Open it without `seed`, or create another run.",
        )
    if input_hash is not None and input_hash != created.input_hash:
        raise Conflict(
            "the run was created with other input data",
            where=run.run_id,
            expected=created.input_hash or "no input hash",
            found=input_hash,
            hint="Open it without `input_hash`, or create another run.",
        )
    if options.config is not None:
        _compare_configs(run, options.config)
    for name, given in {
        "owner": _label(options.owner, "an owner"),
        "project": _label(options.project, "a project"),
        "labels": check_labels(options.labels),
        "total_steps": _total_steps(options.total_steps),
    }.items():
        if given is not None and given != getattr(created, name):
            _LOGGER.warning("%s: `%s` is set when a run is created, and stays", run.run_id, name)


def _check_same_spec(run: RunManifest, options: RunOptions) -> None:
    monitors, preset, retention = _monitors(options.monitor), options.preset, options.retention
    if preset is None and retention is None and not options.overrides:
        if monitors and monitors != run.monitors:
            raise Conflict(
                "the run was created with other monitors",
                where=run.run_id,
                expected=_described(run.monitors),
                found=_described(monitors),
                hint="Ask with `run.best(monitor=...)`, or create another run.",
            )
        return
    if _spec(preset, options.overrides, monitors, retention) != run.spec:
        raise Conflict(
            "the run was created with another preset or retention",
            where=run.run_id,
            expected=run.spec.name or "those of its creation",
            found=str(preset) if preset else "another retention",
            hint="Open it without `preset` and `retention`, or fork it with others.",
        )


def _compare_configs(run: RunManifest, config: object) -> None:
    """Refuse or warn of a configuration that differs from the run's, by its rules."""
    found = _changes(run, config)
    if not found:
        return
    if "config" in (run.spec.must_match or ()):
        listed = "".join(f"\n  {line}" for line in _lines(found))
        raise Conflict(
            f"the run was created with another configuration, and its preset demands the same one; "
            f"of the run -> given:{listed}",
            where=run.run_id,
            hint="Give the configuration of the run, or create or fork another one.",
        )
    _LOGGER.warning(
        "%s: the configuration differs from the one that the run was created with, first at %s; "
        "the run keeps the first one, unless a pivot gives another",
        run.run_id,
        printable(found[0].name),
    )


def differing(run: RunManifest, options: RunOptions) -> list[str]:
    """Return how a given configuration and input hash differ from those of a run, in lines."""
    created = run.created
    assert created is not None  # a run has its commit 0
    found = []
    if options.config is not None:
        found = [f"config {line}" for line in _lines(_changes(run, options.config))]
    input_hash, own = _input_hash(options.input_hash), created.input_hash
    if input_hash not in (None, own):
        found.append(f"input_hash {quoted(own)} -> {quoted(input_hash)}")
    return found


def _changes(run: RunManifest, config: object) -> tuple[ValueDiff, ...]:
    """Return the values of a configuration that are not the run's; their order may differ."""
    mine = encode_plain(config, "config")
    if plain_digest(mine) == plain_digest(run.config):
        return ()
    return compare_configs(run.config, mine)


def _lines(found: Sequence[ValueDiff]) -> list[str]:
    more = len(found) - _SHOWN
    return [*map(str, found[:_SHOWN]), *([f"... and {more} more"] if more > 0 else [])]


def default_ids(seed: int) -> list[str]:
    """Return default names of a run, in the order in which they are tried."""
    base = f"{datetime.now(UTC):%Y%m%d_%H%M%S}_{seed & 0xFFFFFFFF:08x}"
    return [base, *(f"{base}_{number}" for number in range(2, _COLLISIONS))]


def _seed(seed: object) -> int | None:
    if seed is None:
        return None
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise InvalidInput("not a seed", expected="a whole number below 2^64", found=quoted(seed))
    return seed


def _input_hash(input_hash: object) -> str | None:
    if not isinstance(input_hash, str | None):
        raise InvalidInput("an input hash is a string", found=type(input_hash).__name__)
    return input_hash


def _label(given: object, what: str) -> str | None:
    if given is None or (isinstance(given, str) and re.fullmatch(LABEL, given)):
        return given
    raise InvalidInput(
        f"not {what}",
        expected="1 to 128 letters, digits or ._:/@+-, the first one a letter or digit",
        found=quoted(given),
    )


def _total_steps(given: object) -> int | None:
    if given is None or (type(given) is int and 1 <= given < 2**63):
        return given
    raise InvalidInput(
        "not a step at which training can end",
        expected="a whole number from 1",
        found=quoted(given),
    )


def check_labels(given: object) -> tuple[str, ...] | None:
    """Return labels as actions have them; `None` if there are none."""
    if given is None:
        return None
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise InvalidInput("labels are a list of texts", found=quoted(given))
    labels = sorted({_label(one, "a label") or "" for one in given})
    if len(labels) > MOST_LABELS or "" in labels:
        raise InvalidInput(
            "not the labels of a run", expected=f"at most {MOST_LABELS} texts", found=quoted(given)
        )
    return tuple(labels) or None


def _spec(
    preset: Preset | None,
    overrides: Overrides | None,
    monitors: tuple[Monitor, ...],
    retention: Retention | None,
) -> RunSpec | None:
    if retention is not None and not isinstance(retention, Retention):
        raise InvalidInput("not a policy", expected="Retention(last=3)", found=quoted(retention))
    if overrides and preset is None:
        raise InvalidInput(
            "overrides without the preset that they change",
            found=", ".join(overrides),
            hint=Hint("Pass preset='NAME', too.", "Give `--preset NAME`, too."),
        )
    spec = load_preset(RunSpec() if preset is None else preset, overrides)
    where = f"preset {spec.name}" if preset is not None else None
    if monitors or retention is not None:
        if spec.phases:
            raise InvalidInput(
                "this preset has its own monitors and retention for each phase",
                where=where,
                hint=Hint(
                    "Pass overrides={'phases.NAME.retention.last': 3}, or copy the preset to a "
                    "file of your own and change it there.",
                    "Give `--set phases.NAME.retention.last=3`, or copy the preset to a file of "
                    "your own and change it there.",
                ),
            )
        spec = _changed(spec, monitors or spec.monitors, retention or spec.retention, where)
    for phase in spec.phases:
        check_phase(phase.name)
    for monitor in (*spec.monitors, *(one for phase in spec.phases for one in phase.monitors)):
        if not {".", ".."}.isdisjoint(monitor.label.split("/")):
            raise InvalidInput(
                "a monitor's name is a step of a path",
                where=quoted(monitor.label),
                expected="a name that can stand in RUN/best/NAME",
                hint=Hint(
                    "Give it another one: Monitor(metric=..., mode=..., name='...').",
                    "Choose a metric of another name.",
                ),
            )
    return None if preset is None and retention is None else spec


def _changed(
    spec: RunSpec, monitors: tuple[Monitor, ...], retention: Retention | None, where: str | None
) -> RunSpec:
    """Return a specification with other monitors and another policy, checked again."""
    own = spec.changed(monitors=monitors, retention=retention)
    try:
        return RunSpec.of(own.to_json())
    except InvalidRecord as error:
        raise InvalidInput(
            "the options contradict each other",
            where=where,
            found=error.problems[0].text,
            hint=Hint(
                "Pass monitor=Monitor(metric=..., mode=...) to keep the best checkpoints.",
                "Give `--monitor loss:min`, or another METRIC:min or METRIC:max, to keep the best.",
            ),
        ) from error


def _monitors(monitor: Monitor | Iterable[Monitor] | None) -> tuple[Monitor, ...]:
    monitors = (monitor,) if isinstance(monitor, Monitor) else tuple(monitor or ())
    if not all(isinstance(one, Monitor) for one in monitors):
        raise InvalidInput(
            "not a monitor",
            expected="Monitor(metric='loss', mode='min'), or several",
            found=quoted(monitor),
        )
    return monitors


def _described(monitors: Iterable[Monitor]) -> str:
    return ", ".join(f"{monitor.metric}:{monitor.mode}" for monitor in monitors) or "none"


def warn_of_secrets(config: object, *, stacklevel: int) -> None:
    """Warn of a configuration with a key that names a secret."""
    paths = list(_secret_paths(config, ""))
    if paths:
        named = printable(", ".join(paths))
        warnings.warn(
            f"the configuration looks as if it held a secret: {named}. It is stored in the run's "
            "log for ever, and everybody who can read the registry can read it.",
            SecretWarning,
            stacklevel=stacklevel,
        )


def _secret_paths(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            name = shown(key)
            below = f"{path}.{name}" if path else name
            if isinstance(item, str) and item and _SECRET.search(name):
                yield below
            yield from _secret_paths(item, below)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _secret_paths(item, f"{path}[{index}]")


# The first commit of a run: when it was created, and from which run it was forked.


@dataclass(frozen=True, slots=True)
class Birth:
    """The beginning of a run. It never changes."""

    created_ms: int  # time of its first commit, by its author's clock, in milliseconds
    parent: Parent | None  # the run that it was forked from


def read_birth(store: Store, name: str) -> Birth | None:
    """Return the beginning of a run: one request.

    `None` if its first slot is absent or unreadable; `verify` reports that.
    """
    key = slot_key(name, 0)
    try:
        slot = Slot.decode(0, store.backend.get(key), where=key)
    except (AccessDenied, StoreUnavailable):
        raise
    except (StorageError, IntegrityError, UnsupportedFormat):
        return None
    for _, commit in slot.commits:
        for action in commit.actions:
            if isinstance(action, CreateRun):
                return Birth(commit.time_ms, action.parent)
    return None


def birth_of(run: RunManifest) -> Birth | None:
    """Return the beginning of a run that is open; `None` if it has no commit."""
    return None if run.created is None else Birth(run.created_ms, run.created.parent)


def forks_of(store: Store, run_id: str) -> list[str]:
    """Return the runs that were forked from a run, by name: one request for each run."""
    names = list_runs(store)
    births = store.pools.small.map(lambda name: read_birth(store, name), names)
    return [
        name
        for name, birth in zip(names, births, strict=True)
        if birth is not None and birth.parent is not None and birth.parent.run == run_id
    ]
