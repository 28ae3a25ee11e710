"""IPython and Jupyter: `%load_ext holdfast.ipython` completes refs and paths within strings.

docs/notebooks.md describes it.
"""

from __future__ import annotations

from holdfast.registry.adapters.ipython import (
    load_ipython_extension,
    unload_ipython_extension,
)

__all__ = ["load_ipython_extension", "unload_ipython_extension"]
