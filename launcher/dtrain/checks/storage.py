"""Checks space, inodes and permissions of the job's folders, shared memory, and shared file
systems."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from dtrain.checks.evidence import Evidence, Facts, HostFacts
from dtrain.checks.files import SAFE
from dtrain.checks.finding import Finding, warning
from dtrain.checks.sizes import GIB, MIB, in_words
from dtrain.hostlist import fold

LEAST_FREE = 16 * MIB
"""A launch does not start with less free space."""
FEW_INODES = 1000
FULL = ("no space left on device", "disk quota exceeded")
SHM = "/dev/shm"  # noqa: S108 - not a file, but a subject
DOCKER_SHM = 64 * MIB
"""The default size in containers. NCCL and data loaders fail with it."""
SHARED = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb", "9p", "glusterfs", "wekafs",
          "virtiofs", "fuse.sshfs", "fuse.juicefs", "afs", "panfs", "orangefs")  # fmt: skip


def judge(evidence: Evidence) -> Iterator[Finding]:
    for host in evidence.hosts:
        for name, found in host.fact("storage").items():
            if name == "shm":
                yield from _shared_memory(host, found)
            elif name == "cluster.run_dir":
                yield from _needed(host, name, found, "set cluster.run_dir to another folder")
            elif name == "job.workdir" and evidence.plan.job.sync is not None:
                yield from _needed(host, name, found, "set job.workdir to another folder")
            else:
                yield from _wanted(host, name, found)
    yield from _shared(evidence)


def _needed(host: HostFacts, name: str, found: Facts, remedy: str) -> Iterator[Finding]:
    """A folder that the launch itself writes to."""
    where, left = host.short(found["nearest"]), _left(host, found)
    unsafe = found.get("unsafe")
    if unsafe:
        yield host.error(name, unsafe["seen"], SAFE, unsafe["remedy"])
    elif found["not_writable"]:
        yield host.error(
            name,
            f"cannot write to {where}: {found['not_writable']}",
            f"a launch can create files in {host.short(found['path'])}",
            f"{_let_write(host, found)}, or {remedy}{_own_copy(name)}",
        )
    elif found["free"] < LEAST_FREE or _few_inodes(found):
        yield host.error(name, left, "space for logs and files", f"free some space, or {remedy}")
    elif found["free"] < GIB:
        yield host.warning(name, left, "at least 1 GiB", f"free some space, or {remedy}")


def _let_write(host: HostFacts, found: Facts) -> str:
    if "read-only" in found["not_writable"]:
        return f"sudo mount -o remount,rw {found['mount']} there (`dmesg` shows the reason)"
    if found["not_writable"] in FULL:
        return "remove files there (`df -i` and `quota` show how many are left)"
    where = host.short(found["nearest"])
    user = host.fact("machine").get("user", "$USER")
    owner = found.get("stranger")
    if owner:  # Never suggest to take another user's folder.
        return f"ask {owner} to share {where} with a group, and set cluster.trust_group to it"
    if not found["exists"] and not where.startswith("~"):
        # The folder above may be one of all users, such as /home.
        missing = found["path"]
        if host.short(missing).startswith("~"):
            missing = host.fact("machine")["home"]
        return f"sudo install -d -o {user} {shlex.quote(missing)} there"
    return f"sudo chown {user} {where} there"


def _own_copy(name: str) -> str:
    return ", or let job.sync send the files to a folder of yours" if name == "job.workdir" else ""


def _wanted(host: HostFacts, name: str, found: Facts) -> Iterator[Finding]:
    """A folder that only the job's own code may want to write to."""
    if not found["exists"] and name == "job.workdir":
        return  # `files` reports this.
    if found["not_writable"]:
        yield host.warning(
            name,
            f"cannot write to {host.short(found['nearest'])}: {found['not_writable']}",
            "the script can write there (checkpoints, temporary files)",
            f"{_let_write(host, found)}, or let the script write elsewhere{_own_copy(name)}",
        )
    elif found["free"] < GIB or _few_inodes(found):
        left, expected = _left(host, found), "at least 1 GiB and 1000 inodes free"
        yield host.warning(name, left, expected, "free some space")


def _few_inodes(found: Facts) -> bool:
    # File systems without a fixed number of inodes report 0.
    return bool(found["inodes"] > 0 and found["inodes_free"] < FEW_INODES)


def _left(host: HostFacts, found: Facts) -> str:
    where = host.short(found["nearest"])
    if _few_inodes(found):
        return f"{found['inodes_free']} inodes are free under {where}"
    return f"{in_words(found['free'])} are free under {where}"


def _shared_memory(host: HostFacts, found: Facts) -> Iterator[Finding]:
    total, free = found["total"], found["free"]
    expected = "at least 1 GiB: NCCL, gloo and data loaders share memory through it"
    container = host.fact("machine").get("container")
    # Several GPU ranks on one host always need it; for others it depends on the script.
    judged = host.error if len(host.part.host.gpus) > 1 else host.warning
    grow = "sudo mount -o remount,size=8G /dev/shm there"
    if container:
        grow = "start the container with --shm-size=8g (or --ipc=host)"
    if found["mount"] != SHM and not container:
        return  # /dev/shm is not a separate tmpfs, and as large as /dev.
    if found["not_writable"]:
        remedy = "sudo chmod 1777 /dev/shm there"
        seen = f"cannot write to {SHM}: {found['not_writable']}"
        yield judged(SHM, seen, "every user can write to it", remedy)
    elif total <= DOCKER_SHM:
        yield judged(SHM, f"it has {in_words(total)}", expected, grow)
    elif total < GIB:
        yield host.warning(SHM, f"it has {in_words(total)}", expected, grow)
    elif free < DOCKER_SHM:
        remedy = "remove leftover files of ended jobs: `ls -l /dev/shm`"
        seen = f"{in_words(free)} of its {in_words(total)} are free"
        yield judged(SHM, seen, expected, remedy)


def _shared(evidence: Evidence) -> Iterator[Finding]:
    """Finds a working folder that only some hosts share."""
    found = {host.name: host.fact("storage").get("job.workdir") for host in evidence.hosts}
    there = {name: one for name, one in found.items() if one and one["exists"]}
    shared = [name for name, one in there.items() if one["type"].startswith(SHARED)]
    own = [name for name in there if name not in shared]
    if len(shared) > 1 and own:
        yield warning(
            "job.workdir",
            own,
            f"the folder is local; {fold(shared)} share {there[shared[0]]['source']}",
            "all hosts share it, or none",
            f"mount {there[shared[0]]['source']} at {there[shared[0]]['mount']} there",
        )
