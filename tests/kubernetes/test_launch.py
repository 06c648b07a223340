"""Launches on a cluster: output, the first cause, restarts, Ctrl-C, and what disturbs a job."""

from __future__ import annotations

import json
import re
import signal

import pytest

from support.kubernetes.desk import COUNT, WAIT, Desk

pytestmark = [pytest.mark.kubernetes, pytest.mark.netns]


def test_a_job_runs_and_leaves_nothing(desk: Desk) -> None:
    done = desk.launch('echo "rank $RANK at $MASTER_ADDR"; echo oops >&2').wait()
    assert done.code == 0, str(done)
    for rank in range(4):
        assert re.fullmatch(rf"rank {rank} at test-[0-9a-f]+-node-0-0\..*\n", desk.log(rank))
        assert desk.log(rank, "err") == "oops\n"
    assert desk.is_empty()


def test_long_lines_arrive_whole(desk: Desk) -> None:
    """They are longer than what a pipe, a container runtime or the launcher takes at once."""
    program = (
        'line() { head -c "$2" /dev/zero | tr "\\0" "$1"; echo; }; letter=({a..d});'
        ' line $RANK 1200000 & for n in 1 2 3; do line "${letter[RANK]}" 100000; done >&2; wait'
    )
    done = desk.launch(program).wait()
    assert done.code == 0, str(done)[:2000]
    for rank in range(4):
        assert desk.log(rank) == str(rank) * 1_200_000 + "\n"
        assert desk.log(rank, "err") == ("abcd"[rank] * 100_000 + "\n") * 3
    assert "(1,200,000 bytes, whole in" in done.stdout


def test_the_first_cause_of_a_failure(desk: Desk) -> None:
    program = '[ $RANK = 3 ] && { echo "ValueError: bad batch" >&2; exit 7; }; exec sleep 500'
    done = desk.launch(program).wait()
    assert done.code == 1, str(done)
    assert "rank 3 on node1 exited with status 7" in done.stderr
    assert "ValueError: bad batch" in done.stderr
    assert desk.is_empty()


def test_ctrl_c_deletes_the_job(desk: Desk) -> None:
    launch = desk.launch(WAIT)
    launch.until("the worker waits", count=4)
    launch.send(signal.SIGINT)
    done = launch.wait()
    assert done.code == 130, str(done)
    assert "nothing of it runs" in done.stderr
    assert desk.is_empty()


def test_a_failed_job_starts_again(desk: Desk) -> None:
    program = (
        'echo "attempt $DTRAIN_ATTEMPT"; [ $DTRAIN_ATTEMPT = 2 ] && exit 0;'
        " until [ -e /shared/enough ]; do sleep 0.05; done; exit 5"
    )
    progress = {"line": "attempt {step}", "total": 2}
    file = desk.shared_file(program, restart={"max": 1}, progress=progress)
    launch = desk.start("launch", str(file))
    launch.until("attempt 1\n", count=4)
    desk.enough()
    done = launch.wait()
    assert done.code == 0, str(done)
    assert "exited with status 5; all pods start again (restart 1)" in done.stderr
    assert "step 2 of 2" in done.stderr
    (run,) = desk.runs
    for folder, text in (("logs", "attempt 1\n"), ("logs-2", "attempt 2\n")):
        found = [path.read_text() for path in (run / folder).glob("node*/worker-*.out")]
        assert found == [text] * 4
    assert desk.is_empty()


def test_secrets_reach_the_processes_and_nothing_else(desk: Desk) -> None:
    file = desk.file("echo length ${#TOKEN}; exec sleep 500", secrets=["TOKEN"])
    launch = desk.start("launch", str(file), TOKEN="hunter2-hunter2")  # noqa: S106
    launch.until("length 15", count=4)
    (secret,) = desk.kubernetes.list("secrets")
    (job,) = desk.kubernetes.list("jobsets")
    assert "hunter2" not in json.dumps(desk.kubernetes.list("jobsets"))
    assert "hunter2" not in json.dumps(desk.kubernetes.list("configmaps"))
    assert secret["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]
    launch.send(signal.SIGINT)
    assert launch.wait().code == 130
    (run,) = desk.runs
    files = [path for path in run.rglob("*") if path.is_file()]
    assert not [path for path in files if b"hunter2" in path.read_bytes()]
    assert desk.is_empty()


def test_code_of_sync_comes_from_the_config_map(desk: Desk) -> None:
    source = desk.folder / "src"
    source.mkdir()
    (source / "train.py").write_text("import os; print('from', os.environ['RANK'])\n")
    file = desk.file("", framework="none", command=["python3", "train.py"], sync={"source": "src"})
    done = desk.start("launch", str(file)).wait()
    assert done.code == 0, str(done)
    assert desk.log(3) == "from 3\n"


def test_attach_goes_on_at_the_same_line(desk: Desk) -> None:
    """A killed launcher: another process stores each line once."""
    launch = desk.count()
    launch.until("line 30\n")
    launch.kill()
    (run,) = desk.runs
    assert "running" in desk.start("ps", run.name).wait().stdout
    attached = desk.start("attach", run.name)
    attached.until("line ")
    desk.enough()
    done = attached.wait()
    assert done.code == 0, str(done)
    assert all(desk.has_each_line_once(rank) for rank in range(4))


def test_detach_and_stop(desk: Desk) -> None:
    done = desk.launch(WAIT, "--detach").wait()
    assert done.code == 0, str(done)
    run = done.stdout.strip()
    logs = desk.start("logs", run, "--follow")
    logs.until("the worker waits", count=4)
    stopped = desk.start("stop", run).wait()
    assert stopped.code == 0, str(stopped)
    assert desk.is_empty()
    assert logs.wait().code == 0


def test_disturbances_lose_and_double_no_line(desk: Desk) -> None:
    launch = desk.count()
    launch.until("line 50\n")
    desk.kubernetes.end_watches(gone=True)
    desk.kubernetes.cut_logs()
    launch.until("line 200\n")
    with desk.kubernetes.down():
        launch.until("the job goes on, trying again")
    launch.until("the API server answers again")
    desk.kubernetes.cut_logs()
    desk.kubernetes.end_watches()
    desk.enough()
    done = launch.wait()
    assert done.code == 0, str(done)
    assert all(desk.has_each_line_once(rank) for rank in range(4))
    assert "lines are missing" not in done.stderr


def test_a_pod_that_ran_out_of_memory(desk: Desk) -> None:
    launch = desk.launch(WAIT)
    launch.until("the worker waits", count=4)
    desk.kubernetes.run_out_of_memory(desk.pod(1))
    done = launch.wait()
    assert done.code == 1, str(done)
    assert "on node1 was killed: out of memory" in done.stderr, done.stderr
    assert "cluster.kubernetes.resources" in done.stderr


def test_a_trainjob_whose_runtime_starts_containers_again(desk: Desk) -> None:
    """As that of Trainer does, because JobSet's default is OnFailure."""
    program = "[ $RANK = 2 ] && exit 7; exec sleep 500"
    launch = desk.start("launch", str(desk.file(program, {"api": "trainjob"})))
    done = launch.wait()
    assert done.code == 1, str(done)
    assert "node1: Kubernetes has started the failed container again" in done.stderr
    assert "rank 2 on node1 exited with status 7" in done.stderr
    assert "lines are missing" not in done.stderr
    assert desk.is_empty()


def test_a_pod_that_somebody_deletes(desk: Desk) -> None:
    launch = desk.launch(WAIT)
    launch.until("the worker waits", count=4)
    pod = desk.pod(1)
    desk.kubernetes.kubectl("delete", "pod", pod, "--wait=false")
    done = launch.wait()
    assert done.code == 1, str(done)
    assert f"error: node1: pod {pod} was deleted outside dtrain\n" in done.stderr
    assert desk.is_empty()


def test_an_evicted_pod(desk: Desk) -> None:
    launch = desk.launch(WAIT)
    launch.until("the worker waits", count=4)
    desk.kubernetes.evict(desk.pod(1))
    done = launch.wait()
    assert done.code == 3, str(done)
    assert "Kubernetes ended node1" in done.stderr


def test_an_image_that_cannot_be_pulled_is_shown(desk: Desk) -> None:
    desk.kubernetes.break_image("test:1", "no such image")
    launch = desk.launch("echo done")
    launch.until("the image cannot be pulled")
    desk.kubernetes.repair_image("test:1")
    assert launch.wait().code == 0


def test_pods_that_cannot_be_scheduled_are_shown(desk: Desk) -> None:
    file = desk.file(WAIT, {"resources": {"nvidia.com/mig-1g.5gb": "64"}})
    launch = desk.start("launch", str(file))
    launch.until(" waits: Unschedulable")
    launch.send(signal.SIGINT)
    assert launch.wait().code == 130


def test_a_quota_without_room_is_shown(desk: Desk) -> None:
    desk.kubernetes.limit(pods="1")
    launch = desk.launch(WAIT)
    launch.until("waits: FailedCreate: exceeded quota")
    launch.send(signal.SIGINT)
    assert launch.wait().code == 130


def test_a_queue(desk: Desk) -> None:
    desk.kubernetes.add_queue("gpu")
    launch = desk.start("launch", str(desk.file("echo done", {"queue": "gpu"})))
    launch.until("waits in the queue gpu: Pending: couldn't assign flavors to pod set node")
    (job,) = desk.kubernetes.list("jobsets")
    desk.kubernetes.release(job["metadata"]["name"])
    assert launch.wait().code == 0


@pytest.mark.parametrize("api", ["jobset", "trainjob"])
def test_a_job_that_its_queue_suspends_and_resumes(desk: Desk, api: str) -> None:
    """The pods of the time before the suspension are not blamed for what happens later."""
    program = (
        "trap 'echo stopped; [ -e /shared/enough ] || exit 3; exit 0' TERM; echo begins;"
        " until [ -e /shared/enough ]; do sleep 0.05; done; [ $RANK = 2 ] && exit 9;"
        " while :; do sleep 0.05; done"
    )
    desk.kubernetes.add_queue("gpu")
    file = desk.shared_file(program, {"queue": "gpu", "api": api}, grace=60)
    launch = desk.start("launch", str(file))
    launch.until("waits in the queue gpu")
    (job,) = desk.kubernetes.list(f"{api}s")
    name = job["metadata"]["name"]
    desk.kubernetes.release(name)
    launch.until("has left the queue gpu")
    launch.until("] begins\n", count=4)
    desk.kubernetes.preempt(name)
    launch.until("is suspended and waits in the queue gpu: Preempted: Preempted to accommodate")
    launch.until("] stopped\n", count=4)
    desk.kubernetes.release(name)
    launch.until("has left the queue gpu", count=2)
    launch.until("] begins\n", count=8)
    desk.enough()
    done = launch.wait()
    assert done.code == 1, str(done)
    assert "rank 2 on node1 exited with status 9" in done.stderr, done.stderr
    assert "status 3" not in done.stderr
    assert desk.log(0) == "begins\nstopped\nbegins\nstopped\n"
    assert desk.is_empty()


def test_attach_to_a_job_that_its_queue_has_suspended(desk: Desk) -> None:
    """Without the permission to read Workloads, the reason comes from events."""
    desk.kubernetes.add_queue("gpu")
    desk.kubernetes.deny("list", "workloads")
    launch = desk.start("launch", str(desk.shared_file(COUNT, {"queue": "gpu"})))
    launch.until("waits in the queue gpu: Pending: couldn't assign flavors")
    (job,) = desk.kubernetes.list("jobsets")
    desk.kubernetes.release(job["metadata"]["name"])
    # The launcher asks once a second whether the job is suspended.
    launch.until("has left the queue gpu")
    launch.until("line 20\n", count=4)
    desk.kubernetes.preempt(job["metadata"]["name"])
    launch.until("is suspended and waits in the queue gpu")
    launch.kill()
    (run,) = desk.runs
    attached = desk.start("attach", run.name)
    attached.until("waits in the queue gpu: Preempted: Preempted to accommodate")
    desk.kubernetes.release(job["metadata"]["name"])
    attached.until("line 20\n", count=4)
    desk.enough()
    done = attached.wait()
    assert done.code == 0, str(done)
    lines = desk.log(0).splitlines()
    first = lines.index("line 1", 1)
    assert lines == [*_counted(first), *_counted(len(lines) - first - 1), lines[-1]]


def _counted(count: int) -> list[str]:
    return [f"line {number}" for number in range(1, count + 1)]


def test_a_token_that_expires(desk: Desk) -> None:
    launch = desk.count()
    launch.until("line 50\n")
    desk.kubernetes.access.expire()
    launch.until("trying again")
    desk.kubernetes.access.renew()
    desk.kubernetes.cut_logs()
    desk.enough()
    done = launch.wait()
    assert done.code == 0, str(done)
    assert all(desk.has_each_line_once(rank) for rank in range(4))


def test_a_user_who_may_not_list_pods_can_stop_a_job(desk: Desk) -> None:
    desk.kubernetes.deny("list", "pods")
    launch = desk.launch(WAIT)
    launch.until("`dtrain check FILE` lists the permissions that are missing")
    launch.send(signal.SIGINT)
    done = launch.wait()
    assert done.code == 130, str(done)
    assert "nothing of it runs" in done.stderr
    assert desk.is_empty()


def test_a_user_who_may_not_read_logs_waits_for_none(desk: Desk) -> None:
    desk.kubernetes.deny("get", "pods/log")
    launch = desk.launch(WAIT)
    launch.until("pods/log")
    launch.send(signal.SIGINT)
    done = launch.wait()
    assert done.code == 130, str(done)
    assert "the API server answers again" not in done.stderr
    assert desk.is_empty()


def test_a_missing_permission_is_named(desk: Desk) -> None:
    desk.kubernetes.deny("create", "jobsets")
    done = desk.launch(WAIT).wait()
    assert done.code == 3, str(done)
    assert "forbidden" in done.stderr
    assert desk.is_empty()
