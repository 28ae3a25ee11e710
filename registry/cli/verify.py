"""`verify`, `repair`, `care`, `doctor` and `verify-resume`: check a registry or a program."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from holdfast.backends.limits import VARIABLE as MAX_RECORD
from holdfast.backends.local.mounts import ALLOW
from holdfast.backends.patience import LEAST_RATE, TIMEOUT
from holdfast.registry.cli import options, output
from holdfast.registry.cli.command import Answer, command
from holdfast.registry.cli.comparing import differing_json
from holdfast.registry.cli.describe import picked
from holdfast.registry.cli.executing import run_to_end, status_text
from holdfast.registry.cli.opening import (
    DASK,
    SHARD,
    address_of,
    opened_at,
    reads,
    workers_at,
    writes,
)
from holdfast.registry.cli.options import argument, flag, option
from holdfast.registry.cli.output import Bar, Part
from holdfast.registry.errors import IntegrityError, InvalidInput, StoreUnsuitable
from holdfast.registry.face import CareReport, Registry, ResumeReport, said, verify_segments
from holdfast.registry.face import care as care_for
from holdfast.registry.face import repair as mend
from holdfast.registry.saving import EXIT_WAIT
from holdfast.registry.store import BYTES_VARIABLE, FOLDER_VARIABLE, Address
from holdfast.registry.store.heads import MEMORY
from holdfast.registry.upkeep import (
    Check,
    Finding,
    Left,
    RepairReport,
    VerifyReport,
    checks,
    secrets_of,
)

_TRAINED = "verify-resume"
#: Variables of the real registry, which the training of `verify-resume` does not get.
_REAL = {"HOLDFAST_STORAGE_OPTIONS", "HOLDFAST_JOURNAL", "HOLDFAST_SIGN"}
_PLACE = re.compile(r"\{(registry|run|stop)\}")
_SHOWN = 10


@command(reads, bar="verifying")
def verify(
    opened: Registry,
    *,
    advance: Bar,
    deep: bool = flag("--deep", "Read and hash every byte."),
    sample: float | None = option(
        "--sample",
        "SHARE",
        "Read and hash this share of the packs: 5% or 0.05.",
        parser=options.share,
    ),
    resume: Path | None = option(
        "--resume",
        "FILE",
        "Record in FILE what was read, and continue from there next time; implies --deep.",
    ),
    decode: bool = flag(
        "--decode", "Also decode every compressed chunk and hash the result; implies --deep."
    ),
    heads: Path | None = option(
        "--heads", "FILE", "Check each log against FILE: it must not be shorter, different or gone."
    ),
    write_heads: Path | None = option(
        "--write-heads", "FILE", "Write the heads to FILE if nothing is wrong."
    ),
    signed: list[Path] | None = option(
        "--signed",
        "KEYS",
        "A file or folder of public keys that you trust; repeatable. Each commit must be signed.",
    ),
    since_last: bool = flag(
        "--since-last", "Read only what is new since the last such check of this machine."
    ),
    shard: str | None = SHARD,
    dask: str | None = DASK,
) -> Answer:
    """Check that every checkpoint is complete.

    Others may use the registry meanwhile. The exit status is 6 if a checkpoint is not complete, or
    with --signed if a commit is not signed.
    """
    with workers_at(dask) as executor:
        report = opened.verify(
            deep=deep,
            sample=sample,
            resume=resume,
            decode=decode,
            heads=heads,
            write_heads=write_heads,
            since_last=since_last,
            signed=signed or None,
            shard=shard,
            executor=executor,
            progress=advance,
        )
    return Answer(lambda: _json(report), lambda: _text(report, shard), status=_status(ok=report.ok))


def _status(*, ok: bool) -> int:
    return 0 if ok else IntegrityError.exit_code


def _json(report: VerifyReport) -> dict[str, object]:
    return {
        **picked(report, "ok runs unchanged checkpoints objects bytes_checked"),
        "data": None if report.data is None else asdict(report.data),
        "findings": [asdict(finding) for finding in report.findings],
        "standing": [asdict(finding) for finding in report.standing],
        "vouched": [picked(one, "run=run_id name key commits of") for one in report.vouched],
    }


def _text(report: VerifyReport, shard: str | None) -> Iterator[Part]:
    for finding in report.findings:
        yield from _fault(finding.severity, finding)
    for one in report.vouched:
        yield (
            f"{one.run_id}: {one.name} ({one.key.short}) vouches for {one.commits:,} of "
            f"{output.counted(one.of, 'commit')}"
        )
    numbers = {"run": report.runs, "checkpoint": report.checkpoints, "object": report.objects}
    counts = ", ".join(output.counted(number, noun) for noun, number in numbers.items())
    read = "" if report.data is None else f"; {output.size(report.bytes_checked)} hashed"
    errors = sum(finding.severity == "error" for finding in report.findings)
    verdict = "ok" if report.ok else output.counted(errors, "error")
    yield f"{verdict}: {counts}{read}"
    if shard is not None:
        yield f"Of packs, manifests and placements only shard {shard} was checked."
    yield from _extent(report)
    for finding in report.standing:
        yield from _fault(f"not looked at, but damaged when --{finding.needs} read it", finding)


def _extent(report: VerifyReport) -> Iterator[Part]:
    """Say how much was checked, unless it was everything."""
    data, counted = report.data, output.counted
    if report.unchanged:
        runs = counted(report.unchanged, "run")
        yield f"{runs} did not change since the last verification, and were not read again."
    if data is None:
        if report.ok:
            yield "Names and sizes were checked; --deep hashes every byte."
        return
    if data.chunks_decoded is not None:
        yield f"{counted(data.chunks_decoded, 'compressed chunk')} decoded and hashed."
    if data.packs_noted:
        before = f"{counted(data.packs_noted, 'pack')}, {output.size(data.bytes_noted)}"
        yield f"{before}, were read before in this pass."
    if data.packs_archived:
        archived = counted(data.packs_archived, "pack")
        yield f"{archived} in an archive, not read; `holdfast tier --restore-days` asks for them."
    if data.packs_read + data.packs_noted + data.packs_archived < data.packs:
        yield (
            f"Read {data.packs_read:,} of {counted(data.packs, 'pack')}: "
            f"{output.size(data.bytes_read)} of {output.size(data.pack_bytes)}, drawn at random."
        )


def _fault(kind: str, fault: Finding | Left, *more: str) -> Iterator[Part]:
    """Yield a fault, the states that it affects, and further advice."""
    # Messages of errors begin with the place already.
    place = "" if fault.message.startswith(fault.where) else f"{fault.where}: "
    yield f"{kind}: {place}{fault.message}"
    yield from (f"  affects {ref}" for ref in fault.affects)
    yield from (f"  {line}" for line in (*more, fault.advice) if line)


@command(writes, bar="verifying and mending")
def repair(
    opened: Registry,
    *,
    advance: Bar,
    mirror: str = option("--from", "URL", "A registry that holds the same states.", default=...),
    mirror_storage_option: list[str] | None = options.MIRROR_OPTION,
    deep: bool = flag(
        "--deep/--no-deep",
        "Find damage by reading every byte, or by names and sizes.",
        default=True,
    ),
    dry_run: bool = flag("--dry-run", "Check, and write nothing."),
) -> Answer:
    """Restore missing and damaged data from a mirror.

    Nothing is invented. The exit status is 6 if something cannot be restored.
    """
    place = address_of(mirror, mirror_storage_option, side="from")
    with opened_at(place, read_only=True) as source:
        report = mend(opened, source, deep=deep, dry_run=dry_run, progress=advance)
    return Answer(
        lambda: {
            **picked(report, "ok dry_run"),
            "found": _json(report.found),
            "mended": [asdict(mended) for mended in report.mended],
            "left": [asdict(left) for left in report.left],
            "bytes_written": report.bytes_written,
        },
        lambda: _repaired(report),
        status=_status(ok=report.ok),
    )


def _repaired(report: RepairReport) -> Iterator[Part]:
    would = "would be " * report.dry_run
    for mended in report.mended:
        yield f"{would}{mended.how}: {mended.where}"
        yield f"  from {mended.source}"
        yield from (f"  mends {ref}" for ref in mended.affects)
    for left in report.left:
        yield from _fault("left", left, f"not mended: {left.reason}")
    if not report.mended and not report.left:
        yield "ok: nothing to mend"
        return
    verdict = "ok" if report.ok else f"{len(report.left):,} left"
    written = output.size(report.bytes_written)
    yield f"{verdict}: {len(report.mended):,} {would}mended, {written} {would}written"


@command(writes, bar="caring", metrics=True)
def care(
    opened: Registry,
    *,
    advance: Bar,
    for_s: float | None = option(
        "--for",
        "TIME",
        "End after this time: 30m, 4h; the next call goes on.",
        parser=options.seconds,
    ),
    most_requests: int | None = option(
        "--max-requests", "N", "End after this many requests to the registry.", min=1
    ),
    read_all_in: float = option(
        "--read-all-in",
        "TIME",
        "Read and hash a share of the bytes, so that this time covers all of them.",
        parser=options.seconds,
        default="28d",
    ),
    mirror: list[str] | None = option(
        "--mirror", "URL", "A registry to bring up to date at the end; repeatable."
    ),
) -> Answer:
    """Do the work of a night: prune, gc, repack, verify, sync mirrors.

    Each run is pruned by its own policy. Others may use the registry meanwhile, and a second `care`
    on the same machine ends at once. If a step fails, the others are done, and the exit status is
    that of the failure; 6 for damage.
    """
    report = care_for(
        opened,
        for_s=for_s,
        most_requests=most_requests,
        read_all_in_days=read_all_in / 86_400,
        mirrors=mirror or (),
        progress=advance,
    )
    return Answer(
        lambda: {"ok": report.ok, "steps": [asdict(step) for step in report.steps]},
        lambda: _cared(report),
        status=report.exit_code,
    )


def _cared(report: CareReport) -> Iterator[Part]:
    for step in report.steps:
        yield from (f"{step.name} failed: {text}" for text in step.errors)
    done = "; ".join(f"{step.name}: {said(step)}" for step in report.steps)
    verdict = "ok" if report.ok else "failed"
    yield f"{verdict}: {done}" if done else "nothing done: another care of this machine is at work"


# `doctor`: check whether a registry can be used, here and now.


_VARIABLES = (
    *("HOLDFAST_RUN", FOLDER_VARIABLE, BYTES_VARIABLE, MAX_RECORD, ALLOW, EXIT_WAIT, MEMORY),
    *(TIMEOUT, LEAST_RATE),
    *("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_REGION"),
)


@command()
def doctor(
    *,
    address: Address,
    json: bool,
    public: bool = flag("--public", "Mask keys, names and places: for a public issue."),
) -> Answer:
    """Check whether a registry can be used; its probes are deleted.

    Prints one line for each check. The exit status is 8 if one fails.
    """
    found: list[Check] = []
    secrets = tuple(secrets_of(address, _VARIABLES)) if public else ()
    for check in checks(address, _VARIABLES):
        check = check.public(secrets) if public else check
        found.append(check)
        if not json:
            output.hanging(f"{check.status:4}  {check.name:12}  ", check.message)
    ok = all(check.status != "fail" for check in found)
    return Answer(
        lambda: {"ok": ok, "checks": [picked(check, "name status message") for check in found]},
        lambda: (),
        status=0 if ok else StoreUnsuitable.exit_code,
    )


@command()
def verify_resume(
    *,
    words: list[str] = argument("CMD", "The training program and its arguments, after --."),
    steps: int = option("--steps", "N", "The step at which they are compared.", default=...),
    at: int | None = option("--at", "STEP", "The step to resume at; by default half of N."),
) -> Answer:
    """Verify that a training program resumes exactly.

    The program runs straight to step N; and to half of it and, in another process, on to N; each
    in a scratch registry. Then the ids are compared. The exit status is 1 if they differ.
    """
    found = verify_segments(
        lambda place, stop: _train(words, place, stop), steps=steps, resume_at=at
    )
    return Answer(
        lambda: _resume_json(found), lambda: _resume_text(found), status=0 if found.ok else 1
    )


def _train(words: list[str], place: Path, stop: int) -> None:
    """Run the program to a step. How it ends does not matter, but its checkpoint does."""
    given = {"registry": str(place), "run": _TRAINED, "stop": str(stop)}
    environment = {name: value for name, value in os.environ.items() if name not in _REAL} | {
        "HOLDFAST_REGISTRY": str(place),
        "HOLDFAST_RUN": _TRAINED,
        "HOLDFAST_STOP_STEP": str(stop),
        "HOLDFAST_HEADS": "0",
    }
    output.note(f"training to step {stop} ...")
    filled = [_PLACE.sub(lambda found: given[found[1]], word) for word in words]
    try:
        status = run_to_end(filled, environment, sys.stderr.fileno())  # its output is not ours
    except (OSError, ValueError) as error:
        raise InvalidInput("the command cannot be started", where=words[0], found=error) from error
    if status:
        output.note(f"the command ended with {status_text(status)}")


def _resume_text(found: ResumeReport) -> Iterator[Part]:
    where = f"at step {found.steps}, resumed at step {found.resumed_at}"
    if found.ok:
        yield f"exact {where}: {found.straight.short}"
        return
    yield f"NOT exact {where}: {found.straight.short} straight, {found.resumed.short} resumed"
    yield f"first difference: {found.first}"
    assert found.difference is not None  # the ids differ
    lines = [*(one.path for one in found.difference.differing), *map(str, found.difference.values)]
    yield from (f"  {line}" for line in lines[:_SHOWN])
    yield from output.more(len(lines), _SHOWN)
    yield "usual causes:"
    yield from (f"  {cause}" for cause in found.causes)


def _resume_json(found: ResumeReport) -> dict[str, Any]:
    difference = found.difference
    return {
        **picked(found, "ok steps resumed_at straight resumed first"),
        "deterministic": found.is_deterministic,
        "components": {one.name: one.kind for one in difference.components} if difference else {},
        "tensors": differing_json(difference),
        "causes": found.causes,
    }
