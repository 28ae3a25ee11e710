"""`python -m holdfast.registry.cli` is `holdfast`."""

from holdfast.registry.cli import main

main()
