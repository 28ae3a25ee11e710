"""Make a checkpoint of others: some tensors averaged, the rest picked.

- `merge`: `merge`, committed like a push; `arguments`: its arguments, checked.
- `merge_plan`: which tensor is averaged and which is picked, from manifests alone.
- `mixing`: reads, averages and stores the chunks, one group at a time; `averaging`: the sums.
- `borrowing`: chunks of other runs that the run may name.

The result depends on the rounding in `averaging`: equal sources must give equal ids everywhere.
`run` depends on this room. Specified in docs/spec.md, section 34.
"""
