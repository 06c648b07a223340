"""Only a job whose workers never connect to each other ends with a warning."""

from __future__ import annotations

from typing import Any

import pytest

from support.launching import Scene
from support.ports import free_port

WARNING = "no worker ever connected to another"

ALONE = "print('trained', flush=True)"

# A store at another port than MASTER_PORT, as Lightning and others have; each exits at once.
OWN_PORT = """
import os, socket, sys, time
from pathlib import Path
rank, place = int(os.environ["RANK"]), Path(sys.argv[1])
if rank == 0:
    server = socket.create_server(("127.0.0.1", 0))
    (place / "draft").write_text(str(server.getsockname()[1]))
    (place / "draft").rename(place / "port")
    peer, _ = server.accept()
else:
    while not (place / "port").exists():
        time.sleep(0.02)
    peer = socket.create_connection(("127.0.0.1", int((place / "port").read_text())))
# The supervisor looks less often the longer it runs, and on a busy machine some seconds late.
ticks = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19])
begun = ticks / os.sysconf("SC_CLK_TCK")
time.sleep(6 + time.clock_gettime(time.CLOCK_BOOTTIME) - begun)
"""

# A connection at MASTER_PORT that lasts no longer than the process that opened it. The other end
# stays open until then: if both close at once, packets may overtake each other, and the kernel can
# then forget the connection at once.
MEET = """
import os, socket, time
port = int(os.environ["MASTER_PORT"])
if os.environ["RANK"] == "0":
    server = socket.create_server(("127.0.0.1", port))
    peer, _ = server.accept()
    opened_by = int(peer.makefile().read())
    while os.path.exists(f"/proc/{opened_by}"):
        time.sleep(0.02)
else:
    while True:
        try:
            peer = socket.create_connection(("127.0.0.1", port))
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    peer.sendall(str(os.getpid()).encode())
"""


@pytest.mark.parametrize("hosts", [1, 2])
def test_workers_that_never_connect_cause_a_warning(scene: Scene, hosts: int) -> None:
    # Not a port of those that runs draw: a connection of another run, just closed, would count.
    alone = {"rendezvous": {"port": free_port()}}
    file = scene.cluster_file(scene.script(ALONE), hosts=hosts, slots=2 // hosts, **alone)
    done = scene.run(file, "--no-check")
    assert done.code == 0, str(done)
    assert f"{WARNING}: 2 separate programs ran" in done.stderr
    assert "init_process_group" in done.stderr
    assert "a launcher in it" not in done.stderr


def test_a_launcher_that_does_not_know_the_other_hosts(scene: Scene) -> None:
    """Such as `torchrun` without `--nnodes`."""
    alone = {"rendezvous": {"port": free_port()}, "per": "host"}
    file = scene.cluster_file(scene.script(ALONE), hosts=2, slots=2, **alone)
    done = scene.run(file, "--no-check")
    assert done.code == 0, str(done)
    assert f"{WARNING}: 2 separate programs ran" in done.stderr
    assert "and a launcher in it the number of hosts (`dtrain help programs`)" in done.stderr


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("script", [OWN_PORT, MEET], ids=["own port", "shortest"])
def test_workers_that_connect_cause_no_warning(scene: Scene, script: str, hosts: int) -> None:
    file = scene.cluster_file(
        scene.script(script), hosts=hosts, slots=2 // hosts, args=[str(scene.folder)]
    )
    done = scene.run(file, "--no-check")
    assert done.code == 0, str(done)
    assert WARNING not in done.stderr


@pytest.mark.parametrize(
    "job",
    [
        {"framework": "none"},
        {"slots": 1, "hosts": 1},
        {"framework": "tensorflow", "roles": {"chief": 1, "evaluator": 1}},
    ],
    ids=["framework none", "one worker", "an evaluator"],
)
def test_independent_workers_cause_no_warning(scene: Scene, job: dict[str, Any]) -> None:
    done = scene.run(scene.cluster_file(scene.script(ALONE), **job), "--no-check")
    assert done.code == 0, str(done)
    assert WARNING not in done.stderr
