"""Host lists fold and unfold."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.hostlist import MAX_HOSTS, HostListError, brief, fold, unfold

UNFOLDED = {
    "login": ["login"],
    "gpu[01-03]": ["gpu01", "gpu02", "gpu03"],
    "gpu[01-03,07],login": ["gpu01", "gpu02", "gpu03", "gpu07", "login"],
    "r[1-2]n[01-02]": ["r1n01", "r1n02", "r2n01", "r2n02"],
    "r[1-2]n[1-2].x[3]": ["r1n1.x3", "r1n2.x3", "r2n1.x3", "r2n2.x3"],
    "a[8-11]": ["a8", "a9", "a10", "a11"],
    "a[08-10]": ["a08", "a09", "a10"],
    "a[98-101]": ["a98", "a99", "a100", "a101"],
    "a[098-101]": ["a098", "a099", "a100", "a101"],
    "a[08-100]": [f"a{n:02d}" for n in range(8, 101)],
    "a[0-2]": ["a0", "a1", "a2"],
    "a[00-02]": ["a00", "a01", "a02"],
    "[1-2]": ["1", "2"],
    "10.0.0.[1-3]": ["10.0.0.1", "10.0.0.2", "10.0.0.3"],
    " a , b[ 1 - 2 , 4 ] ": ["a", "b1", "b2", "b4"],
    "a,a": ["a", "a"],
    "a[3,1,2]": ["a3", "a1", "a2"],
}


@pytest.mark.parametrize("text", UNFOLDED)
def test_unfold(text: str) -> None:
    assert unfold(text) == tuple(UNFOLDED[text])


MALFORMED = {
    "": ("a host name is missing here", 0),
    "  ": ("a host name is missing here", 0),
    "a,": ("a host name is missing here", 1),
    ",a": ("a host name is missing here", 0),
    "a,,b": ("a host name is missing here", 2),
    "gpu[01-08": ("'[' without a ']' after it", 3),
    "gpu[": ("'[' without a ']' after it", 3),
    "gpu01-08]": ("']' without a '[' before it", 8),
    "gpu[[1]]": ("brackets cannot be nested", 4),
    "gpu[]": ("a number is missing in the brackets", 4),
    "gpu[1,]": ("a number is missing in the brackets", 6),
    "gpu[1,,2]": ("a number is missing in the brackets", 6),
    "gpu[a-c]": ("'a-c' is neither a number nor a range", 4),
    "gpu[1-2-3]": ("'1-2-3' is neither a number nor a range", 4),
    "gpu[-3]": ("'-3' is neither a number nor a range", 4),
    "gpu[1-]": ("'1-' is neither a number nor a range", 4),
    "[::1]": ("'::1' is neither a number nor a range", 1),
    "gpu[٣]": ("'٣' is neither a number nor a range", 4),
    "x,gpu[8-1]": ("the range 8-1 runs backwards", 6),
    "gpu[001-10]": ("the ends of the range 001-10 have different numbers of digits", 4),
    "gpu[1-08]": ("the ends of the range 1-08 have different numbers of digits", 4),
    "gpu01 gpu02": ("a host name cannot contain spaces", 5),
    "a\nb": ("a host name cannot contain spaces", 1),
    "gpu[1-99999]": (f"the list has more than {MAX_HOSTS} hosts", 0),
    "a[1-200]b[1-200]": (f"the list has more than {MAX_HOSTS} hosts", 0),
    "a[1-9999],b[1-9999]": (f"the list has more than {MAX_HOSTS} hosts", 10),
    "a[1-999999999999999999][1-999999999999999999]": (
        f"the list has more than {MAX_HOSTS} hosts",
        0,
    ),
    "a[" + "9" * 5000 + "]": ("numbers have at most 18 digits", 2),
    "a" * 254: ("a host name has at most 253 characters; this has 254", 0),
    "a" * 250 + "[1-9999]": ("a host name has at most 253 characters; this has 254", 0),
}


@pytest.mark.parametrize("text", MALFORMED, ids=range(len(MALFORMED)))
def test_errors_and_positions(text: str) -> None:
    with pytest.raises(HostListError) as caught:
        unfold(text)
    assert (caught.value.message, caught.value.offset) == MALFORMED[text]


def test_the_limits_are_allowed() -> None:
    assert len(unfold("gpu[1-16384]")) == 16384
    assert unfold("ab[1-2],c", limit=3) == ("ab1", "ab2", "c")
    assert unfold("a" * 253) == ("a" * 253,)
    assert unfold("a" * 251 + "[8-10,9]")[2] == "a" * 251 + "10"
    assert unfold("a[" + "9" * 18 + "]") == ("a" + "9" * 18,)
    for beyond in ("gpu[1-16385]", "a" * 250 + "[1-9,1000]", "a[1-" + "9" * 19 + "]"):
        with pytest.raises(HostListError):
            unfold(beyond)


@pytest.mark.parametrize(
    ("text", "marked", "hint"),
    [
        ("x,gpu[8-1]", "8-1", "write 1-8"),
        ("gpu[001-10]", "001-10", "write 001-010"),
        ("gpu[1-08]", "1-08", "write 01-08"),
        ("gpu[3, a-c ]", " a-c ", "write numbers and ranges in brackets, e.g. [01-08,11]"),
        ("gpu01 gpu02", " ", "separate hosts with commas"),
        ("a,b[1-99999]", "b[1-99999]", ""),
        ("b," + "a" * 254, "a" * 254, ""),
    ],
)
def test_an_error_marks_its_text_and_gives_a_remedy(text: str, marked: str, hint: str) -> None:
    with pytest.raises(HostListError) as caught:
        unfold(text)
    error = caught.value
    assert text[error.offset : error.offset + error.width] == marked
    assert error.hint == hint


def test_names_that_no_list_can_shorten() -> None:
    long, digits = "a" * 253, "1" * 18
    for names in ([f"{long}1", f"{long}2"], [f"a{digits}1", f"a{digits}2"]):
        assert fold(names) == ",".join(names)
    assert fold([f"a{digits}", f"a{digits[:-1]}2"]) == f"a[{digits}-{digits[:-1]}2]"


FOLDED = {
    "": [],
    "login": ["login"],
    "gpu[01-03,07],login": ["gpu01", "gpu02", "gpu03", "gpu07", "login"],
    "r[1-2]n[01-02]": ["r1n01", "r1n02", "r2n01", "r2n02"],
    "r1n[1-2],r2n1": ["r1n1", "r1n2", "r2n1"],
    "a[1-2]b1": ["a1b1", "a2b1"],
    "a[9-10]": ["a9", "a10"],
    "a[09-10]": ["a09", "a10"],
    "a[9,010]": ["a9", "a010"],
    "a[3,1-2]": ["a3", "a1", "a2"],
    "b1,a[1-2],b2": ["b1", "a1", "a2", "b2"],
    "10.0.0.[9-11]": ["10.0.0.9", "10.0.0.10", "10.0.0.11"],
    "a[1,1]": ["a1", "a1"],
}


@pytest.mark.parametrize("folded", FOLDED)
def test_fold(folded: str) -> None:
    assert fold(FOLDED[folded]) == folded


def test_brief_cuts_a_list_that_no_brackets_shorten() -> None:
    hosts = [f"train-{number:04}-{number % 7}x.example.com" for number in range(1200)]
    assert brief(hosts) == f"{fold(hosts[:4])} and 1,196 more"
    for short in (hosts[:8], ["a" * 253, "b" * 253], [f"gpu{number}" for number in range(1200)]):
        assert brief(short) == fold(short)


names = st.one_of(
    st.from_regex(r"[a-c]{0,1}[0-2]{1,3}([ab][0-3]{1,2})?", fullmatch=True),
    st.text("ab019.-_:", min_size=1, max_size=30),
)


@given(st.lists(names, min_size=1, max_size=60))
def test_unfold_undoes_fold(hosts: list[str]) -> None:
    assert unfold(fold(hosts)) == tuple(hosts)


@given(st.text("ab[]-, 0129\n", max_size=30) | st.text())
def test_any_text_has_names_or_an_error(text: str) -> None:
    try:
        hosts = unfold(text, limit=2000)
    except HostListError as error:
        assert 0 <= error.offset <= len(text)
        assert error.width >= 1
    else:
        assert 0 < len(hosts) <= 2000
        assert unfold(fold(hosts)) == hosts
