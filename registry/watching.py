"""Following a run: each checkpoint once for each group of followers."""

from __future__ import annotations
