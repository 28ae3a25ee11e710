"""The fixture of journals that are carried by hand."""

from tests.registry.saving.journal.machines import by_hand

__all__ = ["by_hand"]
