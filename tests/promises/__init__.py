"""One test for each promise of the README."""
