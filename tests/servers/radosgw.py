"""Ceph's S3 server on this machine: one monitor, one memory-backed OSD and a gateway.

The real server of the suite: conditional puts are atomic, signatures are checked. All data lies in
memory, so tests keep it small. Under pytest-xdist the workers share one.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.servers.process import free_port, start, stop, wait_for_http

_ROOT = Path(__file__).parents[2]
#: Holds the gateway, or the error, in the folder of one that was begun.
_READY = "gateway.json"
PROGRAMS = ("ceph", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")

_CONFIG = """\
[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{v2},v1:127.0.0.1:{v1}]
auth cluster required = none
auth service required = none
auth client required = none
ms mon client mode = crc
ms cluster mode = crc
ms service mode = crc
ms client mode = crc
public addr = 127.0.0.1
cluster addr = 127.0.0.1
run dir = {folder}/run
log file = {folder}/$name.log
admin socket =
pid file =
crash dir = {folder}/crash
osd pool default size = 1
osd pool default min size = 1
mon allow pool size one = true
mon allow pool delete = true
mon data avail warn = 1
mon data avail crit = 0
osd pool default pg num = 4
osd pool default pgp num = 4
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
osd objectstore = memstore
memstore device bytes = {memory_bytes}
osd max object size = 268435456
osd memory target = 939524096
osd journal =

[mon.a]
mon data = {folder}/mon

[osd.0]
osd data = {folder}/osd

[client.admin]
rgw frontends = beast endpoint=127.0.0.1:{http} tcp_nodelay=1
rgw data = {folder}/rgw
rgw thread pool size = 32
rgw enable usage log = false
# What is replaced or deleted would else fill the memory within hours: a full OSD stalls every put.
rgw gc obj min wait = 5
rgw gc processor period = 5
rgw gc processor max time = 60
rgw enable lc threads = false
"""


def missing_programs() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name) is None]


@dataclass(frozen=True)
class Gateway:
    """A running gateway: its address, the keys of its user, and the processes that make it up."""

    endpoint_url: str
    access_key: str
    secret_key: str
    pids: tuple[int, ...]


def start_gateway(folder: Path, memory_bytes: int = 2**31) -> Gateway:
    """Start monitor, OSD and gateway in an empty folder; takes about ten seconds.

    Args:
        folder: The folder.
        memory_bytes: How much memory the objects may take.
    """
    http = free_port()
    config = _configure(folder, http, memory_bytes)
    pids: list[int] = []
    try:
        pids.append(_start_monitor(folder, config))
        pids.append(_start_osd(folder, config))
        command = ["radosgw", "-f", "-n", "client.admin", "-c", str(config)]
        pids.append(start(command, folder / "radosgw.out"))
        endpoint = f"http://127.0.0.1:{http}"
        wait_for_http(endpoint)
        access_key, secret_key = _make_user(config)
    except BaseException:
        stop(pids)
        raise
    return Gateway(endpoint, access_key, secret_key, tuple(pids))


def begin_gateway(folder: Path) -> None:
    """Begin to start a gateway in a folder that is not there yet, in a process of its own."""
    folder.mkdir()
    python = [sys.executable, "-m", "tests.servers.radosgw", str(folder)]
    start(["env", f"--chdir={_ROOT}", *python], folder / "start.out")


def wait_for_gateway(folder: Path, deadline_s: float = 300) -> Gateway:
    """Return the gateway that was begun in a folder when it is ready."""
    end = time.monotonic() + deadline_s
    while not (folder / _READY).exists():
        if time.monotonic() > end:
            raise TimeoutError(f"no radosgw in {folder}")
        time.sleep(0.05)
    found = json.loads((folder / _READY).read_text())
    if "error" in found:
        raise RuntimeError(found["error"])
    return Gateway(**found | {"pids": tuple(found["pids"])})


def _begun(folder: Path) -> None:
    """Start a gateway, and leave word of it."""
    try:
        found: dict[str, object] = asdict(start_gateway(folder))
    except Exception:
        found = {"error": traceback.format_exc()}
    (folder / "said").write_text(json.dumps(found))
    (folder / "said").rename(folder / _READY)


def _configure(folder: Path, http: int, memory_bytes: int) -> Path:
    for name in ("mon", "osd", "run", "rgw", "crash"):
        (folder / name).mkdir(parents=True)
    fsid, v2, v1 = str(uuid.uuid4()), free_port(), free_port()
    config = folder / "ceph.conf"
    ports = {"v2": v2, "v1": v1, "http": http}
    text = _CONFIG.format(fsid=fsid, folder=folder, memory_bytes=memory_bytes, **ports)
    config.write_text(text)
    address = f"[v2:127.0.0.1:{v2},v1:127.0.0.1:{v1}]"
    monmap = str(folder / "monmap")
    _call("monmaptool", "--create", "--addv", "a", address, "--fsid", fsid, monmap)
    return config


def _start_monitor(folder: Path, config: Path) -> int:
    monitor = ["ceph-mon", "-c", str(config), "-i", "a"]
    _call(*monitor, "--mkfs", "--monmap", str(folder / "monmap"))
    return start([*monitor, "-f"], folder / "mon.out")


def _start_osd(folder: Path, config: Path) -> int:
    identity = str(uuid.uuid4())
    _ceph(config, "osd", "new", identity, "0")
    osd = ["ceph-osd", "-c", str(config), "-i", "0"]
    _call(*osd, "--mkfs", "--osd-uuid", identity)
    return start([*osd, "-f"], folder / "osd.out")


def _make_user(config: Path) -> tuple[str, str]:
    made = _call(
        "radosgw-admin",
        "-c",
        str(config),
        "user",
        "create",
        "--uid=holdfast",
        "--display-name=holdfast",
    )
    keys = json.loads(made)["keys"][0]
    return keys["access_key"], keys["secret_key"]


def _ceph(config: Path, *words: str) -> str:
    return _call("ceph", "-c", str(config), "--connect-timeout", "30", *words)


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()[-2000:]}")
    return done.stdout


def main() -> None:
    """Run one until interrupted, for benchmarks and for looking around."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs of a script ignore it
    folder = Path(tempfile.mkdtemp(prefix="radosgw-"))
    began = time.monotonic()
    gateway = start_gateway(folder, memory_bytes=2**33)
    print(f"# ready after {time.monotonic() - began:.0f} s, in {folder}")
    print(f"export AWS_ENDPOINT_URL={gateway.endpoint_url}")
    print(f"export AWS_ACCESS_KEY_ID={gateway.access_key}")
    print(f"export AWS_SECRET_ACCESS_KEY={gateway.secret_key}", flush=True)
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        # `timeout` and a terminal may both pass one on.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        stop(gateway.pids)
        shutil.rmtree(folder)


if __name__ == "__main__":
    _begun(Path(sys.argv[1])) if sys.argv[1:] else main()
