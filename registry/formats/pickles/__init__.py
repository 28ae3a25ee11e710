"""Read a pickle without unpickling it: an interpreter that knows plain values and a closed list.

Python's own unpickler looks names up and calls them, so a pickle is a program. This interpreter
imports nothing and looks nothing up. It follows the opcodes that build plain values; a name is
looked up in the table of its caller, which says for each name how its value is made. Any other name
and any other opcode is refused. Protocols 2 to 5 are read; no program of these formats writes an
older one. The opcodes are those of Python's `pickletools`.

- `machine`: the stack, the memo and the names of one reading; dicts and sets, whose keys must be
  safe to hash.
- `opcodes`: the effect of each opcode, and the reading from bytes to a value.
"""

from __future__ import annotations

from holdfast.registry.formats.pickles.machine import Keys, Known, Names
from holdfast.registry.formats.pickles.opcodes import read_pickle
