"""Find the file system of a folder, and refuse one that is unsafe for a registry.

| file system | verdict | why |
|---|---|---|
| ext2/3/4, xfs, btrfs, zfs, tmpfs, overlay, apfs, hfs | allowed | exclusive links, ordered fsync |
| NFS, Lustre, GPFS, BeeGFS, CephFS, 9p, any FUSE | allowed on request | clients cache |
| CIFS/SMB, FAT, exFAT | refused | no hard links, so no exclusive create |

`HOLDFAST_ALLOW_NETWORK_FS=1` requests the second row; run the probe from two machines first. If the
table of mounts cannot be read, nothing is refused here: the first put still fails without links.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from holdfast.backends.errors import StoreUnsuitable

MOUNTS = Path("/proc/self/mounts")
ALLOW = "HOLDFAST_ALLOW_NETWORK_FS"

_NETWORK = {
    *("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "9p", "afs", "glusterfs", "ocfs2"),
    *("gfs2", "orangefs", "pvfs2", "virtiofs", "panfs", "wekafs"),
}
#: File systems that compress, or share blocks: more may fit than they report as free.
_ELASTIC = {"btrfs", "zfs", "bcachefs"}
_NO_LINKS = {"cifs", "smb3", "smbfs", "vfat", "msdos", "exfat"}
_OCTAL = re.compile(r"\\([0-7]{3})")


def check_file_system(folder: str) -> None:
    """Refuse a folder whose file system cannot keep the promises.

    Args:
        folder: An existing folder.

    Raises:
        StoreUnsuitable: The file system is unsafe, or allowed only on request.
    """
    kind = file_system(folder)
    if kind in _NO_LINKS:
        raise StoreUnsuitable(
            "the file system makes no hard links",
            where=folder,
            found=kind,
            hint="Use a local file system such as ext4, xfs or apfs, or a bucket.",
        )
    if _over_network(kind) and os.environ.get(ALLOW) != "1":
        raise StoreUnsuitable(
            "a network file system, whose clients may see each other's writes late",
            where=folder,
            expected="a local file system or a bucket",
            found=kind,
            hint=f"Set {ALLOW}=1 after `holdfast doctor` found no race from two machines.",
        )


def tells_free_bytes(folder: str) -> bool:
    """Return whether no more fits on a folder's file system than the free bytes that it reports."""
    kind = file_system(folder)
    return kind not in _ELASTIC and not _over_network(kind)


def _over_network(kind: str) -> bool:
    # Any file system can be behind FUSE; only `fuseblk` is certain to be a local device.
    return kind in _NETWORK or kind == "fuse" or kind.startswith("fuse.")


def file_system(folder: str) -> str:
    """Return the kind of file system of a folder, or "" if the system does not tell."""
    try:
        table = MOUNTS.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""
    real = os.path.realpath(folder)
    best, kind = "", ""
    for line in table.splitlines():
        point, found = _mount(line)
        # A later line of the same point is mounted on top of the earlier one.
        if _below(real, point) and len(point) >= len(best):
            best, kind = point, found
    return kind


def _mount(line: str) -> tuple[str, str]:
    fields = line.split(" ")
    if len(fields) < 3:
        return "\0", ""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[1]), fields[2]


def _below(path: str, point: str) -> bool:
    return point == "/" or path == point or path.startswith(point + "/")
