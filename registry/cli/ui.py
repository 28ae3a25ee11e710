"""`ui` and `page`: look at a registry in a browser, or write that to a file."""

from __future__ import annotations

import sys
import webbrowser
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from holdfast.registry import ui as pages
from holdfast.registry.cli import output
from holdfast.registry.cli.command import command
from holdfast.registry.cli.options import argument, flag, option
from holdfast.registry.errors import InvalidInput
from holdfast.registry.formats import check_target, new_file
from holdfast.registry.store import Address


@command(url=True)
def ui(
    *,
    address: Address,
    mirror: list[str] | None = option(
        "--mirror", "URL", "A copy, which Health compares with it; repeatable."
    ),
    port: int = option(
        "--port", "N", "Port on this machine; any free one by default.", default=0, min=0, max=65535
    ),
    no_browser: bool = flag("--no-browser", "Only print the URL; open no browser."),
) -> str:
    """Look at a registry in a browser, read-only, until you press Ctrl-C.

    The pages are for this machine alone: the URL that is printed has a token, which admits one
    browser, and no other address is listened on. From another machine, forward the port with ssh.
    """
    with _installed():
        serve = pages.Server
    with ExitStack() as stack:

        def opened(place: Address) -> pages.Source:
            return stack.enter_context(closing(pages.Source.open(place)))

        source = opened(address)
        source.mirrors = tuple(opened(Address(one)) for one in mirror or ())
        server = serve(source, port, lambda url: output.note(f"for another browser: {url}"))
        with suppress(KeyboardInterrupt):
            output.line(server.url)
            sys.stdout.flush()  # a program that started it waits for this line
            if not no_browser:
                webbrowser.open(stack.enter_context(_link_to(server.url)))
            server.serve()
    return "stopped"


@contextmanager
def _link_to(url: str) -> Iterator[str]:
    """Make a file that leads to a URL, since everybody can see the arguments of a browser."""
    with TemporaryDirectory(prefix="holdfast-") as folder:  # nobody else can look into it
        file = Path(folder, "open.html")
        file.touch(0o600)
        file.write_text(f'<!doctype html><meta http-equiv="refresh" content="0;url={url}">')
        yield file.as_uri()


@command()
def page(
    *,
    address: Address,
    run: list[str] = argument("RUN", "Names of runs."),
    to: Path = option("--to", "FILE", "The file to write, such as report.html.", default=...),
    force: bool = flag("--force", "Replace an existing file."),
) -> str:
    """Write the pages of runs to one file, which opens offline.

    It has everything that `holdfast ui` shows of these runs, and asks for nothing when it is open.
    """
    check_target(to, force=force)
    with _installed():
        write = pages.page_of
    with closing(pages.Source.open(address)) as source:
        data = write(source, list(dict.fromkeys(run)))
    with new_file(to, len(data), force=force) as file:
        file.write(data)
    return f"{to}  {output.size(len(data))}"


@contextmanager
def _installed() -> Iterator[None]:
    """Say which extra to install if a library of the pages is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise InvalidInput(
            "pages need a library that is not installed",
            where=error.name,
            hint="Install the extra: pip install 'holdfast[ui]'.",
        ) from error
