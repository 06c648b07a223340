"""What is quoted arrives: argv sent through real shells comes back byte for byte."""

import os
import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dtrain.quoting import ShellCommand, path, sh, word, words
from support.limits import HANG

SHOW = "import os, sys; sys.stdout.buffer.write(b'\\0'.join(map(os.fsencode, sys.argv[1:])))"
HOSTILE = [
    "",
    " ",
    "~",
    "~/x",
    "-rf",
    "--",
    "a'b",
    'a"b',
    "$(touch /tmp/pwned)",
    "`id`",
    "; echo pwned",
    "new\nline",
    "tail\n",
    "\\",
    "\\'",
    "'\\''",
    "a\\nb",
    "!!",
    "*",
    "{a,b}",
    "é…漢😀",
    "\t",
    "\r",
    "\x1b[31m",
    "A=1",
    "=ls",
    "if",
    "time",
    "#no",
    "%1",
    "&",
    "|",
    "\udcff",
]

texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
shells = pytest.mark.parametrize("shell", ["sh", "bash"])


def through(shell: str, command: ShellCommand, home: str = "/home/me") -> bytes:
    env = {"PATH": os.environ["PATH"], "HOME": home, "LC_ALL": "C.UTF-8"}
    return subprocess.run(
        [shell, "-c", str(command)], env=env, stdout=subprocess.PIPE, timeout=HANG, check=True
    ).stdout


@shells
@settings(max_examples=25, deadline=None)
@given(st.lists(texts, min_size=1, max_size=20))
@example(HOSTILE)
def test_arguments_arrive_byte_exact(shell: str, argv: list[str]) -> None:
    command = sh("exec ", words([sys.executable, "-c", SHOW, *argv]))
    assert through(shell, command) == b"\0".join(map(os.fsencode, argv))


@shells
@settings(max_examples=25, deadline=None)
@given(texts.filter(lambda text: not text.startswith("/")))
@example("a b'$(id)")
@example("")
def test_only_a_leading_home_expands_in_a_path(shell: str, rest: str) -> None:
    command = sh("exec ", words([sys.executable, "-c", SHOW]), " ", path("~/" + rest))
    assert through(shell, command, "/h o'm$e") == os.fsencode("/h o'm$e/" + rest)


@shells
@pytest.mark.parametrize("text", ["~root/x", "a/~/b", "$HOME", "-x", " ~/x", ""])
def test_other_paths_arrive_as_they_are(shell: str, text: str) -> None:
    command = sh("exec ", words([sys.executable, "-c", SHOW]), " ", path(text))
    assert through(shell, command) == os.fsencode(text)


@shells
def test_a_lone_tilde_is_the_home_folder(shell: str) -> None:
    command = sh("exec ", words([sys.executable, "-c", SHOW]), " ", path("~"))
    assert through(shell, command) == b"/home/me"


@shells
@pytest.mark.parametrize("name", ["if", "A=1", "time", "-x", "a b", "~"])
def test_a_word_in_command_position_is_a_program(shell: str, name: str, tmp_path: object) -> None:
    program = os.path.join(str(tmp_path), name)
    with open(program, "w") as script:
        script.write("#!/bin/sh\nprintf ran\n")
    os.chmod(program, 0o700)
    command = sh("PATH=", word(str(tmp_path)), ":$PATH; ", word(name))
    assert through(shell, command) == b"ran"


def test_shell_text_is_kept_and_words_nest() -> None:
    inner = sh("echo ", word("it's"))
    assert str(sh("sh -c ", word(str(inner)))) == f"sh -c {word(str(inner))}"
    assert str(sh("cd ", path("~/a b"), " && ", word("ls"))) == "cd ~/'a b' && ls"


@pytest.mark.parametrize("build", [word, path, sh, lambda text: words([text])])
@pytest.mark.parametrize("text", ["\0", "~/\0", "a\0b"])
def test_a_nul_is_refused(build: object, text: str) -> None:
    with pytest.raises(ValueError, match="NUL"):
        build(text)  # type: ignore[operator]
