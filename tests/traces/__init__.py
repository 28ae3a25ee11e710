"""Traces of real programs, held against the model of the protocol.

`recording` writes each call of a program to its store into a file, `reading` reads such files, and
`acceptor` replays them through `tests.model`: it accepts what the model allows. `python -m
tests.traces --help` records and checks programs of users.
"""
