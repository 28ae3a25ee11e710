"""Tests that damage what is stored, and then look."""
