"""TensorBoard serves on a free port and does not outlive the training."""

import json
import os
import select
import signal
import urllib.request

import pytest

from runtime.tensorflow.conftest import CHECKS
from support.limits import HANG

pytestmark = pytest.mark.tensorflow


def test_it_serves_and_ends_with_a_training_that_is_killed(start, tmp_path) -> None:
    folder = tmp_path / "progress"
    folder.mkdir()
    task = start("none", [CHECKS / "serve_tensorboard.py"], {"DTRAIN_RUN_DIR": str(folder)})["-0"]
    words = task.wait_for("process ").split()
    process, port = int(words[1]), int(words[3])
    assert f"TensorBoard at http://127.0.0.1:{port}/" in task.output
    assert task.output.count("TensorBoard is not installed") == 1
    event = json.loads((folder / "worker-0.progress").read_text())
    assert (event["event"], event["port"]) == ("tensorboard", port)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/data/logdir", timeout=HANG) as answer:
        assert json.load(answer)["logdir"].endswith("events")

    ended = os.pidfd_open(process)
    task.signal(signal.SIGKILL)
    assert select.select([ended], [], [], HANG)[0], "TensorBoard outlived the training"
    os.close(ended)
