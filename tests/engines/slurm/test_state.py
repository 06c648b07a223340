"""What ``scontrol show job --oneliner`` says about a job."""

from __future__ import annotations

import pytest

from dtrain.engines.slurm.state import NO_OUTPUT, SlurmState, parse
from dtrain.messages.decode import ProtocolError

# As Slurm 22.05 prints it, shortened.
PENDING = (
    "JobId=8 JobName=run UserId=root(0) Priority=4294901758 Account=(null) JobState=PENDING "
    "Reason=Resources Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 ExitCode=0:0 "
    "RunTime=00:00:00 TimeLimit=01:00:00 SubmitTime=2026-11-22T10:59:42 "
    "StartTime=2026-11-22T11:00:43 EndTime=2026-11-22T12:00:43 Partition=gpu NodeList= "
    "NumNodes=4-4 Command=/home/a b/job.sbatch WorkDir=/root "
)
FAILED = (
    "JobId=1 JobName=run JobState=FAILED Reason=NonZeroExitCode Restarts=2 ExitCode=143:0 "
    "TimeLimit=01:00:00 StartTime=2026-11-22T10:59:31 NodeList=gpu[01-02,7] BatchHost=gpu01 "
    "Command=JobState=RUNNING "
)


def test_a_queued_job() -> None:
    state = parse(PENDING)
    assert state == SlurmState(
        "PENDING", "Resources", "2026-11-22 11:00:43", (), time_limit="01:00:00"
    )
    assert (state.queued, state.final, state.word) == (True, False, "queued")
    assert state.explanation == "waiting for free machines (Resources)"


def test_a_job_that_has_ended() -> None:
    state = parse(FAILED)
    assert state.hosts == ("gpu01", "gpu02", "gpu7")
    assert parse(FAILED.replace("143:0", "0:53")).signal == NO_OUTPUT
    assert (state.status, state.restarts, state.final, state.word) == (143, 2, True, "ended")


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (
            "QOSMaxWallDurationPerJobLimit",
            "it asks for more than its quality of service allows; cancel it, and ask for less",
        ),
        (
            "AssocMaxNodePerJobLimit",
            "it asks for more than its account allows; cancel it, and ask for less",
        ),
        (
            "QOSMinGRES",
            "it asks for less than its quality of service requires; cancel it, and ask for more",
        ),
        (
            "QOSMaxGRESPerUser",
            "other jobs use what its quality of service allows, or it asks for more than that",
        ),
        (
            "MaxGRESPerAccount",
            "other jobs use what its quality of service allows, or it asks for more than that",
        ),
        (
            "AssocGrpCPURunMinutesLimit",
            "other jobs use what its account allows, or it asks for more than that",
        ),
        ("AssocGrpCPUMinutesLimit", "its account has too little time left for it"),
        (
            "AccountNotAllowed",
            "the partition does not accept its account; cancel it, and set cluster.slurm.account",
        ),
    ],
)
def test_limits_say_whether_waiting_helps(reason: str, words: str) -> None:
    assert parse(PENDING.replace("Resources", reason)).explanation == f"{words} ({reason})"


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        (
            "ReqNodeNotAvail,_UnavailableNodes:gpu1",
            "machines that it needs are down or reserved (ReqNodeNotAvail, UnavailableNodes:gpu1)",
        ),
        ("PartitionConfig", "it asks for more than the partition allows (PartitionConfig)"),
        ("launch_failed_requeued_held", "launch failed requeued held"),
    ],
)
def test_reasons_are_sentences(reason: str, shown: str) -> None:
    """``scontrol`` writes them in one word."""
    assert parse(PENDING.replace("Resources", reason)).explanation == shown


@pytest.mark.parametrize(
    "text",
    [
        "slurm_load_jobs error",
        FAILED.replace("gpu[01-02,7]", "gpu[1-"),
        FAILED.replace("ExitCode=143:0", "ExitCode=x:0"),
        FAILED.replace("gpu[01-02,7]", "gpu[1-999999999]"),
    ],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError, match="job: "):
        parse(text)
