"""Find the peers of the benchmarks that are installed here."""

from __future__ import annotations

import shutil
from importlib.util import find_spec


def is_here(contender: str, *modules: str, program: str = "") -> bool:
    """Return whether a contender can take part; print one line if it cannot.

    Args:
        contender: Its name.
        *modules: The packages that it needs, which the extra `bench` installs.
        program: The program that it needs, if it needs one.
    """
    missing = [name for name in modules if find_spec(name) is None]
    if program and shutil.which(program) is None:
        missing.append(program)
    if missing:
        print(f"{contender} is left out: {', '.join(missing)} is not installed", flush=True)
    return not missing
