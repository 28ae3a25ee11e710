"""Names that keep stored states: gates, artifacts, tags, releases; forks and evictions by hand."""
