"""The type of the fixture `refuse`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from holdfast.registry.errors import RegistryError

Refuse = Callable[[Path, str], RegistryError]
