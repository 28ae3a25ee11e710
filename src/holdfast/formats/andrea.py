"""Features of ANDREA's step files alone: names and shapes of the parameters, from outside.

`holdfast.formats.read`, `write`, `inspect` and `validate` know these files too.
"""

from __future__ import annotations

from holdfast.registry.formats.andrea import load, read_table

__all__ = ["load", "read_table"]
