"""The saving side of a run: what a save says, what it commits, and who may."""
