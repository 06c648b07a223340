"""Reading ssh's client configuration."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dtrain.transport.ssh_config import Config, Options, SshConfigError, expand, matches


def lookup(home: Path, text: str, host: str = "gpu01", user: str | None = None) -> Options:
    (home / ".ssh" / "config").write_text(text)
    config = Config()
    config.read(home / ".ssh" / "config", home)
    return config.lookup(host, local_user="me", user=user)


def test_the_first_value_wins_and_identity_files_accumulate(home: Path) -> None:
    options = lookup(
        home,
        """
        Host gpu*
            Port 2201
            IdentityFile ~/.ssh/one
        Host *
            Port 2202
            User ml
            IdentityFile "~/.ssh/t w o"   # the spare
            IdentityFile ~/.ssh/one
        """,
    )
    assert options.get("port") == "2201"
    assert options.get("user") == "ml"
    assert options.all("identityfile") == ("~/.ssh/one", "~/.ssh/t w o")
    assert options.get("proxyjump") is None


def test_settings_before_the_first_host_line_apply_to_all_hosts(home: Path) -> None:
    assert lookup(home, "Port=99\nHost gpu01\n  Port 22\n").get("port") == "99"


@pytest.mark.parametrize(
    ("patterns", "host", "expected"),
    [
        ("*", "anything", True),
        ("gpu0?", "gpu01", True),
        ("gpu0?", "gpu10", False),
        ("GPU01", "gpu01", True),
        ("gpu* !gpu07", "gpu07", False),
        ("!gpu07 gpu*", "gpu08", True),
        ("!gpu07", "gpu08", False),
        ("gpu[01]", "gpu0", False),
        ("gpu[01]", "gpu[01]", True),
    ],
)
def test_host_patterns(patterns: str, host: str, expected: bool) -> None:
    assert matches(host, tuple(patterns.split())) is expected


def test_include_follows_globs_relative_to_the_ssh_folder(home: Path) -> None:
    folder = home / ".ssh" / "conf.d"
    folder.mkdir()
    (folder / "20-b").write_text("Port 20\nUser second\n")
    (folder / "10-a").write_text("Include more/deep\n")
    (home / ".ssh" / "more").mkdir()
    (home / ".ssh" / "more" / "deep").write_text("User first\n")
    options = lookup(home, "Include conf.d/* missing\nPort 30\nConnectTimeout 7\n")
    assert options.get("user") == "first"
    assert options.get("port") == "20"
    assert options.get("connecttimeout") == "7"


def test_include_in_a_host_block_applies_to_that_host_only(home: Path) -> None:
    (home / "extra").write_text("User inside\nHost gpu02\n  User two\nHost *\n  Port 77\n")
    text = "Host gpu01\n  Include ~/extra\n  ConnectTimeout 3\nHost *\n  User outside\n"
    assert lookup(home, text, "gpu01").get("user") == "inside"
    assert lookup(home, text, "gpu01").get("port") == "77"
    assert lookup(home, text, "gpu01").get("connecttimeout") == "3"
    assert lookup(home, text, "gpu02").get("user") == "outside"
    assert lookup(home, text, "gpu02").get("port") == "22"


def test_a_file_that_includes_itself_is_an_error(home: Path) -> None:
    with pytest.raises(SshConfigError, match=r"config:1: more than 16 nested includes"):
        lookup(home, "Include config\n")


@pytest.mark.parametrize(
    ("criteria", "applies"),
    [
        ("all", True),
        ("host gpu01.example.com", True),
        ("host gpu01", False),
        ("originalhost gpu01", True),
        ("user ml", True),
        ("user root", False),
        ("!user root", True),
        ("localuser me,you", True),
        ("originalhost gpu* user ml", True),
        ("originalhost gpu* !user ml", False),
        ("final all", True),
        ("canonical", False),
        ("final host gpu01.example.com", True),
        ("final originalhost other exec true", False),
    ],
)
def test_match(home: Path, criteria: str, applies: bool) -> None:
    text = f"Host gpu01\n  HostName %h.example.com\n  User ml\nMatch {criteria}\n  Port 99\n"
    assert lookup(home, text).get("port") == ("99" if applies else "22")


def test_a_host_line_matches_the_name_as_given(home: Path) -> None:
    text = "Host GPU01\n  Port 1\nHost gpu01\n  Port 2\n"
    assert lookup(home, text, "gpu01").get("port") == "2"
    assert lookup(home, text, "GPU01").get("port") == "1"


def test_the_final_pass_matches_the_resolved_name(home: Path) -> None:
    text = "Host a.example.com\n  Port 1\nHost gpu01\n  HostName a.Example.com\nMatch final\n"
    assert lookup(home, text).get("port") == "1"
    assert lookup(home, text.replace("Match final", "Match all")).get("port") == "22"


@pytest.mark.parametrize(
    "criterion", ["exec true", "!exec false", "localnetwork 10.0.0.0/8", "!final"]
)
def test_criteria_that_need_ssh_are_refused(home: Path, criterion: str) -> None:
    text = f"Match host gpu* {criterion}\n  Port 99\n"
    with pytest.raises(SshConfigError, match="needs the `ssh` program"):
        lookup(home, text)
    if criterion != "!final":
        assert lookup(home, text, "other").get("port") == "22"


@pytest.mark.parametrize("writable", [0o620, 0o602])
def test_a_file_that_other_users_can_write_is_refused(home: Path, writable: int) -> None:
    lookup(home, "Include more\n")
    (home / ".ssh" / "more").write_text("Port 7\n")
    (home / ".ssh" / "more").chmod(writable)
    with pytest.raises(SshConfigError, match=r"bad owner or permissions on .*more"):
        lookup(home, "Include more\n")
    (home / ".ssh" / "config").chmod(writable)
    with pytest.raises(SshConfigError, match=r"bad owner or permissions on .*config") as caught:
        lookup(home, "Port 7\n")
    assert "chmod go-w " in caught.value.hint


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file away")
def test_a_file_of_another_user_is_refused(home: Path) -> None:
    lookup(home, "Port 7\n")
    os.chown(home / ".ssh" / "config", 65534, 65534)
    with pytest.raises(SshConfigError, match="bad owner") as caught:
        lookup(home, "Port 7\n")
    assert "chmod" not in caught.value.hint
    assert "sudo chown root " in caught.value.hint


def test_a_proxy_command_keeps_its_quotes(home: Path) -> None:
    text = """ProxyCommand sh -c 'nc "$0" %p' %h # not a comment\n"""
    assert lookup(home, text).get("proxycommand") == """sh -c 'nc "$0" %p' %h # not a comment"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Port\n", "config:1: not `keyword value`"),
        ('\nUser "ml\n', "config:2: missing closing quote"),
        ("Match\n", "config:1"),
        ("Match user\n", "config:1: `Match user` needs an argument"),
        ("Prot 22\n", "config:1: bad configuration option: prot"),
        ("Port 22 23\n", "config:1: extra arguments"),
        ("Match nothing x\n", "config:1: unsupported Match attribute nothing"),
        ("Match all user x\n", "config:1: `all` cannot be combined"),
    ],
)
def test_errors_name_file_and_line(home: Path, text: str, message: str) -> None:
    with pytest.raises(SshConfigError) as caught:
        lookup(home, text)
    assert message in str(caught.value)


def test_tokens() -> None:
    assert expand("%h-%%h", {"h": "gpu01"}.get) == "gpu01-%h"
    with pytest.raises(SshConfigError, match="does not support the token %x"):
        expand("%h-%x", {"h": "gpu01"}.get)
