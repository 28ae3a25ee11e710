"""`tag`, `gate`, `artifact` and `release`: names that keep stored states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.backends.escape import quoted
from holdfast.registry import formats
from holdfast.registry.cli import describe, options, output
from holdfast.registry.cli.columns import Column, Table, metrics, numbers
from holdfast.registry.cli.command import Answer, answer_of, command, listed
from holdfast.registry.cli.files import FORMAT, OPAQUE
from holdfast.registry.cli.opening import moves, reads, writes
from holdfast.registry.cli.options import argument, option
from holdfast.registry.cli.output import Part
from holdfast.registry.curation import Release, write_card
from holdfast.registry.errors import InvalidInput
from holdfast.registry.face import Registry, Run

_GATES = (
    Column("gate", "name"),
    Column("phase", drop=3),
    Column("checkpoint", "source", none="-"),
    Column("id", text=describe.short, drop=2),
    metrics(drop=4),
    *numbers("age=set", text=describe.age, drop=1),
)
_ARTIFACTS = (
    Column("artifact", "name"),
    Column("id", text=describe.short),
    *numbers("age=set", text=describe.age),
)
_RELEASES = (
    Column("version"),
    Column("id", text=describe.short, drop=3),
    Column("source", none="-", drop=2),
    metrics(drop=4),
    *numbers("age=published", text=describe.age, drop=1),
    Column("marks", "latest", lambda is_latest: "latest" if is_latest else ""),
)
_VERSION = argument("VERSION", "The release, such as 1.4.0.")


def _pin_json(run: Run, kind: str, name: str) -> dict[str, Any]:
    pin = run.manifest.pin(kind, name)
    assert pin is not None  # it was just set
    return describe.pin_json(run, pin)


@command(writes)
def set_gate(
    opened: Registry,
    *,
    run: options.NamedRun,
    name: str = argument("NAME", "The gate. It is set once."),
    ref: str | None = argument(
        "REF", "The checkpoint; by default the best of the gate's phase.", default=None
    ),
    thinned: bool = options.THINNED,
) -> Answer:
    """Make a checkpoint a gate, which is never evicted.

    A gate names another checkpoint only if the first one is damaged. RUN/gates/NAME then finds it.
    """
    into = opened.run(run)
    checkpoint = None if ref is None else opened.checkpoint(ref)
    into.pins.gates.set(name, checkpoint, thinned=thinned)
    shape = _pin_json(into, "gate", name)
    return answer_of(shape, f"{shape['ref']} -> {shape['source']}")


@command(reads, table=True)
def list_gates(opened: Registry, *, run: options.Run) -> Answer:
    """List the gates of a run: first those that are set.

    Gates that the run's preset declares and nobody has set yet come last.
    """
    of = opened.run(run)
    phases = {gate.name: gate.phase for gate in of.manifest.spec.gates}
    gates = [describe.pin_json(of, pin) for pin in of.manifest.pins_of("gate")]
    due = phases.keys() - {gate["name"] for gate in gates}
    unset: dict[str, Any] = {"set": None, "source": None, "metrics": {}}
    gates += [
        {"ref": f"{run}/gates/{name}", "id": None, "name": name, **unset}
        for name in phases
        if name in due
    ]
    return listed(
        _GATES,
        gates,
        dict,
        more=lambda gate: {"phase": phases.get(gate["name"], "")},
        first=describe.monitored(of),
        none="no gates yet",
    )


@command(moves, bar="adding")
def add_artifact(
    opened: Registry,
    *,
    run: options.NamedRun,
    name: str = argument("NAME", "Its name. It is given once."),
    file: Path = argument("FILE", "The file to store."),
    format_name: str | None = FORMAT,
    max_bytes: int | None = options.MAX_BYTES,
) -> Answer:
    """Store a file beside the checkpoints of a run, permanently.

    The file is read as by `push`. RUN/artifacts/NAME then finds it.
    """
    found = formats.read(file, format=format_name, portable=True, max_bytes=max_bytes)
    into = opened.run(run)
    stored = into.pins.artifacts.set(name, found.state)
    return answer_of(
        {**_pin_json(into, "artifact", name), "format": found.format},
        f"added: {describe.named(stored)}",
        *[OPAQUE] * (found.format == "opaque"),
    )


@command(reads, table=True)
def list_artifacts(opened: Registry, *, run: options.Run) -> Answer:
    """List the artifacts of a run, oldest first."""
    of = opened.run(run)
    pins = of.manifest.pins_of("artifact")
    return listed(_ARTIFACTS, pins, lambda pin: describe.pin_json(of, pin), none="no artifacts yet")


@command(writes)
def set_tag(
    opened: Registry,
    *,
    ref: options.Ref,
    name: str = argument("NAME", "The tag; it moves if it exists."),
    thinned: bool = options.THINNED,
) -> str:
    """Point a name at a checkpoint.

    RUN/tags/NAME then finds it. A name that exists moves.
    """
    checkpoint = opened.checkpoint(ref)
    opened.run(checkpoint.run_id).pins.tags.set(name, checkpoint, thinned=thinned)
    return f"{checkpoint.run_id}/tags/{name} -> {checkpoint.ref}"


@command(writes)
def remove_tag(
    opened: Registry, *, ref: str = argument("RUN/tags/NAME", "The tag, as `tag set` prints it.")
) -> str:
    """Remove a tag; its checkpoint stays until retention evicts it."""
    run, is_tag, name = ref.partition("/tags/")
    if not is_tag:
        raise InvalidInput("not a tag", expected="RUN/tags/NAME", found=quoted(ref))
    opened.run(run).pins.tags.remove(name)
    return f"removed: {ref}"


def _release_json(release: Release) -> dict[str, Any]:
    """Return a release; its card is read for it."""
    return {**_release_row(release), "card": release.card}


def _release_row(release: Release) -> dict[str, Any]:
    return {
        **describe.picked(release, "ref id=digest version"),
        "published": describe.iso(release.record.time_ms),
        **describe.picked(release, "latest=is_latest source metrics"),
    }


@command(writes)
def publish(
    opened: Registry,
    *,
    ref: options.Ref,
    version: str = argument("VERSION", "Semantic version, given once: 1.4.0."),
    card: Path | None = option("--card", "FILE", "Model card, a file of YAML."),
    metric: list[str] | None = option(
        "--metric", "NAME=NUMBER", "A metric; repeatable. By default the metrics of the checkpoint."
    ),
    only: list[str] | None = option(
        "--only",
        "COMPONENT",
        "Only this component; repeatable. By default the preset's components for inference.",
    ),
) -> Answer:
    """Publish a checkpoint, or parts of it, under a version.

    A version is permanent. No data is stored again. RUN/releases/VERSION and RUN/releases/latest
    then find it.
    """
    metrics = options.numbers(metric) if metric else None
    checkpoint = opened.checkpoint(ref)
    releases = opened.run(checkpoint.run_id).releases
    release = releases.publish(version, checkpoint, card=card, metrics=metrics, only=only or None)
    return Answer(lambda: _release_json(release), lambda: [f"published: {describe.named(release)}"])


@command(reads, table=True)
def list_releases(opened: Registry, *, run: options.Run) -> Answer:
    """List the releases of a run in the order of publication."""
    of = opened.run(run)
    releases, first = of.releases.list(), describe.monitored(of)
    return Answer(
        lambda: list(map(_release_json, releases)),
        lambda: [
            Table(_RELEASES, map(_release_row, releases), none="no releases yet", first=first)
        ],
    )


@command(reads)
def show_release(opened: Registry, *, run: options.NamedRun, version: str = _VERSION) -> Answer:
    """Show a release and its model card.

    The card is printed as YAML.
    """
    releases = opened.run(run).releases
    release = releases.latest() if version == "latest" else releases.get(version)
    return Answer(lambda: _release_json(release), lambda: _release_text(release))


def _release_text(release: Release) -> list[Part]:
    fields: dict[str, object] = {
        "ref": release.ref,
        "id": release.digest.hex(),
        "published": output.date(release.record.time_ms),
        "marks": "latest" if release.is_latest else "",
        "source": release.source,
        "size": output.size(release.size_bytes),
        "metrics": output.metrics(release.metrics),
    }
    card = release.card
    return [fields, f"\n{write_card(card)}".rstrip("\n")] if card else [fields]


@command(writes)
def rollback(
    opened: Registry,
    *,
    run: options.NamedRun,
    version: str = _VERSION,
    reason: str = option("--reason", "TEXT", "The reason, for the history of the run.", default=""),
) -> Answer:
    """Point RUN/releases/latest at an earlier release.

    Nothing else changes.
    """
    release = opened.run(run).releases.rollback(version, reason)
    return answer_of(_release_json(release), f"{release.run_id}/releases/latest -> {release.ref}")
