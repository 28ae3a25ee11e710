"""The views of some runs as one file: it opens offline, in a mail or from a bucket."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from holdfast.registry.errors import RegistryError
from holdfast.registry.ui.pages import VIEWS
from holdfast.registry.ui.pages.view import Asked, Shown, View, trouble_of
from holdfast.registry.ui.rendering import FOLDER, render, script_path, style_ids
from holdfast.registry.ui.source import Source, now_ms

#: The end of an element within a script, which a browser takes for the end of the script itself.
_END = re.compile(r"</(?=script|style)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Part:
    view: View
    asked: Asked
    anchor: str


def page_of(source: Source, runs: Sequence[str]) -> bytes:
    """Return the page about some runs."""
    for name in runs:
        _check_exists(source, name)
    parts = [
        _Part(view, asked, f"{view.name}-{number}")
        for view in VIEWS
        for number, asked in enumerate(view.parts(source, runs), 1)
    ]
    link = _links(parts)
    shown = [(part, _shown(source, part)) for part in parts]
    style = _read("style.css")
    scripts = [script_path().read_text(encoding="utf-8"), _read("app.js")]
    scripts = [_END.sub(r"<\/", script) for script in scripts]
    context = {
        "title": ", ".join(runs),
        "place": source.registry.url,
        "written_ms": now_ms(),
        "contents": [(part.anchor, one.title, part.view.label) for part, one in shown],
        "sections": [Markup(_section(part, one, link)) for part, one in shown],  # noqa: S704
        "policy": _policy(style, scripts),
        "style": Markup(style),  # noqa: S704 - our own files, and Plotly's
        "scripts": [Markup(script) for script in scripts],  # noqa: S704
        "style_ids": style_ids(),
    }
    return render("page.html", context).encode()


def _check_exists(source: Source, name: str) -> None:
    found = source.runs([name]).failed.get(name)
    if found is not None and not _can_be_shown(found):
        raise found


def _can_be_shown(error: RegistryError) -> bool:
    """Return whether a page about a run with this error shows more than the error."""
    return error.exit_code in (6, 8)  # damaged, or of a newer version


def _shown(source: Source, part: _Part) -> Shown:
    try:
        return part.view.ask(source, part.asked)
    except RegistryError as error:
        title = part.asked.text("run") or part.view.label
        return Shown(title, None, (trouble_of(error),))


def _section(part: _Part, shown: Shown, link: Callable[..., str | None]) -> str:
    context = {
        "layout": "section.html",
        "is_file": True,
        "level": 3,
        "anchor": part.anchor,
        "prefix": f"{part.anchor}-",
        "asked": part.asked,
        "shown": shown,
        "link": link,
    }
    return render("section.html" if shown.body is None else part.view.template, context)


def _links(parts: Sequence[_Part]) -> Callable[..., str | None]:
    """Return the links of a page: to the part with the same path, if it exists."""
    known = {(part.view.name, frozenset(part.asked.path.items())): part for part in parts}
    paths = {view.name: view.path for view in VIEWS}

    def link(view: str, **arguments: object) -> str | None:
        path = paths.get(view, "")
        wanted = {
            name: str(value)
            for name, value in arguments.items()
            if f"{{{name}}}" in path or f"{{{name}:path}}" in path
        }
        found = known.get((view, frozenset(wanted.items())))
        return None if found is None else f"#{found.anchor}"

    return link


def _policy(style: str, scripts: Sequence[str]) -> str:
    """Return a policy that allows these styles and scripts, and no request at all."""
    allowed = " ".join(map(_digest, scripts))
    return (
        f"default-src 'none'; script-src {allowed}; style-src {_digest(style)} {_digest('')}; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _read(name: str) -> str:
    return (FOLDER / "static" / name).read_text(encoding="utf-8")
