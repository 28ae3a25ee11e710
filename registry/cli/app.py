"""Every command by name, and the options that all of them share.

The module of a command is imported when the command is called. A list of commands imports none.
"""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from holdfast.registry.cli import failures
from holdfast.registry.cli.failures import DEBUG, reported
from holdfast.registry.values import renaming

#: By name: the module and function of a command, and the first sentence of its help.
_COMMANDS = {
    "init": "registries.init: Create a registry.",
    "doctor": "verify.doctor: Check whether a registry can be used; its probes are deleted.",
    "push": "files.push: Store a file or folder as a checkpoint, artifact or run.",
    "pull": "files.pull: Write a checkpoint or another state to a file, or a run to a folder.",
    "ls": "checkpoints.ls: List checkpoints, newest last, or what else a run holds.",
    "show": "checkpoints.show: Show a checkpoint, release, artifact or pool entry.",
    "log": "history_listing.log: Show the history of a run or of all runs, newest first.",
    "diff": "comparing.diff: Compare two checkpoints, or runs; only --values reads data.",
    "attest": "comparing.attest: Say which checkpoint's bytes a file has, from digests alone.",
    "merge": "merging.merge: Average checkpoints, or pick parts of them, into a new one.",
    "ui": "ui.ui: Look at a registry in a browser, and edit notes with --edit.",
    "page": "ui.page: Write a report about runs, which opens offline: one file, or a site.",
    "hub": "ui.hub: Serve a registry to clients of Hugging Face, until you press Ctrl-C.",
    "watch": "watch.watch: Run a command for each checkpoint of a run as it appears.",
    "follow": "watch.follow: Keep inference engines at the newest checkpoint of a run.",
    "bisect": "bisect.bisect: Find the first bad checkpoint between two of a run.",
    "care": "verify.care: Do the work of a night: prune, gc, repack, verify, sync mirrors.",
    "prune": "retention.prune: Evict the checkpoints that retention does not keep.",
    "rm": "retention.rm: Evict one checkpoint.",
    "note": "retention.note: Write a note on a run or a checkpoint.",
    "hold": "retention.hold: Hold a run or a checkpoint until a date: nothing evicts or drops it.",
    "undo": "retention.undo: Bring back evicted and thinned checkpoints, or a dropped run.",
    "du": "retention.du: Show how many bytes runs and checkpoints use and would free.",
    "gc": "repacking.gc: Delete the objects that no run needs any more.",
    "repack": "repacking.repack: Remove dead bytes from packs, and combine small packs.",
    "tier": "repacking.tier: Move packs to another storage class, or ask for archived ones.",
    "verify": "verify.verify: Check that every checkpoint is complete.",
    "verify-resume": "verify.verify_resume: Verify that a training program resumes exactly.",
    "sign": "registries.sign: Sign the newest commit of runs, and thereby all before it.",
    "upgrade": "registries.upgrade: Let newer rules begin; older programs can only read then.",
    "preset": "presets.preset: List the presets, print one to copy and change, or check your own.",
    "freeze": "registries.freeze: Forbid everybody to write, and say where the registry goes on.",
    "drops": "registries.drops: Show or set for how long dropped runs can be taken back.",
    "trust": "registries.trust: Accept a registry that was set back or replaced.",
    "repair": "verify.repair: Restore missing and damaged data from a mirror.",
    "sync": "registries.sync: Copy runs from one registry to another.",
}
#: Groups of commands: the help of the group, and its commands as above.
_GROUPS = {
    "run": (
        "Create, show, change and drop runs.",
        {
            "create": "runs.create: Create a run and print its name.",
            "ls": "run_listing.ls: List the runs by name.",
            "show": "showing.show: Show a run: its settings, and its state now.",
            "set": "runs.change: Set the status or the labels of a run, or its schema version.",
            "pivot": "runs.pivot: Change the policy of a run within its phase.",
            "rm": "runs.rm: Drop a run; `undo` takes that back.",
        },
    ),
    "file": (
        "Files without a registry: describe, check and convert them.",
        {
            "show": "files.inspect: Describe a file without reading the data of its tensors.",
            "check": "files.validate: Check a file, and list its problems.",
            "convert": "files.convert: Write a file again, in another format or form.",
        },
    ),
    "metric": (
        "Numbers by which checkpoints are compared, such as an evaluation.",
        {"add": "merging.add_metric: Add metrics, or replace their values."},
    ),
    "pool": (
        "Models in self-play: the pool that training draws opponents from.",
        {
            "promote": "pool.promote: Add the model of a checkpoint to the pool of its run.",
            "rate": "pool.rate: Record a match: update ratings, games and wins of its entries.",
            "sample": "pool.sample: Show which opponents the model in training plays.",
        },
    ),
    "tag": (
        "Names that move from checkpoint to checkpoint.",
        {
            "set": "pins.set_tag: Point a name at a checkpoint.",
            "rm": "pins.remove_tag: Remove a tag; its checkpoint stays until retention evicts it.",
        },
    ),
    "gate": (
        "Checkpoints of a run that are never evicted.",
        {"set": "pins.set_gate: Make a checkpoint a gate, which is never evicted."},
    ),
    "release": (
        "Published versions of a run, with a model card.",
        {
            "publish": "pins.publish: Publish a checkpoint, or parts of it, under a version.",
            "export": "pins.export: Write a release as plain files for loaders of safetensors.",
            "rollback": "pins.rollback: Point RUN/releases/latest at an earlier release.",
        },
    ),
    "journal": (
        "Saves that are only in the journal of this machine.",
        {
            "ls": "journal.ls: List the saves that are not in the registry.",
            "push": "journal.push: Add waiting saves to their runs, or stranded ones to a fork.",
            "rm": "journal.rm: Delete a save that was stranded, refused or damaged.",
        },
    ),
    "stream": (
        "Series beside checkpoints, such as the loss of every step.",
        {
            "append": "streams.append: Append entries to a stream: all of them or none.",
            "read": "streams.read: Print entries as lines of JSON, or with --json as one list.",
            "archive": "streams.archive: Archive the entries of a resettable stream and empty it.",
        },
    ),
}
#: Headings in the help of `holdfast`, and the commands below each.
_SECTIONS = {
    "Start": "init doctor preset run",
    "Look": "ls show log diff attest watch bisect verify-resume",
    "Name": "tag note gate release metric pool merge",
    "Move": "push pull sync stream journal",
    "Keep clean": "care prune rm undo hold du gc repack tier verify repair",
    "Files": "file",
    "Serve": "ui hub follow page",
    "A whole registry": "sign upgrade freeze drops trust",
}
#: By old words: the new ones, and the version in which the old ones end. `ls --long` is an option.
_RENAMED: dict[str, tuple[str, str]] = {}
#: Words that people type, each with the command to use: the former names, then other tools'.
_INSTEAD: dict[str, str] = dict(
    re.findall(
        r"([a-z -]+) = (.+?)(?:, |$)",
        "inspect = file show, validate = file check, convert = file convert, evict = rm, "
        "files = show --files, stats = show --stats, checkout = pull --layout, "
        "import = push --layout, thaw = freeze --off, unhold = hold --off, "
        "artifact add = push --artifact, "
        "artifact ls = ls RUN/artifacts, gate ls = ls RUN/gates, pool ls = ls RUN/pool, "
        "release ls = ls RUN/releases, release show = show, stream ls = ls RUN/streams, "
        "tag ls = ls RUN/tags, journal carry = journal push, run diff = diff --runs, "
        "run fork = run create --from, run raise-version = run set --schema-version, "
        "run status = run set --status, run drop = run rm, run undrop = undo, "
        "preset ls = preset, preset show = preset NAME, preset check = preset FILE, "
        "delete = rm` or `holdfast run rm, remove = rm` or `holdfast run rm, runs = run ls, "
        "list = run ls, run list = run ls, run delete = run rm, run remove = run rm, "
        "checkpoints = ls, create = init` or `holdfast run create, save = push, upload = push, "
        "load = pull, download = pull, export = pull, history = log, compare = diff, "
        "status = run show, restore = undo, serve = ui` or `holdfast hub, clone = sync, "
        "fsck = verify, best = ls '*/best', get = pull, plot = page` or `holdfast ui, info = show, "
        "events = log, lineage = log --graph, releases = ls RUN/releases, tags = ls RUN/tags, "
        "streams = ls RUN/streams, metrics = ls RUN, archive = tier",
    )
)


class _Later(TyperCommand):
    """A command whose code is imported when it is called."""

    def __init__(self, name: str, entry: str) -> None:
        where, _, about = entry.partition(": ")
        # As the short help it is wrapped in a list of commands; the first part of a help is cut.
        super().__init__(name, help=about, short_help=about)
        self._module, _, self._function = where.partition(".")

    def make_context(self, *given: Any, **options: Any) -> Any:
        """Import the command, and let it read its part of the command line."""
        context = self.whole().make_context(*given, **options)
        if not gc.isenabled():  # `main` paused it; what was imported until now stays
            gc.freeze()
            gc.enable()
        return context

    def whole(self) -> Any:
        """Import the command, and return it with its parameters."""
        alone = typer.Typer(rich_markup_mode=None, add_completion=False)
        function = getattr(import_module(f"{__package__}.{self._module}"), self._function)
        alone.command(self.name, cls=_Command, epilog=function.epilog)(function)
        whole = typer.main.get_command(alone)
        for one in whole.params:
            if one.param_type_name == "argument":  # its name says what it takes; a type is Python's
                one.display_type_rich = lambda **_: ""  # type: ignore[attr-defined]
        return whole


class _ReadsLate:
    """A command whose parameters need no reading by typer where they are not given, or text."""

    def get_params(self, ctx: Any) -> Any:
        """Return the parameters."""
        params = super().get_params(ctx)  # type: ignore[misc]
        for one in params:
            if getattr(one, "_runtime_param", one) is None:
                one._runtime_param = _AtFirstValue(one)
        return params


class _Command(_ReadsLate, TyperCommand):
    """One command."""


class _Group(_ReadsLate, TyperGroup):
    """Several commands below one word."""


class _AtFirstValue:
    """Passes on what needs no reading, and lets typer read the rest.

    For that it imports all of pydantic, which takes longer than most commands.
    """

    def __init__(self, param: Any) -> None:
        kind = param.type_descriptor
        self._is_text = kind.annotation in (str, list[str]) and kind.parameter_info.parser is None

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the value of a parameter: words of the command line, or its default."""
        many = param.multiple or param.nargs == -1
        if value is None:
            return () if many else None
        if self._is_text and many and isinstance(value, list | tuple):
            return list(value)
        if not many and (self._is_text or not isinstance(value, str)):
            return value
        param._runtime_param = None
        return param.get_runtime_param().coerce(value, param=param, ctx=ctx)


def _later(commands: Mapping[str, str]) -> dict[str, Any]:
    return {name: _Later(name, entry) for name, entry in commands.items()}


class _Commands(_Group):
    """The top of the command line, which reports every failure of a command."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands.update(_later(_COMMANDS))
        for name, (about, commands) in _GROUPS.items():
            self.add_command(
                _Group(
                    name=name,
                    help=about,
                    short_help=about,
                    commands=_later(commands),
                    rich_markup_mode=None,
                    no_args_is_help=True,
                )
            )

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """Write the commands below their headings."""
        for heading, names in _SECTIONS.items():
            with formatter.section(heading):
                about = ((name, self.commands[name]) for name in names.split())
                formatter.write_dl([(name, one.get_short_help_str(200)) for name, one in about])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command of these words; warn of an old name, refuse one from before 0.1."""
        match args:
            case ["help"]:
                print(ctx.get_help())
                ctx.exit()
            case ["help", *words]:
                args = [*words, "--help"]
            case ["version"]:
                _print_version(wanted=True)
        for size in (2, 1):
            typed = " ".join(args[:size])
            if typed in _INSTEAD and not ctx.resilient_parsing:  # as completion is
                ctx.fail(f"there is no command `{typed}`: use `holdfast {_INSTEAD[typed]}`")
        for old, (now, ends) in _RENAMED.items():
            *command, last = old.split()
            size, before = len(command), args
            if args[: size + 1] == [*command, last]:
                args = [*now.split(), *args[size + 1 :]]
            elif args[:size] == command and last[0] == "-":
                end = args.index("--") if "--" in args else len(args)
                given = (re.sub(rf"^{last}(?==|$)", now.split()[-1], one) for one in args[size:end])
                args = [*command, *given, *args[end:]]
            if args != before and not ctx.resilient_parsing:  # as completion is
                text = renaming(f"holdfast {old}", f"holdfast {now}", ends)
                typer.echo(f"DeprecationWarning: {text}", err=True)
        return super().resolve_command(ctx, args)

    def main(self, *given: Any, **options: Any) -> Any:
        """Run the command line; what is wrong with it is told as every other error is."""
        try:
            status = super().main(*given, **{**options, "standalone_mode": False})
        except typer.Abort:
            print("error: nothing was done: no answer was given", file=sys.stderr)
            status = 1
        except Exception as error:
            if not failures.is_usage(error):
                raise
            status = failures.report_usage(error)
        sys.exit(status)

    def invoke(self, ctx: Any) -> Any:
        """Run a command; an error becomes a message on stderr and an exit status."""
        with reported(debug=bool(ctx.params.get("debug"))):
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Commands,
    name="holdfast",
    # Plain help: it is read in pipes as often as on terminals, and loads in half the time.
    rich_markup_mode=None,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(*, wanted: bool) -> None:
    if wanted:
        metadata = import_module("importlib.metadata")  # slow, and needed here alone
        try:
            number = metadata.version("holdfast-registry")
        except metadata.PackageNotFoundError:
            number = "(not installed)"
        print(f"holdfast {number}")
        raise typer.Exit


@app.callback()
def _top(
    *,
    debug: Annotated[
        bool, typer.Option("--debug", envvar=DEBUG, help="Show tracebacks of errors.")
    ] = False,
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Keep, find and copy checkpoints of machine learning; a bucket or a folder is enough."""
