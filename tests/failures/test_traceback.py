"""What a process said last, from tracebacks that Python itself prints."""

import subprocess
import sys

import pytest

from dtrain.failures.traceback import headline, last_words, shorten


def stderr_of(code: str) -> bytes:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).stderr


def test_a_traceback_is_found_between_other_output():
    said = stderr_of(
        "import sys; print('loading', file=sys.stderr)\n"
        "def step(): raise ValueError('bad batch')\n"
        "step()"
    )
    text = last_words(said + b"\n[W1121 10:00:00.1 ProcessGroup.cpp:1] destroy it\n")
    assert text.startswith("Traceback (most recent call last):")
    assert text.endswith("ValueError: bad batch")


def test_the_last_of_several():
    said = stderr_of("raise KeyError(1)") + b"retrying\n" + stderr_of("raise OSError('second')")
    text = last_words(said)
    assert text.count("Traceback") == 1
    assert text.endswith("OSError: second")


@pytest.mark.parametrize(
    ("how", "between"),
    [("", "During handling of the above"), ("from e", "direct cause of the following")],
)
def test_chained_exceptions_come_whole(how, between):
    said = stderr_of(
        "try:\n  try: 1/0\n"
        f"  except ZeroDivisionError as e: raise ValueError('second') {how}\n"
        f"except ValueError as e: raise RuntimeError('third') {how}"
    )
    text = last_words(stderr_of("raise KeyError('earlier')") + said)
    assert text.count("Traceback") == 3
    assert between in text
    assert "earlier" not in text
    assert text.endswith("RuntimeError: third")


@pytest.mark.parametrize(
    "advice",
    [
        "is not going to be frozen to produce an executable.",
        "section in https://docs.python.org/3/library/multiprocessing.html",
    ],
)
def test_a_child_that_cannot_import_the_script_explains_its_parent(advice: str) -> None:
    """Python writes both messages of multiprocessing, by its version."""
    frame = 'Traceback (most recent call last):\n  File "a.py", line 1, in b\n'
    child = f"{frame}RuntimeError: \n        An attempt\n\n        {advice}\n        \n"
    parent = f"{frame}EOFError\n"
    found = last_words((child + child + parent).encode())
    assert (found.count("An attempt"), headline(found)) == (2, "EOFError")
    other = last_words((child.replace(advice, "to read") + parent).encode())
    assert "An attempt" not in other


def test_the_rank_prefix_of_torch_is_taken_off():
    said = stderr_of("def f():\n  raise RuntimeError('CUDA error\\n\\nFor debugging, see')\nf()")
    prefixed = "\n".join(f"[rank3]: {line}" if line else "" for line in said.decode().split("\n"))
    text = last_words(said + prefixed.encode() + b"[W1121 later.cpp] noise\n")
    assert "[rank3]" not in text
    assert text.count("Traceback") == 1
    assert text.startswith("Traceback (most recent call last):\n  File")
    assert text.endswith("For debugging, see")


def test_messages_of_several_lines():
    text = last_words(stderr_of("raise RuntimeError('CUDA error: assert\\nCompile with X')"))
    assert text.endswith("RuntimeError: CUDA error: assert\nCompile with X")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups came with 3.11")
def test_exception_groups_come_whole():
    said = stderr_of("raise ExceptionGroup('many', [ValueError('one'), OSError('two')])")
    text = last_words(b"noise\n" + said)
    assert text.startswith("  + Exception Group Traceback")
    assert "ValueError: one" in text
    assert "OSError: two" in text


def test_a_crash_of_the_interpreter():
    said = stderr_of("import faulthandler, os; faulthandler.enable(); os.abort()")
    text = last_words(b"x\n" * 5 + said)
    assert text.startswith("Fatal Python error: Aborted")
    assert 'File "<string>"' in text


def test_without_a_traceback_the_last_lines():
    said = b"".join(b"line %d\n\n" % number for number in range(100)) + b"Killed \xff\x1b[2J"
    lines = last_words(said).split("\n")
    assert lines == [f"line {number}" for number in range(81, 100)] + ["Killed \\xff"]
    assert last_words(b"") == ""


def test_what_each_start_of_a_framework_writes_is_left_out():
    start = (
        b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n"
        b"I0000 00:00:1795708981.666344      64 port.cc:153] oneDNN custom operations are on.\n"
        b"I1126 10:00:00.123456 64 torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1] started\n"
    )
    assert last_words(start) == ""
    assert last_words(start + b"an evaluator reads checkpoints: pass --checkpoint DIR\n") == (
        "an evaluator reads checkpoints: pass --checkpoint DIR"
    )


def test_an_old_traceback_is_not_the_end():
    said = stderr_of("raise ValueError('handled')") + b"".join(
        b"step %d\n" % number for number in range(500)
    )
    assert "handled" not in last_words(said)


def test_any_tail_of_a_file_will_do():
    said = stderr_of("def f(): raise ValueError('x')\nf()")
    for start in range(len(said) - len("ValueError: x\n")):
        assert last_words(said[start:]).endswith("ValueError: x")


def test_what_tensorflow_says_after_empty_lines():
    message = "Graph execution error:\n\nDetected at node X\n\nCollective ops is aborted by: peer"
    said = stderr_of(f"raise RuntimeError({message!r})")
    text = last_words(said + b"\nI0000 00:00:1795282027.880313   12969 server.cc:467] bye\n")
    assert text.endswith(f"RuntimeError: {message}")


def test_a_traceback_of_another_process_comes_whole():
    """As a DataLoader passes it on, however deep."""
    message = (
        "Caught OSError in DataLoader worker process 0.\n"
        "Original Traceback (most recent call last):\n"
        + "".join(f'  File "a.py", line {number}, in f\n    f()\n' for number in range(40))
        + "OSError: in the worker"
    )
    said = stderr_of(f"raise OSError({message!r})")
    assert last_words(said).endswith("OSError: in the worker")


FRAMES = "".join(f"frame #{number}: <unknown function> + 0xd3e95\n" for number in range(40))
WATCHDOG = f"""\
[rank1]:[E1016 03:31:38.928019586 ProcessGroupNCCL.cpp:607] [Rank 1] Watchdog caught collective \
operation timeout: WorkNCCL(SeqNum=9141, OpType=ALLREDUCE) ran for 600071 milliseconds before \
timing out.
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG 3 Rank 1] Process group watchdog thread terminated with exception
Exception raised from checkTimeout at ProcessGroupNCCL.cpp:609 (most recent call first):
{FRAMES}""".encode()


def test_native_frames_do_not_push_the_reason_out_of_sight():
    text = last_words(b"step 1\n" + WATCHDOG)
    assert "Watchdog caught collective operation timeout" in text
    assert "frame #" not in text


def test_why_a_library_aborted_stands_before_where_python_was():
    said = stderr_of("import faulthandler, os; faulthandler.enable(); os.abort()")
    text = last_words(b"step 1\n" * 50 + WATCHDOG + b"\n" + said)
    assert text.startswith("[E1016 03:31:38")
    assert "Fatal Python error: Aborted" in text
    assert 'File "<string>"' in text


def long_message(lines):
    code = (
        "def step(): raise ValueError('bad values:\\n' + '\\n'.join(f'row {n}' "
        f"for n in range({lines})))\nstep()"
    )
    return stderr_of(code)


@pytest.mark.parametrize("lines", [90, 1000, 100_000])
def test_a_long_message_keeps_its_type_and_frames(lines):
    said = b"loading\n" * 10 + long_message(lines)
    text = last_words(said, uncaught=True)
    assert text.startswith("Traceback (most recent call last):")
    assert "in step" in text
    assert headline(text) == "ValueError: bad values:"
    assert text.endswith(f"row {lines - 1}")
    shown = shorten(text).split("\n")
    assert len(shown) < 30
    assert "ValueError: bad values:" in shown
    (cut,) = (line for line in shown if line.endswith(" lines of the message left out"))
    number = int(cut.split(" lines")[0].split()[-1].replace(",", ""))
    # All bytes of a shorter message are known.
    assert number == lines - 19 if lines < 10_000 else cut.startswith("… over ") and number > 1000


@pytest.mark.parametrize(
    "line", ["step %d", "INFO:root:at %d", "2026-01-02 10:00:00 at %d", "x:  %d%%|##"]
)
def test_a_log_after_a_traceback_is_not_its_message(line):
    said = stderr_of("raise ValueError('handled')") + b"".join(
        line.encode() % number + b"\n" for number in range(500)
    )
    assert "handled" not in last_words(said, uncaught=True)


def test_where_there_is_no_traceback_the_last_line_is_the_headline():
    assert headline("a\nb") == "b"
    assert shorten("a\n" * 100) == "a\n" * 100


def test_a_line_of_a_library_log_is_no_part_of_a_message():
    """JAX aborts a process that waits for the others after its exception."""
    aborts = b"F1122 11:33:30.808732     137 client.h:80] Terminating process because of errors\n"
    text = last_words(stderr_of("raise ValueError('bad batch')") + aborts)
    assert text.endswith("ValueError: bad batch")


def test_an_exception_that_python_ignores_does_not_hide_the_one_that_ends_the_process():
    said = stderr_of(
        "class Loader:\n"
        "  def __del__(self): raise AttributeError('no workers')\n"
        "loader = Loader()\n"
        "raise ValueError('bad batch')"
    )
    assert said.index(b"bad batch") < said.index(b"no workers")
    text = last_words(said, uncaught=True)
    assert text.endswith("ValueError: bad batch"), text
    assert text == last_words(said)
