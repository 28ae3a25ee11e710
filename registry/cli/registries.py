"""Commands on registries: `init`, `sign`, `upgrade`, `freeze`, `drops`, `trust` and `sync`."""

from __future__ import annotations

import time

import typer

from holdfast.backends import parse
from holdfast.backends.escape import shown
from holdfast.registry.cli import options, output
from holdfast.registry.cli.columns import Column, Table, numbers
from holdfast.registry.cli.command import Answer, answer_of, command
from holdfast.registry.cli.describe import picked
from holdfast.registry.cli.opening import DASK, address_of, workers_at, writes
from holdfast.registry.cli.options import argument, flag, option
from holdfast.registry.cli.output import Bar, Note, Part
from holdfast.registry.face import Registry
from holdfast.registry.face import init as make_registry
from holdfast.registry.face import sync as sync_registries
from holdfast.registry.store import Address
from holdfast.registry.store import trust as trust_registry
from holdfast.registry.upkeep import FreezeReport
from holdfast.registry.values import HERE, duration

_SYNCED = (
    Column("run"),
    *numbers("commits", drop=2),
    *numbers("checkpoints", drop=1),
    *numbers("packs sent=packs_copied", "present=packs_present", drop=3),
    *numbers("bytes sent=bytes_copied", text=output.size),
)


@command(bar="racing the store", url=True)
def init(
    *,
    address: Address,
    compression: str | None = option(
        "--compression", None, "How chunks are stored: none (raw, the default), auto, zstd, lz4."
    ),
    keyframe_every: int | None = option(
        "--keyframe-every",
        "N",
        "Store changing chunks as deltas, and whole every N versions: 1 (no deltas) to 32.",
    ),
    skip_race_probe: bool = flag(
        "--skip-race-probe", "For emulators: do not race the store first."
    ),
) -> Answer:
    """Create a registry.

    The store's exclusive create is raced first; a store that lets two writers win is refused.
    """
    with make_registry(
        address.url,
        storage_options=address.storage_options,
        compression=compression,  # type: ignore[arg-type]  # checked there
        keyframe_every=keyframe_every,
        skip_race_probe=skip_race_probe,
    ) as made:
        config = made.handle.store.config
        place = made.url
    text: list[Part] = [f"made: {place}  {config.id}"]
    if config.compression:
        text.append(f"Chunks are compressed: {config.compression}.")
    if config.keyframe_every:
        every = config.keyframe_every
        text.append(f"Changing chunks are stored as deltas, and whole every {every} versions.")
    if config.race_probe == "passed":
        text.append("The probe found no race. It cannot prove that none exists.")
    else:
        text.append(Note("warning: the race probe was skipped; two writers may both win here."))
    shape = {
        "url": place,
        **picked(config, "id race_probe"),
        "compression": config.compression or "none",
        "keyframe_every": config.keyframe_every or 1,
    }
    return answer_of(shape, *text)


@command(url=True)
def trust(*, address: Address) -> Answer:
    """Accept a registry that was set back or replaced.

    This machine forgets the heads of its runs.
    """
    url = parse(address.url).url
    forgotten = trust_registry(address.url, storage_options=address.storage_options)
    trusted = f"trusted: {url}; this machine has forgotten its old heads"
    none = f"no heads were remembered for {url}"
    return answer_of({"url": url, "forgotten": forgotten}, trusted if forgotten else none)


@command(writes)
def upgrade(opened: Registry, *, yes: bool = flag("--yes", "Do not ask.")) -> Answer:
    """Let newer rules begin; older programs can only read then.

    Upgrade every program that writes first. This cannot be undone. It marks every run, so that
    trainers of an older version stop at their next commit. If it is killed, run it again.
    """
    if not yes:
        output.confirm(f"Programs older than this one can never write to {opened.url} again.")
    report = opened.upgrade()
    marked = f"{report.marked} of {output.counted(report.runs, 'run')} marked"
    text = f"least writer version {report.min_writer}, by epoch {report.epoch}; {marked}"
    return answer_of(picked(report, "min_writer raised epoch runs marked"), text)


@command(writes)
def sign(
    opened: Registry,
    *,
    run: list[str] | None = argument("RUN", "Only these runs.", default=None),
    key: str = option(
        "--key", "KEY", "An Ed25519 key: FILE, env:VARIABLE or agent:COMMAND.", default=...
    ),
) -> Answer:
    """Sign the newest commit of runs, and thereby all before it.

    Each log is read whole first. `verify --signed` checks signatures. To sign each commit as it is
    made, name the key in HOLDFAST_SIGN.
    """
    done = opened.sign(key, run or None)
    text = [
        f"{one.run_id}: {output.counted(one.commits, 'commit')} "
        f"{'signed' if one.is_new else 'signed before'}"
        for one in done
    ]
    return answer_of([picked(one, "run=run_id commits new=is_new") for one in done], *text)


@command(writes)
def freeze(
    opened: Registry,
    *,
    moved_to: str | None = option(
        "--moved-to", "URL", "Where the registry goes on, for everybody's messages."
    ),
    off: bool = flag("--off", "Allow writing again."),
    yes: bool = flag("--yes", "Do not ask."),
) -> Answer:
    """Forbid everybody to write, and say where the registry goes on.

    Each writer stops at its next commit with an error that names the place; reading goes on.
    --off ends it; if training went on at another place meanwhile, the histories of its runs
    diverge. If the command is killed, run it again.
    """
    if off:
        if moved_to:
            raise typer.BadParameter("--moved-to is for a freeze, and --off ends one")
        return _frozen(opened.thaw())
    if not yes:
        output.confirm(f"No program can write to {opened.url} then; training stops.")
    return _frozen(opened.freeze(moved_to))


@command(writes)
def drops(
    opened: Registry,
    *,
    delay: float | None = option(
        "--delay",
        "TIME",
        "Free dropped runs after this time: 0, 30m, 12h, 7d.",
        parser=options.seconds,
        default=None,
    ),
    keep: bool | None = option(
        "--keep/--no-keep", None, "Free nothing that evictions and drops release, as a mirror."
    ),
) -> Answer:
    """Show or set for how long dropped runs can be taken back.

    To set it takes the rights of a collector; programs of older versions can never write then.
    """
    rules = opened.drop_rules(delay_s=delay, keep=keep)
    text = f"dropped runs can be taken back for {duration(rules.delay_s)}"
    if rules.keep:
        text = "nothing is freed: gc keeps what was evicted, thinned and dropped"
    return answer_of(picked(rules, "delay_s keep epoch"), text)


def _frozen(report: FreezeReport) -> Answer:
    is_frozen = report.moved_to is not None
    where = f", moved to {shown(report.moved_to)}" if report.moved_to else ""
    marked = f"{report.marked} of {output.counted(report.runs, 'run')} marked"
    text = f"{'frozen' if is_frozen else 'not frozen'}{where}, by epoch {report.epoch}; {marked}"
    return answer_of(picked(report, "moved_to epoch runs marked"), text)


@command(bar="copying", table=True, metrics=True)
def sync(
    *,
    advance: Bar,
    source: str = argument("SRC", "Registry to read."),
    destination: str = argument("DST", "Registry to write."),
    run: list[str] | None = argument("RUN", "Only these runs.", default=None),
    src_storage_option: list[str] | None = option(
        "--src-storage-option", "KEY=VALUE", "An option of the store of SRC; repeatable."
    ),
    dst_storage_option: list[str] | None = option(
        "--dst-storage-option", "KEY=VALUE", "An option of the store of DST; repeatable."
    ),
    dask: str | None = DASK,
) -> Answer:
    """Copy runs from one registry to another.

    Fast-forward only. Data that the destination has already is not sent again.
    """
    src = address_of(source, src_storage_option, side="src")
    dst = address_of(destination, dst_storage_option, side="dst")
    with workers_at(dask) as executor:
        report = sync_registries(
            src.url,
            dst.url,
            run or None,
            src_storage_options=src.storage_options,
            dst_storage_options=dst.storage_options,
            executor=executor,
            progress=advance,
        )
    HERE.put("mirror_synced_timestamp_seconds", time.time(), mirror=1)
    copied = sum(done.commits > 0 for done in report.runs)
    packless = [done for done in report.runs if not done.packs_copied + done.packs_present]
    small = any(done.checkpoints for done in packless) and not report.bytes_copied
    names = "run=run_id commits checkpoints packs_copied packs_present bytes_copied"
    runs = [picked(done, names) for done in report.runs]
    return answer_of(
        {"runs": runs, "bytes_copied": report.bytes_copied},
        Table(_SYNCED, runs),
        f"{output.counted(copied, 'run')} copied, {len(report.runs) - copied} up to date before; "
        f"{output.size(report.bytes_copied)} of packs sent"
        f"{' (small states travel in manifests)' * small}",
    )
