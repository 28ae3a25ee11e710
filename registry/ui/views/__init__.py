"""Every view, in the order of the navigation. A view is added by its line here."""

from __future__ import annotations

from holdfast.registry.ui.views import run, runs
from holdfast.registry.ui.views.view import View

VIEWS: tuple[View, ...] = (
    runs.VIEW,
    run.VIEW,
)
