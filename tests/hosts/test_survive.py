"""Hosts and networks fail while a job runs: no output is lost, and no process is left."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable

import pytest

from cluster import Cluster
from support.cluster import Launcher, job
from support.launching import Launch
from support.limits import HANG, until

pytestmark = pytest.mark.netns
Hosts = Callable[..., Cluster]


class Training:
    """A job of one rank on each of the first hosts; the others are spares."""

    def __init__(
        self,
        cluster: Cluster,
        launcher: Launcher,
        count: int,
        min_hosts: int | None = None,
        **restart: object,
    ) -> None:
        self.cluster, self.launcher = cluster, launcher
        self.folder = launcher.folder / "shared"
        self.folder.mkdir()
        launcher.notice_silence()
        names = [host.name for host in cluster.hosts]
        self.file = launcher.file(
            cluster,
            {
                "framework": "torch",
                "script": job("resume.py"),
                "args": [str(self.folder)],
                "restart": restart,
                **({} if min_hosts is None else {"elastic": {"min_hosts": min_hosts}}),
            },
            hosts=names[:count],
            spares=names[count:],
        )

    def lose(self, name: str) -> None:
        """A host refuses connections, and nothing runs there any more."""
        self.cluster[name].stop_sshd()
        self.cluster[name].kill_all()

    def step(self, rank: int) -> int:
        """The last step of a rank, in any attempt."""
        files = self.folder.glob(f"step-{rank}-*")
        return max((int(file.read_text()) for file in files), default=0)

    def until_step(self, rank: int, step: int) -> None:
        until(lambda: self.step(rank) >= step, f"step {step} of rank {rank}")

    def end(self, watching: Launch) -> None:
        """Let the job finish. Nothing of it is left."""
        (self.folder / "stop").touch()
        done = watching.wait()
        assert done.code == 0, str(done)
        assert self.launcher.left(self.cluster) == {}

    def lines(self, host: str, rank: int, logs: str = "logs") -> list[str]:
        (run,) = (self.launcher.home / "runs").iterdir()
        return (run / logs / host / f"worker-{rank}.out").read_text().splitlines()


def numbers(lines: list[str]) -> list[int]:
    return [int(line.split()[1]) for line in lines if line.startswith("line ")]


def test_status_queries_the_hosts(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(2)
    training = Training(cluster, launcher, 2)
    launch = launcher.start(training.file)
    training.until_step(1, 5)
    (run,) = [path.name for path in (launcher.home / "runs").iterdir()]
    launch.kill()
    cluster["node2"].firewall("reject with icmpx admin-prohibited")
    shown = launcher.command("ps", run).wait()
    assert shown.code == 0, str(shown)
    assert re.search(r"node1 +running +for [\d min]+s +rank 0 running\n", shown.stdout)
    assert re.search(r"node2 +unreachable +\S.*\n", shown.stdout)
    cluster.heal()
    shown = launcher.command("ps", run).wait()
    assert re.search(r"node\[1-2] +running +for [\d min]+s +ranks 0-1 running\n", shown.stdout)
    training.end(launcher.command("attach", run))


def test_a_spare_takes_the_place_of_a_host_that_lost_power(
    hosts: Hosts, launcher: Launcher
) -> None:
    cluster = hosts(3)
    training = Training(cluster, launcher, 2, max=2, node_timeout="2s")
    launch = launcher.start(training.file)
    training.until_step(1, 5)
    cluster.power_off("node2")
    launch.until("node3 replaces node2")
    until(lambda: re.search(r"attempt 2 on node3 from step \d+\n", launch.stdout), "attempt 2")
    (resumed,) = re.findall(r"attempt 2 on node3 from step (\d+)\n", launch.stdout)
    assert int(resumed) >= 5
    training.until_step(1, int(resumed) + 5)
    training.end(launch)
    assert numbers(training.lines("node3", 1, "logs-2"))[0] == int(resumed) + 1


def test_the_next_attempt_waits_for_a_host_that_restarts(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(2)
    training = Training(cluster, launcher, 2, max=1, node_timeout="20s")
    launch = launcher.start(training.file)
    training.until_step(1, 5)
    cluster.power_off("node2")
    launch.until("node2 cannot be reached; waiting for it for up to 20 s")
    cluster.boot("node2")
    launch.until("attempt 2 on node2")
    training.end(launch)


def test_a_spare_replaces_a_host_that_restarts_between_attempts(
    hosts: Hosts, launcher: Launcher
) -> None:
    cluster = hosts(3)
    training = Training(cluster, launcher, 2, max=2, node_timeout="20s")
    launch = launcher.start(training.file)
    training.until_step(1, 5)
    # It takes no new connections: nothing shows that while the first attempt runs.
    cluster["node2"].firewall("tcp flags & (syn | ack) == syn reject with tcp reset")
    for pid, command in cluster["node1"].processes().items():
        if "resume.py" in command:
            os.kill(pid, signal.SIGKILL)
    launch.until("node3 replaces node2")
    launch.until("attempt 3 on node3")
    training.end(launch)
    assert "waiting for it" not in launch.stderr


def test_a_host_that_never_ran_the_job_is_not_waited_for(hosts: Hosts, launcher: Launcher) -> None:
    """It refuses all keys, and another host makes a second attempt necessary."""
    cluster = hosts(3)
    training = Training(cluster, launcher, 2, max=1)
    (cluster["node1"].home / ".ssh" / "authorized_keys").unlink()
    cluster["node2"].stop_sshd()
    done = launcher.start(training.file).wait()
    assert done.code == 3
    assert "node3 replaces node2" in done.stderr
    assert "waiting for it" not in done.stderr
    assert "not restarted: a job that a host refuses is not retried" in done.stderr


def test_a_spare_shows_that_the_only_host_is_lost(hosts: Hosts, launcher: Launcher) -> None:
    """Without another host, it could also be the launcher that has lost its network."""
    cluster = hosts(2)
    training = Training(cluster, launcher, 1, max=1, node_timeout="2s")
    launch = launcher.start(training.file)
    training.until_step(0, 5)
    cluster.power_off("node1")
    launch.until("node2 replaces node1")
    launch.until("attempt 2 on node2")
    training.end(launch)


def test_a_host_that_has_ended_shows_that_the_last_one_is_lost(
    hosts: Hosts, launcher: Launcher
) -> None:
    cluster = hosts(2)
    launcher.notice_silence()
    script = launcher.folder / "one_waits.py"
    script.write_text("import os, time\nif os.environ['RANK'] == '1':\n    time.sleep(3600)\n")
    section = {"framework": "torch", "script": str(script), "restart": {"node_timeout": "2s"}}
    launch = launcher.start(launcher.file(cluster, section))
    (journal,) = until(lambda: [*launcher.home.glob("runs/*/journal.jsonl")], "the journal")
    until(lambda: '"host": "node1", "state": "ended"' in journal.read_text(), "the end of node1")
    cluster.cut("node2")
    done = launch.wait()
    assert done.code == 3, str(done)
    assert "node2 failed" in done.stderr


def test_a_host_that_comes_back_after_it_was_replaced_is_cleaned(
    hosts: Hosts, launcher: Launcher
) -> None:
    cluster = hosts(3)
    training = Training(cluster, launcher, 2, max=2, node_timeout="2s")
    launch = launcher.start(training.file)
    training.until_step(1, 5)
    cluster["node2"].stop_sshd()
    launch.until("attempt 2 on node3")
    assert cluster["node2"].processes()
    cluster["node2"].start_sshd()
    until(lambda: not cluster["node2"].processes(), "the end of what node2 still ran")
    reached = training.step(1)
    training.until_step(1, reached + 5)
    training.end(launch)


def test_an_unreachable_spare_is_passed_over(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(4)
    training = Training(cluster, launcher, 2, max=3, node_timeout="2s")
    launch = launcher.start(training.file)
    training.until_step(1, 3)
    training.lose("node3")
    training.lose("node2")
    launch.until("attempt 3 on node4", timeout=HANG)
    training.end(launch)


def test_an_elastic_job_continues_without_a_host_even_when_it_comes_back(
    hosts: Hosts, launcher: Launcher
) -> None:
    cluster = hosts(3)
    training = Training(cluster, launcher, 3, min_hosts=2, max=3, node_timeout="2s")
    run = launcher.run(training.file, "--detach").stdout.strip()
    training.until_step(2, 5)
    cluster["node2"].stop_sshd()
    journal = launcher.home / "runs" / run / "journal.jsonl"
    until(lambda: '"attempt": 2, "hosts": ["node1", "node3"]' in journal.read_text(), "it")
    cluster["node2"].start_sshd()
    until(lambda: not cluster["node2"].processes(), "the end of what node2 still ran")
    # node3 has its rank now and continues where node2 was.
    reached = training.step(1)
    training.until_step(1, reached + 5)
    (listed,) = json.loads(launcher.command("ps", "--json").wait().stdout)["runs"]
    assert (listed["state"], listed["workers"]) == ("running", 2)
    attached = launcher.command("attach", run)
    attached.until("run test")
    # A worker that fails ends the attempt on the hosts that are left, and starts the next there.
    cluster["node3"].run("pkill", "-KILL", "-f", "resume.py")
    attached.until("attempt 3 on node3")
    training.end(attached)
    said = launcher.command("logs", "--rank", "1", run).wait().stdout
    places = re.findall(r"attempt (\d) on (\w+)", said)
    assert places == [("1", "node2"), ("2", "node3"), ("3", "node3")]


def test_an_elastic_job_ends_if_too_few_hosts_are_left(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(3)
    training = Training(cluster, launcher, 3, min_hosts=2, max=9, node_timeout="2s")
    launch = launcher.start(training.file)
    training.until_step(2, 5)
    training.lose("node1")
    launch.until("without node1: 2 of 3 hosts")
    launch.until("attempt 2 on node3")
    training.lose("node3")
    launch.until("not restarted: 1 host is left, and job.elastic.min_hosts is 2")
    done = launch.wait()
    assert done.code == 3, str(done)
    assert launcher.left(cluster) == {}


def test_a_killed_supervisor_starts_the_next_attempt_on_its_host(
    hosts: Hosts, launcher: Launcher
) -> None:
    cluster = hosts(2)
    training = Training(cluster, launcher, 2, max=2, node_timeout="20s")
    launch = launcher.start(training.file)
    training.until_step(1, 5)
    cluster["node2"].run("pkill", "-KILL", "-f", "dtrain-supervisor")
    launch.until("attempt 2 on node2")
    reached = training.step(1)
    training.until_step(1, reached + 3)
    training.end(launch)


def test_ctrl_c_with_one_host_out_of_reach_ends_twice(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(2)
    training = Training(cluster, launcher, 2, node_timeout="10m")
    launch = launcher.start(training.file)
    training.until_step(1, 5)
    cluster.cut("node2")
    launch.until("cannot be reached")
    for said in ("stopping with TERM, KILL", "killing the workers", "giving up on hosts"):
        launch.send(signal.SIGINT)
        launch.until(said)
    done = launch.wait()
    assert done.code == 130, str(done)
    assert "node2" in done.stderr
    cluster.heal()
    # Its worker waits for a dead peer. `stop` ends it now that the host is reachable.
    (run,) = [path.name for path in (launcher.home / "runs").iterdir()]
    assert launcher.command("stop", run).wait().code == 0
    assert launcher.left(cluster) == {}
