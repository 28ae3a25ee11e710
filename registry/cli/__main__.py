"""`python -m registry.cli` is `holdfast`."""

from registry.cli import main

main()
