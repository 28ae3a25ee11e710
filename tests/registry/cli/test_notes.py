"""`note` and `run set --label`."""

from __future__ import annotations

from pathlib import Path

from tests.registry.cli.calling import Call, CallJson


def test_notes_and_labels(call: Call, call_json: CallJson, tmp_path: Path) -> None:
    assert call("note", "demo", "it wins\nby far").stdout == "noted: demo\n"
    file = tmp_path / "note.txt"
    file.write_text("the \x1b[2Jone", encoding="utf-8")
    best = call_json("note", "demo/best", "--file", file)
    assert (best["ref"], best["text"]) == (call_json("show", "demo/best")["ref"], "the \x1b[2Jone")
    assert [one["text"] for one in call_json("run", "show", "demo")["notes"]] == [
        "it wins\nby far",
        "the \x1b[2Jone",
    ]
    shown = call("run", "show", "demo").stdout
    assert "demo: it wins ..." in shown
    assert r"the \x1b[2Jone" in shown
    assert "note on the run: it wins ..." in call("log", "demo").stdout
    assert "no note: demo" in call("note", "demo", "--rm").stdout
    assert len(call_json("run", "show", "demo")["notes"]) == 1
    call("note", "demo", "--file", tmp_path / "none", status=3)
    call("note", "demo", "x" * 10_001, status=3)
    call("note", "demo", status=2)
    call("note", "demo", "x", "--rm", status=2)
    said = call("run", "set", "demo", "--label", "b", "--label", "a").stdout
    assert said == "demo: labels a, b\n"
    assert call("run", "set", "demo", "--label", "").stdout == "demo: labels none\n"
    call("run", "set", "demo", "--label", "a", "--status", "running", status=2)
