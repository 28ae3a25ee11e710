"""Phase transitions carried out: checked, executed and recorded as one commit."""

from __future__ import annotations

from holdfast.registry.transitions.execution import Transitioned, TransitionOptions, transition
from holdfast.registry.transitions.rows import Applied, Initialise

__all__ = ["Applied", "Initialise", "TransitionOptions", "Transitioned", "transition"]
