"""The fixture of journals that are carried by hand."""

from tests.registry.journal.machines import by_hand

__all__ = ["by_hand"]
