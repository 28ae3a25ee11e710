"""Runs as the folders of other systems, and such folders as runs.

- `table`: the layouts by name; each is a module with the functions of `Layout`: `hydra`, `adr004`,
  `andrea`, `thalia`, `cobre`, `hf`. Each gives the files of a run, and their meaning.
- `checkout`: write such a folder and bring it up to date; `made`: its notes of the files it made.
- `importing`: take such a folder in; `scanning`: its names and sidecars; `following`: a folder into
  which a program writes.
- `contents`: a run at one moment.

Formats of single files are in `formats`. Names from a folder or a log never become paths unchecked.
Specified in docs/spec.md, section 41; docs/layouts.md describes the layouts for users.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.registry.errors import Hint, InvalidInput
from holdfast.registry.formats import read_table
from holdfast.registry.layouts.checkout import CheckoutReport, check_out
from holdfast.registry.layouts.following import follow_folder, follow_run
from holdfast.registry.layouts.importing import ImportedFile, Importer
from holdfast.registry.layouts.scanning import check_folder
from holdfast.registry.layouts.table import LAYOUTS, NAMES, OF_SYSTEMS, import_spec
from holdfast.registry.loading.following import Patience
from holdfast.registry.values.first_use import at_first_use
from holdfast.registry.writing import Committer

if TYPE_CHECKING:
    from holdfast.registry.layouts.cobre import policy_of
    from holdfast.registry.layouts.hub_folder import CONFIGS, METADATA
else:
    __getattr__ = at_first_use(__name__)

PathLike = str | os.PathLike[str]


def check_out_as(committer: Committer, root: PathLike, layout: str | None) -> CheckoutReport:
    """Write a run as a folder; see `RunExchange.checkout`."""
    return check_out(committer, Path(root), _name_of(committer, layout))


def keep_checked_out(
    committer: Committer, root: PathLike, layout: str | None, patience: Patience
) -> Iterator[CheckoutReport]:
    """Check a run out whenever its log has grown; yield the report of each checkout.

    It ends when the run is completed, failed or dropped.
    """
    check = partial(check_out, committer, Path(root), _name_of(committer, layout))
    return follow_run(committer, check, patience)


def import_from(
    committer: Committer,
    root: PathLike,
    layout: str | None,
    table: PathLike | None,
    *,
    dry_run: bool,
) -> list[ImportedFile]:
    """Take a folder in; see `RunExchange.import_tree`."""
    return _importer(committer, root, layout, table, dry_run=dry_run).once()


def watch_folder(
    committer: Committer,
    root: PathLike,
    layout: str | None,
    table: PathLike | None,
    *,
    quiet_s: float,
    patience: Patience,
) -> Iterator[ImportedFile]:
    """Follow a folder; see `RunExchange.watch_folder`."""
    importer = _importer(committer, root, layout, table, dry_run=False)
    return follow_folder(importer, quiet_s, patience)


def _importer(
    committer: Committer,
    root: PathLike,
    layout: str | None,
    table: PathLike | None,
    *,
    dry_run: bool,
) -> Importer:
    name = _name_of(committer, layout)
    options = {} if table is None else {"table": read_table(Path(table))}
    return Importer(committer, Path(root), name, options=options, dry_run=dry_run)


def _name_of(committer: Committer, layout: str | None) -> str:
    name = committer.log.run.spec.name if layout is None else layout
    if layout is None and name not in LAYOUTS:
        raise InvalidInput(
            "the run's preset has no layout",
            where=committer.log.run_id,
            expected=NAMES,
            hint=Hint("Name one: layout=...", "Name one by `--layout`."),
        )
    return name
