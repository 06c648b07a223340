"""Reports of workers through `dtrain.runtime`."""

from pathlib import Path

from dtrain.engines.ssh.worker_reports import WorkerReports
from dtrain.runs import events
from dtrain.runs.journal import JournalReader
from support.attempts import TWO_HOSTS, context_of
from support.scripted import ScriptedHosts

FILE = TWO_HOSTS.replace("job: {", "job: {env: {DTRAIN_TENSORBOARD: '1'}, ")


def test_a_report_after_the_end_opens_no_forward(tmp_path: Path) -> None:
    context = context_of(ScriptedHosts({}), tmp_path, FILE)
    first, second = (WorkerReports(context, part, lambda: None) for part in context.plan.hosts)
    report = {"event": "tensorboard", "port": 6006}
    first.add("progress-0", report)
    first.close()
    second.close()
    second.add("progress-0", report)
    shown = [event for _, event in JournalReader(context.folder.journal).read()]
    assert [type(event) for event in shown] == [events.TensorBoardAddress]
