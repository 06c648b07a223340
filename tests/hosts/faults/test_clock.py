"""A host whose clock is wrong by an hour."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import yaml

from dtrain.runs.events import RelayHello
from dtrain.runs.journal import JournalReader
from support.faults import Field
from support.limits import until

pytestmark = pytest.mark.netns
Make = Callable[..., Field]

WRONG = """\
#!/usr/bin/env bash
# A Python whose time.time(), and that of its child Pythons, is {hours} hours off.
args=("$@")
for at in "${{!args[@]}}"; do
  [ "${{args[at]}}" != -c ] || args[at + 1]="
import sys, time
sys.executable, now = '$0', time.time
time.time = lambda: now() + 3600 * {hours}
${{args[at + 1]}}"
done
exec {python} "${{args[@]}}"
"""

FAILS = """\
import os, sys, time
from pathlib import Path
folder, rank = Path(sys.argv[1]), os.environ["RANK"]
print("line", flush=True)
while not (folder / f"fail-{rank}").exists():
    time.sleep(0.01)
# Clocks are compared by messages, which on a busy machine take long.
time.sleep(float((folder / f"fail-{rank}").read_text() or 0))
sys.exit(3 + int(rank))
"""


@pytest.mark.parametrize(("first", "hours"), [(0, -1), (1, 1)])
def test_the_first_cause_is_the_first(field: Make, first: int, hours: int) -> None:
    """Rank 1 is on the host with the wrong clock. Its events say the opposite of what happened."""
    scene = field(2)
    wrong = scene.folder / "python"
    wrong.write_text(WRONG.format(hours=hours, python=sys.executable))
    wrong.chmod(0o755)
    script = scene.folder / "fails.py"
    script.write_text(FAILS)
    file = scene.file(script=str(script))
    document = yaml.safe_load(file.read_text())
    document["cluster"]["overrides"]["node2"]["python"] = str(wrong)
    file.write_text(yaml.safe_dump(document))
    launch = scene.command("launch", str(file))
    launch.until("line\n", count=2)
    off = {
        event.host: event.said["time"] - then
        for then, event in JournalReader(scene.run / "journal.jsonl").read()
        if isinstance(event, RelayHello)
    }
    assert [round(off[host.name] / 3600) for host in scene.cluster.hosts] == [0, hours]
    # Neither failure is reported before both have happened.
    scene.cluster.cut(f"node{first + 1}")
    (scene.folder / f"fail-{first}").touch()
    node = scene.cluster.hosts[first]
    until(lambda: not workers(scene, node.name), "the first failure")
    (scene.folder / "second").write_text("4")
    (scene.folder / "second").rename(scene.folder / f"fail-{1 - first}")
    launch.until("stopping the other workers")
    scene.cluster.heal()
    done = scene.over(launch, 1)
    assert f"\nerror: rank {first} on node{first + 1} exited with status {3 + first}" in done.stderr
    scene.check_hosts()
    shown = scene.over(scene.command("logs", "--since", "10m", scene.run.name), 0)
    assert shown.stdout.count("line\n") == 2


def workers(scene: Field, host: str) -> list[str]:
    return [line for line in scene.left().get(host, {}).values() if "fails.py" in line]
