"""Options and arguments that several commands share, and the reading of their values."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.registry.cli import completing
from holdfast.registry.errors import InvalidInput, NotFound
from holdfast.registry.spec import Monitor, Retention


def argument(metavar: str, about: str, *, default: Any = ..., **more: Any) -> Any:
    """Return an argument by its name in the usage line and its help."""
    return typer.Argument(default, metavar=metavar, help=about, **more)


def option(name: str, metavar: str | None, about: str, *, default: Any = None, **more: Any) -> Any:
    """Return an option that takes a value, by its name, the name of the value and its help."""
    return typer.Option(default, name, metavar=metavar, help=about, **more)


def flag(name: str, about: str, *, default: bool = False) -> Any:
    """Return an option that takes no value."""
    return typer.Option(default, name, help=about)


_REGISTRY = typer.Option(
    "--registry",
    "-r",
    envvar="HOLDFAST_REGISTRY",
    metavar="URL",
    help="The registry: a path, or a URL such as s3://BUCKET/PREFIX.",
)
Registry = Annotated[str, _REGISTRY]
OptionalRegistry = Annotated[str | None, _REGISTRY]
Url = Annotated[
    str | None, typer.Argument(metavar="URL", help="The registry; by default the one of -r.")
]
#: The option that repeats for each option of a file system.
STORAGE_OPTION = "--storage-option"
_STORAGE_OPTIONS = typer.Option(
    STORAGE_OPTION,
    metavar="KEY=VALUE",
    help="An option of the store, as fsspec names it; repeatable. No secrets here.",
)
StorageOptions = Annotated[list[str] | None, _STORAGE_OPTIONS]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Columns = Annotated[
    str | None,
    typer.Option("--columns", metavar="NAME,...", help="Columns, or fields of --json, to show."),
]
Sort = Annotated[
    str | None,
    typer.Option("--sort", metavar="NAME", help="Sort by this column; by -NAME: greatest first."),
]
Csv = Annotated[bool, typer.Option("--csv", help="Print the table as CSV, with exact values.")]
MetricsAt = Annotated[
    str | None,
    typer.Option(
        "--metrics",
        metavar="PATH|:PORT",
        help="Show figures to Prometheus: a file *.prom, or a port of this machine.",
    ),
]
MetricsRuns = Annotated[
    bool, typer.Option("--metrics-runs", help="Show the figures of each run, by its name.")
]
#: `HOLDFAST_RUN` may name the first; the second is followed by arguments, so it is required.
Run = Annotated[
    str,
    typer.Argument(
        envvar="HOLDFAST_RUN", metavar="RUN", help="Name of a run.", autocompletion=completing.RUNS
    ),
]
NamedRun = Annotated[
    str, typer.Argument(metavar="RUN", help="Name of a run.", autocompletion=completing.RUNS)
]
_PATTERN = re.compile(r"[*?[]")  # no name of a run has one of these


def is_pattern(name: str) -> bool:
    """Return whether a name of runs is a pattern."""
    return _PATTERN.search(name) is not None


def matching(names: Iterable[str], runs: Callable[[], list[str]]) -> list[str]:
    """Return names of runs, each pattern replaced by the runs that it matches."""
    found: list[str] = []
    for name in names:
        some = fnmatch.filter(runs(), name) if is_pattern(name) else [name]
        if not some:
            raise NotFound("no run has a name like this", where=name, hint="See `holdfast run ls`.")
        found += some
    return found


def monitor(text: str) -> Monitor:
    """Return the monitor that METRIC:min or METRIC:max means."""
    metric, _, mode = text.rpartition(":")
    match mode:
        case "min" | "max" if metric:
            return Monitor(metric=metric, mode=mode)
    raise typer.BadParameter(f"{text!r} is not of the form METRIC:min or METRIC:max")


Ref = Annotated[
    str,
    typer.Argument(
        metavar="REF",
        help="A checkpoint: RUN, RUN/best, RUN/phase1/step5, RUN/tags/NAME, RUN/ID.",
        autocompletion=completing.REFS,
    ),
]
WHERE = option(
    "--where",
    "FILTER",
    "Only runs that fit, such as 'lr < 1e-3 and status=failed and name~vit'.",
    default="",
)
METRICS = option("--metric", "NAME=NUMBER", "A metric; repeatable.")
PHASE = option("--phase", "NAME", "Its phase; by default the current phase of the run.")
MAX_BYTES = option(
    "--max-bytes",
    "N",
    "Maximum file size in bytes, before and after decompression; by default "
    "HOLDFAST_MAX_FILE_BYTES.",
    min=1,
)
SHARD_BYTES = option(
    "--shard-bytes",
    "N",
    "Bytes of tensors in a file of weights, at most.",
    default=5_000_000_000,
    min=1,
)
KEY_FILE = option("--key-file", "FILE", "A key for the engines; or in HOLDFAST_ENGINE_KEY.")
CREATE = flag("--create", "Create the run if it does not exist.")
MIRROR_OPTION = option(
    "--from-storage-option", "KEY=VALUE", "An option of the mirror's store; repeatable."
)
LAST = option("--last", "N", "Keep the newest N.", min=1)
BEST = option("--best", "N", "Keep the best N.", min=1)
EVERY = option("--every", "N", "Keep every N steps.", min=1)
DAYS = option("--days", "N", "Keep the checkpoints of the last N days.", min=1)
THIN = option(
    "--thin", "COMPONENT", "The others keep this component, and are not evicted; repeatable."
)
REASON = option("--reason", "TEXT", "The reason, for the history.", default=...)
THINNED = flag("--thinned", "A thinned checkpoint will do.")


def retention(
    last: int | None,
    best: int | None,
    every: int | None,
    days: int | None,
    thin: list[str] | None = None,
) -> Retention | None:
    """Return the policy that options give; None without any."""
    if not any((last, best, every, days, thin)):
        return None
    return Retention(last=last, best=best, every=every, for_days=days, then=thin or None)


#: Bytes of the longest note.
_NOTE_BYTES = 2**20


def note_of(file: Path) -> str:
    """Read a note, which a person wrote."""
    try:
        with file.open("rb") as opened:
            data = opened.read(_NOTE_BYTES + 1)
        if len(data) > _NOTE_BYTES:
            raise InvalidInput("too long", where=file, expected=f"at most {_NOTE_BYTES} bytes")
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(
            "the note cannot be read", where=file, expected="text in UTF-8", found=error
        ) from error


_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw]?)")
_UNIT_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def seconds(text: str) -> float:
    """Read a time such as `90`, `30m`, `12h` or `7d`."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a duration such as 0, 30m, 12h or 7d")
    return float(match[1]) * _UNIT_S[match[2]]


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGTP]?)(i?)B?", re.IGNORECASE)


def size_bytes(text: str) -> float:
    """Read a size such as `500GB`, `2TB` or `1.5 TiB`."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        raise typer.BadParameter(f"{text!r} is not a size such as 500GB, 2TB or 1.5TiB")
    power = " kmgtp".index(match[2].lower() or " ")
    return float(match[1]) * float(1024 if match[3] else 1000) ** power


def moment(text: str) -> datetime:
    """Read a time of ISO 8601, in UTC unless it names a time zone; a date is its first moment."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a date such as 2027-01-31") from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def path(text: str) -> Path:
    """Read the path of a file or folder."""
    if not text:
        raise typer.BadParameter("the path is empty; '.' is the current folder")
    return Path(text)


def pairs(texts: Iterable[str]) -> dict[str, str]:
    """Read `name=value` texts."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise typer.BadParameter(f"{text!r} is not of the form name=value")
        if name in found:
            raise typer.BadParameter(f"{name!r} is given twice")
        found[name] = value
    return found


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, unless a key occurs twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has the same key twice")
    return found


def numbers(texts: Iterable[str]) -> dict[str, float]:
    """Read `name=number` texts; nan and inf are numbers here."""
    found = {}
    for name, value in pairs(texts).items():
        try:
            found[name] = float(value)
        except ValueError:
            raise typer.BadParameter(f"{name}={value!r} is not a number") from None
    return found


_SHARE = re.compile(r"\s*(\d{0,3}(?:\.\d+)?)\s*(%?)\s*")


def share(text: str) -> float:
    """Read a share such as `25%` or `0.25`."""
    match = _SHARE.fullmatch(text)
    found = float(match[1]) / (100 if match[2] else 1) if match and match[1] else 0.0
    if not 0 < found <= 1:
        raise typer.BadParameter(f"{text!r} is not a share such as 25% or 0.25")
    return found
