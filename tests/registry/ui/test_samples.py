"""Pictures and texts in a stream: what is a picture, and how a server hands it out."""

from __future__ import annotations

import base64
import html
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast.registry.curation.streams import kind_of
from holdfast.registry.ui import page as report
from holdfast.registry.ui import samples
from holdfast.registry.ui.pages import streams as run_page
from holdfast.registry.ui.samples import Pictures, samples_of
from tests.registry.ui.conftest import Site, served
from tests.registry.ui.kinds import EVIL
from tests.registry.ui.test_editing import Person
from tests.support.commands import invoke

pytestmark = pytest.mark.xdist_group("browser")


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int = 3, height: int = 2, *more: bytes) -> bytes:
    """Return a picture of gray pixels; `more` are chunks before them."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    pixels = zlib.compress((b"\0" + b"\x80" * min(width, 9)) * min(height, 9))
    body = b"".join(more) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + head + body


def jpeg(width: int, height: int) -> bytes:
    frame = struct.pack(">BHHB", 8, height, width, 1) + b"\x01\x11\0"
    return b"\xff\xd8\xff\xe0\0\x04ab\xff\xc2" + struct.pack(">H", 2 + len(frame)) + frame


def filled(by: bytes) -> bytes:
    """Return a JPEG of 65,535 x 65,535 with bytes before its frame that are no segment."""
    large = jpeg(65_535, 65_535)
    data = (large[:8] + by + large[8:]).ljust(70_000, b"\0")
    at = 8 + 2 + int.from_bytes(data[10:12])  # where a reader is who takes them for one
    return data[:at] + jpeg(1, 1)[8:]


def webp(kind: bytes, body: bytes) -> bytes:
    return b"RIFF" + struct.pack("<I", 12 + len(body)) + b"WEBP" + kind + bytes(4) + body


def extended(width: int, height: int, flags: int = 0) -> bytes:
    sizes = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return webp(b"VP8X", bytes([flags, 0, 0, 0]) + sizes)


LOSSY = webp(b"VP8 ", b"\0\0\0\x9d\x01\x2a" + struct.pack("<HH", 30, 20))
LOSSLESS = webp(b"VP8L", b"\x2f" + struct.pack("<I", 29 | 19 << 14))
SVG = b'<svg xmlns="http://www.w3.org/2000/svg" onload="hacked=1"><script>hacked=1</script></svg>'
HOSTILE = [
    SVG,
    b"\xef\xbb\xbf<?xml version='1.0'?>" + SVG,
    b"<html><script>hacked=1</script>",
    b"GIF89a\x01\0\x01\0" + SVG,
    b"\x89PNG\r\n\x1a\n" + SVG,  # the first bytes alone
    png(2**16, 2**16),  # 4 Gi pixels out of a few bytes
    png(0, 5),
    png(3, 2, chunk(b"acTL", struct.pack(">II", 10**9, 0))),  # a thousand million frames
    png(3, 2, chunk(b"tEXt", b"c\0IDAT"), chunk(b"acTL", struct.pack(">II", 9, 0))),
    jpeg(65_535, 65_535),
    filled(b"\xff"),
    filled(b"\xff\x01"),
    b"\xff\xd8\xff" + b"\xff\xe0\0\x04ab" * 9,  # ends before a frame
    b"\xff\xd8\xff\xe0\0\0",  # a length that goes nowhere
    extended(2**24, 2**24),
    extended(30, 20, flags=2),  # animated
    extended(30, 20)[:-2],
    b"RIFF\0\0\0\0WEBPVP8 ",
    b"",
]


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (png(), "png"), (png() + SVG, "png"), (jpeg(640, 480), "jpeg"), (LOSSY, "webp"),
        (LOSSLESS, "webp"), (extended(30, 20), "webp"), (png(4096, 4096), "png"),
    ],
)  # fmt: skip
def test_a_picture_is_known_by_its_first_bytes(data: bytes, kind: str) -> None:
    assert kind_of(data) == (kind, "")


@pytest.mark.parametrize("data", HOSTILE)
def test_anything_else_is_no_picture(data: bytes) -> None:
    kind, problem = kind_of(data)
    assert kind == ""
    assert problem.startswith((f"{len(data):,} bytes", "65,5", "16,7", "0 x 5")), problem


def test_sizes_are_those_of_the_header() -> None:
    assert "4,097 x 4,096 pixels" in kind_of(png(4097, 4096))[1]
    assert "9,000 x 8,000 pixels" in kind_of(jpeg(9000, 8000))[1]
    assert "16,000 x 16,000 pixels" in kind_of(extended(16_000, 16_000))[1]
    assert kind_of(png() + bytes(8 * 2**20))[1].startswith("3 x 2 pixels in 8,388,")
    wide = webp(b"VP8L", b"\x2f" + struct.pack("<I", 16_383 | 16_383 << 14))
    assert "16,384 x 16,384 pixels" in kind_of(wide)[1]


def test_pictures_are_kept_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "_KEPT_BYTES", 100)
    pictures = Pictures()
    names = [pictures.keep("png", bytes([n]) * 40) for n in (1, 2, 1, 3)]
    assert [pictures.get(name) is not None for name in names] == [True, False, True, True]
    entries = [{"step": n, "text": "x" * 20_000, "loss": 0.5} for n in range(100)]
    found = list(samples_of(entries, pictures))
    assert [one.step for one in found] == list(range(99, 99 - samples.SHOWN, -1))
    assert len(found[0].text) == 10_004


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Site]]:
    folder = tmp_path_factory.mktemp("samples") / "reg"
    with holdfast.init(folder, skip_race_probe=True) as reg:
        stream = reg.create_run("night").streams["samples"]
        stream.append([{"step": n, "image": one} for n, one in enumerate(HOSTILE)])
        stream.append({"step": 99, "image": png() + SVG, "text": f"{EVIL} \u202e"})
        big = reg.create_run("big").streams["samples"]
        big.append({"step": 1, "image": bytes(100_000)})
        logs = reg.create_run("logs")
        for step in range(9):  # in two segments
            logs.log({"seen": [png(3, 2 + step)] * 9, "said": EVIL}, step=step)
            logs.handle.ownership.logged.tick()
    with served(folder) as site:
        yield folder, site


def test_a_server_hands_out_pictures_that_it_has_shown(
    sampled: tuple[Path, Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, site = sampled
    person = Person(site)
    _, page = person.ask("GET", "/runs/night")
    shown = re.findall(r'<img src="([^"]*)"', page)
    assert len(shown) == 1
    assert page.count("not shown: ") == len(HOSTILE)
    assert "<script>hacked" not in page
    assert "&lt;img src=x onerror=hacked=1&gt;" in page
    assert "\u202e" not in page
    data, headers = person.fetch(shown[0])
    assert data == png() + SVG
    assert headers["content-type"] == "image/png"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["content-disposition"] == 'attachment; filename="sample.png"'
    assert headers["content-security-policy"] == "default-src 'none'; sandbox"
    assert person.ask("GET", "/samples/" + "0" * 64)[0].status == 404
    assert person.ask("GET", shown[0], Cookie="")[0].status == 403
    monkeypatch.setattr(run_page, "SEGMENT_UNASKED_BYTES", 2000)
    assert "Read it</a>" in person.ask("GET", "/runs/big")[1]
    assert "not shown: 100,000 bytes" in person.ask("GET", "/runs/big?stream=samples")[1]


def test_a_page_shows_what_was_logged_last(
    sampled: tuple[Path, Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_page, "_NEWEST", 1)
    person = Person(sampled[1])
    _, page = person.ask("GET", "/runs/logs")
    assert "Stream log-samples" in page
    newest = [(str(at), "8") for at in range(9)]
    assert re.findall(r'alt="seen/(\d) of step (\d)"', page) == newest
    assert page.count("&lt;img src=x onerror=hacked=1&gt;") == 1
    assert "Read it</a>" in page
    _, page = person.ask("GET", "/runs/logs?stream=log-samples")
    named = re.findall(r'alt="seen/(\d) of step (\d)"', page)
    assert named[:9] == newest
    assert len(named) + 2 == samples.SHOWN


def test_a_report_holds_pictures_and_a_limit_of_them(
    sampled: tuple[Path, Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = sampled

    def written(*asked: object) -> str:
        assert invoke("page", *asked, "-r", folder).exit_code == 0
        return (folder.parent / "made" / "run-night.html").read_text()

    page = written("--site", folder.parent / "made")
    data = base64.b64encode(png() + SVG).decode()
    assert re.findall(r'<img src="([^"]*)"', page) == [f"data:image/png;base64,{data}"]
    assert page.count("not shown: ") == len(HOSTILE)
    assert "<script>hacked" not in page
    (policy,) = re.findall(r'Security-Policy" content="([^"]*)"', page)
    assert {"default-src 'none'", "img-src data: blob:"} < set(html.unescape(policy).split("; "))
    file = folder.parent / "made" / "run-night.html"
    monkeypatch.setattr(report, "_PICTURES", 2 * len(data))
    page = written("night", "logs", "--to", file, "--force")
    assert "a picture, for which this report has no room" in page
    held = re.findall(r'<img src="(data:[^"]*)"', page)  # small ones of the other run
    assert 0 < len("".join(held)) <= len(data)
    assert data not in page
