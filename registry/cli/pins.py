"""`tag`, `gate` and `release`, and the list of all names that keep stored states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from holdfast.backends import open_files
from holdfast.backends.escape import quoted
from holdfast.registry.cli import completing, describe, options, output
from holdfast.registry.cli.columns import Column, metrics, numbers
from holdfast.registry.cli.command import Answer, answer_of, command, listed
from holdfast.registry.cli.listing import Listing
from holdfast.registry.cli.opening import address_of, moves, writes
from holdfast.registry.cli.options import argument, option
from holdfast.registry.curation import Naming, Release, read_namings
from holdfast.registry.errors import InvalidInput
from holdfast.registry.face import Registry, Run
from holdfast.registry.history.replay import Pin

_PINS = (
    Column("pin", "ref", lambda ref: ref.partition("/")[2]),
    Column("checkpoint", "source", none="-"),
    Column("id", text=describe.short, none="-", drop=2),
    metrics(drop=4),
    *numbers("age=set", text=describe.age, none="-", drop=1),
    Column("marks", text=", ".join, drop=3),
)
_NAMINGS = (
    Column("kind", text=lambda kind: "latest release" if kind == "release" else kind),
    Column("name"),
    Column("of", "source"),
    Column("by", none="-", drop=2),
    Column("since", text=lambda time: output.date(describe.time_ms_of(time)), none="-", drop=1),
)
#: The kinds of names that keep stored states.
KINDS = ("tags", "gates", "releases", "artifacts")
_VERSION = argument("VERSION", "The release, such as 1.4.0.")


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
    pin = into.manifest.pin("gate", name)
    assert pin is not None  # it was just set
    shape = _row(into, pin)
    return answer_of(shape, f"{shape['ref']} -> {shape['source']}")


def _in_order(ref: str, name: str) -> str:
    """Return a ref, unless the name that follows it is one."""
    if "/" in name:
        raise typer.BadParameter(f"{name!r} comes after {ref!r}: give the ref first, then the name")
    return ref


def listing(run: Run, kind: str) -> Answer:
    """Return the pins of a run as an answer: those of one kind, or all."""
    found = _tags(run) if kind in ("pins", "tags") else []
    for one in KINDS[1:]:
        if kind in ("pins", one):
            found += [_row(run, pin) for pin in run.manifest.pins_of(one[:-1])]
        if kind in ("pins", "gates") and one == "gates":
            found += _unset(run, {pin["name"] for pin in found if pin["kind"] == "gate"})
    return listed(_PINS, found, dict, first=describe.monitored(run.manifest), none=f"no {kind} yet")


def named(listing: Listing, runs: Sequence[Run]) -> Answer:
    """Return the latest release, the tags and the labels of runs as an answer."""

    def read(run: Run) -> list[dict[str, Any]]:
        return [_naming(run, one) for one in read_namings(run.handle.log).found]

    found = [row for rows in listing.described(runs, read).values() for row in rows]
    found.sort(key=lambda row: ("release", "tag", "label").index(row["kind"]))
    none = "no releases, tags or labels yet"
    return replace(listed(_NAMINGS, found, dict, none=none), damaged=listing.damaged)


def _naming(run: Run, one: Naming) -> dict[str, Any]:
    at = None if one.pin is None else describe.source(run, one.pin.checkpoint)
    return {
        **describe.picked(one, "kind name ref"),
        "id": one.pin and one.pin.manifest,
        "source": at or one.ref,
        "by": one.author,
        "since": None if one.time_ms is None else describe.iso(one.time_ms),
    }


def _row(run: Run, pin: Pin) -> dict[str, Any]:
    is_latest = pin.kind == "release" and pin.name == run.manifest.release
    return {**describe.pin_json(run, pin), "kind": pin.kind, "marks": ["latest"] * is_latest}


def _tags(run: Run) -> list[dict[str, Any]]:
    records = {name: run.manifest.by_n[n] for name, n in sorted(run.manifest.tags.items())}
    return [
        {
            **_name(run, "tag", name),
            "id": record.manifest,
            "source": describe.ref(run.id, record),
            "metrics": record.metrics,
            "marks": [],
        }
        for name, record in records.items()
    ]


def _unset(run: Run, known: set[str]) -> list[dict[str, Any]]:
    """Return the gates that the run's preset declares, and that nobody has set."""
    empty: dict[str, Any] = {"id": None, "source": None, "metrics": {}}
    return [
        {**_name(run, "gate", gate.name), **empty, "marks": [f"not set, of phase {gate.phase}"]}
        for gate in run.manifest.spec.gates
        if gate.name not in known
    ]


def _name(run: Run, kind: str, name: str) -> dict[str, Any]:
    return {"ref": f"{run.id}/{kind}s/{name}", "kind": kind, "name": name, "set": None}


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
    checkpoint = opened.checkpoint(_in_order(ref, name))
    opened.run(checkpoint.run_id).pins.tags.set(name, checkpoint, thinned=thinned)
    if name in ("latest", "best"):
        output.note(f"warning: {checkpoint.run_id}/{name} is another checkpoint than this tag")
    return f"{checkpoint.run_id}/tags/{name} -> {checkpoint.ref}"


@command(writes)
def remove_tag(
    opened: Registry, *, ref: str = argument("RUN/tags/NAME", "The tag, as `tag set` prints it.")
) -> str:
    """Remove a tag; its checkpoint stays until retention evicts it."""
    run, is_tag, name = ref.partition("/tags/")
    if not is_tag:
        raise InvalidInput(
            "not a tag",
            expected="RUN/tags/NAME",
            found=quoted(ref),
            hint="`holdfast ls RUN/tags` lists those of a run.",
        )
    opened.run(run).pins.tags.remove(name)
    return f"removed: {ref}"


def _release_json(release: Release) -> dict[str, Any]:
    """Return a release; its card is read for it."""
    return {
        **describe.picked(release, "ref id=digest version"),
        "published": describe.iso(release.record.time_ms),
        **describe.picked(release, "latest=is_latest source metrics card"),
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
        autocompletion=completing.COMPONENTS,
    ),
) -> Answer:
    """Publish a checkpoint, or parts of it, under a version.

    A version is permanent. No data is stored again. RUN/releases/VERSION and RUN/releases/latest
    then find it.
    """
    metrics = options.numbers(metric) if metric else None
    checkpoint = opened.checkpoint(_in_order(ref, version))
    releases = opened.run(checkpoint.run_id).releases
    release = releases.publish(version, checkpoint, card=card, metrics=metrics, only=only or None)
    return Answer(lambda: _release_json(release), lambda: [f"published: {describe.named(release)}"])


@command(moves, bar="exporting")
def export(
    opened: Registry,
    *,
    ref: str = argument("RUN/releases/VERSION", "The release.", autocompletion=completing.REFS),
    to: str = option("--to", "URL", "The folder or bucket, outside of a registry.", default=...),
    to_storage_option: list[str] | None = option(
        "--to-storage-option", "KEY=VALUE", "An option of that store; repeatable. No secrets here."
    ),
    shard_bytes: int = options.SHARD_BYTES,
    sign: str | None = option(
        "--sign", "KEY", "Add model.sig by an ECDSA key: FILE, env:VARIABLE or agent:COMMAND."
    ),
) -> Answer:
    """Write a release as plain files for loaders of safetensors.

    They are written to URL/RUN/VERSION/REVISION, a part at a time, and read again. The folder is
    printed once it is whole: name it to nobody before. A second export changes nothing.
    """
    from holdfast.registry.history import SigningKey
    from holdfast.registry.hub import ViewOptions, export_release

    key = None if sign is None else SigningKey.load(sign, "ECDSA")
    release = opened.stored(ref)
    if not isinstance(release, Release):
        raise InvalidInput("not a release", where=ref, expected="RUN/releases/VERSION")
    address = address_of(to, to_storage_option, side="to")
    target = open_files(address.url, address.storage_options)
    found = export_release(release, target, ViewOptions(shard_bytes), key)
    size = f"{output.counted(found.files, 'file')}, {output.size(found.size_bytes)}"
    said = "exported" if found.is_new else "there already"
    about = describe.picked(found, "url files size_bytes new=is_new")
    return answer_of(
        {"ref": release.ref, "id": release.digest, **about},
        f"{said}: {release.ref}  {size}",
        found.url,
    )


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
