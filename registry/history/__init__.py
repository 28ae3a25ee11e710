"""The history of a run: its log, the actions in it, and their replay.

- `log`: `RunLog` opens a run, reads its slots and appends one. `slots` has the files,
  and checks that the log is still the one that was read; `snapshots` shortens the reading.
  `aside` keeps a log that was read as bytes; `authorship`: who writes a commit.
- `actions`: all parts of commits; `replay`: `RunManifest`, the run after all its commits.
- `signatures`: who vouches for a run up to which commit; `signing_keys`: their keys.
- `seals`: which sealed runs may have changed, by three listings for all of them.
- `creating`: the first commit; `retention`: which checkpoints are kept, and why.
- `action_texts`: actions in words; `log_values`: values in the log, and the names of phases and
  steps.
- `holds`: what until a date nobody may evict, drop or supersede.
- `writer_token`: which handle may save. `epochs`: the log of sweeps that all runs share,
  `condemned_names`: the names in it.
- `state_reader`: where a stored state is (`PlacedState`), and reading it from there.

The fields of actions and the rules of replay are on every store: they change only with a new
version. `Slots.put` is the only place where a commit is made. Specified in docs/spec.md, sections
8 to 10, 12 and 22.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.registry.values.first_use import at_first_use

if TYPE_CHECKING:
    from holdfast.registry.history.action_texts import first_line as first_line
    from holdfast.registry.history.action_texts import in_words as in_words
    from holdfast.registry.history.action_texts import named as named
    from holdfast.registry.history.action_texts import refs_of as refs_of
    from holdfast.registry.history.aside import set_aside as set_aside
    from holdfast.registry.history.aside import taken_up as taken_up
    from holdfast.registry.history.authorship import Authorship as Authorship
    from holdfast.registry.history.authorship import commit_line as commit_line
    from holdfast.registry.history.authorship import new_authorship as new_authorship
    from holdfast.registry.history.condemned_names import CondemnedNames as CondemnedNames
    from holdfast.registry.history.condemned_names import SweepTable as SweepTable
    from holdfast.registry.history.creating import Birth as Birth
    from holdfast.registry.history.creating import RunOptions as RunOptions
    from holdfast.registry.history.creating import begin as begin
    from holdfast.registry.history.creating import birth_of as birth_of
    from holdfast.registry.history.creating import check_labels as check_labels
    from holdfast.registry.history.creating import check_same as check_same
    from holdfast.registry.history.creating import creation as creation
    from holdfast.registry.history.creating import default_ids as default_ids
    from holdfast.registry.history.creating import differing as differing
    from holdfast.registry.history.creating import forked as forked
    from holdfast.registry.history.creating import forks_of as forks_of
    from holdfast.registry.history.creating import read_birth as read_birth
    from holdfast.registry.history.creating import warn_of_secrets as warn_of_secrets
    from holdfast.registry.history.epochs import DROP_DELAY_S as DROP_DELAY_S
    from holdfast.registry.history.epochs import MAX_URL as MAX_URL
    from holdfast.registry.history.epochs import EpochHeader as EpochHeader
    from holdfast.registry.history.epochs import Epochs as Epochs
    from holdfast.registry.history.epochs import encode_drops as encode_drops
    from holdfast.registry.history.epochs import encode_forget as encode_forget
    from holdfast.registry.history.epochs import encode_freeze as encode_freeze
    from holdfast.registry.history.epochs import encode_upgrade as encode_upgrade
    from holdfast.registry.history.holds import check_rewind as check_rewind
    from holdfast.registry.history.holds import end_all_holds as end_all_holds
    from holdfast.registry.history.holds import ended_holds as ended_holds
    from holdfast.registry.history.holds import hold_in_words as hold_in_words
    from holdfast.registry.history.holds import hold_ref as hold_ref
    from holdfast.registry.history.holds import own_time_ms as own_time_ms
    from holdfast.registry.history.holds import store_time_ms as store_time_ms
    from holdfast.registry.history.log import RunLog as RunLog
    from holdfast.registry.history.log_values import MAX_STEP as MAX_STEP
    from holdfast.registry.history.log_values import MERGE as MERGE
    from holdfast.registry.history.log_values import check_metrics as check_metrics
    from holdfast.registry.history.log_values import check_name as check_name
    from holdfast.registry.history.log_values import check_phase as check_phase
    from holdfast.registry.history.log_values import check_step as check_step
    from holdfast.registry.history.log_values import decode_or_keep as decode_or_keep
    from holdfast.registry.history.log_values import decode_plain as decode_plain
    from holdfast.registry.history.log_values import encode_plain as encode_plain
    from holdfast.registry.history.log_values import format_time as format_time
    from holdfast.registry.history.log_values import is_dated as is_dated
    from holdfast.registry.history.log_values import is_text as is_text
    from holdfast.registry.history.log_values import join_plain as join_plain
    from holdfast.registry.history.log_values import json_ready as json_ready
    from holdfast.registry.history.log_values import kept_ref as kept_ref
    from holdfast.registry.history.log_values import merged_from as merged_from
    from holdfast.registry.history.log_values import moment as moment
    from holdfast.registry.history.log_values import parent_ref as parent_ref
    from holdfast.registry.history.log_values import phase_segment as phase_segment
    from holdfast.registry.history.log_values import phase_value as phase_value
    from holdfast.registry.history.log_values import plain_digest as plain_digest
    from holdfast.registry.history.log_values import step_ref as step_ref
    from holdfast.registry.history.plain import ValueDiff as ValueDiff
    from holdfast.registry.history.plain import compare_configs as compare_configs
    from holdfast.registry.history.plain import compare_values as compare_values
    from holdfast.registry.history.plain import config_by_path as config_by_path
    from holdfast.registry.history.plain import plain_values as plain_values
    from holdfast.registry.history.retention import RetentionPlan as RetentionPlan
    from holdfast.registry.history.retention import Verdict as Verdict
    from holdfast.registry.history.retention import choose_tier as choose_tier
    from holdfast.registry.history.retention import has_policies as has_policies
    from holdfast.registry.history.retention import may_thin as may_thin
    from holdfast.registry.history.retention import plan_retention as plan_retention
    from holdfast.registry.history.retention import protections as protections
    from holdfast.registry.history.retention import tier_after_report as tier_after_report
    from holdfast.registry.history.retention import warn_of_unrated as warn_of_unrated
    from holdfast.registry.history.seals import Seals as Seals
    from holdfast.registry.history.seals import Seen as Seen
    from holdfast.registry.history.seals import TableHeader as TableHeader
    from holdfast.registry.history.seals import newer_notes as newer_notes
    from holdfast.registry.history.seals import note_sizes as note_sizes
    from holdfast.registry.history.seals import read_table as read_table
    from holdfast.registry.history.signatures import CommitSigner as CommitSigner
    from holdfast.registry.history.signatures import Signature as Signature
    from holdfast.registry.history.signatures import sign_commit as sign_commit
    from holdfast.registry.history.signatures import signatures_of as signatures_of
    from holdfast.registry.history.signing_keys import SigningKey as SigningKey
    from holdfast.registry.history.signing_keys import trusted_keys as trusted_keys
    from holdfast.registry.history.slots import CommitSlot as CommitSlot
    from holdfast.registry.history.slots import LogEnd as LogEnd
    from holdfast.registry.history.slots import Look as Look
    from holdfast.registry.history.slots import Races as Races
    from holdfast.registry.history.slots import Slots as Slots
    from holdfast.registry.history.slots import list_runs as list_runs
    from holdfast.registry.history.snapshots import COMPLETE_VERSIONS as COMPLETE_VERSIONS
    from holdfast.registry.history.snapshots import PARTED_SLOT as PARTED_SLOT
    from holdfast.registry.history.snapshots import PARTED_VERSION as PARTED_VERSION
    from holdfast.registry.history.snapshots import REPLAY_VERSION as REPLAY_VERSION
    from holdfast.registry.history.snapshots import Snapshots as Snapshots
    from holdfast.registry.history.snapshots import stale_snapshots as stale_snapshots
    from holdfast.registry.history.state_reader import PlacedState as PlacedState
    from holdfast.registry.history.state_reader import StateReader as StateReader
    from holdfast.registry.history.state_reader import describe_eviction as describe_eviction
    from holdfast.registry.history.state_reader import describe_thinning as describe_thinning
    from holdfast.registry.history.state_reader import placed_state as placed_state
    from holdfast.registry.history.summaries import Made as Made
    from holdfast.registry.history.summaries import Summaries as Summaries
    from holdfast.registry.history.writer_token import TRAIN_ON as TRAIN_ON
    from holdfast.registry.history.writer_token import WriterToken as WriterToken
    from holdfast.registry.history.writer_token import check_not_completed as check_not_completed
    from holdfast.registry.history.writer_token import check_not_dropped as check_not_dropped
    from holdfast.registry.history.writer_token import how_to_undrop as how_to_undrop
else:
    __getattr__ = at_first_use(__name__)
