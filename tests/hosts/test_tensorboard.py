"""`dtrain launch --tensorboard` forwards a host's page to this machine; so does `attach`."""

from __future__ import annotations

import re
import signal
import urllib.error
import urllib.request
from collections.abc import Callable

import pytest

from cluster import Cluster
from support.cluster import Launcher, job
from support.launching import Launch
from support.limits import HANG, until

pytestmark = [pytest.mark.netns]


def get(url: str) -> str:
    # Ignore proxies from the environment: the page is on loopback.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=HANG) as answer:
        return str(answer.read().decode())


def page(launch: Launch) -> tuple[str, str]:
    """The host and the address of the page that a command shows."""
    shown = re.compile(r"TensorBoard of (\S+): (http://127\.0\.0\.1:\d+/)\n")
    until(lambda: shown.search(launch.stderr), "the page's address")
    found = shown.search(launch.stderr)
    assert found
    return found[1], found[2]


def test_the_page_of_a_host_is_shown_here(
    hosts: Callable[..., Cluster], launcher: Launcher
) -> None:
    cluster = hosts(2)
    file = launcher.file(cluster, {"framework": "torch", "script": job("web_page.py")})
    launch = launcher.start(file, "--tensorboard")
    host, url = page(launch)
    for _ in range(3):
        assert get(url) == f"a page of {host} ".ljust(200_000, ".")
    launch.send(signal.SIGTERM)
    assert launch.wait().code == 130
    with pytest.raises(urllib.error.URLError):
        get(url)
    assert launcher.left(cluster) == {}


def test_an_attached_process_sees_it_too(hosts: Callable[..., Cluster], launcher: Launcher) -> None:
    cluster = hosts(2)
    file = launcher.file(cluster, {"framework": "torch", "script": job("web_page.py")})
    launch = launcher.start(file, "--tensorboard")
    launch.until("TensorBoard of ")
    (run,) = [path.name for path in (launcher.home / "runs").iterdir()]
    # First the process in charge serves it. When that exits, its successor does.
    for _ in range(2):
        attached = launcher.command("attach", run)
        host, url = page(attached)
        assert get(url) == f"a page of {host} ".ljust(200_000, ".")
        attached.send(signal.SIGINT)
        attached.wait()
        launch.kill()
    assert launcher.command("stop", run).wait().code == 0
    assert launcher.left(cluster) == {}


def test_it_is_off_by_default(hosts: Callable[..., Cluster], launcher: Launcher) -> None:
    cluster = hosts(1)
    file = launcher.file(
        cluster, {"framework": "torch", "script": job("web_page.py"), "args": ["once"]}
    )
    done = launcher.run(file)
    assert done.code == 0, str(done)
    assert "TensorBoard" not in done.stderr
