"""Keeping a registry in order: collecting, moving, checking and mending what lies in it."""
