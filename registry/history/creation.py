"""How a run is begun: what commit 0 says, and whether one that exists is the one meant."""

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

from pydantic import ValidationError

from holdfast.backends.escape import printable, quoted, shown
from holdfast.registry.errors import Conflict, InvalidInput
from holdfast.registry.history.actions import CreateRun, Line, Parent
from holdfast.registry.history.log import RunLog, commit_line
from holdfast.registry.history.log_values import (
    check_phase,
    decode_plain,
    encode_plain,
    plain_digest,
)
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.spec import Retention, RunSpec
from holdfast.registry.spec.monitors import Monitor
from holdfast.registry.spec.presets import load_preset
from holdfast.registry.values.canonical import Json, encode
from holdfast.registry.values.environment import describe_environment

_LOGGER = logging.getLogger("holdfast")
_COLLISIONS = 100
_SECRET = re.compile(
    r"(?i)(^|[^a-z])(pass(word|wd|phrase)?|secret|(api|access|private)[_-]?key|credentials?"
    r"|(auth|access|bearer|api|hf|wandb)[_-]?token)([^a-z]|$)"
)

Preset = str | os.PathLike[str] | RunSpec


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of a new run; see `Registry.create_run`."""

    preset: Preset | None = None
    config: object = None
    seed: int | None = None
    monitor: Monitor | Iterable[Monitor] = ()
    retention: Retention | None = None
    input_hash: str | None = None


class SecretWarning(UserWarning):
    """A configuration that is about to enter a log for good looks as if it held a secret."""


def creation(options: RunOptions, parent: Parent | None = None) -> CreateRun:
    """Return what commit 0 says.

    Raises:
        InvalidInput: An option is wrong.
        NotFound: There is no such preset.
    """
    seed, input_hash = _seed(options.seed), _input_hash(options.input_hash)
    seed = secrets.randbits(64) if seed is None else seed
    monitors = _monitors(options.monitor)
    spec = _spec(options.preset, monitors, options.retention)
    encoded = encode_plain(options.config, "config")
    _warn_of_secrets(options.config, stacklevel=4 if parent is None else 5)
    return CreateRun(
        config=encoded,
        config_hash=plain_digest(encoded),
        input_hash=input_hash,
        seed=f"{seed:016x}",
        environment=describe_environment(),
        monitors=() if spec else monitors,
        spec=spec,
        parent=parent,
    )


def forked(parent: RunManifest, origin: Parent, options: RunOptions) -> CreateRun:
    """Return what commit 0 of a fork says: the parent's options where none are given."""
    created = parent.created
    assert created is not None  # it has a checkpoint
    monitors = _monitors(options.monitor)
    is_own = options.preset is not None or bool(monitors) or options.retention is not None
    return creation(
        RunOptions(
            preset=options.preset if is_own else created.spec,
            config=decode_plain(created.config) if options.config is None else options.config,
            seed=int(created.seed, 16) if options.seed is None else options.seed,
            monitor=monitors if is_own else created.monitors,
            retention=options.retention,
            input_hash=created.input_hash if options.input_hash is None else options.input_hash,
        ),
        origin,
    )


def begin(log: RunLog, action: CreateRun) -> bool:
    """Put commit 0; return whether this call began the run, or finds the same fork half done."""
    begun = False

    def compose(run: RunManifest) -> Sequence[Line] | None:
        nonlocal begun
        begun = run.commits == 0 or _is_half_done(run, action)
        return [commit_line(run, [action])] if run.commits == 0 else None

    log.append(compose)
    return begun


def _is_half_done(run: RunManifest, action: CreateRun) -> bool:
    """Return whether a run is this fork, broken off before it had what it inherits.

    Commits do not tell: its status may have been set since, by nothing but a `with` block.
    """
    created = run.created
    mine = action.parent is not None and created is not None and created.parent == action.parent
    return mine and not run.has_checkpoints


def check_same(run: RunManifest, options: RunOptions) -> None:
    """Refuse to go on with a run that was begun as something else.

    A configuration may hold what changes from start to start, such as a time: another one is only
    warned of.

    Raises:
        Conflict: Its seed, input, monitors, preset or retention are others than those that are
            given.
        InvalidInput: An option is wrong.
    """
    _check_same_spec(run, options)
    created = run.created
    assert created is not None  # a run has its commit 0
    seed, input_hash = _seed(options.seed), _input_hash(options.input_hash)
    if seed is not None and seed != int(created.seed, 16):
        raise Conflict(
            "the run was begun with another seed",
            where=run.run_id,
            expected=str(int(created.seed, 16)),
            found=str(seed),
            hint="Open it without `seed`, or begin another run.",
        )
    if input_hash is not None and input_hash != created.input_hash:
        raise Conflict(
            "the run was begun with other input data",
            where=run.run_id,
            expected=created.input_hash or "no input hash",
            found=input_hash,
            hint="Open it without `input_hash`, or begin another run.",
        )
    if options.config is not None:
        _compare_configs(run.run_id, created, options.config)


def _check_same_spec(run: RunManifest, options: RunOptions) -> None:
    monitors, preset, retention = _monitors(options.monitor), options.preset, options.retention
    if preset is None and retention is None:
        if monitors and monitors != run.monitors:
            raise Conflict(
                "the run was begun with other monitors",
                where=run.run_id,
                expected=_told(run.monitors),
                found=_told(monitors),
                hint="Ask with `run.best(monitor=...)`, or begin another run.",
            )
        return
    if _spec(preset, monitors, retention) != run.spec:
        raise Conflict(
            "the run was begun with another preset or retention",
            where=run.run_id,
            expected=run.spec.name or "what it was begun with",
            found=str(preset) if preset else "another retention",
            hint="Open it without `preset` and `retention`, or begin another run.",
        )


def _compare_configs(run_id: str, created: CreateRun, config: object) -> None:
    """Warn where a run goes on under another configuration than it was begun with."""
    mine = encode_plain(config, "config")
    if plain_digest(mine) == created.config_hash:
        return
    theirs, given = _by_key(created.config), _by_key(mine)
    for key in {**theirs, **given}:
        if key not in theirs or key not in given or theirs[key] != given[key]:
            _LOGGER.warning(
                "%s: the configuration is another one than the run was begun with, first at %s; "
                "the run keeps what it was begun with",
                run_id,
                printable(key),
            )
            return


def _by_key(encoded: Json) -> dict[str, bytes]:
    """Return the encodings of a configuration's values by its keys, as `config` where it has none.

    Encodings tell a `NaN` from another and 1 from 1.0 and True, as the log does.
    """
    config = decode_plain(encoded)
    items = config if isinstance(config, Mapping) else {"config": config}
    return {shown(key): encode(encode_plain(value, "config")) for key, value in items.items()}


def default_ids(seed: int) -> list[str]:
    """Return the names that a run gets by default, in the order in which they are tried."""
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


def _spec(
    preset: Preset | None, monitors: tuple[Monitor, ...], retention: Retention | None
) -> RunSpec | None:
    if retention is not None and not isinstance(retention, Retention):
        raise InvalidInput("not a policy", expected="Retention(last=3)", found=quoted(retention))
    given = RunSpec() if preset is None else preset
    spec = given if isinstance(given, RunSpec) else load_preset(given)
    where = f"preset {spec.name}" if preset is not None else None
    if monitors or retention is not None:
        if spec.phases:
            raise InvalidInput(
                "this preset says for each phase what is best and what is kept",
                where=where,
                hint="Copy the preset to a file of your own and change it there.",
            )
        spec = _changed(spec, monitors or spec.monitors, retention or spec.retention, where)
    for phase in spec.phases:
        check_phase(phase.name)
    return None if preset is None and retention is None else spec


def _changed(
    spec: RunSpec, monitors: tuple[Monitor, ...], retention: Retention | None, where: str | None
) -> RunSpec:
    """Return a specification with other monitors and another policy, checked anew."""
    own = spec.model_copy(update={"monitors": monitors, "retention": retention})
    try:
        return RunSpec.model_validate_json(own.encode())
    except ValidationError as error:
        raise InvalidInput(
            "contradicts itself",
            where=where,
            found=error.errors(include_url=False)[0]["msg"].removeprefix("Value error, "),
            hint="Pass monitor=Monitor(metric=..., mode=...) where the best are to be kept.",
        ) from error


def _monitors(monitor: Monitor | Iterable[Monitor]) -> tuple[Monitor, ...]:
    monitors = (monitor,) if isinstance(monitor, Monitor) else tuple(monitor)
    if not all(isinstance(one, Monitor) for one in monitors):
        raise InvalidInput(
            "not a monitor",
            expected="Monitor(metric='loss', mode='min'), or several",
            found=quoted(monitor),
        )
    return monitors


def _told(monitors: Iterable[Monitor]) -> str:
    return ", ".join(f"{monitor.metric}:{monitor.mode}" for monitor in monitors) or "none"


def _warn_of_secrets(config: object, *, stacklevel: int) -> None:
    suspects = list(_suspects(config, ""))
    if suspects:
        named = printable(", ".join(suspects))
        warnings.warn(
            f"the configuration looks as if it held a secret: {named}. It is stored in the run's "
            "log for ever, and everybody who can read the registry can read it.",
            SecretWarning,
            stacklevel=stacklevel,
        )


def _suspects(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            name = shown(key)
            place = f"{path}.{name}" if path else name
            if isinstance(item, str) and item and _SECRET.search(name):
                yield place
            yield from _suspects(item, place)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _suspects(item, f"{path}[{index}]")
