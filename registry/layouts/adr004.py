"""ADR-004: `training/`, `milestones/`, `production/` and `metadata/`.

The names are those of the preset `adr004`. The document's program writes other keys into a
milestone than into the training file of the same epoch. An import makes one checkpoint of both:
the training file's, with the companions `milestone`, `best_accuracy` and `best_loss`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from holdfast.registry import formats
from holdfast.registry.curation import Release
from holdfast.registry.layouts.contents import RunContents, imported_as
from holdfast.registry.layouts.scanning import counted, ends_like_torch, fields_of, written
from holdfast.registry.layouts.table import Entry, Found, Link, Reading, StateFile, TextFile
from holdfast.registry.loading import Checkpoint
from holdfast.registry.spec.presets import load_preset

NAME: Final = "adr004"
SIDECARS: Final = False
COMPANIONS: Final = True
STEPPED: Final = False
_PHASE: Final = "main"
#: The tier of milestones, and the companion of a checkpoint that is the file `epoch_NNNN.pt`.
MILESTONE: Final = "milestone"
_TRAINING: Final = "training"
_RELEASE_KEYS: Final = ("version", "model_state_dict", "config", "metrics", "model_card")


is_complete = ends_like_torch


# Out of a run


def entries(run: RunContents) -> Iterator[Entry]:
    """Yield training checkpoints, milestones, releases with their cards, and the history."""
    names = {**load_preset(NAME).layout, **run.run.spec.layout}
    yield from _training(run, names)
    yield from _milestones(run, names)
    yield from _releases(run, names)
    for name, stream in run.streams.items():
        text = json.dumps(stream.read(), indent=2)
        yield TextFile(written(names["stream"], {"name": name}), f"{text}\n".encode())


def _training(run: RunContents, names: Mapping[str, str]) -> Iterator[Entry]:
    paths = {}
    recent = run.checkpoints[-_kept(run) :]
    for one in run.checkpoints:
        noted = imported_as(one, NAME).get("file", "")
        if noted and fields_of(names["training"], noted) is None:
            continue  # only a milestone, never a training file
        if not noted and one not in recent:
            continue  # a milestone, which the run keeps
        paths[one.handle.n] = noted or written(
            names["training"], {"step": one.step, "global_step": _global_step(one)}
        )
        yield StateFile(paths[one.handle.n], one, "torch", f"{one.handle.n}:{one.digest}")
    latest = run.latest()
    if latest is not None and latest.handle.n in paths:
        yield Link(names["latest"], Path(paths[latest.handle.n]).name)


def _kept(run: RunContents) -> int:
    """Return the number of training files that the document's program keeps; all without a tier."""
    counts = [
        tier.retention.last
        for phase in run.phases
        for tier in run.run.spec.phase(phase).tiers
        if tier.name == _TRAINING and tier.retention.last
    ]
    return max(counts, default=len(run.checkpoints))


def _global_step(checkpoint: Checkpoint) -> int:
    if "global_step" not in checkpoint.components:
        return checkpoint.step
    found = checkpoint.load(only="global_step")["global_step"]
    return found if type(found) is int and found >= 0 else checkpoint.step


def _milestones(run: RunContents, names: Mapping[str, str]) -> Iterator[Entry]:
    """Yield a file for each reason that makes a checkpoint a milestone."""
    best: dict[str, float] = {}
    for one in run.checkpoints:
        improved = []
        for monitor in run.monitors(one.handle.record.phase):
            rank = one.handle.newest_record().rank(monitor)
            if rank < best.get(monitor.label, float("inf")):
                best[monitor.label] = rank
                improved.append(monitor.metric)
        for path in _milestone_names(run, names, one, improved):
            of = one.companions.get(_companion(path), one)
            yield StateFile(path, of, "torch", f"{one.handle.n}:{of.digest}")


def _milestone_names(
    run: RunContents, names: Mapping[str, str], one: Checkpoint, improved: list[str]
) -> list[str]:
    noted = imported_as(one, NAME)
    if noted:
        mine = dict.fromkeys([noted.get("file", ""), *noted.get("milestones", "").split("\n")])
        return [one for one in mine if _milestone_fields(names, one) is not None]
    if one.tier != MILESTONE:
        return []
    tiers = {tier.name: tier for tier in run.run.spec.phase(one.handle.record.phase).tiers}
    every = tiers[MILESTONE].every if MILESTONE in tiers else None
    found = [
        written(
            names["milestone_best"],
            {"metric": metric, "value": one.metrics[metric], "step": one.step},
        )
        for metric in improved
    ]
    if (every and one.step % every == 0) or not found:
        found.append(written(names["milestone"], {"step": one.step}))
    return found


def _releases(run: RunContents, names: Mapping[str, str]) -> Iterator[Entry]:
    latest = None
    for release in run.releases:
        path = written(names["release"], {"version": release.version})
        key = f"{release.version}:{release.digest}:{release.record.card}"
        yield StateFile(path, release, "torch", key, state=lambda one=release: _production(one))  # type: ignore[misc]
        if release.card:
            yield TextFile(
                written(names["card"], {"version": release.version}), release.card_yaml().encode()
            )
        if release.is_latest:
            latest = Link(names["release_latest"], Path(path).name)
    if latest is not None:
        yield latest


def _production(release: Release) -> dict[str, Any]:
    """Return a production checkpoint with the keys that the document's own loader needs."""
    state = {
        "version": release.version,
        "metrics": release.metrics,
        "model_card": release.card,
        **release.load(),
    }
    first = [key for key in _RELEASE_KEYS if key in state]
    return {key: state[key] for key in [*first, *(key for key in state if key not in first)]}


# Into a run


def find(files: Mapping[str, str | None]) -> Iterable[Found]:
    """Yield checkpoints by epoch, then releases, then streams."""
    names = load_preset(NAME).layout
    plain = [path for path, target in files.items() if target is None]
    training: dict[int, str] = {}
    milestones: dict[int, list[str]] = {}
    others = []
    for path in sorted(plain):
        if fields := fields_of(names["training"], path):
            training[fields["step"]] = path
        elif fields := _milestone_fields(names, path):
            milestones.setdefault(fields["step"], []).append(path)
        elif fields := fields_of(names["release"], path):
            card = written(names["card"], fields)
            beside = card if card in files else None
            others.append(Found(path, "release", "torch", fields["version"], beside=beside))
        elif (fields := fields_of(names["stream"], path)) and fields["name"] != "model_cards":
            others.append(Found(path, "stream", "json", fields["name"]))
    for epoch in sorted({*training, *milestones}):
        yield from _checkpoints(epoch, training.get(epoch), milestones.get(epoch, []))
    yield from sorted(others, key=lambda one: (one.kind, _order(one.name)))
    newest = files.get(names["release_latest"])
    fields = fields_of(Path(names["release"]).name, newest or "")
    if fields is not None:
        yield Found(names["release_latest"], "latest release", "", fields["version"])


def _checkpoints(epoch: int, training: str | None, milestones: list[str]) -> Iterator[Found]:
    path = training or milestones[0]
    same = [one for one in milestones if one != path]
    noted = {"milestones": "\n".join(milestones)} if milestones else {}
    companions = {_companion(one): one for one in same}
    tier = MILESTONE if milestones else _TRAINING
    yield Found(
        path, "checkpoint", "torch", "", _PHASE, epoch, tier, companions=companions, noted=noted
    )


def _milestone_fields(names: Mapping[str, str], path: str) -> dict[str, Any] | None:
    return fields_of(names["milestone_best"], path) or fields_of(names["milestone"], path)


def _companion(path: str) -> str:
    """Return the name of the companion for a file of a milestone."""
    fields = fields_of(load_preset(NAME).layout["milestone_best"], path)
    return MILESTONE if fields is None else f"best_{fields['metric']}"


def _order(version: str) -> list[int | str]:
    return [int(part) if part.isdigit() else -1 for part in version.split(".")]


def reading(found: Found, path: Path, options: Mapping[str, Any]) -> Reading:  # noqa: ARG001
    """Read the file of a checkpoint."""
    state: Any = formats.read(path, format="torch", portable=True).state
    return Reading(state, *counted(found, state, "epoch"))
