"""Pages that show a registry: `holdfast ui` serves them, `holdfast page` writes them to files.

Only `editing` writes to a registry: notes, tags and labels, with `ui --edit`. The pages need the
extra `ui` (Starlette, uvicorn, Jinja2, markdown-it and Plotly's JavaScript); only `server`,
`serving`, `rendering` and `page` import these libraries.

| part | what it does |
|---|---|
| `source` | the open registry: keeps runs open, reads several at once, counts requests |
| `samples` | pictures and texts in streams: what is a picture, and those that were shown |
| `pages/` | one module for each view: its query, path and template |
| `charts` | charts and coloured grids as data, each with a table of the same values |
| `rendering` | templates, and values as text |
| `serving` | the bounded HTTP server, which `holdfast hub` uses too |
| `server` | the pages on it, and the guard that checks their visitors |
| `editing` | the acts of the forms of the pages |
| `page` | reports: the same views as one file, or as files of a folder or bucket |

To add a view:

1. Write its query in `pages/NAME.py`, a function of a `Source` and of plain arguments that returns
   a frozen dataclass. It reads only what its view shows, and its tests state the requests.
2. Write `templates/NAME.html`. It extends `frame.html` and fills the block `body`; it finds the
   answer of its query as `shown.body`. Charts, tables and refs have macros in `parts.html`. There
   are no inline scripts and no `style` attributes: the Content-Security-Policy refuses them.
3. Add a `VIEW` to `pages/NAME.py`: its name, path, template, and `ask`, which reads the
   arguments out of an `Asked`, calls the query, and returns a `Shown`. A view that belongs into a
   report has `parts`, which names its arguments for the runs of the report, and is listed in
   `page`.
4. Add `NAME.VIEW` to `VIEWS` in `pages/__init__.py`. Routes, navigation and links follow from it:
   `link("NAME", run=..., ...)` in a template is its URL, in a page its anchor, and nothing where
   the view is absent.
5. Add it to the tests in `tests/registry/ui/test_browser.py`: they open every view on every kind of
   registry and let no request, no error and no violation of the policy pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.registry.ui.editing import Editor
    from holdfast.registry.ui.page import Report, page_of, write_site
    from holdfast.registry.ui.pages.runs import newest_first
    from holdfast.registry.ui.server import Server
    from holdfast.registry.ui.serving import HOST, Listener, is_same, loopback_hosts
    from holdfast.registry.ui.source import Source
else:
    from holdfast.registry.values.first_use import at_first_use

    __getattr__ = at_first_use(__name__)
