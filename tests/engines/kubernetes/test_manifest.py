"""``job.yaml``: byte for byte what was reviewed, and valid for Kubernetes, JobSet and Trainer.

``--update-golden`` writes the references anew; read the `git diff`.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import subprocess
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from dtrain.diagnostics import SpecError
from dtrain.engines.kubernetes import lines, manifest, script
from dtrain.launchplan.build import build
from dtrain.launchplan.plan import LaunchPlan
from dtrain.spec.load import parse
from dtrain_cli.dry_run import rendered
from support.kubernetes_rules import problems
from support.limits import HANG
from support.specs import read

SURELY_ATOMIC = 512
"""Bytes of a write to a pipe that POSIX never mixes with others (_POSIX_PIPE_BUF)."""
PIECE = 450
"""Bytes of a long line in each of its pieces."""
FOLDER = Path(__file__).parent / "cases"
CONFIGS = Path(__file__).parents[3] / "configs"
CASES = sorted(FOLDER.glob("*.yaml"))

FILE = """
cluster: {kubernetes: {image: "train:1"}, nodes: 2, gpus: 2}
job: {framework: torch, script: t.py}
"""


@pytest.fixture(params=CASES, ids=lambda path: path.stem)
def case(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


def plan(text: str) -> LaunchPlan:
    return build(parse(text, "job.yaml"))


def objects(text: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(rendered(plan(text))))


def test_golden(case: Path, golden: Callable[[str, Path], None]) -> None:
    text = rendered(build(read(case)))
    golden(text, case.with_suffix(".manifest"))


def test_the_objects_are_valid(case: Path) -> None:
    config, job = yaml.safe_load_all(rendered(build(read(case))))
    subprocess.run(["bash", "-n"], input=config["data"]["job.sh"].encode(), check=True)
    assert problems(config) == []
    assert problems(job) == []


REFUSED = {
    "gpt-100b.yaml": ["job.elastic"],
    "tensorflow-parameter-server.yaml": ["job.on_disconnect"],
}
"""Keys of a file of configs/ that Kubernetes has no feature for."""


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
@pytest.mark.parametrize("api", ["jobset", "trainjob"])
def test_a_shipped_file_moves_to_kubernetes_with_its_cluster_alone(path: Path, api: str) -> None:
    document = yaml.safe_load(path.read_text())
    cluster = document["cluster"]
    kept = ("gpus", "slots", "gpu", "network", "python")
    nodes = len(read(path).cluster.hosts)
    document["cluster"] = {key: cluster[key] for key in kept if key in cluster}
    document["cluster"] |= {"kubernetes": {"image": "train:1", "api": api}, "nodes": nodes}
    try:
        config, job = objects(yaml.safe_dump(document))
    except SpecError as error:
        found = {problem.message.split(" is not")[0] for problem in error.problems}
        assert found <= {*REFUSED.get(path.name, ()), "a TrainJob cannot set job.restart.max"}
    else:
        assert path.name not in REFUSED
        assert problems(config) + problems(job) == []


@pytest.mark.parametrize("text", ["y", "N", "1e3", "1.5e3", "0o17", "08", "true", "12"])
def test_text_stays_text_for_kubectl(text: str) -> None:
    """It reads more words and numbers as values of other types than PyYAML does."""
    file = FILE.replace('image: "train:1"', f'image: i, node_selector: {{a: "{text}"}}')
    assert f"a: '{text}'\n" in rendered(plan(file))


def test_commands_name_the_namespace_and_the_context_of_the_job() -> None:
    keys = 'image: i, namespace: ml, context: "it\'s prod"'
    file = FILE.replace('image: "train:1"', keys).replace("t.py", "t.py, secrets: [TOKEN]")
    head = rendered(plan(file)).partition("apiVersion")[0]
    context = r"""--context 'it'"'"'s prod'"""
    assert f"kubectl apply -f job.yaml {context}\n" in head
    create = "kubectl create secret generic job --from-env-file=secrets.env"
    assert f"{create} --namespace ml {context}\n" in head


def test_a_secret_is_a_reference() -> None:
    """The value comes from the environment of a launch, and only the Secret has it."""
    spec = parse(FILE.replace("script: t.py", "script: t.py, secrets: [TOKEN]"), "job.yaml")
    launched = build(spec, run="job-20261122-100000-abc123")
    secret = manifest.secret(launched, {"TOKEN": "hunter2"})
    assert problems(secret) == []
    name = secret["metadata"]["name"]
    assert name == "job-abc123"
    text = json.dumps(manifest.objects(launched))
    assert "hunter2" not in text
    assert f'"secretKeyRef": {{"name": "{name}", "key": "TOKEN"}}' in text


def test_the_plan_has_the_dns_names_of_the_pods() -> None:
    found = json.loads(rendered(plan(FILE), json=True))
    assert [host["address"] for host in found["hosts"]] == ["job-node-0-0.job", "job-node-0-1.job"]
    assert found["hosts"][1]["processes"][1]["environment"]["RANK"] == "3"
    assert found["hosts"][1]["environment"]["MASTER_ADDR"] == "job-node-0-0.job"
    assert list(found["files"]) == ["job.yaml"]


@pytest.mark.parametrize(
    ("framework", "nodes", "count"), [("tensorflow", 2, 1), ("torch", 2, 0), ("torch", 1, 1)]
)
def test_ports_of_the_machine_that_every_pod_uses(framework: str, nodes: int, count: int) -> None:
    """Kubernetes puts no two pods with the same port on one machine. With torch, only the first of
    several pods has one."""
    keys = f'{{kubernetes: {{image: "train:1", host_network: true}}, nodes: {nodes}, gpus: 2}}'
    text = f"cluster: {keys}\njob: {{framework: {framework}, script: t.py}}\n"
    config, job = objects(text)
    assert problems(job) == []
    (replicated,) = job["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    found = container.get("ports", [])
    assert len(found) == count
    for one in found:
        assert one["hostPort"] == one["containerPort"]
        assert f"dtrain_port={one['hostPort']}\n" in config["data"]["job.sh"]
    (container,) = manifest.pod_spec(plan(text.replace("host_network: true", "")))["containers"]
    assert "ports" not in container


def test_output_is_the_manifest_and_the_plan(tmp_path: Path) -> None:
    out = tmp_path / "out"
    rendered(plan(FILE), output=out)
    assert sorted(path.name for path in out.iterdir()) == ["job.yaml", "plan.json"]
    rendered(plan(FILE.replace('kubernetes: {image: "train:1"}', "slurm: {}")), output=out)
    assert sorted(path.name for path in out.iterdir()) == ["job.sbatch", "plan.json"]


def test_pods_that_serve_end_with_the_others() -> None:
    _, job = objects((FOLDER / "tensorflow-parameter-server.yaml").read_text())
    (replicated,) = job["spec"]["replicatedJobs"]
    assert replicated["template"]["spec"]["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}


def test_processes_that_serve_end_with_the_last_other_one_of_their_pod(tmp_path: Path) -> None:
    program = "case $TF_CONFIG in *chief*chief*) exit;; *) exec sleep 1000;; esac"
    text = (FOLDER / "tensorflow-parameter-server.yaml").read_text()
    text = text.replace("script: train.py", f"command: [sh, -c, {json.dumps(program)}]")
    done = run_pod(script.render(plan(text.replace("  sync: {}\n", ""))), tmp_path)
    assert done.returncode == 0
    written = [line.split(" at ")[0] for line in done.stdout.splitlines() if line]
    ends = ["[dtrain] chief-0 ended: 0", "[dtrain] worker-0 ended: 143"]
    assert written == ["[dtrain] begins", *ends, "[dtrain] ends"]


@pytest.mark.parametrize("count", [1, 3])
def test_the_script_runs_the_processes_of_one_pod(tmp_path: Path, count: int) -> None:
    """Each line has the name of its process; one that fails ends the others."""
    program = (
        'echo "rank $RANK of $WORLD_SIZE at $MASTER_ADDR"; echo "to stderr" >&2; '
        f": >{tmp_path}/up-$RANK; [ $RANK = 0 ] || exec sleep 1000; "
        f"until [ $(ls {tmp_path}/up-* | wc -l) = {count} ]; do sleep 0.02; done; exit 7"
    )
    done = run_pod(script.render(plan(file_of(program, count))), tmp_path)
    written = done.stdout.splitlines()
    assert done.returncode == 7
    for rank in range(count):
        assert f"[worker-{rank}] rank {rank} of {2 * count} at job-node-0-0.job" in written
        assert f"[worker-{rank} err] to stderr" in written
    begins, *ended, ends = [
        line.split(" at ")[0] for line in written if line.startswith("[dtrain]")
    ]
    assert (begins, ends) == ("[dtrain] begins", "[dtrain] ends") and written[-1] == ends
    assert ended[0] == "[dtrain] worker-0 ended: 7"
    assert set(ended[1:]) == {f"[dtrain] worker-{rank} ended: 143" for rank in range(1, count)}


def test_lines_of_all_lengths_reach_the_log_whole(tmp_path: Path) -> None:
    """With all bytes, and the last one without its newline."""
    sizes = (0, 1, *range(PIECE - 1, PIECE + 2), 2 * PIECE, 5000)
    hostile = bytes(set(range(256)) - {10})
    text = b"\n".join((hostile * size)[:size] for size in sizes)
    (tmp_path / "text").write_bytes(text)
    written = log_of(file_of(f"cat {tmp_path}/text"), tmp_path)
    assert joined(written)["worker-0", False] == text + b"\n"


@pytest.mark.parametrize("text", ["a line\\n", "no newline", "z" * 1000])
def test_a_process_that_a_worker_has_left_keeps_no_text_back(tmp_path: Path, text: str) -> None:
    """It has the pipe of the worker, which does not end."""
    goes_on = tmp_path / "goes-on"
    os.mkfifo(goes_on)
    program = f"(: <{goes_on}) & printf '{text}'"
    written = log_of(file_of(program), tmp_path)
    os.close(os.open(goes_on, os.O_WRONLY | os.O_NONBLOCK))  # there is somebody who reads it
    assert joined(written)["worker-0", False] == text.replace("\\n", "").encode() + b"\n"


def test_a_pod_ends_although_its_pipes_are_gone_and_a_process_is_left(tmp_path: Path) -> None:
    goes_on = tmp_path / "goes-on"
    os.mkfifo(goes_on)
    program = f"rm -r $DTRAIN_RUN_DIR; (: <{goes_on}) & echo done"
    command, environment = pod(script.render(plan(file_of(program))), tmp_path)
    log = tmp_path / "log"
    with log.open("wb") as output:  # no pipe, which the readers keep open
        subprocess.run(command, env=environment, stdout=output, timeout=HANG, check=True)
    os.close(os.open(goes_on, os.O_WRONLY | os.O_NONBLOCK))  # there is somebody who reads it
    assert joined(log.read_bytes())["worker-0", False] == b"done\n"


def test_a_pod_ends_although_the_file_of_the_watcher_is_a_pipe(tmp_path: Path) -> None:
    written = log_of(file_of("mkfifo $DTRAIN_RUN_DIR/watcher.pid; echo done"), tmp_path)
    assert joined(written)["worker-0", False] == b"done\n"


def test_pieces_end_between_characters(tmp_path: Path) -> None:
    """Some runtimes of containers replace the bytes of half a character."""
    text = "x\u4f60\u597d" * 700
    (tmp_path / "text").write_text(text)
    written = log_of(file_of(f"cat {tmp_path}/text"), tmp_path)
    assert max(map(len, written.splitlines(keepends=True))) <= SURELY_ATOMIC
    for line in written.splitlines():
        line.decode()
    assert joined(written)["worker-0", False].decode() == text + "\n"


def test_long_lines_of_several_streams_do_not_mix(tmp_path: Path) -> None:
    program = (
        'lines() { for n in 1 2 3; do head -c 30000 /dev/zero | tr "\\0" "$1"; echo; done; };'
        " lines $RANK & lines $((RANK + 3)) >&2; wait"
    )
    written = log_of(file_of(program, slots=3), tmp_path)
    assert max(map(len, written.splitlines(keepends=True))) <= SURELY_ATOMIC
    found = joined(written)
    for rank in range(3):
        assert found[f"worker-{rank}", False] == (b"%d" % rank * 30000 + b"\n") * 3
        assert found[f"worker-{rank}", True] == (b"%d" % (rank + 3) * 30000 + b"\n") * 3


@pytest.mark.parametrize("count", [1, 6])
def test_the_script_writes_when_the_pod_is_deleted(tmp_path: Path, count: int) -> None:
    """Before it ends its processes, of which some start after the TERM."""
    program = "[ $RANK != 0 ] || kill $PPID; exec sleep 1000"
    done = run_pod(script.render(plan(file_of(program, count))), tmp_path)
    assert done.returncode == 143
    begins, term, *ended, end = map(lines.labelled, done.stdout.encode().splitlines())
    assert begins is lines.ScriptLine.BEGIN and end is lines.ScriptLine.END
    assert term is lines.ScriptLine.TERM
    assert [one.status for one in ended if isinstance(one, lines.ProcessEnd)] == [143] * count


def test_the_program_that_a_shell_has_started_gets_term_too(tmp_path: Path) -> None:
    """The shell dies of TERM. Without it, its program would get KILL with the pod."""
    program = "trap 'echo saved; exit' TERM; kill $pod; while kill -0 $pod; do sleep 0.02; done"
    (tmp_path / "program").write_text(program)
    shell = f"export pod=$PPID; sh {tmp_path}/program; :"
    done = run_pod(script.render(plan(file_of(shell))), tmp_path)
    assert done.returncode == 143
    assert "[worker-0] saved" in done.stdout.splitlines()
    assert done.stdout.endswith("[dtrain] ends\n")


@pytest.mark.parametrize(
    ("trap", "said"),
    [("echo saved; exit", ["saved"]), ("", [])],
    ids=["saves", "ignores"],
)
def test_a_program_that_outlives_its_failed_shell_has_job_grace(
    tmp_path: Path, trap: str, said: list[str]
) -> None:
    """It gets TERM. If it ignores that, it does not keep the pod."""
    over = tmp_path / "over"
    (tmp_path / "left").write_text(
        f"trap '{trap}' TERM; touch ready; until [ -e {over} ]; do sleep 0.02; done"
    )
    shell = f"cd {tmp_path}; sh ./left & until [ -e ready ]; do sleep 0.02; done; exit 5"
    text = file_of(shell).replace("framework: none", "framework: none, grace: 1s")
    done = run_pod(script.render(plan(text)), tmp_path)
    over.touch()
    assert done.returncode == 5
    printed = [line for line in done.stdout.splitlines() if line.startswith("[worker-0]")]
    assert printed == [f"[worker-0] {line}" for line in said]


def test_a_deletion_after_the_last_process_does_not_change_how_the_pod_ends(
    tmp_path: Path,
) -> None:
    """The pod waits for a reader whose pipe the job has removed."""
    ignored = "grep -q '^SigIgn:.*[4-7c-f]...$' /proc/$pod/status"
    too_late = "grep -q Z /proc/$pod/status"
    (tmp_path / "late").write_text(
        f"until {ignored}; do ! {too_late} || exit; sleep 0.02; done; kill $pod && echo killed"
    )
    program = f"rm -r $DTRAIN_RUN_DIR; pod=$PPID setsid sh {tmp_path}/late & :"
    done = run_pod(script.render(plan(file_of(program))), tmp_path)
    assert done.returncode == 0
    assert "[worker-0] killed" in done.stdout.splitlines()


def test_a_killed_process_adds_no_line_of_the_shell(tmp_path: Path) -> None:
    """Bash writes one about a process that a signal has ended; it would be the first cause. Some
    end while others start."""
    done = run_pod(script.render(plan(file_of("kill -KILL $$", 6))), tmp_path)
    assert done.returncode == 137
    lines = done.stdout.splitlines()
    assert [line for line in lines if not line.startswith("[dtrain]")] == []


def test_a_script_that_cannot_start_all_processes_says_so(tmp_path: Path) -> None:
    """Bash also ends if it cannot fork, which takes it 15 s."""
    fails = tmp_path / "mkfifo"
    fails.write_text('#!/bin/sh\n[ "${1##*/}" != worker-1.out ] && exec /usr/bin/mkfifo "$@"\n')
    fails.chmod(0o755)
    command, environment = pod(script.render(plan(file_of("true", 2))), tmp_path)
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=HANG, check=False
    )
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "not all processes of this pod could start"


def test_the_script_does_not_run_again_in_the_same_pod(tmp_path: Path) -> None:
    text = script.render(plan(FILE.replace("script: t.py", "command: ['true']")))
    assert run_pod(text, tmp_path).returncode == 0
    again = run_pod(text, tmp_path)
    assert again.returncode == 1
    assert again.stdout.startswith("[dtrain] begins\nthis container cannot start again alone")


def run_pod(job: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the script of the first pod."""
    command, environment = pod(job, folder)
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=HANG, check=False
    )


def pod(job: str, folder: Path) -> tuple[list[str], dict[str, str]]:
    """The command and the environment of the first pod."""
    command = ["bash", "-c", job.replace("/dtrain/run", str(folder / "run"))]
    return command, {"JOB_COMPLETION_INDEX": "0", "PATH": "/usr/bin:/bin"}


def file_of(program: str, slots: int = 1) -> str:
    """A job whose processes run a program of the shell."""
    return FILE.replace("gpus: 2", f"slots: {slots}").replace(
        "framework: torch, script: t.py",
        f"framework: none, command: [sh, -c, {json.dumps(program)}]",
    )


def log_of(text: str, folder: Path) -> bytes:
    """What the first pod writes to a pipe that takes no more than the shortest writes at once."""
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, select.PIPE_BUF)
    command, environment = pod(script.render(plan(text)), folder)
    with subprocess.Popen(command, env=environment, stdout=write) as process:
        os.close(write)
        with open(read, "rb", buffering=0) as log:
            written = b"".join(iter(lambda: log.read(select.PIPE_BUF), b""))
    assert process.returncode == 0
    return written


def joined(log: bytes) -> dict[tuple[str, bool], bytes]:
    """The text of each stream."""
    streams: dict[tuple[str, bool], bytes] = defaultdict(bytes)
    for line in map(lines.labelled, log.split(b"\n")):
        if isinstance(line, lines.ProcessLine):
            streams[line.process, line.stderr] += line.text
    return streams
