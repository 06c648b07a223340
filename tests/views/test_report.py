"""The report at the end of a run, which fits on one screen."""

from dataclasses import replace

from dtrain.diagnostics import ExitCode
from dtrain.failures.cause import Failure, Report
from dtrain_cli.views.report import render

FIRST = Failure(
    "gpu01",
    "worker",
    3,
    3,
    0.0,
    code=1,
    message="ValueError: bad batch",
    traceback="Traceback (most recent call last):\n  File x\nValueError: bad batch\n",
)


def failed(*failures: Failure, **fields) -> str:
    report = Report(ExitCode.JOB_FAILED, failures[0].summary, failures, seconds=75, **fields)
    return render(report, {}, color=False)


def test_the_first_cause_comes_first():
    rest = [
        Failure(f"gpu{rank // 8 + 1:02}", "worker", rank, rank, 1.0, signal="SIGABRT")
        for rank in range(8, 64)
    ]
    rest.append(Failure("gpu02", "ps", 0, None, 1.0, code=9))
    text = failed(FIRST, *rest, problems=("gpu05: lost",), hint="look\nthere", logs="/runs/x")
    assert text == (
        "\n"
        "error: rank 3 on gpu01 exited with status 1\n"
        "\n"
        "    Traceback (most recent call last):\n"
        "      File x\n"
        "    ValueError: bad batch\n"
        "\n"
        "then also failed: gpu[02-08] ranks 8-63 (killed by SIGABRT)\n"
        "then also failed: gpu02 ps0 (exited with status 9)\n"
        "problem: gpu05: lost\n"
        "hint: look\n"
        "    there\n"
        "dtrain: failed after 1 min 15 s; logs in /runs/x\n"
    )


def test_sentences_wrap_at_words_on_a_terminal():
    hint = "install it there, or check `job.command`\nand cluster.python"
    report = Report(ExitCode.NODE_FAILED, "gpu01: no answer within the limit", hint=hint)
    assert render(report, {}, color=False, columns=24) == (
        "\n"
        "error: gpu01: no answer\n"
        "    within the limit\n"
        "hint: install it there,\n"
        "    or check\n"
        "    `job.command`\n"
        "    and cluster.python\n"
        "dtrain: failed after 0.0 s\n"
    )


def test_without_a_traceback_the_message_is_in_the_headline():
    text = failed(replace(FIRST, traceback="", code=None, signal="SIGKILL", message="Killed"))
    assert "error: rank 3 on gpu01 was killed by SIGKILL: Killed\n" in text


def test_the_output_before_a_kill_is_not_shown_as_its_reason():
    killed = replace(FIRST, message="", traceback="UserWarning: slow", code=None)
    assert failed(replace(killed, signal="SIGKILL")).splitlines()[1:5] == [
        "error: rank 3 on gpu01 was killed by SIGKILL",
        "before that, its stderr ended with:",
        "",
        "    UserWarning: slow",
    ]
    assert "before that" not in failed(replace(killed, signal="SIGSEGV"))


def test_a_reason_that_is_no_failure_comes_before_all_failures():
    ranks = [Failure("gpu01", "worker", rank, rank, 1.0, signal="SIGKILL") for rank in range(2)]
    report = Report(ExitCode.JOB_FAILED, "gpu01 was full", tuple(ranks))
    assert render(report, {}, color=False).splitlines()[1:3] == [
        "error: gpu01 was full",
        "then also failed: gpu01 ranks 0-1 (killed by SIGKILL)",
    ]


def test_a_long_traceback_keeps_both_ends_and_names_the_file():
    long = "\n".join(f"line {number} {'x' * 1000}" for number in range(500))
    paths = {("gpu01", "worker", 3, "stderr"): "/runs/x/logs/gpu01/worker-3.err"}
    report = Report(ExitCode.JOB_FAILED, FIRST.summary, (replace(FIRST, traceback=long),))
    text = render(report, paths, color=False)
    assert "470 lines left out (full text in /runs/x/logs/gpu01/worker-3.err)" in text
    assert "line 0 " in text
    assert "line 499 " in text
    assert len(text.splitlines()) < 40
    assert max(map(len, text.splitlines())) < 420


def test_hosts_and_problems_are_bounded():
    failures = [replace(FIRST, host=f"gpu{n}", rank=n, code=n) for n in range(1, 300)]
    text = failed(*failures, problems=tuple(f"gpu{n}: lost" for n in range(300)))
    assert "then also failed: 294 others\n" in text
    assert "problem: and 292 more\n" in text
    assert len(text.splitlines()) < 24


def test_hosts_fold_in_the_order_of_their_numbers():
    failures = [replace(FIRST, host=f"gpu{n}", rank=n) for n in (12, 2, 11, 9, 10)]
    assert "gpu[9-12] ranks 9-12 (" in failed(
        replace(FIRST, host="gpu2", rank=2), *failures[:1], *failures[2:]
    )


def test_control_characters_of_workers_are_escaped():
    mean = replace(FIRST, host="g\x1b[2J", traceback="\x1b]0;t\x07a\nb\x9b2J", message="\x1b[2J")
    report = Report(
        ExitCode.JOB_FAILED, mean.summary, (mean, mean), ("p\x1b[2J",), "h\x1b[2J", 1.0, "/x\x1b[2J"
    )
    assert "\x1b" not in render(report, {}, color=False)
    assert "\x1b[2J" not in render(report, {}, color=True)


def test_done_and_stopped_are_one_line():
    done = Report(ExitCode.OK, "all 4 workers finished", seconds=41.7, logs="/runs/x")
    assert render(done, {}, color=False) == (
        "dtrain: done in 41 s: all 4 workers finished; logs in /runs/x\n"
    )
    stopped = Report(ExitCode.INTERRUPTED, "Ctrl-C", (FIRST,), seconds=3)
    assert render(stopped, {}, color=False) == "dtrain: stopped after 3.0 s: Ctrl-C\n"


def test_a_problem_that_is_the_reason_is_shown_once():
    report = Report(ExitCode.NODE_FAILED, "gpu01: lost", problems=("gpu01: lost",))
    assert render(report, {}, color=False).count("gpu01: lost") == 1


def test_a_hint_is_never_cut():
    hint = "install a key with `ssh-copy-id -o UserKnownHostsFile=" + 500 * "x" + "`; then retry"
    report = Report(ExitCode.NODE_FAILED, "it failed", hint=hint)
    assert f"hint: {hint}\n" in render(report, {}, color=False)
