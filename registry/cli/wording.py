"""The words of the command line for messages of the library, whose hints name calls of Python.

People give options and call commands. Each hint that a command can show, and that speaks of a call,
has its words here; tests/registry/cli/test_wording.py finds the hints that lack them.
"""

from __future__ import annotations

import re

_MONITOR = "`--monitor loss:min`, or another METRIC:min or METRIC:max"
_RETRAIN = "Continue its training, which restores its newest checkpoint."
#: What the library says, and what a command says; `X` stands for any value.
_WORDS = {
    "such as Retention(last=3, best=1)": "such as `--last 3`",
    "Pass monitor=Monitor(metric=..., mode=...) to": f"Give {_MONITOR}, to",
    "with monitor=Monitor(metric='loss', mode='min'), or pass one.": f"with {_MONITOR}.",
    "Continue it with reg.run(id), or choose another name.": "Choose another name.",
    "reg.stored(ref) returns it, with `load` and `load_into`.": "`holdfast show` describes it, and "
    "`holdfast pull` writes it to a file.",
    "Reopen it with `run.set_status('running')`, or create": "Create",
    "Call `registry.fork` with": "Call `holdfast run fork` with",
    "Call `run.restore()` to continue there.": _RETRAIN,
    "Call `run.restore()` to continue from its newest checkpoint.": _RETRAIN,
    "Call `run.restore()` first, or create another run.": "Give a later step, or another run.",
    "To continue from an earlier checkpoint, call `run.restore()` first; it supersedes the later "
    "ones. Otherwise use": "Use",
    "To go back, call `run.restore(at=...)` with a checkpoint of that phase.": "Use another run.",
    "Name one: layout=...": "Name one by `--layout`.",
    "`run.evicted()` returns the evicted one: until it is collected it can be loaded, and saved at "
    "another step.": "Name those that shall come back, without this one.",
    "Its ratings stay: `run.pool.history(X)`.": "Its ratings stay in `holdfast log`.",
    ", or pass allow_nonfinite=True": "",
    "Save it with allow_nonfinite=True if you want it anyway.": "Choose another checkpoint.",
    "Guard the call: `if rank == 0: run.save(...)`. Every": "Run it on rank 0 alone. Every",
    "Load fewer components with only=[...].": "Choose components by `--only`.",
    "Name components by only=[...] where that is possible,": "Choose components by `--only`,",
    "Leave it out of `average`, or of `pick`.": "Leave it out of `--average`, or of `--pick`.",
    "Pass allow_lossy_optimizer=True (`--allow-lossy-optimizer`)": "Give `--allow-lossy-optimizer`",
    "Use str(key); in YAML, quote it.": "Quote it.",
    "Convert it: float(x), str(x), x.tolist().": "Write it as text, a number or a list.",
    "can be read by `load_into`": "can be read by a program",
    "boolean, None, date": "boolean, null, date",
    "Save the model with safe_serialization=True.": "Save the model as safetensors.",
    ", or load it in Python: holdfast.open(URL).checkpoint(REF).load().": ".",
    ", or load the checkpoint in Python: holdfast.open(URL).checkpoint(REF).load().": ".",
    "a state of `formats.read` of an opaque file": "a file that was pushed as an opaque one",
    "a file of torch.save(state_dict, path)": "a file of torch.save with the state of a module",
    "Save module.state_dict() instead.": "Save the state of the module instead.",
    "Save it with the state: `holdfast.formats.read(DIR)` shows its form.": "`holdfast push DIR` "
    "stores a folder with it.",
    "Call `run.wait(remote=True)` first:": "Call `holdfast journal carry` first:",
    "run.transition(X) first: it checks and records the change": "a transition first, by the "
    "training program: it checks and records the change",
    "Pass companions={X: state} once; later saves use it too.": "A training program gives it once; "
    "later saves use it too.",
    "To begin it again call `run.restore(at=...)` with": "Its training begins it again from",
}
_PATTERN = re.compile("|".join(re.escape(one).replace("X", ".*?") for one in _WORDS))


def in_commands(text: str) -> str:
    """Return a message with options and commands in place of calls."""
    return _PATTERN.sub(_replaced, text)


def _replaced(found: re.Match[str]) -> str:
    """Return the words for what was found; a pattern with a value is found by its beginning."""
    text = found[0]
    return _WORDS.get(text) or next(
        (words for one, words in _WORDS.items() if text.startswith(one.partition("X")[0])), ""
    )
