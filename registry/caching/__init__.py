"""Verified chunks on a local disk, shared by processes."""
