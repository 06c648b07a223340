"""Which paths patterns cover."""

from __future__ import annotations

import pytest

from dtrain.sync.exclude import Exclusion

CASES = [
    # pattern, covered, not covered; a path that ends in a slash is a folder
    ("*.pt", ["a.pt", "deep/er/a.pt", "x.pt/"], ["a.ptx", "a.py"]),
    ("data/", ["data/", "deep/data/"], ["data", "mydata/"]),
    ("/top", ["top", "top/"], ["a/top"]),
    ("a/b", ["a/b"], ["x/a/b", "a/x/b"]),
    ("**/x", ["x", "a/x", "a/b/x"], ["ax", "x2"]),
    ("a/**", ["a/b", "a/b/c"], ["a/", "b/a"]),
    ("a/**/b", ["a/b", "a/x/b", "a/x/y/b"], ["ab", "a/xb"]),
    ("?.txt", ["a.txt", "d/b.txt"], ["ab.txt", ".txt"]),
    ("[a-c]x", ["ax", "d/cx"], ["dx", "x"]),
    ("[!a-c]x", ["dx"], ["ax", "x"]),
    ("a\\*", ["a*"], ["ab"]),
    ("[", [], ["a"]),
    ("a[", ["a["], ["a"]),
    (".git", [".git/", "sub/.git"], ["git", ".gitignore"]),
    ("a(b|c).py", ["a(b|c).py"], ["ab.py"]),
    ("new\nline", ["new\nline"], ["newline"]),
    ("", [], ["a"]),
    ("/", [], ["a", "a/"]),
]


@pytest.mark.parametrize(("pattern", "covered", "spared"), CASES)
def test_pattern(pattern: str, covered: list[str], spared: list[str]) -> None:
    exclusion = Exclusion([pattern])
    for path in covered:
        assert exclusion.covers(path.rstrip("/"), folder=path.endswith("/")), path
    for path in spared:
        assert not exclusion.covers(path.rstrip("/"), folder=path.endswith("/")), path


def test_the_last_pattern_decides() -> None:
    exclusion = Exclusion(["*.pt", "!keep.pt", "/old/keep.pt"])
    assert exclusion.covers("a.pt", folder=False)
    assert not exclusion.covers("x/keep.pt", folder=False)
    assert exclusion.covers("old/keep.pt", folder=False)
