"""Putting packs together anew: what moves, how it is encoded then, and where it is placed."""
