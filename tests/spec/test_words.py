"""A program given as one text is split as a shell splits it."""

import subprocess
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dtrain.diagnostics import SpecError
from dtrain.spec.load import parse

FILE = "cluster: {hosts: [a], gpus: 1}\njob:\n  framework: none\n  command: |-\n"


def words(text: str) -> tuple[str, ...]:
    lines = "".join(f"    {line}\n" for line in text.split("\n"))
    return parse(FILE + lines, "x.yaml").job.command


def shell_words(text: str, folder: Path) -> tuple[str, ...]:
    """The words that a shell makes of ``text``."""
    run = subprocess.run(
        ["sh", "-c", f"printf '%s\\0' {text}"], capture_output=True, check=True, cwd=folder
    )
    return tuple(run.stdout.decode().split("\0")[:-1])


@given(st.text("ab{}-=[]!'\"\\ \n$#~*", min_size=1, max_size=12).filter(lambda text: text.strip()))
@example("""train.py --name 'it''s' "a b" c\\ d "\\"" \\\\ '$y' \\; {rank}""")
@example("accelerate launch \\\n  --num_processes 8")
def test_the_words_are_those_of_a_shell(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    try:
        found = words("x" + text)
    except SpecError:
        return
    assert found == shell_words("x" + text, tmp_path_factory.getbasetemp())


@pytest.mark.parametrize(
    "text",
    ["a | b", "a && b", "a > b", "$A", '"$A"', '"; $A"', "`a`", "~/a", "b *", "a\nb", "a #b"],
)
def test_what_a_shell_would_carry_out_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match=r"job\.command: .* has a meaning only in a shell"):
        words(text)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("train.py \\", "ends with"),
        ("train.py 'a", "a quote that is not closed"),
        ("GPUS=0 python train.py", "is a variable"),
    ],
)
def test_what_no_program_can_be_started_with(text: str, fault: str) -> None:
    with pytest.raises(SpecError, match=fault):
        words(text)


def test_a_number_is_a_word() -> None:
    job = "job: {framework: none, script: a.py, args: 8}"
    assert parse(f"cluster: {{hosts: [a], gpus: 1}}\n{job}", "x.yaml").job.args == ("8",)
