"""The tests, a mirror of the packages, and the servers they need."""
