"""Hosts with podman, and an image without programs."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster import Cluster

IMAGE = "localhost/marked"
ROOT = Path(__file__).parents[2]
WRAPPER = """#!/bin/sh
exec /usr/bin/podman --runtime=runc --cgroup-manager=cgroupfs --storage-driver=vfs \\
  --root="$HOME/containers" --runroot=/run/containers "$@"
"""
"""podman with a storage of each host's own, which works in the namespaces of a test's host."""


def image() -> bytes:
    """An image without programs: the containers mount those of this machine."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in ("tmp", "proc", "sys", "dev", "etc", "usr", "run"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(folder)
        for name in ("bin", "sbin", "lib", "lib64"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, f"usr/{name}"
            archive.addfile(link)
        mark = tarfile.TarInfo("etc/marked")
        archive.addfile(mark)
    return buffer.getvalue()


def container(**more: Any) -> dict[str, Any]:
    """The value of ``job.container``."""
    pythons = {Path(sys.prefix), Path(sys.base_prefix)} - {Path("/usr")}
    folders = {Path("/usr"), ROOT, *pythons}
    return {
        "engine": "podman",
        "image": IMAGE,
        "mounts": [f"{folder}:ro" for folder in sorted(folders)],
        # Raising limits, which podman does, needs rights that a test machine may lack.
        "options": ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096"],
        **more,
    }


@pytest.fixture
def pair(hosts: Callable[..., Cluster]) -> Iterator[Cluster]:
    """Two hosts that have the image. No container is left on them after the test."""
    cluster = hosts(2)
    importing = []
    for host in cluster.hosts:
        wrapper = host.home / "bin" / "podman"
        wrapper.parent.mkdir()
        wrapper.write_text(WRAPPER)
        wrapper.chmod(0o755)
        (host.home / ".bashrc").write_text("PATH=~/bin:$PATH\n")
        command = host.command(str(wrapper), "import", "-q", "-", IMAGE)
        importing.append(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        )
    for process in importing:
        process.communicate(image())
        assert process.returncode == 0
    yield cluster
    for host in cluster.hosts:
        assert containers(host) == []


def containers(host: Any) -> list[str]:
    """The names of all containers on a host."""
    wrapper = str(host.home / "bin" / "podman")
    listed = host.run(wrapper, "ps", "--all", "--format", "{{.Names}}")
    return [name for name in listed.split("\n") if name]
