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
    from holdfast.registry.history.action_texts import first_line, in_words, named, refs_of
    from holdfast.registry.history.aside import set_aside, taken_up
    from holdfast.registry.history.authorship import Authorship, commit_line, new_authorship
    from holdfast.registry.history.condemned_names import CondemnedNames, SweepTable
    from holdfast.registry.history.creating import (
        Birth,
        RunOptions,
        begin,
        birth_of,
        check_labels,
        check_same,
        creation,
        default_ids,
        differing,
        forked,
        forks_of,
        read_birth,
        warn_of_secrets,
    )
    from holdfast.registry.history.epochs import (
        MAX_URL,
        EpochHeader,
        Epochs,
        encode_drops,
        encode_forget,
        encode_freeze,
        encode_upgrade,
    )
    from holdfast.registry.history.holds import (
        check_rewind,
        end_all_holds,
        ended_holds,
        hold_in_words,
        hold_ref,
        own_time_ms,
        store_time_ms,
    )
    from holdfast.registry.history.log import RunLog
    from holdfast.registry.history.log_values import (
        MAX_STEP,
        MERGE,
        check_metrics,
        check_name,
        check_phase,
        check_step,
        decode_or_keep,
        decode_plain,
        encode_plain,
        format_time,
        is_dated,
        is_text,
        join_plain,
        json_ready,
        kept_ref,
        merged_from,
        moment,
        parent_ref,
        phase_segment,
        phase_value,
        plain_digest,
        step_ref,
    )
    from holdfast.registry.history.plain import (
        ValueDiff,
        compare_configs,
        compare_values,
        config_by_path,
        plain_values,
    )
    from holdfast.registry.history.retention import (
        RetentionPlan,
        Verdict,
        choose_tier,
        has_policies,
        may_thin,
        plan_retention,
        protections,
        tier_after_report,
        warn_of_unrated,
    )
    from holdfast.registry.history.seals import (
        Seals,
        Seen,
        TableHeader,
        newer_notes,
        note_sizes,
        read_table,
    )
    from holdfast.registry.history.signatures import (
        CommitSigner,
        Signature,
        sign_commit,
        signatures_of,
    )
    from holdfast.registry.history.signing_keys import SigningKey, trusted_keys
    from holdfast.registry.history.slots import CommitSlot, LogEnd, Look, Races, Slots, list_runs
    from holdfast.registry.history.snapshots import (
        COMPLETE_VERSIONS,
        PARTED_SLOT,
        PARTED_VERSION,
        REPLAY_VERSION,
        Snapshots,
        stale_snapshots,
    )
    from holdfast.registry.history.state_reader import (
        PlacedState,
        StateReader,
        describe_eviction,
        describe_thinning,
        placed_state,
    )
    from holdfast.registry.history.summaries import Made, Summaries
    from holdfast.registry.history.writer_token import (
        TRAIN_ON,
        WriterToken,
        check_not_completed,
        check_not_dropped,
        how_to_undrop,
    )
else:
    __getattr__ = at_first_use(__name__)
