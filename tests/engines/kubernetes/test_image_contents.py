"""What `dtrain check` concludes from the output of the pod that looks into the image."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from dtrain.checks import Severity
from dtrain.engines.kubernetes import image_contents
from dtrain.engines.kubernetes.training_runtime import TrainingRuntime
from dtrain.launchplan.build import build
from dtrain.messages.decode import ProtocolError
from dtrain.node.interpreter import to_json
from dtrain.spec.load import parse

TORCH = {"version": "2.13.0", "cuda": "12.8"}


def log(framework: dict[str, Any], *more: str, output: str = "") -> bytes:
    report = {"python": "3.11.2", "executable": "/bin/python3", "framework": framework}
    facts = [*more, "status=0", f"report={to_json(report)}", "done=yes"]
    return "\n".join([output, *(f"[dtrain] {fact}" for fact in facts)]).encode() + b"\n"


def judged(
    output: bytes, job: str = "", kubernetes: str = "", runtime: TrainingRuntime | None = None
) -> list[tuple[Severity, str]]:
    text = f"""
cluster: {{kubernetes: {{image: "train:1", {kubernetes}}}, nodes: 2, gpus: 2}}
job: {{framework: torch, script: t.py, workdir: /code, {job}}}
"""
    contents = image_contents.read(output)
    assert contents is not None
    found = image_contents.judge(build(parse(text, "job.yaml")), contents, runtime)
    return [(finding.severity, finding.seen) for finding in found]


CODE = ("workdir=yes", "script=yes")
NO_SCRIPT = (Severity.ERROR, "/code/t.py does not exist")
MISSING = "torch is not installed for python3"


def test_what_is_missing() -> None:
    assert judged(log(TORCH, *CODE, output="a warning of an image")) == []
    assert judged(log({"version": "2.13.0+cpu"}, "missing=GNU sed", "workdir=yes")) == [
        (Severity.ERROR, "the image has no GNU sed"),
        (Severity.ERROR, "torch 2.13.0+cpu is a CPU-only build"),
        NO_SCRIPT,
    ]


@pytest.mark.parametrize(
    ("job", "kubernetes", "severity"),
    [
        ("", 'claims: ["data:/data"]', Severity.ERROR),
        ("setup: [pip install torch]", "", Severity.WARNING),
        ("env: {PYTHONPATH: '/lib:/data/lib'}", 'claims: ["data:/data"]', Severity.WARNING),
    ],
)
def test_setup_lines_and_volumes_may_bring_the_framework(
    job: str, kubernetes: str, severity: Severity
) -> None:
    assert judged(log({"missing": True}, *CODE), job, kubernetes) == [(severity, MISSING)]


def test_a_runtime_may_bring_code_and_framework() -> None:
    """An error stays one only if the runtime is known and brings nothing."""
    bare = log({"missing": True}, "workdir=yes")
    known = TrainingRuntime()
    assert judged(bare, runtime=known) == [(Severity.ERROR, MISSING), NO_SCRIPT]
    unseen = TrainingRuntime(unseen="what the runtime r adds (init containers)")
    warned = [(Severity.WARNING, text) for _, text in judged(bare)]
    assert judged(bare, runtime=unseen) == warned
    mounted = TrainingRuntime(folders=("/code",), environment={"PYTHONPATH": "/code/lib"})
    assert judged(bare, runtime=mounted) == [(Severity.WARNING, MISSING)]


def test_code_that_the_image_need_not_have() -> None:
    assert judged(log(TORCH), "sync: {source: .}") == []
    assert judged(log(TORCH), kubernetes='claims: ["code:/code"]') == []


def test_output_that_is_incomplete_or_hostile() -> None:
    assert image_contents.read(log(TORCH)[:-20]) is None
    with pytest.raises(ProtocolError):
        image_contents.read(log({"version": {"a": []}}))
    for report in (b"[]", b"{", b"[" * 100_000, b'{"python": [1]}'):
        with pytest.raises(ProtocolError):
            image_contents.read(
                b"[dtrain] status=0\n[dtrain] report=%s\n[dtrain] done=yes" % report
            )


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_the_script_of_the_pod(shell: str, tmp_path: Path) -> None:
    (tmp_path / "t.py").touch()
    text = f"""
cluster: {{kubernetes: {{image: "train:1"}}, nodes: 2, gpus: 2, python: {sys.executable}}}
job: {{framework: torch, script: t.py, workdir: {tmp_path}}}
"""
    script = image_contents.script(build(parse(text, "job.yaml")))
    done = subprocess.run([shell, "-c", script], capture_output=True, check=True)
    contents = image_contents.read(done.stdout)
    assert contents is not None
    assert (contents.workdir, contents.script, contents.missing) == (True, True, frozenset())
    assert contents.interpreter is not None
    assert contents.interpreter["framework"]["version"] == version("torch")


def test_a_sed_that_keeps_lines_back(tmp_path: Path) -> None:
    """As that of BusyBox, which does not know the option."""
    sed = tmp_path / "sed"
    sed.write_text("#!/bin/sh\necho \"sed: invalid option -- 'u'\" >&2\nexit 1\n")
    sed.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    cluster = 'cluster: {kubernetes: {image: "train:1"}, nodes: 2, gpus: 2}'
    text = f"{cluster}\njob: {{framework: none, command: [x]}}\n"
    script = image_contents.script(build(parse(text, "job.yaml")))
    done = subprocess.run(
        ["/bin/sh", "-c", script], env=environment, capture_output=True, check=True
    )
    contents = image_contents.read(done.stdout)
    assert contents is not None and contents.missing == {"GNU sed"}
