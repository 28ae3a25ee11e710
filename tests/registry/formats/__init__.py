"""Formats: what goes in by a file comes out by a file."""
