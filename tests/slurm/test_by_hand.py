"""``job.sbatch`` of a dry run, submitted with sbatch alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dtrain.engines.slurm.script import render
from dtrain.launchplan import shell
from dtrain.launchplan.build import build
from dtrain.launchplan.plan import LaunchPlan
from dtrain.spec.load import parse
from support.limits import HANG
from support.slurm import Slurm

pytestmark = [pytest.mark.slurm, pytest.mark.netns]

JOBS = Path(__file__).parents[1] / "jobs"

OF_THE_ENGINE = ("SLURM", "SRUN", "HYDRA", "I_MPI_HYDRA", "PRTE_MCA", "OMPI_MCA", "ENVIRONMENT",
                 "TMPDIR", "HOSTNAME", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES",
                 "ZE_AFFINITY_MASK")  # fmt: skip
"""Variables, or how they begin, that Slurm sets."""
OF_THE_MACHINE = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "SHLVL", "_", "OLDPWD")
"""Variables that differ because the SSH scripts run on this machine here."""
ONLY_BY_HAND = ("PET_REDIRECTS",)

PROGRAMS = {
    "torch": "framework: torch",
    "static": "framework: torch, rendezvous: {backend: static, ports: 29700-29700}",
    "c10d": "framework: torch, rendezvous: {backend: c10d, ports: 29700-29700}",
    "tensorflow": "framework: tensorflow, rendezvous: {ports: 29700-29700}",
    "roles": "framework: tensorflow, roles: {chief: 1, worker: 4, ps: 1},"
    " rendezvous: {ports: 29700-29702}",
    "jax": "framework: jax",
    "none": "framework: none, per: host",
}


PRINT = """\
#!/bin/sh
printf '%s\\n' "$@"; printf '\\0\\n'; env -0
printed=${DTRAIN_RUN_DIR%/*}/printed
case $TF_CONFIG in
*'"type": "chief"'*) until [ "$(ls "$printed" | wc -l)" -ge 5 ]; do sleep 0.1; done ;;
*'"chief":'*)
  mkdir -p "$printed" && : >"$printed/$DTRAIN_HOST-$$"
  [ -z "$SLURM_STEP_ID" ] || exec sleep 3600
  ;;
esac
"""
"""Prints its arguments and variables. The chief waits until the five processes that serve it have
printed theirs. Under Slurm these run until they are ended, which is when the chief has ended."""


def plan(slurm: Slurm, job: str, nodes: int = 2, gpus: int = 2) -> LaunchPlan:
    cluster = f"slurm: {{}}, nodes: {nodes}, gpus: {gpus}, run_dir: {slurm.shared}/runs"
    text = f"name: job\ncluster: {{{cluster}, python: {sys.executable}}}\njob: {job}\n"
    return build(parse(text, "job.yaml"))


def environment(output: bytes) -> dict[str, str]:
    """The variables that a process has printed, and its arguments."""
    arguments, _, pairs = output.decode().partition("\0\n")
    return {**dict(pair.split("=", 1) for pair in pairs.split("\0")[:-1]), "argv": arguments}


def test_environment_is_that_of_an_ssh_launch(slurm: Slurm, tmp_path: Path) -> None:
    python = slurm.shared / "python"
    python.write_text(PRINT)
    python.chmod(0o755)
    hosts = slurm.nodes[:2]
    addresses = ", ".join(f"{host.name}: {{address: {host.address}}}" for host in hosts)
    names = ", ".join(host.name for host in hosts)
    jobs = {}
    for name, program in PROGRAMS.items():
        rest = (
            f"gpus: 2, python: {python}, run_dir: {slurm.shared}/runs}}\n"
            f"job: {{{program}, workdir: {slurm.shared}, script: train.py, env: {{LIST: a b}}, "
            "args: ['{node_rank}', '$x y', '{total_gpus} of {nodes}', '{addresses}', '{host}', "
            '"\\t\'\\n"]}\n'
        )
        text = f"name: {name}\ncluster: {{slurm: {{}}, nodes: 2, {rest}"
        over_ssh = f"name: {name}\ncluster: {{hosts: [{names}], overrides: {{{addresses}}}, {rest}"
        on = ("--nodelist", ",".join(host.name for host in hosts))
        job = slurm.submit(render(build(parse(text, "a.yaml"))), *on)
        jobs[job] = build(parse(over_ssh, "a.yaml"))
    for job, expected in jobs.items():
        slurm.wait(job)
        run = f"{expected.name}-{job}"
        report = (slurm.shared / f"{run}.out").read_text()
        assert slurm.state(job) == "COMPLETED", report
        scripts = dict(shell.files(expected))
        for part in expected.hosts:
            folder = slurm.shared / "runs" / "nodes" / run / part.host.name
            here = tmp_path / job / part.host.name
            here.mkdir(parents=True)
            for process in part.processes:
                stem = f"{process.role}-{process.index}"
                for name in (f"{stem}.sh", f"{stem}.env"):
                    (here / name).write_text(scripts[f"{part.host.name}/{name}"])
                found = environment((folder / f"{stem}.out").read_bytes())
                launched = {
                    "DTRAIN_RUN_ID": run,
                    "DTRAIN_RUN_DIR": str(folder),
                }
                if "MASTER_PORT" in found:
                    launched["MASTER_PORT"] = found["MASTER_PORT"]
                by_hand = subprocess.run(
                    ["bash", here / f"{stem}.sh"],
                    env={**os.environ, **slurm.environment, **launched},
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    timeout=HANG,
                    check=True,
                )
                compare(found, environment(by_hand.stdout))


def compare(found: dict[str, str], expected: dict[str, str]) -> None:
    for name in expected.keys() | found.keys():
        if name not in expected:
            assert name.startswith((*OF_THE_ENGINE, *OF_THE_MACHINE)), name
        elif name not in OF_THE_MACHINE + ONLY_BY_HAND and not name.startswith(OF_THE_ENGINE):
            assert found.get(name) == expected[name], name
    assert found["PWD"] == expected["PWD"]


_APPTAINER = """\
#!/bin/bash
until [[ $1 == *.sif ]]; do shift; done
given=()
for name in ${!APPTAINERENV_@}; do given+=("${name#APPTAINERENV_}=${!name}"); done
exec env -i "${given[@]}" "${@:2}"
"""
"""In place of apptainer, which Debian does not have."""


def test_a_container_gets_the_variables_of_its_rank(slurm: Slurm) -> None:
    program = slurm.shared / "bin" / "apptainer"
    program.parent.mkdir(exist_ok=True)
    program.write_text(_APPTAINER)
    program.chmod(0o755)
    container = "container: {engine: apptainer, image: /torch.sif}"
    setup = f"setup: 'PATH={program.parent}:$PATH'"
    job = slurm.sbatch(
        render(plan(slurm, f"{{framework: jax, command: [/usr/bin/env], {container}, {setup}}}"))
    )
    assert slurm.state(job) == "COMPLETED", (slurm.shared / f"job-{job}.out").read_text()
    found = "".join(said(slurm.shared / "runs" / "nodes" / f"job-{job}"))
    assert sorted(line for line in found.splitlines() if line.startswith("RANK=")) == [
        f"RANK={rank}" for rank in range(4)
    ]
    assert "SLURM" not in found


_SRUN = """\
#!/bin/bash
case $1 in --help) echo "  --container-image=..."; exit ;; esac
given=()
for word; do
  case $word in
  --container-* | --no-container-*) echo "$word" >>~/pyxis ;;
  *) given+=("$word") ;;
  esac
done
exec /usr/bin/srun "${given[@]}"
"""
"""An srun with the options of pyxis, which Debian does not have."""


def test_pyxis_takes_the_tasks_if_slurm_has_it(slurm: Slurm) -> None:
    programs = slurm.shared / "pyxis-bin"
    programs.mkdir()
    (programs / "srun").write_text(_SRUN)
    (programs / "srun").chmod(0o755)
    container = "container: {image: nvcr.io/torch:2, mounts: [/data]}, env: {A: b c}"
    command = f"command: [/bin/sh, -c, 'echo $RANK $A $HOME'], workdir: {slurm.shared}"
    text = render(plan(slurm, f"{{framework: jax, {command}, {container}}}"))
    text = text.replace("\n\n", f"\nPATH={programs}:$PATH HOME={programs}\n", 1)
    job = slurm.sbatch(text)
    assert slurm.state(job) == "COMPLETED", (slurm.shared / f"job-{job}.out").read_text()
    runs = slurm.shared / "runs" / "nodes"
    homes = sorted(path.parent for path in (runs / f"job-{job}").rglob("worker-*.out"))
    assert sorted(said(runs / f"job-{job}")) == [
        f"{rank} b c {home}\n" for rank, home in enumerate(homes)
    ]
    image, mounts, *others = (programs / "pyxis").read_text().splitlines()
    assert image == "--container-image=nvcr.io#torch:2"
    folders = f"/data:/data,{slurm.shared}:{slurm.shared},{runs}:{runs}"
    assert mounts == f"--container-mounts={folders}"
    assert others == ["--container-writable", "--no-container-mount-home"]


@pytest.mark.torch
@pytest.mark.parametrize("backend", ["direct", "c10d"])
def test_torch_ranks_meet(slurm: Slurm, backend: str) -> None:
    script = f"script: {JOBS}/allreduce_torch.py"
    job = f"{{framework: torch, {script}, rendezvous: {{backend: {backend}}}}}"
    number = slurm.sbatch(render(plan(slurm, job, gpus=1)))
    folder = slurm.shared / "runs" / "nodes" / f"job-{number}"
    texts = [path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file()]
    assert slurm.state(number) == "COMPLETED", "\n".join(texts)
    assert sum(text.count('"sum": 3.0') for text in texts) == 2


def sh(slurm: Slurm, text: str, rest: str = "", *, nodes: int = 2, framework: str = "none") -> str:
    """The script of a job whose ranks run a shell script."""
    program = slurm.shared / "program.sh"
    program.write_text(text)
    job = f"{{framework: {framework}, per: host, script: {program}{rest}}}"
    return render(plan(slurm, job, nodes))


def test_a_failed_rank_ends_the_job(slurm: Slurm) -> None:
    job = slurm.sbatch(sh(slurm, "((RANK == 0)) || exit 3; sleep 1000"))
    assert slurm.state(job) == "FAILED"
    assert "task 1: Exited with exit code 3" in (slurm.shared / f"job-{job}.out").read_text()


def test_a_failed_job_goes_back_to_the_queue_as_often_as_the_file_allows(slurm: Slurm) -> None:
    job = slurm.submit(
        sh(
            slurm,
            "echo attempt $DTRAIN_ATTEMPT; ((RANK)) && sleep 1000; exit 3",
            ", restart: {max: 1}",
        )
    )
    slurm.wait_for("a restart", lambda: slurm.job(job).get("Restarts") == "1")
    second = slurm.shared / "runs" / "nodes" / f"job-{job}.2"
    slurm.start_again(job)
    slurm.wait_for("the second attempt", lambda: any(second.glob("*/*.out")))
    slurm.wait(job, "FAILED")
    assert slurm.job(job)["Restarts"] == "1"
    for number, name in ((1, f"job-{job}"), (2, f"job-{job}.2")):
        (first,) = (slurm.shared / "runs" / "nodes" / name).rglob("worker-0.out")
        assert first.read_text() == f"attempt {number}\n"


def test_services_end_after_the_others_with_time_to_finish(slurm: Slurm) -> None:
    program = slurm.shared / "program.sh"
    up = slurm.shared / "up"
    up.mkdir()
    program.write_text(
        f'served() {{ [ "$(ls {up} | wc -l)" = 2 ]; }}\n'
        'case $TF_CONFIG in\n*\'"type": "ps"\'*) ;;\n'
        "*) until served; do sleep 0.1; done; echo done; exit;; esac\n"
        f"trap 'echo ended; exit' TERM; echo serving; : >{up}/$SLURM_PROCID\n"
        "while :; do sleep 0.1; done\n"
    )
    roles = "roles: {chief: 1, worker: 2, ps: 2}, strategy: parameter_server"
    job = slurm.sbatch(
        render(plan(slurm, f"{{framework: tensorflow, {roles}, script: {program}}}", gpus=0))
    )
    folder = slurm.shared / "runs" / "nodes" / f"job-{job}"
    assert slurm.state(job) == "COMPLETED"
    assert [path.read_text() for path in folder.rglob("ps-*.out")] == ["serving\nended\n"] * 2
    assert [path.read_text() for path in folder.rglob("chief-*.out")] == ["done\n"]


def test_workers_get_term_before_the_time_limit(slurm: Slurm) -> None:
    text = "trap 'echo saved; exit 0' TERM; echo ready; while :; do sleep 0.1; done"
    job = slurm.submit(sh(slurm, text))
    folder = slurm.shared / "runs" / "nodes" / f"job-{job}"
    slurm.wait_for("ranks", lambda: said(folder) == ["ready\n"] * 2)
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    slurm.wait(job)
    assert said(folder) == ["ready\nsaved\n"] * 2
    assert slurm.state(job) == "FAILED"


def test_a_job_that_is_cancelled_does_not_come_back(slurm: Slurm) -> None:
    job = slurm.submit(sh(slurm, "echo ready; exec sleep 1000", ", restart: {max: 3}"))
    folder = slurm.shared / "runs" / "nodes" / f"job-{job}"
    slurm.wait_for("ranks", lambda: said(folder) == ["ready\n"] * 2)
    slurm.run("scancel", job)
    slurm.wait(job)
    slurm.wait_until_idle()
    assert slurm.job(job)["JobState"] == "CANCELLED"


def said(folder: Path) -> list[str]:
    return [path.read_text() for path in folder.rglob("worker-*.out")]


def test_a_secret_that_is_not_exported_is_named(slurm: Slurm) -> None:
    job = slurm.sbatch(sh(slurm, "exit 0", ", secrets: [TOKEN]"))
    assert slurm.state(job) == "FAILED"
    assert "TOKEN: is a secret" in (slurm.shared / f"job-{job}.out").read_text()


def test_every_option_reaches_slurm(slurm: Slurm) -> None:
    text = (
        "cluster:\n  slurm: {partition: gpu, time: 90s, cpus: 3, options: "
        '[--exclusive, "--comment=it\'s \\"one\\" #1 \\\\"]}\n'
        "  nodes: 2\n  gpus: 2\n"
        "job: {framework: none, command: ['true'], restart: {max: 1}}\n"
    )
    job = slurm.submit(render(build(parse(text, "a.yaml"))), "--hold")
    said = slurm.run("scontrol", "show", "job", job)
    for part in (
        "JobName=a", "Partition=gpu", "NumNodes=2", "CPUs/Task=3", "TimeLimit=00:02:00",
        "Requeue=1", "Comment=it's \"one\" #1 \\",
    ):  # fmt: skip
        assert part in said, said
    assert re.search("TresPerNode=gres[:/]gpu:2", said), said
