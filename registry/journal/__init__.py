"""The journal: a save is durable on the trainer's own disk first, and in the registry later.

- `settings`: `Journal`, the folder and its bound.
- `records`: the files of a journal. `folder`: `RunFolder`, the journal of one run; `locks`.
- `states`: the bytes of one entry, in a store of their own.
- `entry_saves`: a save as an entry: checked now, composed again when it is carried.
- `log_scan`: what the log says since a takeover. `expected`: the run with the entries that wait.
- `carrier`: adds the entries to the run, in order. `background`: its thread and its pools.
- `trainer`: `JournaledTrainer`, which acknowledges saves. `bound`: a save waits for room.
  `checkpoint`: a checkpoint that may be only here. `ending`: the end of the program. `pushing`:
  stranded entries into a fork.

`runs` and the commands depend on this room. Specified in docs/spec.md, section 40.
"""
