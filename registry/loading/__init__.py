"""Stored states and checkpoints as users hold them, and their way back into memory."""
