"""Releases: inference-only states under semantic versions, each with a model card, immutable."""

from __future__ import annotations

from registry.committer import Committer
from registry.log import RunLog
from registry.state import Pin
from registry.store import Store
from registry.stored import Stored


class Release(Stored):
    """A published state."""

    def __init__(self, store: Store, log: RunLog, pin: Pin) -> None:
        super().__init__(store, log, pin.manifest, pin.ref)
        self._pin = pin

    @property
    def version(self) -> str:
        """Its semantic version."""
        return self._pin.name

    @property
    def metrics(self) -> dict[str, float]:
        """The values that describe it."""
        return dict(self._pin.metrics)


class Releases:
    """The releases of a run: publishing, finding, rolling back."""

    def __init__(self, committer: Committer) -> None:
        self._committer = committer

    def get(self, version: str) -> Release:
        """Return a release."""
        raise NotImplementedError

    def latest(self) -> Release:
        """Return the release that `releases/latest` names."""
        raise NotImplementedError
