"""Circles: a native run goes on in the files of its own system, and comes back."""
