"""Real processes that push, prune, read and collect at once, and are killed at random."""
