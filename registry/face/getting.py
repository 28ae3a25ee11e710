"""How to get a stored state elsewhere, to copy: the command for a file, and lines of Python."""

from __future__ import annotations

import shlex

from holdfast.registry.loading import OPAQUE, Checkpoint, Stored, is_tree
from holdfast.registry.pytree import leaf_kinds


def pull_command(url: str, stored: Stored, *, is_whole: bool = True) -> str:
    """Return a command that writes a file which can hold the state; its manifest may be damaged."""
    target = stored.ref.replace("/", "-") + (_extension(stored) if is_whole else "")
    lines = ["holdfast", "pull", stored.ref], ["--to", target], ["-r", url]
    return " \\\n  ".join(map(shlex.join, lines))


def _extension(stored: Stored) -> str:
    parts = stored.manifest.components
    if is_tree(parts) or set(parts) == {OPAQUE}:
        return ""
    kinds = {kind for part in parts.values() for kind in leaf_kinds(part.skeleton).values()}
    return ".zarr" if "numpy" in kinds else ".pt"  # arrays of NumPy need code in a `.pt`


def python_lines(url: str, stored: Stored) -> str:
    """Return lines of Python that load the state."""
    call = "checkpoint" if isinstance(stored, Checkpoint) else "stored"
    opened = f"reg = holdfast.open({url!a})"
    return f"import holdfast\n\n{opened}\nstate = reg.{call}({stored.ref!a}).load()"
