"""Keep a registry in order: collect, verify, repair, repack, and count bytes.

- `gc`: `Collector`, the collector's rules G1 to G5: choose, condemn, mark, delete. Nothing else
  deletes an object. `gc_plan` finds the unneeded objects, `live` what the runs need, `gc_report`
  has the result.
- `verify`: `verify` checks structure, and with `deep` every byte. `histories`, `file_names`,
  `placement_checks`, `object_checks`, `data_pass`, `decoding` and `head_check` are its parts.
  `last_verify` remembers its last result on this machine.
- `repair`: `repair` brings missing and damaged objects back from a mirror.
- `repacking`: packs rewritten without the bytes that nobody needs.
- `checkup`: whether a registry can be used at all, for `holdfast doctor`.
- `usage`: `measure` counts the bytes of runs and checkpoints.

`gc` is proven (docs/collection.md): its order of steps does not change without the proof. Reports
and checks may. `registry` and the command line depend on this room. Specified in docs/spec.md,
sections 13, 29 and 30.
"""
