"""Compare checkpoints and describe their tensors, in bounded memory.

- `diff`: `diff`, two checkpoints compared by their manifests; `distances`: element by element.
- `branches`: two runs side by side: their fork, settings, steps and first difference.
- `stats`: extremes, means and norms of the tensors of a stored state; `histograms`: how the
  elements of one tensor are distributed.
- `chunkwise`, `elements`: chunks read one after another, and their bytes as numbers.
- `bisecting`: binary search for the first bad checkpoint.

It only reads, through `loading`. `registry`, the command line and `merging` depend on it; no format
does. docs/cli.md describes what users see; docs/spec.md, section 14, how chunks are read.
"""
