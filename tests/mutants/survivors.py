"""Changes that survive since no test can notice them, each with the reason."""

from __future__ import annotations

SURVIVORS = {
    "registry.history.slots:Slots.put: pause(0.02, attempt) -> pass": (
        "It only waits before the next attempt, which finds the same."
    ),
}
