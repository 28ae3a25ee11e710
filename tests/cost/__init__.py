"""Tests of what an operation asks of the store."""
