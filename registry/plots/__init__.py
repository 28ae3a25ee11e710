"""The metrics and streams of a run as a figure of Plotly, with gates, bests and phases marked.

- `curves`: which curves there are, their points, and what is marked: plain values.
- `figure`: the figure. The one module that imports plotly (the extra `ui`), when one is made.

It only reads. `runs` depends on it, and `ui` takes the numbers of streams from `curves`.
docs/notebooks.md describes what users see.
"""
