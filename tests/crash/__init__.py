"""Tests that kill, and then look."""
