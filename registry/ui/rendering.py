"""Templates, values as text, and Plotly's JavaScript out of its Python package."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup

from holdfast.backends.escape import printable
from holdfast.registry.curation import STATUS_REASONS
from holdfast.registry.history import format_time, is_dated, json_ready, moment, step_ref
from holdfast.registry.ui.charts import Moment
from holdfast.registry.ui.pages import fields
from holdfast.registry.values import amounts

FOLDER = Path(__file__).parent
#: Box of a sparkline.
_WIDTH, _HEIGHT = 96, 22

#: Returns the address of a view with these arguments; `None` if the page has no such part.
Link = Callable[..., str | None]
#: Plotly puts the styles of its maps into an element of such an id, unless there is one already.
_STYLE = re.compile(r'getElementById\("([0-9a-f]{64})"\)')


def render(template: str, context: Mapping[str, Any]) -> str:
    """Return a template as HTML; every value is escaped."""
    return _environment().get_template(template).render(context)


@cache
def _environment() -> Environment:
    found = Environment(
        loader=FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    found.filters |= {
        "age": age,
        "ago": ago,
        "breakable": breakable,
        "count": counted,
        "duration": amounts.duration,
        "field_text": fields.text_of,
        "heading": fields.heading,
        "marked": marked,
        "number": number,
        "pretty": pretty,
        "share": amounts.share,
        "size": amounts.size,
        "spark_points": spark_points,
        "step_ref": step_ref,
        "with_code": with_code,
        "when": when,
    }
    found.globals |= {"metric_kinds": fields.METRIC_KINDS, "status_reasons": STATUS_REASONS}
    found.tests |= {"moment": lambda value: isinstance(value, Moment)}
    return found


def _shown(value: Any) -> Any:
    """Return a value for a page; invisible and direction characters of texts become escapes."""
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return printable(value, spare="\n\t")
    return value


def number(value: float) -> str:
    """Return a number: whole ones with separators, others with at most six digits.

    NaN and infinity are marked.
    """
    if isinstance(value, int) or math.isfinite(value):
        return f"{value:,}" if isinstance(value, int) else amounts.number(value)
    return Markup('<span class="nonfinite">{}</span>').format(amounts.number(value))


def marked(text: str) -> str:
    """Return the text of a value; NaN and infinity are marked."""
    return number(float(text)) if text in ("nan", "inf", "-inf") else text


def counted(things: Any, noun: str, plural: str = "") -> str:
    """Return a count, or the length of a collection, with its noun."""
    count = things if isinstance(things, int) else len(things)
    return amounts.counted(count, noun, plural)


def breakable(name: str) -> Markup:
    """Return a name in which lines break after `_`, `/` and `.` first."""
    return Markup("<wbr>").join(re.split(r"(?<=[_/.])(?=.)", printable(name)))


def age(time_ms: int) -> Markup:
    """Return the age of a time in the log, with the time itself for hovering."""
    return Markup('<time datetime="{}" title="{}">{}</time>').format(
        _iso(time_ms), format_time(time_ms), amounts.age(time_ms)
    )


def ago(time_ms: int) -> Markup:
    """Return the age of a time in the log, for a column of ages."""
    return age(time_ms) + (" ago" if amounts.age(time_ms)[0].isdigit() else "")


def when(time_ms: int) -> Markup:
    """Return a time of the log: UTC, to the second."""
    return Markup('<time datetime="{}">{}</time>').format(_iso(time_ms), format_time(time_ms))


def _iso(time_ms: int) -> str:
    return f"{moment(time_ms):%Y-%m-%dT%H:%M:%SZ}" if is_dated(time_ms) else ""


def pretty(value: object) -> str:
    """Return a plain value, such as a configuration, as indented JSON."""
    return json.dumps(json_ready(value), indent=2, ensure_ascii=False, default=str)


def with_code(text: str) -> Markup:
    """Return a sentence; text between backticks is marked as code."""
    parts = re.split(r"`([^`]+)`", printable(text, spare="\n\t"))
    return Markup().join(
        Markup("<code>{}</code>").format(part) if place % 2 else part
        for place, part in enumerate(parts)
    )


def note_html(text: str) -> Markup:
    """Return Markdown as HTML: no HTML of its own, links by http and https only, no pictures.

    A picture becomes a link; its headings are those of a part of a page.
    """
    reader = MarkdownIt("js-default", {"html": False})
    reader.validateLink = lambda url: url.lower().startswith(("http://", "https://"))  # type: ignore[method-assign]
    picture = Markup('<a href="{}">{}</a>')
    reader.add_render_rule(
        "image",
        # As plain text: joined with it, what came before would be escaped.
        lambda _, some, at, *__: str(
            picture.format(some[at].attrs["src"], some[at].content or "picture")
        ),
    )
    tokens = reader.parse(text)
    for token in tokens:
        if token.type.startswith("heading_"):
            token.tag = f"h{min(int(token.tag[1:]) + 1, 6)}"
    # At the end, since Markdown has entities for characters, such as `&#x202e;`.
    made = printable(reader.renderer.render(tokens, reader.options, {}), spare="\n\t")
    return Markup(made)  # noqa: S704


def spark_points(values: Sequence[float]) -> str:
    """Return the points of a polyline through values, in the box of a sparkline."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    across, up = _WIDTH / max(len(values) - 1, 1), _HEIGHT / ((high - low) or 1.0)
    return " ".join(
        f"{index * across:.1f},{_HEIGHT - (value - low) * up:.1f}"
        for index, value in enumerate(values)
        if math.isfinite(value)
    )


def script_path() -> Path:
    """Return the file of the script."""
    spec = find_spec("plotly")
    assert spec is not None  # the extra `ui` has it
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "package_data" / "plotly.min.js"


@cache
def style_ids() -> tuple[str, ...]:
    """Return the ids of elements that keep Plotly from adding styles that no chart here needs.

    The Content-Security-Policy would refuse them, and the browser would report that.
    """
    return tuple(dict.fromkeys(_STYLE.findall(script_path().read_text(encoding="utf-8"))))
