"""The lines at the bottom of a terminal, at any size."""

import pytest
from rich.cells import cell_len

from dtrain_cli.views.header import Header, fit, state, summary

HOSTS = {f"gpu{number:02}": "running" for number in range(1, 9)}


def test_the_content_of_the_header():
    header = Header("gpt-3f2a", 64, dict(HOSTS), ("[gpu01 0] ", "step\t7 \x1b[31mloss 2.1"))
    assert header.lines(44, 24, 161) == [
        "── gpt-3f2a · running · 2 min 41 s ────────",
        "   8 hosts running · 64 workers",
        "   [gpu01 0] step  7 loss 2.1",
    ]


@pytest.mark.parametrize("columns", [1, 2, 20, 40, 80, 200])
@pytest.mark.parametrize("rows", [1, 3, 5, 24])
def test_it_fits(columns, rows):
    text = "日本語 \x1b[2J é́ █" * 40
    header = Header("demo" * 20, 64, {text: "failed", "b": ""}, (text, text))
    lines = header.lines(columns, rows, 1e6)
    assert all(cell_len(line) <= max(1, columns - 1) for line in lines)
    # With the empty line above, half of the terminal.
    assert len(lines) == min(3, max(0, rows // 2 - 1))
    assert "\x1b" not in "".join(lines)


def test_no_header_before_the_run_has_a_name():
    assert Header().lines(80, 24, 0) == []


def test_summaries():
    assert summary({"a": ""}, 1) == "1 host waiting · 1 worker"
    mixed = HOSTS | {"gpu03": "failed", "gpu04": "connecting"}
    assert summary(mixed, 64) == "8 hosts: 1 connecting, 6 running, gpu03 failed · 64 workers"
    assert summary(dict.fromkeys(HOSTS, "unreachable"), 64) == (
        "8 hosts: 8 unreachable · 64 workers"
    )


def test_states():
    assert state(HOSTS) == "running"
    assert state(HOSTS | {"gpu01": "preparing"}) == "starting"
    assert state(HOSTS | {"gpu01": "failed"}) == "stopping"
    assert state(HOSTS | {"gpu01": "ended"}) == "ending"
    assert state({}) == "starting"


def test_long_lines_are_cut_by_columns():
    assert fit("日本語", 6) == "日本語"
    assert fit("日本語", 5) == "日本…"
    assert fit("日本語", 4) == "日 …"  # a half character is a blank
