"""An exception in a few lines of text, for the log of a run: type, message, and the last frames."""

from __future__ import annotations

import os
import re
from itertools import islice
from traceback import walk_tb

from holdfast.backends.escape import printable, shortened
from holdfast.backends.secrets import Secrets, may_be_secret

#: Characters of the message and of a line, and frames.
_MESSAGE, _LINE, _FRAMES = 600, 200, 5
_ASSIGNED = re.compile(r"\b(\w{1,64})=([^\s,;&)]+)")


def failure_text(error: BaseException) -> str:
    """Return an exception as text: its type and message, then the innermost frames.

    The text has no source lines and no values of variables. Secrets of the environment, of URLs and
    behind names such as `token=` are hidden. The log keeps it for everybody who can read the run.
    """
    secrets = Secrets(dict(os.environ))
    try:
        said = printable(str(error)[: 4 * _MESSAGE])
    except Exception:  # its class is what makes the text
        said = ""
    said = _ASSIGNED.sub(_hidden, secrets.hide(said))
    name = type(error).__qualname__
    lines = [shortened(f"{name}: {said}" if said else name, _MESSAGE)]
    frames = [(frame.f_code, line) for frame, line in walk_tb(error.__traceback__)]
    for code, line in islice(reversed(frames), _FRAMES):
        place = secrets.hide(printable(f"{code.co_filename}:{line}"))[-_LINE:]
        lines.append(f"at {place} in {shortened(printable(code.co_name), _LINE)}")
    return "\n".join(lines)


def _hidden(found: re.Match[str]) -> str:
    return f"{found[1]}=***" if may_be_secret(found[1]) else found[0]
