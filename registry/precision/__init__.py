"""Store tensors in fewer bits.

- `policy`: which tensors of a state are narrowed, and to which type.
- `rounding`: floating-point elements made narrower, to the nearest number, and wider again.
- `optimizers`: finds optimizer state, which keeps its precision unless the caller allows it.

`rounding` decides bytes, so it decides ids: it does not change. `training` narrows before a save,
`loading` and `following` widen. Specified in docs/spec.md, section 33.
"""
