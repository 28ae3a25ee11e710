"""Files that real programs of other systems wrote, where this machine has them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

#: Environment variable: the folder with the files; by default one beside the checkout.
VARIABLE = "HOLDFAST_FOREIGN_FILES"
_DEFAULT = Path(__file__).resolve().parents[3] / "shared" / "golden"
FOLDER = Path(os.environ.get(VARIABLE, _DEFAULT))


def foreign(name: str) -> Path:
    """Return a file or folder; skip the test where it is missing."""
    path = FOLDER / name
    if not path.exists():
        pytest.skip(f"no files of other programs here: {path.name} ({VARIABLE} names their folder)")
    return path


def expected_arrays(path: Path) -> dict[str, Any]:
    """Return the arrays that a file holds, by path."""
    with np.load(path.with_name(f"{path.name}.expected.npz"), allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def expected(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a file holds: its description, and its arrays by path."""
    text = path.with_name(f"{path.name}.expected.json").read_text()
    return json.loads(text), expected_arrays(path)


class Calls:
    """Its pickle calls a function.

    Args:
        function: The function, or a class.
        *arguments: What it is called with.
    """

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call
