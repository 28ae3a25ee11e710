"""Suggest known names for a mistyped one."""

from __future__ import annotations

from collections.abc import Iterable


def near(name: str, known: Iterable[str]) -> str | None:
    """Return "Did you mean ...?" with the known names nearest to `name`, or `None`."""
    from difflib import get_close_matches  # only errors need it

    found = get_close_matches(name, list(known), n=3, cutoff=0.6)
    return f"Did you mean {' or '.join(repr(match) for match in found)}?" if found else None
