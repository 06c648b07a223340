"""No text of a worker or a host may do more to a terminal than print."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.framing import clean, clean_all, split

ATTACKS = {
    "title": ("a\x1b]0;owned\x07b", "ab"),
    "title ended by ST": ("a\x1b]2;owned\x1b\\b", "ab"),
    "hyperlink": ("\x1b]8;;http://evil/\x1b\\click\x1b]8;;\x1b\\", "click"),
    "clipboard": ("a\x1b]52;c;cm0gLXJmIH4K\x07b", "ab"),
    "unfinished string hides nothing": ("a\x1b]0;shown", "a0;shown"),
    "device control": ("a\x1bP$q\x1b\\b", "ab"),
    "8-bit string": ("a\x9d0;owned\x9cb", "ab"),
    "8-bit sequence": ("a\x9b2Jb", "ab"),
    "clear screen": ("\x1b[2J\x1b[Ha", "a"),
    "cursor up": ("a\x1b[1Ab", "ab"),
    "alternate screen": ("\x1b[?1049ha", "a"),
    "answerback": ("\x1b[6n\x1b[c\x05a", "a"),
    "character set": ("\x1b(0a\x0eb", "ab"),
    "reset": ("\x1bca", "a"),
    "lone escape": ("a\x1b", "a"),
    "nested escapes": ("\x1b\x1b[2J[2Ja", "[2Ja"),
    "bell and backspace": ("rm\x08\x08ls\x07", "rmls"),
    "reordered text": ("user\u202etxt.exe\u2066", "usertxt.exe"),
    "line breaks": ("a\nb\r\nc\u2028d", "a b c d"),
    "vertical": ("a\x0bb\x0cc\x85d", "abcd"),
    "null": ("a\x00b", "ab"),
    "surrogate": ("a\udc80b", "a\ufffdb"),
    "tab stays": ("a\tb", "a\tb"),
    "text stays": ("né 日本 █ 😀 [bold]x[/bold]", "né 日本 █ 😀 [bold]x[/bold]"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks(name):
    text, expected = ATTACKS[name]
    assert clean(text) == expected
    assert clean(text, color=True) == expected


def test_colors_are_kept_where_allowed_and_end_with_the_line():
    text = "\x1b[1;38;5;196mred\x1b[2Kstill\x1b]0;t\x07"
    assert clean(text) == "redstill"
    assert clean(text, color=True) == "\x1b[1;38;5;196mredstill\x1b[0m"


@given(
    st.text(st.characters(codec=None, categories=["Cc", "Cf", "Cs", "Zl", "L"]) | st.just("\x1b"))
)
def test_nothing_dangerous_is_left(text):
    assert not re.search(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", clean(text))
    colored = re.sub(r"\x1b\[[0-9;:]*m", "", clean(text, color=True))
    assert "\x1b" not in colored
    clean(text).encode()


@given(st.lists(st.text(st.characters(exclude_characters="\n", codec=None))), st.booleans())
def test_many_lines_are_cleaned_like_one(lines, color):
    text = "".join(f"{line}\n" for line in lines)
    assert split(clean_all(text, color)) == [clean(line, color) for line in lines]
