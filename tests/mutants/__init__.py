"""Small changes to the library that some test must notice: drawn by a seed, tried one by one.

`mutations` makes them, `reach` finds the tests that run the changed statement, `trial` runs those
tests with the change in a process of its own. `survivors` explains the changes that nobody can
notice. `python -m tests.mutants --help` is the command.
"""
