"""Storing tensors in fewer bits: which ones, and how they are rounded."""
