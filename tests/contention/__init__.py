"""Tests of many processes at once."""
