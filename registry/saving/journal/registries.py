"""The registries that runs of a journal are in, known while they cannot be reached."""

from __future__ import annotations

import logging
import os
from contextlib import suppress

from holdfast.backends.local.backend import LocalBackend
from holdfast.registry.errors import IntegrityError, ObjectNotFound, StorageError
from holdfast.registry.objects import join_lines, split_lines
from holdfast.registry.saving.journal.settings import Journal
from holdfast.registry.store import Address, RegistryConfig, Store
from holdfast.registry.store.heads import place_name

# Paths are strings here, as in the store of folders.
# ruff: noqa: PTH118

_LOGGER = logging.getLogger("holdfast")
#: No name of a registry begins with a dot.
_KNOWN = ".registries"


class PrivateFolder(LocalBackend):
    """A folder that only this user can read."""

    file_mode, folder_mode = 0o600, 0o700


def keep_registry(journal: Journal, store: Store) -> None:
    """Keep the configuration of a registry."""
    place, config = place_name(Address.location(store.backend)), store.config.encode()
    _known(journal).put(place, join_lines([config]))


def _known(journal: Journal) -> PrivateFolder:
    return PrivateFolder(os.path.join(journal.path, _KNOWN))


def known_registry(journal: Journal | None, place: str) -> RegistryConfig | None:
    """Return the configuration of the registry at a place, if a run of this journal is in it."""
    if journal is None:
        return None
    with suppress(ObjectNotFound, IntegrityError, StorageError):
        line, *_ = split_lines(_known(journal).get(place), where=place)
        config = RegistryConfig.decode(line, where=place)
        _LOGGER.warning(
            "the registry cannot be reached: opened from the journal %s, whose saves are carried "
            "when it is back",
            journal.path,
        )
        return config
    return None
