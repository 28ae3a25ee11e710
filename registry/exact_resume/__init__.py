"""What an exact resume needs beside the state, and the proof that a training resumes exactly.

- `rng`: the random number generators of a process, as a part of a state. Users import it as
  `holdfast.rng`.
- `batches`: a loader with its position and the generators, for a loop that resumes exactly.
- `resume_check`: compares a training that goes straight with one that resumes.

Specified in docs/spec.md, section 37.
"""
