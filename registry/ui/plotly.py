"""Plotly's JavaScript, from its Python package, without importing Python code."""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

#: Plotly puts the styles of its maps into an element of such an id, unless there is one already.
_STYLE = re.compile(r'getElementById\("([0-9a-f]{64})"\)')


def script_path() -> Path:
    """Return the file of the script."""
    spec = find_spec("plotly")
    assert spec is not None  # the extra `ui` has it
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "package_data" / "plotly.min.js"


@cache
def style_ids() -> tuple[str, ...]:
    """Return the ids of elements that keep Plotly from adding styles that no chart here needs.

    The Content-Security-Policy would refuse them, and the browser would report that.
    """
    return tuple(dict.fromkeys(_STYLE.findall(script_path().read_text(encoding="utf-8"))))
