"""A registry, and a run of it, as users hold them. These are public: names, arguments, errors stay.

- `factory`: `init` and `open`. `registry`: `Registry`; `registry_handle`: its inner value. `refs`:
  from `RUN/latest` or a part of an id to a stored state. `attesting`:
  which checkpoint's bytes a file has. `syncing`: copies the missing history of
  runs from one registry to another, fast-forward only, and repairs one from a mirror; `compared`:
  which runs were equal then. `caring`: the work of a night, step by step. `metrics`: figures of
  this process for Prometheus.
- `run`: `Run`, the handle that trains; `resuming`: how its training comes back, and how a `with`
  block ends. Its facets: `phases`, `exchange`, `follow`, `history`; `pins`, `releases`, `pool`,
  `streams` and `retention` are those of `curation`.
- `options`: options that several calls share, each list written once. `getting`: how to load a
  state elsewhere, to copy.
- `rng`: random number generators as a part of a state; `resume_check`: compares a training that
  goes straight with one that resumes.

The face does nothing itself: each method calls the room that does, and imports it then if only some
calls need it. Specified in docs/spec.md, sections 11, 21, 23 and 37.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.registry.values.first_use import at_first_use

if TYPE_CHECKING:
    from holdfast.registry.face.attesting import Attestation
    from holdfast.registry.face.batches import lost_within_an_epoch, own_generators
    from holdfast.registry.face.caring import CareReport, care, said
    from holdfast.registry.face.factory import init, open_on
    from holdfast.registry.face.factory import open as open  # noqa: A004
    from holdfast.registry.face.getting import pull_command, python_lines
    from holdfast.registry.face.metrics import Export, exposition
    from holdfast.registry.face.options import StateOptions, shows_options
    from holdfast.registry.face.refs import find_evicted, find_in_run, is_digest, refs_of
    from holdfast.registry.face.registry import Registry
    from holdfast.registry.face.resume_check import ResumeReport, verify_segments
    from holdfast.registry.face.run import Run
    from holdfast.registry.face.syncing import repair, sync
else:
    __getattr__ = at_first_use(__name__)
