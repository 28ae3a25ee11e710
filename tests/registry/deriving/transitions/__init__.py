"""Transitions from phase to phase."""
