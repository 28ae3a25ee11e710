"""The history of a run without what chance gave it."""

from __future__ import annotations

from pathlib import Path

import holdfast


def history(folder: Path, run_id: str) -> list[dict]:
    """Return the commits of a run, without the random ids that writers give themselves."""
    with holdfast.open(folder) as reg:
        commits = [commit.to_json() for commit in reg.run(run_id).history.commits()]
    tokens: dict[str, int] = {}
    for commit in commits:
        commit["write"] = commit["prev"] = ""
        for action in commit["actions"]:
            if "token" in action:
                action["token"] = tokens.setdefault(action["token"], len(tokens))
            if "parent" in action:  # named by the link of its commit, into which those ids go
                action["parent"]["head"] = ""
    return commits
