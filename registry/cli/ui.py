"""`ui`, `page` and `hub`: a registry in a browser, in one file, and for other programs."""

from __future__ import annotations

import signal
import sys
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from holdfast.backends.errors import install_extra
from holdfast.registry import hub as endpoint
from holdfast.registry import ui as pages
from holdfast.registry.cli import options, output
from holdfast.registry.cli.command import command
from holdfast.registry.cli.opening import opened_at
from holdfast.registry.cli.options import argument, flag, note_of, option
from holdfast.registry.errors import InvalidInput
from holdfast.registry.formats import check_target, new_file
from holdfast.registry.store import Address
from holdfast.registry.values import HERE

#: The runs of a site that names none.
_NEWEST = 50


@command(url=True, metrics=True)
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
    edit: bool = flag("--edit", "Let the pages write notes, tags and labels; nothing else."),
) -> str:
    """Look at a registry in a browser, and edit notes with --edit.

    It runs until you press Ctrl-C, and only reads without --edit. The pages are for this machine
    alone: the URL that is printed has a token, which admits one browser, and no other address is
    listened on. From another machine, forward the port with ssh.
    """
    with _installed():
        serve = pages.Server
    with ExitStack() as stack:

        def opened(place: Address) -> pages.Source:
            return stack.enter_context(closing(pages.Source.open(place)))

        source = opened(address)
        source.mirrors = tuple(opened(Address(one)) for one in mirror or ())
        editor = None
        if edit:
            editor = pages.Editor(stack.enter_context(opened_at(address, read_only=False)))
        server = serve(source, port, lambda url: output.note(f"for another browser: {url}"), editor)
        with until_interrupted(server.stop):
            output.line(server.url)
            sys.stdout.flush()  # a program that started it waits for this line
            if not no_browser:
                webbrowser.open(stack.enter_context(_link_to(server.url)))
            server.serve()
    return "stopped"


@contextmanager
def until_interrupted(stop: Callable[[], None]) -> Iterator[None]:
    """End the block at SIGINT. Where Python swallows it, such as in an import, `stop` has it."""

    def interrupted(*_: object) -> None:
        stop()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        with suppress(KeyboardInterrupt):
            yield
    finally:
        signal.signal(signal.SIGINT, before)


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
    run: list[str] | None = argument(
        "[RUN...]",
        "Names of runs, or patterns: 'sweep-*'. With --site by default the newest 50.",
        default=None,
    ),
    to: Path | None = option("--to", "FILE", "The file to write, such as report.html."),
    site: str | None = option(
        "--site", "DIR|URL", "Instead: a folder or s3:// prefix for a page of each run."
    ),
    title: str = option("--title", "TEXT", "The heading; by default the runs.", default=""),
    note: Path | None = option("--note", "FILE.md", "What you say about the runs, in Markdown."),
    compare: tuple[str, str] | None = option(
        "--compare", "REF REF", "Compare these checkpoints; by default each run's best and latest."
    ),
    force: bool = flag("--force", "Replace an existing file."),
) -> str:
    """Write a report about runs, which opens offline: one file, or a site.

    The runs stand side by side first, their curves over each other; what `holdfast ui` shows of
    each run can be opened below.
    Whoever can read the place sees names, configurations, metrics and notes of these runs.
    """
    if (to is None) == (site is None):
        raise InvalidInput("one place for the pages", expected="--to FILE, or --site DIR or URL")
    if to is not None:
        check_target(to, force=force)
        if not run:
            raise InvalidInput("no runs to write about", expected="names of runs before --to")
    text = "" if note is None else note_of(note)
    with _installed():
        report = pages.Report(title, text, compare)
        write, write_site = pages.page_of, pages.write_site
    with closing(pages.Source.open(address)) as source:
        wanted = options.matching(run or [], source.names)
        runs = list(dict.fromkeys(wanted or pages.newest_first(source, source.names())[:_NEWEST]))
        if site is not None:
            files, nbytes = write_site(source, runs, Address(site), report, force=force)
            told = f"{site}  {output.counted(files, 'page')}, {output.size(nbytes)}"
        else:
            data = write(source, runs, report)
    if to is not None:
        with new_file(to, len(data), force=force) as file:
            file.write(data)
        told = f"{to}  {output.size(len(data))}"
    output.note("whoever can read it sees names, configurations, metrics and notes of these runs")
    return told


@command(url=True, metrics=True)
def hub(
    *,
    address: Address,
    port: int = option(
        "--port", "N", "The port; any free one by default.", default=0, min=0, max=65535
    ),
    main: str | None = option(
        "--main",
        "REF",
        "The ref that revision main means; by default the newest release, or else "
        "best, or else latest.",
    ),
    artifact: list[str] = option(
        "--artifact",
        "NAME",
        "An artifact of each run whose files are added; repeatable.",
        default=["config", "tokenizer"],
    ),
    shard_bytes: int = options.SHARD_BYTES,
    token_file: Path | None = option(
        "--token-file", "FILE", "Who may read which runs: lines of SHA256 PATTERN,... NAME."
    ),
    no_token: bool = flag("--no-token", "Ask for no token; only on this machine."),
    listen: str | None = option("--listen", "ADDRESS", "Another address than that of loopback."),
    behind_tls: bool = flag("--behind-tls", "A proxy in front of this address encrypts."),
    host: list[str] | None = option(
        "--host", "NAME", "A name, with its port, by which clients ask; repeatable."
    ),
    cache: str | None = option(
        "--cache", "DIR", "A folder of a local disk that keeps the chunks that are read."
    ),
) -> str:
    """Serve a registry to clients of Hugging Face, until you press Ctrl-C.

    It only reads. Set HF_ENDPOINT and HF_TOKEN as printed; transformers, peft and `hf download`
    then read RUN or PROJECT/RUN at any ref. The clients send their token to every endpoint: set
    HF_TOKEN for that process, or your own goes out.
    """
    access, token = _access(token_file, no_token=no_token, listen=listen)
    if listen is not None and not (behind_tls and host):
        raise InvalidInput(
            "other machines can ask only through a proxy that encrypts",
            where=f"--listen {listen}",
            expected="--token-file, --behind-tls, and a --host for each name of the proxy",
        )
    views = endpoint.ViewOptions(shard_bytes, tuple(artifact))
    with _installed("hub"):
        listener = pages.Listener(listen or pages.HOST, port)
        make = endpoint.Endpoint
    hosts = frozenset(host) if host else pages.loopback_hosts(listener.port)
    with closing(pages.Source.open(address, cache=cache)) as source:
        catalog = endpoint.Catalog(source, views, main)
        for name in source.names():
            if (reason := endpoint.refusal(name)) is not None:
                output.note(f"{name}: no client asks for this run: {reason}")
        with closing(make(catalog, access, hosts, output.note, HERE)) as app:
            output.line(f"HF_ENDPOINT=http://{listen or pages.HOST}:{listener.port}")
            output.line("" if token is None else f"HF_TOKEN={token}")
            sys.stdout.flush()  # a program that started it waits for these lines
            with until_interrupted(listener.stop):
                listener.serve(app, log_level="critical")
    return "stopped"


def _access(
    token_file: Path | None, *, no_token: bool, listen: str | None
) -> tuple[endpoint.Access, str | None]:
    """Return who may ask, and the token that was made for it, if one was."""
    if no_token and (token_file is not None or listen is not None):
        raise InvalidInput(
            "--no-token is for this machine alone",
            where="--no-token",
            expected="neither --token-file nor --listen",
        )
    if token_file is not None:
        return endpoint.read_tokens(token_file), None
    if listen is not None:
        raise InvalidInput("no tokens", where=f"--listen {listen}", expected="--token-file FILE")
    return (endpoint.Access(None), None) if no_token else endpoint.Access.generated()


@contextmanager
def _installed(extra: str = "ui") -> Iterator[None]:
    """Say which extra to install if a library of the server is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise InvalidInput(
            "this needs a library that is not installed",
            where=error.name,
            hint=install_extra(extra),
        ) from error
