"""JSON Lines: every event, every byte of text, nothing else."""

import json

from dtrain.diagnostics import ExitCode
from dtrain.failures.cause import Failure, Report
from dtrain.runs import events
from dtrain_cli.views import Filters, make_view
from support.limits import HANG
from support.runs import Capture, plan


def test_all_events(workers):
    out, err = Capture(), Capture()
    view = make_view(out.stream, err.stream, Filters(), lambda: None, json=True)
    view.on_event(events.RunLaunched("demo-1", plan(hosts=1), "/runs/demo-1"))
    view.on_event(events.HostState("node0", "failed", "no route"))
    view.notice("port moved")
    stream = workers.stream("node0", 1, "stderr")
    view.output(stream, workers.write(stream, 'a "é" \x1b[31m\t\nlast'.encode(), lambda: 99.5))
    failure = Failure("node0", "worker", 1, 1, 12.5, code=1, message="ValueError: x")
    view.on_event(
        events.Finished(
            Report(
                ExitCode.JOB_FAILED, "rank 1 failed", (failure,), ("p",), "h", 1.5, "/runs/demo-1"
            )
        )
    )
    assert view.wait(HANG)
    shown = [json.loads(line) for line in out.text().splitlines()]
    assert all(event.pop("schema") == 1 for event in shown)
    line = {"event": "line", "host": "node0", "role": "worker", "index": 1, "rank": 1, "time": 99}
    line["attempt"] = 1
    assert shown[:-1] == [
        {
            "event": "started",
            "run": "demo-1",
            "name": "demo",
            "logs": "/runs/demo-1",
            "hosts": [
                {
                    "host": "node0",
                    "processes": [
                        {"role": "worker", "index": 0, "rank": 0},
                        {"role": "worker", "index": 1, "rank": 1},
                    ],
                }
            ],
        },
        {"event": "host", "host": "node0", "state": "failed", "detail": "no route"},
        {"event": "notice", "text": "port moved"},
        {**line, "stream": "stderr", "text": 'a "é" \x1b[31m\t'},
        {**line, "stream": "stderr", "text": "last"},
    ]
    last = shown[-1]
    assert last["event"] == "finished"
    assert (last["exit_code"], last["reason"], last["seconds"]) == (1, "rank 1 failed", 1.5)
    assert last["failures"][0]["message"] == "ValueError: x"
    assert last["failures"][0]["explanation"] is None
    assert (last["problems"], last["hint"], last["logs"]) == (["p"], "h", "/runs/demo-1")
    assert err.text() == ""
