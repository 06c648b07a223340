"""A launch notifies when its job restarts and ends."""

from __future__ import annotations

import json

import pytest
import yaml

import dtrain
from support.launching import Scene
from support.webhook import SECRET, webhook

FAILS_ONCE = "if [ $DTRAIN_ATTEMPT = 1 ]; then echo no luck >&2; exit 4; fi"


def test_a_restart_and_the_end(scene: Scene) -> None:
    cluster = scene.cluster_file("", hosts=1, slots=1, framework="none", restart={"max": 1},
                                 command=["sh", "-c", FAILS_ONCE])  # fmt: skip
    document = yaml.safe_load(cluster.read_text())
    command = ["sh", "-c", "cat > $$.json; echo broken >&2; exit 1"]
    document["notify"] = {"on": ["done", "restarted"], "command": command,
                          "webhook": {"secret": "HOOK"}}  # fmt: skip
    notices: list[str] = []
    with pytest.raises(dtrain.UsageError, match="HOOK"):
        dtrain.launch(scene.write(document))
    with webhook() as server:
        report = dtrain.launch(
            scene.write(document), secrets={"HOOK": server.url}, on_notice=notices.append
        )
    assert report.ok, report
    # Each is sent in a thread of its own, so the second one may arrive first.
    restarted, done = sorted(server.received, key=lambda sent: sent["attempt"])
    assert (restarted["event"], restarted["attempt"], restarted["exit_code"]) == ("restarted", 1, 1)
    assert restarted["reason"] == "rank 0 on node0 exited with status 4"
    assert (done["event"], done["attempt"]) == ("done", 2)
    assert {"run": report.run, "name": "job", "logs": report.logs}.items() <= done.items()
    assert done in [json.loads(file.read_text()) for file in scene.folder.glob("*.json")]
    assert notices.count("notify.command: sh failed with status 1: broken") == 2
    for path in scene.run_folder().rglob("*"):
        assert path.is_dir() or SECRET.encode() not in path.read_bytes()
