"""`tag`, `gate set` and `ls`, `artifact add` and `ls`: names that keep stored states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.registry import formats
from holdfast.registry.cli import describe, options
from holdfast.registry.cli.columns import Column, metrics, numbers
from holdfast.registry.cli.command import Answer, answer_of, command, listed
from holdfast.registry.cli.files import FORMAT, OPAQUE
from holdfast.registry.cli.opening import moves, reads, writes
from holdfast.registry.cli.options import argument
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
) -> Answer:
    """Make a checkpoint a gate, which is never evicted.

    A gate names another checkpoint only if the first one is damaged. RUN/gates/NAME then finds it.
    """
    into = opened.run(run)
    into.pins.gates.set(name, None if ref is None else opened.checkpoint(ref))
    shape = _pin_json(into, "gate", name)
    return answer_of(shape, f"{shape['ref']} -> {shape['source']}")


@command(reads, table=True)
def list_gates(opened: Registry, *, run: options.Run) -> Answer:
    """List the gates of a run: first those that are set.

    Gates that the run's preset declares and nobody has set yet come last.
    """
    of = opened.run(run)
    phases = {gate.name: gate.phase for gate in of.spec.gates}
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
def tag(
    opened: Registry,
    *,
    ref: options.Ref,
    name: str = argument("NAME", "The tag; it moves if it exists."),
) -> str:
    """Point a name at a checkpoint.

    RUN/tags/NAME then finds it. A name that exists moves.
    """
    checkpoint = opened.checkpoint(ref)
    opened.run(checkpoint.run_id).pins.tags.set(name, checkpoint)
    return f"{checkpoint.run_id}/tags/{name} -> {checkpoint.ref}"
