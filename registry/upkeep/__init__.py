"""Keep a registry in order: collect, verify, repair, repack, and count bytes.

- `gc`: `Collector`, the collector's rules G0 to G5: choose, forget, condemn, mark, delete. Nothing
  else deletes an object. `planning` chooses, `live` finds what the runs need, `run_notes` keeps
  that for the next collection, `sealing` finds the quiet runs, `shards` parts the keys,
  `sorted_rows` and `shelf` hold what grows with the store. `gc_report` has the result.
- `verifying`: `verify` checks structure, and with `deep` every byte. `histories`, `file_names`,
  `placement_checks`, `data_pass`, `head_check` and `signature_check` are its parts.
  `verify_notes` remembers its last result on this machine.
- `signing`: `sign_runs` signs the heads of runs.
- `repairing`: `repair` brings missing and damaged objects back from a mirror.
- `upgrading`: `upgrade` lets programs of this version use newer rules, and refuses older ones;
  `freeze` and `thaw` forbid and allow all writing; `set_drop_rules` sets how long a drop can be
  taken back.
- `repacking`: packs rewritten without the bytes that nobody needs.
- `checkup`: whether a registry can be used at all, for `holdfast doctor`.
- `usage`: `measure` counts the bytes of runs and checkpoints; `freeing` says by which command
  they can be freed.
- `tiering`: `tier` moves packs to another storage class, and asks for archived ones.

`gc` is proven (docs/collection-proof.md): its order of steps does not change without the proof.
Reports and checks may. Specified in docs/spec.md, sections 13, 29 and 30.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.registry.values.first_use import at_first_use

if TYPE_CHECKING:
    from holdfast.registry.store import Progress
    from holdfast.registry.upkeep.checkup import Check, checks, secrets_of
    from holdfast.registry.upkeep.data_pass import check_object
    from holdfast.registry.upkeep.findings import Finding, VerifyReport, Vouched
    from holdfast.registry.upkeep.freeing import Freeing, ways_to_free
    from holdfast.registry.upkeep.gc import collect
    from holdfast.registry.upkeep.gc_report import GcReport, Tally
    from holdfast.registry.upkeep.live import given_up
    from holdfast.registry.upkeep.repairing import Left, RepairReport, repair
    from holdfast.registry.upkeep.signature_check import Keys
    from holdfast.registry.upkeep.signing import SignedRun, sign_runs
    from holdfast.registry.upkeep.tiering import TierReport, tier
    from holdfast.registry.upkeep.upgrading import (
        DropRules,
        FreezeReport,
        UpgradeReport,
        freeze,
        set_drop_rules,
        thaw,
        upgrade,
    )
    from holdfast.registry.upkeep.usage import RunUsage, Usage, measure
    from holdfast.registry.upkeep.verify_notes import (
        Damage,
        LastVerify,
        damaged_keys,
        last_verify,
        note_verify,
    )
    from holdfast.registry.upkeep.verifying import verify
else:
    __getattr__ = at_first_use(__name__)
