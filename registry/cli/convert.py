"""`convert`: write a file again, in another format, compression, precision or version."""

from __future__ import annotations

from pathlib import Path

from holdfast.registry import formats
from holdfast.registry.cli import options, output
from holdfast.registry.cli.command import Answer, answer_of, command
from holdfast.registry.cli.describe import picked
from holdfast.registry.cli.options import argument, flag, option
from holdfast.registry.errors import InvalidInput
from holdfast.registry.formats import (
    MAIN_EXTENSIONS,
    WrittenFile,
    by_extension,
    limited,
    named,
    thalia,
)


@command()
def convert(
    *,
    file: Path = argument("FILE", "The file or folder to read."),
    to: Path = argument("TO", f"The file to write: {MAIN_EXTENSIONS}."),
    read_as: str | None = option("--read-as", "NAME", "The format of FILE, as for push."),
    format_name: str | None = option("--format", "NAME", "The format of TO, as for pull."),
    level: int | None = option(
        "--level", "N", ".thalia: level of the compression, 1 to 22 for zstd, 1 to 12 for lz4."
    ),
    precision: str | None = option("--precision", "NAME", ".thalia: fp32, fp16 or mixed."),
    version: str | None = option("--to-version", "X.Y", ".thalia: write version 0.1 or 0.2."),
    max_bytes: int | None = options.MAX_BYTES,
    force: bool = flag("--force", "Replace a file that exists."),
) -> Answer:
    """Write a file again, in another format or form.

    No registry is needed. Tensors and values stay as they are, unless --precision or --to-version
    says otherwise. The file appears complete, or not at all.
    """
    if version is not None or level is not None or precision is not None:
        written = _convert_brain(
            file, to, read_as, level, precision, version, max_bytes, force=force
        )
    else:
        found = formats.read(file, format=read_as, portable=True, max_bytes=max_bytes)
        written = formats.write(to, found.state, format=format_name, force=force)
    size = output.size(written.size_bytes)
    return answer_of(
        {"path": str(written.path), **picked(written, "format size_bytes")},
        f"wrote: {written.path}  {written.format}  {size}",
    )


def _convert_brain(
    file: Path,
    to: Path,
    read_as: str | None,
    level: int | None,
    precision: str | None,
    version: str | None,
    max_bytes: int | None,
    *,
    force: bool,
) -> WrittenFile:
    """Write a file of Thalia, with the options of this format alone."""
    if by_extension(to) != named("thalia"):
        raise InvalidInput(
            "--level, --precision and --to-version are for files of Thalia",
            where=to,
            expected=", ".join(named("thalia").extensions),
        )
    if version is not None and any(one is not None for one in (level, precision, read_as)):
        raise InvalidInput(
            "--to-version excludes --level, --precision and --read-as",
            hint="Convert the file twice.",
        )
    with limited(max_bytes):
        if version is not None:
            return thalia.migrate(file, to, version, force=force)
        state = formats.read(file, format=read_as, portable=True).state
        return thalia.save(to, state, level=level, precision=precision, force=force)
