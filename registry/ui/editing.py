"""The writes of `holdfast ui --edit`: notes, tags and labels of a run, and nothing else.

No act here drops, evicts, prunes, or changes the retention of a run; each commits one of four
actions. The server admits a request by the origin of its page and the page's token.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Mapping

from holdfast.registry.errors import InvalidInput
from holdfast.registry.face import Registry, Run
from holdfast.registry.loading import Checkpoint
from holdfast.registry.values import as_author

#: Maximum bytes of a form: a note as a browser encodes it, three bytes for each, and the rest.
MOST_FORM = 40_000

Form = Mapping[str, str]


class Editor:
    """Writes into a registry what forms of the pages say.

    Attributes:
        author: The name that the person at the keyboard claims; empty until it was given.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._secret = secrets.token_bytes(32)
        self.author = ""
        self._acts: dict[str, Callable[[Run, Form], object]] = {
            "note": lambda run, form: run.history.set_note(
                _text(form), self._checkpoint(run, form)
            ),
            "labels": lambda run, form: run.history.set_labels(form.get("labels", "").split()),
            "tag": self._tag,
            "untag": lambda run, form: run.pins.tags.remove(form.get("name", "")),
        }

    def token(self, run: str) -> str:
        """Return the token of the page of a run."""
        return hmac.new(self._secret, run.encode(), hashlib.sha256).hexdigest()

    def is_token(self, given: str, run: str) -> bool:
        """Return whether a token is that of the page of a run."""
        return hmac.compare_digest(given.encode(), self.token(run).encode())

    def act(self, name: str, form: Form) -> None:
        """Carry out the act of a form on a run."""
        act = form.get("act", "")
        if act == "author":
            with as_author(form.get("author", "")):
                self.author = form["author"].strip()
            return
        if act not in self._acts or not self.author:
            raise InvalidInput(
                "not an edit", where=name, expected=", ".join(self._acts), found=repr(act[:40])
            )
        with as_author(self.author):
            self._acts[act](self._registry.run(name), form)

    def _tag(self, run: Run, form: Form) -> None:
        checkpoint = self._checkpoint(run, form)
        if checkpoint is None:
            raise InvalidInput("a tag without a checkpoint", where=run.id, expected="such as best")
        run.pins.tags.set(form.get("name", ""), checkpoint)

    def _checkpoint(self, run: Run, form: Form) -> Checkpoint | None:
        ref = form.get("checkpoint", "").strip().removeprefix(f"{run.id}/")
        return self._registry.checkpoint(f"{run.id}/{ref}") if ref else None


def _text(form: Form) -> str:
    """Return a text as it was typed: browsers send other ends of lines."""
    return form.get("text", "").replace("\r\n", "\n").strip()
