"""The commands wired together, and what holds for all of them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from registry.cli import (
    artifacts,
    bisect,
    checkpoints,
    collection,
    diffs,
    doctor,
    files,
    gates,
    history,
    maintenance,
    merge,
    pool,
    presets,
    releases,
    repacking,
    retention,
    runs,
    stats,
    streams,
    usage,
    watch,
)
from registry.cli.failures import DEBUG, told


class _Commands(TyperGroup):
    """The top of the command line: every failure below it ends here."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command; errors become words on stderr and an exit status."""
        with told(debug=bool(ctx.params.get("debug"))):
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
        try:
            number = version("holdfast")
        except PackageNotFoundError:
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


app.command("init")(doctor.init)
app.command("doctor")(doctor.doctor)
app.add_typer(runs.app, name="run")
app.add_typer(presets.app, name="preset")
app.command("push")(files.push)
app.command("pull")(files.pull)
app.command("ls")(checkpoints.ls)
app.command("show")(checkpoints.show)
app.command("log")(history.log)
app.command("diff")(diffs.diff)
app.command("stats")(stats.stats)
app.command("merge")(merge.merge)
app.add_typer(checkpoints.metric_app, name="metric")
app.command("tag")(checkpoints.tag)
app.add_typer(pool.app, name="pool")
app.add_typer(gates.app, name="gate")
app.add_typer(releases.app, name="release")
app.add_typer(artifacts.app, name="artifact")
app.add_typer(streams.app, name="stream")
app.command("watch")(watch.watch)
app.command("bisect")(bisect.bisect)
app.command("prune")(retention.prune)
app.command("undo")(retention.undo)
app.command("du")(usage.du)
app.command("gc")(collection.gc)
app.command("repack")(repacking.repack)
app.command("verify")(maintenance.verify)
app.command("trust")(maintenance.trust)
app.command("repair")(maintenance.repair)
app.command("sync")(maintenance.sync)
