"""Phase transitions carried out: checked, executed and recorded as one commit."""

from __future__ import annotations
