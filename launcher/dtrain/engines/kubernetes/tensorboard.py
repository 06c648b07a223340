"""Says how to reach the TensorBoard of a worker.

dtrain does not forward it: that needs a permission of its own.
"""

from __future__ import annotations

from dtrain.engines.kubernetes.kinds import kubectl
from dtrain.engines.kubernetes.objects import Pod
from dtrain.messages.agent import ProgressReport
from dtrain.messages.pods import PodMessage
from dtrain.runs.record import Record
from dtrain.session.reporting.recorder import Recorder


def show_tensorboard(record: Record, recorder: Recorder, pod: Pod, message: PodMessage) -> None:
    """Once for each pod, if the message says that a TensorBoard listens and the user wants one."""
    said = message.said if isinstance(message, ProgressReport) else None
    if not isinstance(said, dict) or said.get("event") != "tensorboard":
        return
    port, plan = said.get("port"), record.plan
    if "DTRAIN_TENSORBOARD" in plan.job.env and isinstance(port, int) and 1024 <= port <= 65535:
        words = ("port-forward", f"pod/{pod.name}", str(port))
        command = kubectl(*words, namespace=record.namespace, context=record.context)
        text = f"TensorBoard of {plan.host_names[pod.index]}: http://127.0.0.1:{port}/ while "
        recorder.notice_once(f"{text}`{command}` runs", kind=f"tensorboard {pod.uid}")
