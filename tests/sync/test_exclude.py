"""Which paths patterns cover: the same as with git."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from dtrain.diagnostics import UsageError
from dtrain.sync.exclude import exclusion

PATTERNS = [
    ["*.pt"],
    ["data/"],
    ["/top"],
    ["a/b"],
    ["**/x"],
    ["a/**"],
    ["a/**/b"],
    ["?.txt"],
    ["[a-c]x"],
    ["[!a-c]x"],
    ["a\\*"],
    [".git*"],
    ["a(b|c).py"],
    ["", "/"],
    ["# a comment", "\\#x"],
    ["x  ", "top\\ "],
    ["*.pt", "!keep.pt", "/old/keep.pt"],
    ["*", "!*/", "!*.py"],
    ["data", "!data/x"],
]
FILES = [
    "a.pt", "deep/er/a.pt", "a.ptx", "a.py", "data/x", "deep/data/x", "mydata/x", "top", "top ",
    "a/top", "a/b", "a/x/b", "a/x/y/b", "x/a/b", "x2", "ab", "a.txt", "d/b.txt", "ab.txt", ".txt",
    "ax", "d/cx", "dx", "a*", ".gitignored", "a(b|c).py", "ab.py", "#x", "# a comment", "x  ",
    "keep.pt", "x/keep.pt", "old/keep.pt", "é.pt",
]  # fmt: skip


def sent(patterns: list[str]) -> set[str]:
    """The files that a walk of the tree includes."""
    found = exclusion(patterns)

    def included(path: str) -> bool:
        parents = [parent.as_posix() for parent in Path(path).parents if parent.name]
        if any(found.match_file(f"{parent}/") for parent in parents):
            return False
        return not found.match_file(path)

    return {path for path in FILES if included(path)}


@pytest.mark.parametrize("patterns", PATTERNS, ids=" ".join)
def test_git_agrees(patterns: list[str], tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / ".git" / "info" / "exclude").write_text("\n".join(patterns) + "\n")
    found = subprocess.run(
        ["git", "check-ignore", "-z", "--no-index", "--stdin"],
        cwd=tmp_path,
        input="\0".join(FILES).encode(),
        capture_output=True,
        check=False,
    )
    ignored = {path.decode() for path in found.stdout.split(b"\0") if path}
    assert sent(patterns) == set(FILES) - ignored


@pytest.mark.parametrize("pattern", ["!", "a\\", "[z-a]"])
def test_what_is_no_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(UsageError, match=r"job\.sync\.exclude: .* is not a pattern"):
        exclusion(["*.pt", pattern])
