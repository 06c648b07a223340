"""What `scontrol` and `sinfo` say, and what a file may ask for."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from dtrain.checks.finding import Finding, Severity
from dtrain.diagnostics import UsageError
from dtrain.engines.slurm import partitions, submission
from dtrain.engines.slurm.judgement import RequestJudge, duration
from dtrain.engines.slurm.login_shell import CommandAnswer
from dtrain.engines.slurm.partitions import gpus_of
from dtrain.messages.slurm import SubmitRefused
from dtrain.parallelism.question import Question
from dtrain.planning.question import pose
from dtrain.planning.request import AskQueue, PlanRequest, QueueGpus
from dtrain.spec.load import parse, position
from dtrain.spec.model import ClusterFile, Slurm
from dtrain_cli import first_slurm_file

SCONTROL = """\
site banner
PartitionName=cpu AllowAccounts=ALL Default=YES MaxNodes=UNLIMITED MaxTime=UNLIMITED State=UP
PartitionName=gpu AllowAccounts=ml,vision Default=NO MaxNodes=3 MaxTime=2-12:00:00 State=UP
PartitionName=own AllowAccounts=ALL Default=NO Hidden=YES MaxNodes=UNLIMITED State=UP
"""
SINFO = """\
cpu|c1|idle|64|(null)|(null)
gpu|g1|idle|128|nvme,a100|gpu:a100:8(S:0-7),shard:64
gpu|g2|mixed|128|nvme,a100|gpu:a100:8(S:0-7)
gpu|g3|down*|128|nvme,a100|gpu:a100:8
gpu|g4|drained|128|h100|gpu:h100:4
own|o1|idle|128|(null)|gpu:9
"""
ACCEPTED = CommandAnswer("sbatch", 0, "", "sbatch: Job 7 to start at 2026-11-22T14:06:46")


def judge_of(keys: str) -> RequestJudge:
    keys += "" if "gpus:" in keys else ", gpus: 0"
    text = f"cluster: {{{keys}}}\njob: {{framework: none, script: t.py}}\n"
    spec = parse(text, "job.yaml")
    return RequestJudge(spec, "login01", lambda key: position(text, "job.yaml", (), key))


def judged(keys: str, tested: CommandAnswer = ACCEPTED) -> list[Finding]:
    return judge_of(keys).judge(partitions.read(SCONTROL, SINFO), tested)


def test_partitions_are_read() -> None:
    cpu, gpu, own = partitions.read(SCONTROL, SINFO)
    assert [each.hidden for each in (cpu, gpu, own)] == [False, False, True]
    assert (cpu.name, cpu.default, cpu.max_time, cpu.gpu_types) == ("cpu", True, None, ())
    assert (gpu.max_time, gpu.max_nodes, gpu.allowed_accounts) == (216000.0, 3, ("ml", "vision"))
    assert gpu.gpu_types == ("a100", "h100")
    assert [machine.count() for machine in gpu.machines] == [8, 8, 8, 4]
    assert [machine.usable for machine in gpu.machines] == [True, True, False, False]
    assert gpu.machines[0].features == ("nvme", "a100")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("UNLIMITED", None), ("30", 1800), ("1:30", 90), ("2:00:00", 7200), ("1-6", 108000)],
)
def test_slurm_times(text: str, expected: float | None) -> None:
    assert partitions.seconds(text) == expected


def test_durations_are_written_as_the_file_has_them() -> None:
    assert [duration(seconds) for seconds in (216000, 5400, 45)] == ["2d12h", "1h30m", "45s"]


@pytest.mark.parametrize(
    ("keys", "subject", "seen"),
    [
        ("slurm: {partition: gpu}, nodes: 2, gpus: 8", "", ""),
        ("slurm: {partition: 'cpu,gpu'}, nodes: 2, gpus: 8", "", ""),
        ("slurm: {partition: own}, nodes: 1, gpus: 9", "", ""),
        ("slurm: {partition: gpus}, nodes: 1", "slurm.partition", "gpus; do you mean gpu?"),
        ("slurm: {}, nodes: 1, gpus: 1", "gpus", "0 of 1 machine of partition cpu have 1 GPU"),
        ("slurm: {partition: gpu}, nodes: 4", "nodes", "4 machines are more than a job in"),
        ("slurm: {partition: gpu}, nodes: 5", "nodes", "5 machines are more than a job in"),
        ("slurm: {partition: cpu}, nodes: 2", "nodes", "partition cpu has 1 machine, and the job"),
        (
            "slurm: {partition: gpu, gpu_type: v100}, nodes: 1, gpus: 1",
            "slurm.gpu_type",
            "have GPUs of type v100; there are a100, h100",
        ),
        (
            "slurm: {partition: gpu, constraint: ib}, nodes: 1",
            "slurm.constraint",
            "have the feature ib; there are a100, h100, nvme",
        ),
        (
            "slurm: {partition: gpu, cpus: 32}, nodes: 1, gpus: 8",
            "slurm.cpus",
            "have 256 CPUs for 8 processes; the most that one has is 128",
        ),
        (
            "slurm: {partition: gpu, account: bio}, nodes: 1",
            "slurm.account",
            "partition gpu does not list account bio",
        ),
        (
            "slurm: {partition: gpu, constraint: a100}, nodes: 3, gpus: 8",
            "nodes",
            "2 of the 3 machines that fit in partition gpu can run jobs; the others are down*",
        ),
    ],
)
def test_a_request_is_compared_with_the_partition(keys: str, subject: str, seen: str) -> None:
    found = judged(keys)
    assert [finding.subject for finding in found][:1] == ([f"cluster.{subject}"] if subject else [])
    assert seen in "".join(finding.seen for finding in found)


@pytest.mark.parametrize(
    ("keys", "subjects"),
    [
        # sbatch accepts it, and the job would wait for ever.
        ("slurm: {partition: gpu, time: 61h}, nodes: 1", ["slurm.time"]),
        ("slurm: {partition: gpu, time: 60h}, nodes: 1", []),
        ("slurm: {partition: 'gpu,cpu', time: 61h}, nodes: 1", []),
        # The flags of a QOS may lift the limits of the partition.
        ("slurm: {partition: gpu, time: 61h, qos: long}, nodes: 4", []),
        ("slurm: {partition: gpu}, nodes: 4", ["nodes"]),
        # What sbatch accepts needs no machines now: those of a cloud may be powered down.
        ("slurm: {partition: cpu}, nodes: 2", []),
    ],
)
def test_a_launch_warns_of_what_slurm_may_let_wait_for_ever(keys: str, subjects: list[str]) -> None:
    found = judge_of(keys).impossible(partitions.read(SCONTROL, SINFO), ACCEPTED)
    assert [finding.subject for finding in found] == [f"cluster.{each}" for each in subjects]
    # The QOS of the account, of the partition or of SBATCH_QOS may lift the limits.
    assert all(finding.severity is Severity.WARNING for finding in found)


def test_a_launch_refuses_an_account_that_the_partition_denies() -> None:
    """sbatch accepts it, and nothing lets the job start."""
    denied = SCONTROL.replace("AllowAccounts=ml,vision", "AllowAccounts=ALL DenyAccounts=bio")
    judge = judge_of("slurm: {partition: gpu, account: bio}, nodes: 1")
    (finding,) = judge.impossible(partitions.read(denied, SINFO), ACCEPTED)
    assert finding.severity is Severity.ERROR


def test_an_account_may_be_below_one_that_the_partition_lists() -> None:
    """Newer versions of Slurm accept it, and ignore DenyAccounts beside AllowAccounts."""
    listed = SCONTROL.replace("=ml,vision", "=ml,vision DenyAccounts=bio")
    judge = judge_of("slurm: {partition: gpu, account: bio}, nodes: 1")
    (finding,) = judge.impossible(partitions.read(listed, SINFO), ACCEPTED)
    assert finding.subject == "cluster.slurm.account"
    assert finding.severity is Severity.WARNING


def test_a_limit_for_which_slurm_refuses_the_job() -> None:
    said = "sbatch: error: Batch job submission failed: Requested time limit is invalid"
    refused = CommandAnswer("sbatch", 1, "", said)
    limit, refusal = judged("slurm: {partition: gpu, time: 61h}, nodes: 1", refused)
    assert [limit.subject, refusal.subject] == ["cluster.slurm.time"] * 2
    assert limit.severity is Severity.WARNING
    assert refusal.severity is Severity.ERROR


def test_the_site_may_choose_the_partition() -> None:
    """A plugin of the site, or a variable such as SBATCH_PARTITION."""
    said = (
        "sbatch: Job 7 to start at 2026-11-22T14:06:46 using 1 processors on nodes g1 in partition"
    )
    assert (
        judged("slurm: {}, nodes: 1, gpus: 8", CommandAnswer("sbatch", 0, "", f"{said} gpu")) == []
    )
    (finding,) = judged("slurm: {}, nodes: 1, gpus: 8")
    assert finding.subject == "cluster.gpus"


@pytest.mark.parametrize(("nodes", "free"), [(2, True), (3, False)])
def test_one_of_several_partitions_may_have_enough_free_machines(nodes: int, free: bool) -> None:
    judge = judge_of(f"slurm: {{partition: 'cpu,gpu'}}, nodes: {nodes}")
    assert judge.free(partitions.read(SCONTROL, SINFO), ACCEPTED) is free


def test_hidden_partitions_are_not_proposed() -> None:
    (finding,) = judged("slurm: {partition: owl}, nodes: 1")
    assert finding.expected == "one of the cluster's partitions: cpu, gpu"
    assert not any(
        "own" in line for line in first_slurm_file.summaries(partitions.read(SCONTROL, SINFO))
    )


LIMIT = (
    "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy"
    " (job submit limit, user's size and/or time limits)"
)


@pytest.mark.parametrize(
    ("said", "key", "remedy"),
    [
        ("sbatch: error: Invalid account or account/partition combination", "slurm.account", "sac"),
        (f"sbatch: error: QOSMaxWallDurationPerJobLimit\n{LIMIT}", "slurm.qos", "ask for less"),
        (f"sbatch: error: AssocMaxSubmitJobLimit\n{LIMIT}", "slurm.account", "ask for less"),
        ("allocation failure: Requested reservation is invalid", "slurm.reservation", "scontrol"),
    ],
)
def test_what_sbatch_says_is_shown_at_the_key(said: str, key: str, remedy: str) -> None:
    refused = CommandAnswer("sbatch", 1, "", said)
    (finding,) = judged("slurm: {partition: gpu, account: ml}, nodes: 1", refused)
    assert finding.subject == f"cluster.{key}"
    assert said.splitlines()[0] in finding.seen
    assert finding.remedy.strip("`").startswith(remedy)
    # A key that the file does not have is at its section.
    assert finding.place == ("job.yaml:1:35" if "account" in key else "job.yaml:1:11")


def test_a_submission_that_did_not_reach_sbatch_blames_no_command() -> None:
    full = SubmitRefused("", 1, "/shared/run: No space left on device", uncertain=False)
    refusal = submission.refusal("login01", full)
    assert refusal.reason == full.text
    assert refusal.hint.startswith("free some space there")
    assert "partition" not in refusal.hint


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("allocation failure: Unable to contact slurm controller", "the controller is down"),
        ("sbatch: fatal: Unable to process configuration file", "run dtrain on a login node"),
        ("sbatch: error: Socket timed out on send/recv operation", "the controller is slow"),
    ],
)
def test_a_controller_that_does_not_answer_has_refused_nothing(said: str, remedy: str) -> None:
    refused = CommandAnswer("sbatch", 1, "", said)
    (finding,) = judged("slurm: {partition: gpu, options: [--exclusive]}, nodes: 1", refused)
    assert (finding.subject, finding.seen) == ("cluster.slurm", said)
    refusal = submission.refusal(
        submission.HERE, SubmitRefused("sbatch --a=b", 1, said, uncertain=False)
    )
    assert refusal.reason.startswith(said), "the options come last: there may be hundreds"
    assert refusal.reason.endswith("sbatch --a=b")
    assert refusal.hint.startswith(remedy)
    assert "compares the file" not in refusal.hint


def test_a_first_file_asks_for_the_most_common_machines() -> None:
    found = partitions.read(SCONTROL, SINFO)
    chosen = first_slurm_file.usual(found)
    assert chosen is not None
    answers = first_slurm_file.SlurmAnswers(chosen, 2, "torch", "train.py", None, "/home/me/gpt")
    text = first_slurm_file.text(answers, found)
    assert yaml.safe_load(text) == {
        "cluster": {
            "slurm": {
                "partition": "gpu",
                "account": "ml",
                "time": "1d",
                "gpu_type": "a100",
                "cpus": 16,
            },
            "nodes": 2,
            "gpus": 8,
            "gpu": "a100-80gb",
        },
        "job": {"framework": "torch", "script": "train.py", "workdir": "/home/me/gpt"},
    }
    assert "#   cpu (default): 1 machine, most with no GPU and 64 CPUs; time limit: none\n" in text
    parse(text, "cluster.yaml")


def planned(tmp_path: Path, slurm: str, ask: AskQueue, gpus: int = 8) -> Question:
    file = tmp_path / "job.yaml"
    file.write_text(
        f"cluster: {{slurm: {slurm}, nodes: 2, gpus: {gpus}}}\n"
        "job: {framework: torch, script: t.py}\n"
    )
    return pose(PlanRequest(file=file, model_size="7B"), ask)


def ask(spec: ClusterFile) -> QueueGpus:
    return gpus_of(partitions.read(SCONTROL, SINFO), spec.cluster.slurm or Slurm())


def test_a_plan_takes_the_gpus_of_the_partition(tmp_path: Path) -> None:
    posed = planned(tmp_path, "{partition: gpu, gpu_type: a100}", ask)
    cluster = posed.cluster
    assert (cluster.gpu.name, cluster.gpus, cluster.hosts) == ("a100-80gb", 16, 2)
    assert any("type a100, planned as a100-80gb" in note for note in posed.notes)
    # A file without GPUs does not say how many a machine has.
    posed = planned(
        tmp_path,
        "{}",
        lambda spec: QueueGpus("partition gpu", "slurm.gpu_type", ("h100",), 4),
        gpus=0,
    )
    assert posed.cluster.gpus == 8


@pytest.mark.parametrize(
    ("slurm", "message", "hint"),
    [
        (
            "{partition: gpu}",
            "has GPUs of 2 types: a100, h100",
            "choose with cluster.slurm.gpu_type",
        ),
        ("{}", "partition cpu has no machine with whole GPUs", "choose other machines"),
        ("{partition: nope}", "there is no partition nope", "`sinfo` lists the partitions"),
    ],
)
def test_gpus_that_a_plan_cannot_know(tmp_path: Path, slurm: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        planned(tmp_path, slurm, ask)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("types", "message"),
    [((), "does not say which GPUs its machines have"), (("tesla9",), "type 'tesla9', which")],
)
def test_gpu_types_that_no_plan_knows(tmp_path: Path, types: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        planned(tmp_path, "{}", lambda spec: QueueGpus("partition gpu", "slurm.gpu_type", types, 8))
    assert "add 'gpu: a100-80gb' to cluster" in caught.value.hint
