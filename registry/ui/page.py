"""Reports: the views of some runs as one file, or as the pages of a folder or a bucket.

A page has its data and its scripts in itself, so it opens offline, in a mail, from the disk or
from a bucket. A browser cannot check the hash of another file that is opened from the disk.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path, PurePosixPath

from markupsafe import Markup

from holdfast.backends import Location, ObjectNotFound, parse
from holdfast.registry.errors import Conflict, InvalidInput, RegistryError, StorageError
from holdfast.registry.formats import new_file
from holdfast.registry.objects import CONFIG
from holdfast.registry.store import Address
from holdfast.registry.ui.pages import VIEWS, checkpoint, diff, lineage, pool, run, side_by_side
from holdfast.registry.ui.pages.view import Asked, Shown, View, trouble_of
from holdfast.registry.ui.rendering import FOLDER, note_html, render, script_path, style_ids
from holdfast.registry.ui.source import Source, now_ms

#: The end of an element within a script, which a browser takes for the end of the script itself.
_END = re.compile(r"</(?=script|style)", re.IGNORECASE)
#: The first page of a site, and what every page of Holdfast has near its beginning.
_INDEX, _MARK = "index.html", b"data-file"
#: Maximum number of runs that a title names.
_NAMED = 4
#: Characters of pictures in one file; each of its runs has the same share.
_PICTURES = 12 * 2**20


@dataclass(frozen=True, slots=True)
class Report:
    """The words of an author about some runs, and what to compare."""

    title: str = ""  # by default the names of the runs
    note: str = ""  # Markdown
    #: Refs of two checkpoints to compare. By default the best and the latest of each run.
    compare: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class _Part:
    view: View
    asked: Asked
    anchor: str
    run: str = ""  # the run that it is about; empty for all
    is_open: bool = False  # whether it can be seen before somebody opens it


@dataclass(frozen=True, slots=True)
class _Site:
    """The pages that a page links to."""

    home: str = ""  # the first page, unless it is the page itself
    pages: Mapping[str, str] = field(default_factory=dict)  # the pages of runs, by name


def page_of(source: Source, runs: Sequence[str], report: Report | None = None) -> bytes:
    """Return one page about some runs."""
    report = report or Report()
    _prepare(source, runs, report)
    shared = _shared(source, runs, report)
    parts = [*shared, *_of_runs(source, runs, report, is_open=len(runs) == 1)]
    return _page(source, parts, runs, report)


def write_site(
    source: Source, runs: Sequence[str], to: Address, report: Report, *, force: bool = False
) -> tuple[int, int]:
    """Write a page of all runs and one of each into a folder or bucket; return files and bytes.

    Raises:
        InvalidInput: A registry is there or above, or the store cannot tell a browser that a file
            is a page.
        Conflict: An `index.html` that no report wrote is there.
    """
    with ExitStack() as stack:
        put = _writer(to, stack, force=force)
        _prepare(source, runs, report)
        site = _Site(pages={name: f"run-{name}.html" for name in runs})
        total = 0
        for name, file in site.pages.items():
            parts = _of_runs(source, [name], report, is_open=True)
            page = _page(source, parts, [name], Report(title=name), _Site(_INDEX, site.pages))
            put(file, page)
            total += len(page)
        # Last, since it links to the others.
        page = _page(source, _shared(source, runs, report), runs, report, site)
        put(_INDEX, page)
    return len(runs) + 1, total + len(page)


def _writer(to: Address, stack: ExitStack, *, force: bool) -> Callable[[str, bytes], None]:
    """Return the function that writes a page, once it is sure that the place may have pages."""
    place = parse(to.url)
    above: object
    write: Callable[[str, bytes], None]
    if place.scheme == "file":
        folder = Path(place.path).resolve()
        above = next((one for one in (folder, *folder.parents) if (one / CONFIG).is_file()), None)
        with suppress(FileNotFoundError):
            _check_index((folder / _INDEX).read_bytes(), place, force=force)
        write = partial(_put, folder)
    elif place.scheme == "s3":
        parents = [
            str(one) for one in (PurePosixPath(place.path), *PurePosixPath(place.path).parents)
        ]
        urls = [place._replace(path="" if one == "." else one).url for one in parents]
        above = next((url for url in urls if _has_registry(replace(to, url=url))), None)
        backend = stack.enter_context(closing(to.open()))
        with suppress(ObjectNotFound):
            _check_index(backend.get(_INDEX), place, force=force)
        write = backend.put
    else:
        raise InvalidInput(
            "pages cannot be written there",
            where=place.url,
            expected="a folder, or s3://BUCKET/PREFIX",
            hint="Write them to a folder, and copy it with a tool that tells the store their type.",
        )
    if above is not None:
        raise InvalidInput(
            "a registry is there, and its folder has no room for other files",
            where=above,
            expected="a place outside of it",
            found=place.url,
        )
    return write


def _has_registry(place: Address) -> bool:
    with closing(place.open()) as backend, suppress(StorageError):
        return bool(backend.stat(CONFIG))
    return False  # or it may not be read: then nobody can say


def _check_index(page: bytes, place: Location, *, force: bool) -> None:
    if _MARK not in page[:200] and not force:
        raise Conflict(
            "an index.html that no report wrote is there",
            where=place.url,
            hint="Choose another place, or replace it by --force.",
        )


def _put(folder: Path, name: str, page: bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with new_file(folder / name, len(page), force=True) as file:
        file.write(page)


def _prepare(source: Source, runs: Sequence[str], report: Report) -> None:
    """Refuse what cannot be shown, and let pages name no path of this machine."""
    if len(runs) > side_by_side.MOST_RUNS:
        raise InvalidInput(
            "too many runs for one report",
            expected=f"at most {side_by_side.MOST_RUNS}",
            found=len(runs),
        )
    place = parse(source.registry.url)
    source.place = Path(place.path).name if place.scheme == "file" else place.url
    for name in runs:
        found = source.runs([name]).failed.get(name)
        if found is not None and found.exit_code not in (6, 8):  # damaged, or of a newer version
            raise found
    for ref in report.compare or ():
        checkpoint.find_checkpoint(source, ref)


def _shared(source: Source, runs: Sequence[str], report: Report) -> Iterator[_Part]:
    for view in (side_by_side.VIEW, diff.VIEW, lineage.VIEW):
        if view is diff.VIEW:
            asked = [] if report.compare is None else [diff.asked_of(*report.compare)]
        else:
            asked = list(view.parts(source, runs))
        for one in asked:
            yield _Part(view, one, view.name, is_open=view is not lineage.VIEW)


def _of_runs(
    source: Source, runs: Sequence[str], report: Report, *, is_open: bool
) -> Iterator[_Part]:
    views = [run.VIEW, pool.VIEW, checkpoint.VIEW]
    views += [diff.VIEW] if report.compare is None else []
    counts: Counter[str] = Counter()
    for name in runs:
        for view in views:
            for asked in view.parts(source, [name]):
                counts[view.name] += 1
                anchor = f"{view.name}-{counts[view.name]}"
                yield _Part(view, asked, anchor, name, is_open and view is run.VIEW)


def _page(
    source: Source,
    parts: Iterable[_Part],
    runs: Sequence[str],
    report: Report,
    site: _Site | None = None,
) -> bytes:
    site, parts = site or _Site(), list(parts)
    link = _links(parts, site)
    room = _PICTURES // max(len(runs), 1)
    sections = [_section(source, part, link, _pictures(source, room)) for part in parts]
    style = _read("style.css")
    has_charts = any('class="plot"' in html for _, html in sections)
    scripts = [script_path().read_text(encoding="utf-8")] if has_charts else []
    scripts = [_END.sub(r"<\/", script) for script in (*scripts, _read("app.js"))]
    named = ", ".join(runs) if len(runs) <= _NAMED else f"{len(runs)} runs of {source.place}"
    shown = zip(parts, sections, strict=True)
    context = {
        "title": report.title or named,
        "note": note_html(report.note),
        "place": source.place,
        "written_ms": now_ms(),
        "home": site.home,
        "pages": {} if site.home else site.pages,
        # The parts of each run, and of all runs, under its name.
        "groups": [
            (name, [(part.anchor, title, Markup(html)) for part, (title, html) in some])  # noqa: S704
            for name, some in groupby(shown, key=lambda one: one[0].run)
        ],
        "policy": _policy(style, scripts),
        "style": Markup(style),  # noqa: S704 - our own files, and Plotly's
        "scripts": [Markup(script) for script in scripts],  # noqa: S704
        "style_ids": style_ids() if has_charts else (),
    }
    return render("page.html", context).encode()


def _pictures(source: Source, room: int) -> Callable[[str], str]:
    """Return the function that gives the `data:` URL of a picture, as long as there is room."""

    def url(name: str) -> str:
        nonlocal room
        kind, data = source.pictures.get(name) or ("", b"")
        found = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
        if not data or len(found) > room:
            return ""
        room -= len(found)
        return found

    return url


def _section(
    source: Source,
    part: _Part,
    link: Callable[..., str | None],
    picture_url: Callable[[str], str],
) -> tuple[str, str]:
    """Return the name of a part in the contents, and its HTML."""
    try:
        shown = part.view.ask(source, part.asked)
    except RegistryError as error:
        shown = Shown(part.asked.text("run") or part.view.label, None, (trouble_of(error),))
    title = re.sub(rf"(?<!\S){re.escape(part.run)}/", "", shown.title) if part.run else shown.title
    label = part.view.label
    if part.view in (diff.VIEW, checkpoint.VIEW):
        title = f"{label}: {title}"
    title = label if title in (part.run, "") else title
    context = {
        "layout": "section.html",
        "is_file": True,
        "editor": None,
        "level": 4 if part.run else 3,
        "anchor": part.anchor,
        "prefix": f"{part.anchor}-",
        "asked": part.asked,
        "shown": shown,
        "title": title,
        "is_open": part.is_open,
        "link": link,
        "picture_url": picture_url,
    }
    return title, render("section.html" if shown.body is None else part.view.template, context)


def _links(parts: Sequence[_Part], site: _Site) -> Callable[..., str | None]:
    """Return the links of a page: to its part with the same path, or to the page of a run."""
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
        if found is not None:
            return f"#{found.anchor}"
        return site.pages.get(wanted.get("run", "")) if view == "run" else None

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
