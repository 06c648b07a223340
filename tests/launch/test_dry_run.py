"""The dry run is the launch: a process gets the environment that its rendered file shows."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.launching import Scene
from support.ports import free_port

DUMP = """
import json, os, sys
pid = os.getppid() if sys.argv[1] == "parent" else os.getpid()
items = open(f"/proc/{pid}/environ", "rb").read().split(b"\\0")
print(json.dumps(dict(item.decode().split("=", 1) for item in items if item)), flush=True)
"""

OF_THE_SHELL = {"SHLVL", "PWD", "OLDPWD", "_"}
"""bash sets these: a script and the shell of a launch count levels and name folders differently."""
OF_THE_LAUNCH = {"DTRAIN_RUN_ID", "DTRAIN_RUN_DIR", "DTRAIN_ATTEMPT", "MASTER_PORT"}
"""A launch decides these. A script takes them from its caller, or has defaults."""
DIFFERENT = {"TF_CONFIG", "PET_REDIRECTS"}
"""``TF_CONFIG`` has the first port of the range in a script, and one that was drawn in a launch.
``PET_REDIRECTS`` sends ranks' output to files in a launch, which reads them, and to the terminal
in a script."""

JOBS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "torch": ("self", 2, {"framework": "torch", "watchdog": {"silence": "10m"}}),
    "torchrun": (
        "parent",
        1,
        {"framework": "torch", "rendezvous": {"backend": "static", "port": free_port()}},
    ),
    "tensorflow": ("self", 2, {"framework": "tensorflow", "roles": {"chief": 1, "worker": 1}}),
}
"""Whose environment is compared, on how many hosts, and the job."""


@pytest.mark.parametrize("kind", JOBS)
def test_a_process_has_the_environment_of_its_script(scene: Scene, kind: str) -> None:
    whose, hosts, job = JOBS[kind]
    file = scene.cluster_file(
        scene.script(DUMP),
        hosts=hosts,
        slots=1,
        python=sys.executable,
        args=[whose],
        # A script's own variables have other names.
        setup="export FROM_SETUP='a b' here=/x route=/x; name=/x workdir=/x",
        secrets=["TOKEN"],
        env={
            "PYTHONPATH": "/a b:/c",
            "QUOTED": "it's ${HOME}",
            "PYTHONUNBUFFERED": "",
            "workdir": "/x",
        },
        **job,
    )
    # Python sets LC_CTYPE for its children where the locale is C.
    base = {**os.environ, "DTRAIN_HOME": str(scene.home), "LC_ALL": "C.UTF-8", "TOKEN": "hunter2"}
    launched = scene.run(file, "--no-check", env=base)
    assert launched.code == 0, str(launched)
    rendered = scene.folder / "rendered"
    # People add it to the command that they would run.
    added = ("--dry-run", "--output", str(rendered))
    assert scene.run(file, "--detach", "--fold", "--no-check", *added).code == 0

    scripts = sorted(rendered.glob("*/*.sh"))
    assert len(scripts) == hosts
    for script in scripts:
        (line,) = re.findall(rf"^\[{script.parent.name} .*?\] (.*)", launched.stdout, re.MULTILINE)
        there = json.loads(line)
        given = {name: there[name] for name in OF_THE_LAUNCH if name in there}
        here = by_hand(script, {**base, **given})
        assert here.keys() - OF_THE_SHELL == there.keys() - OF_THE_SHELL
        for name in there.keys() - OF_THE_SHELL - DIFFERENT:
            assert here[name] == there[name], name
        assert set(variables(script.with_suffix(".env"))) <= there.keys()

        alone = by_hand(script, base)
        assert alone.keys() - OF_THE_SHELL == there.keys() - OF_THE_SHELL
        assert alone["DTRAIN_RUN_DIR"] == str(script.parent)
        assert (alone["DTRAIN_RUN_ID"], alone["DTRAIN_ATTEMPT"]) == ("job", "1")


def by_hand(script: Path, environment: dict[str, str]) -> dict[str, str]:
    done = subprocess.run(["bash", str(script)], env=environment, capture_output=True, check=True)
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def variables(file: Path) -> list[str]:
    """The names that a rendered environment assigns."""
    lines = file.read_text().splitlines()
    return [line.partition("=")[0] for line in lines if not line.startswith("#")]
