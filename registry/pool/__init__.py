"""Pools of opponents: rating, drawing and caching past versions of a model."""
