"""`dtrain help`: its output on a terminal, and unknown topics."""

from __future__ import annotations

import pytest

from dtrain.diagnostics import UsageError
from dtrain_cli.commands.help import help, topics
from dtrain_cli.views.page import drawn


@pytest.mark.parametrize(
    ("topic", "hint"),
    [
        ("securty", "did you mean 'security'? 'dtrain help' lists the topics"),
        ("secur", "did you mean 'security'? 'dtrain help' lists the topics"),
        ("watchdg", "did you mean 'watchdog'? 'dtrain help' lists the topics"),
        ("job.restrat", "did you mean 'job.restart'? 'dtrain help' lists the topics"),
        ("status", "did you mean 'ps'? 'dtrain help' lists the topics"),
        ("dry-run", "did you mean 'launch'? 'dtrain help' lists the topics"),
        ("stp", "did you mean 'stop'? 'dtrain help' lists the topics"),
        ("../help/keys", f"topics: {', '.join(topics())}"),
        ("mpi", "pages that mention it: cluster-file, programs"),
    ],
)
def test_an_unknown_topic(topic: str, hint: str) -> None:
    with pytest.raises(UsageError) as raised:
        help(topic)
    assert raised.value.hint == hint


def test_a_command_without_a_page_shows_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    help("ps")  # also the last part of the key job.roles.ps
    assert capsys.readouterr().out.startswith("Usage: dtrain ps ")


def test_a_part_of_a_key_finds_it(capsys: pytest.CaptureFixture[str]) -> None:
    help("python")
    headings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("## ")]
    assert headings == ["## cluster.python", "## cluster.overrides.HOST.python"]


def test_a_word_of_a_heading_finds_its_sections(capsys: pytest.CaptureFixture[str]) -> None:
    help("Torch")
    assert capsys.readouterr().out.startswith("# ")  # a page's name is its page
    help("jax")
    text = capsys.readouterr().out
    assert text.startswith("## examples: JAX\n")
    assert text.count("## ") == 1
    assert "jax.distributed.initialize()" in text


def test_a_terminal_shows_commands_instead_of_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = drawn("# Title\n\nSee [keys](keys.md) and [PyTorch](https://pytorch.org).\n")
    assert "See keys (dtrain help keys) and PyTorch." in shown
    assert "##" not in shown


def test_a_page_has_no_comments_for_its_editors(capsys: pytest.CaptureFixture[str]) -> None:
    help("keys")
    text = capsys.readouterr().out
    assert "<!--" not in text
    assert "of at least 1 second, such as" in text


def test_a_page_names_files_of_the_source_code(capsys: pytest.CaptureFixture[str]) -> None:
    """An installed dtrain has no such files."""
    help("cluster-file")
    text = capsys.readouterr().out
    assert "The folder `configs` of dtrain's source code" in text
    assert "PyTorch on 64 GPUs (`configs/torch-8x8-a100.yaml`),\n" in text
    for topic in topics():
        help(topic)
        assert "../" not in capsys.readouterr().out
