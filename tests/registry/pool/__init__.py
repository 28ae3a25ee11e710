"""Pools of opponents."""
