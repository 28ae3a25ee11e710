"""Runs, checkpoints and stream entries as Arrow tables, for pandas, Polars, DuckDB and others.

- `columns`: a column with its type and description; makes tables. The one module that imports
  pyarrow (the extra `pyarrow`), when a table is made.
- `checkpoints`: a row for each checkpoint of a run, a column for each metric.
- `runs`: a row for each run of a registry.
- `entries`: a row for each entry of a stream.

It only reads. docs/notebooks.md documents the columns, and a test compares them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.registry.values.first_use import at_first_use

if TYPE_CHECKING:
    from holdfast.registry.tables.checkpoints import checkpoint_table as checkpoint_table
    from holdfast.registry.tables.entries import entry_table as entry_table
    from holdfast.registry.tables.runs import run_table as run_table
else:
    __getattr__ = at_first_use(__name__)
