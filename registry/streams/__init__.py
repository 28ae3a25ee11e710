"""Histories that go with the checkpoints: segments, appends, reading."""
