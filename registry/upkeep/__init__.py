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
    from holdfast.registry.store import Progress as Progress
    from holdfast.registry.upkeep.checkup import Check as Check
    from holdfast.registry.upkeep.checkup import checks as checks
    from holdfast.registry.upkeep.checkup import secrets_of as secrets_of
    from holdfast.registry.upkeep.data_pass import check_object as check_object
    from holdfast.registry.upkeep.findings import Finding as Finding
    from holdfast.registry.upkeep.findings import VerifyReport as VerifyReport
    from holdfast.registry.upkeep.findings import Vouched as Vouched
    from holdfast.registry.upkeep.freeing import Freeing as Freeing
    from holdfast.registry.upkeep.freeing import ways_to_free as ways_to_free
    from holdfast.registry.upkeep.gc import collect as collect
    from holdfast.registry.upkeep.gc_report import GcReport as GcReport
    from holdfast.registry.upkeep.gc_report import Tally as Tally
    from holdfast.registry.upkeep.repairing import Left as Left
    from holdfast.registry.upkeep.repairing import RepairReport as RepairReport
    from holdfast.registry.upkeep.repairing import repair as repair
    from holdfast.registry.upkeep.signature_check import Keys as Keys
    from holdfast.registry.upkeep.signing import SignedRun as SignedRun
    from holdfast.registry.upkeep.signing import sign_runs as sign_runs
    from holdfast.registry.upkeep.tiering import TierReport as TierReport
    from holdfast.registry.upkeep.tiering import tier as tier
    from holdfast.registry.upkeep.upgrading import DropRules as DropRules
    from holdfast.registry.upkeep.upgrading import FreezeReport as FreezeReport
    from holdfast.registry.upkeep.upgrading import UpgradeReport as UpgradeReport
    from holdfast.registry.upkeep.upgrading import freeze as freeze
    from holdfast.registry.upkeep.upgrading import set_drop_rules as set_drop_rules
    from holdfast.registry.upkeep.upgrading import thaw as thaw
    from holdfast.registry.upkeep.upgrading import upgrade as upgrade
    from holdfast.registry.upkeep.usage import RunUsage as RunUsage
    from holdfast.registry.upkeep.usage import Usage as Usage
    from holdfast.registry.upkeep.usage import measure as measure
    from holdfast.registry.upkeep.verify_notes import Damage as Damage
    from holdfast.registry.upkeep.verify_notes import LastVerify as LastVerify
    from holdfast.registry.upkeep.verify_notes import damaged_keys as damaged_keys
    from holdfast.registry.upkeep.verify_notes import last_verify as last_verify
    from holdfast.registry.upkeep.verify_notes import note_verify as note_verify
    from holdfast.registry.upkeep.verifying import verify as verify
else:
    __getattr__ = at_first_use(__name__)
