"""Every error that Holdfast raises: `from holdfast.errors import Fenced, NotFound`.

All of them are `RegistryError`s. The tree, with the exit status of the command for each, is at the
top of `holdfast.registry.errors`.
"""

from __future__ import annotations

from holdfast.registry.errors import *  # noqa: F403 - `__all__` there is the list
from holdfast.registry.errors import __all__ as __all__
