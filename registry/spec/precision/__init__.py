"""Store tensors in fewer bits.

- `policy`: which tensors of a state are narrowed, and to which type; optimizer state keeps its
  precision unless the caller allows it.
- `rounding`: floating-point elements made narrower, to the nearest number, and wider again.

`rounding` decides bytes, so it decides ids: it does not change. A save narrows tensors before it
stores them, a load into a model widens them. Specified in docs/spec.md, section 33.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.registry.values.first_use import at_first_use

if TYPE_CHECKING:
    from holdfast.registry.spec.precision import rounding
    from holdfast.registry.spec.precision.policy import (
        Narrowing,
        Precision,
        PrecisionPolicy,
        narrow_state,
        optimizer_leaves,
        stored_dtypes,
        stored_view,
        widen_all,
    )
else:
    __getattr__ = at_first_use(__name__)
