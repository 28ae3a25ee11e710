"""Every command by name, and the options that all of them share.

The module of a command is imported when the command is called. A list of commands imports none.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from holdfast.registry.cli.failures import DEBUG, reported

#: By name: the module and function of a command, and the first sentence of its help.
_COMMANDS = {
    "init": "registries.init: Make a registry.",
    "doctor": "verify.doctor: Check whether a registry can be used.",
    "push": "files.push: Store a file, or a folder of files, as a checkpoint.",
    "pull": "files.pull: Write a checkpoint, release, artifact or pool entry to a file.",
    "files": "files.files: List the files of a folder that was pushed, as sha256sum does.",
    "checkout": "folders.checkout: Write a run as the folder of another system.",
    "import": "folders.import_folder: Take the folder of another system into a run.",
    "convert": "files.convert: Write a file again, in another format or form.",
    "inspect": "files.inspect: Describe a file without reading the data of its tensors.",
    "validate": "files.validate: Check a file, and list its problems.",
    "ls": "checkpoints.ls: List checkpoints, newest last.",
    "show": "checkpoints.show: Show a checkpoint, release, artifact or pool entry.",
    "log": "showing.log: Show the history of a run, newest first.",
    "diff": "comparing.diff: Compare two checkpoints; only --values reads their data.",
    "stats": "comparing.stats: Show minimum, maximum, mean, norm, zeros and NaN of tensors.",
    "merge": "checkpoints.merge: Average checkpoints, or pick parts of them, into a new one.",
    "ui": "ui.ui: Look at a registry in a browser, read-only, until you press Ctrl-C.",
    "page": "ui.page: Write the pages of runs to one file, which opens offline.",
    "watch": "watch.watch: Run a command for each checkpoint of a run as it appears.",
    "bisect": "bisect.bisect: Find the first bad checkpoint between two of a run.",
    "prune": "retention.prune: Evict the checkpoints that retention does not keep.",
    "evict": "retention.evict: Evict one checkpoint.",
    "undo": "retention.undo: Bring evicted and thinned checkpoints back.",
    "du": "retention.du: Show how many bytes runs and checkpoints use and would free.",
    "gc": "repacking.gc: Delete the objects that no run needs any more.",
    "repack": "repacking.repack: Remove dead bytes from packs, and combine small packs.",
    "verify": "verify.verify: Check that every checkpoint is complete.",
    "verify-resume": "verify.verify_resume: Verify that a training program resumes exactly.",
    "upgrade": "registries.upgrade: Let newer rules begin; older programs can only read then.",
    "freeze": "registries.freeze: Forbid everybody to write, and say where the registry goes on.",
    "thaw": "registries.thaw: Allow writing again after a freeze.",
    "trust": "registries.trust: Accept a registry that was set back or replaced.",
    "repair": "verify.repair: Restore missing and damaged data from a mirror.",
    "sync": "registries.sync: Copy runs from one registry to another.",
}
#: Groups of commands: the help of the group, and its commands as above.
_GROUPS = {
    "run": (
        "Create and inspect runs.",
        {
            "create": "runs.create: Create a run and print its name.",
            "ls": "runs.ls: List the runs by name.",
            "show": "showing.show: Show a run: its settings, and its state now.",
            "pivot": "runs.pivot: Change the policy of a run within its phase.",
            "diff": "comparing.run_diff: Compare runs side by side, such as two forks or a sweep.",
            "fork": "runs.fork: Create a run that continues from a checkpoint, and print its name.",
            "drop": "runs.drop: Release everything that a run holds. This cannot be undone.",
        },
    ),
    "preset": (
        "Presets that runs are created with.",
        {
            "ls": "presets.ls: List the presets that come with Holdfast.",
            "show": "presets.show: Print a preset as TOML, to copy and change.",
            "check": "presets.check: Check a preset of your own, and show its phases.",
        },
    ),
    "metric": (
        "Metrics of checkpoints.",
        {"add": "checkpoints.add_metric: Add metrics, or replace their values."},
    ),
    "pool": (
        "Pools of opponents.",
        {
            "promote": "pool.promote: Add the model of a checkpoint to the pool of its run.",
            "rate": "pool.rate: Record a match: update ratings, games and wins of its entries.",
            "sample": "pool.sample: Show which opponents the model in training plays.",
            "ls": "pool.ls: List the entries of a pool, newest last.",
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
        "Gates of runs.",
        {
            "set": "pins.set_gate: Make a checkpoint a gate, which is never evicted.",
            "ls": "pins.list_gates: List the gates of a run: first those that are set.",
        },
    ),
    "release": (
        "Releases of runs.",
        {
            "publish": "pins.publish: Publish a checkpoint, or parts of it, under a version.",
            "ls": "pins.list_releases: List the releases of a run in the order of publication.",
            "show": "pins.show_release: Show a release and its model card.",
            "rollback": "pins.rollback: Point RUN/releases/latest at an earlier release.",
        },
    ),
    "artifact": (
        "Artifacts of runs.",
        {
            "add": "pins.add_artifact: Store a file beside the checkpoints of a run, permanently.",
            "ls": "pins.list_artifacts: List the artifacts of a run, oldest first.",
        },
    ),
    "journal": (
        "Saves that are only in the journal of this machine.",
        {
            "ls": "journal.ls: List the saves that are not in the registry.",
            "carry": "journal.carry: Add the saves that wait to their runs.",
            "push": "journal.push: Put stranded and refused saves of a run into a fork.",
            "rm": "journal.rm: Delete a save that was stranded, refused or damaged.",
        },
    ),
    "stream": (
        "Append-only histories beside checkpoints.",
        {
            "append": "streams.append: Append entries to a stream: all of them or none.",
            "read": "streams.read: Print entries as lines of JSON, or with --json as one list.",
            "archive": "streams.archive: Archive the entries of a resettable stream and empty it.",
            "ls": "streams.ls: List the streams of a run.",
        },
    ),
}


class _Later(TyperCommand):
    """A command whose code is imported when it is called."""

    def __init__(self, name: str, entry: str) -> None:
        where, _, about = entry.partition(": ")
        # As the short help it is wrapped in a list of commands; the first part of a help is cut.
        super().__init__(name, help=about, short_help=about)
        self._module, _, self._function = where.partition(".")

    def make_context(self, *given: Any, **options: Any) -> Any:
        """Import the command, and let it read its part of the command line."""
        alone = typer.Typer(rich_markup_mode=None, add_completion=False)
        module = import_module(f"{__package__}.{self._module}")
        alone.command(self.name)(getattr(module, self._function))
        return typer.main.get_command(alone).make_context(*given, **options)


def _later(commands: Mapping[str, str]) -> dict[str, Any]:
    return {name: _Later(name, entry) for name, entry in commands.items()}


class _Commands(TyperGroup):
    """The top of the command line, which reports every failure of a command."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands.update(_later(_COMMANDS))
        for name, (about, commands) in _GROUPS.items():
            self.add_command(
                TyperGroup(
                    name=name,
                    help=about,
                    short_help=about,
                    commands=_later(commands),
                    rich_markup_mode=None,
                    no_args_is_help=True,
                )
            )

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
            number = metadata.version("holdfast")
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
