"""The heap of a launch."""

import resource
import subprocess
import sys

from support.limits import HANG

TUNED = """
from dtrain_cli.memory import tune_heap

tune_heap()
"""

THREADS = """
import ctypes, threading

allocated = threading.Barrier(8)

def work():
    kept = [bytes(1000) for _ in range(1000)]
    allocated.wait()

threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc = ctypes.CDLL(None)
libc.malloc_info(0, ctypes.c_void_p.in_dll(libc, "stdout"))
libc.fflush(None)
"""


ROUNDS, BLOCKS = 50, 4
PIECES = f"""
import resource

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

before = faults()
for _ in range({ROUNDS}):
    pieces = [bytes(256 << 10) for _ in range({BLOCKS})]
    del pieces
print(faults() - before)
"""


def printed(code: str) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=True)
    return done.stdout


def test_all_threads_share_a_heap() -> None:
    assert printed(THREADS).count("<heap nr=") > 1
    assert printed(TUNED + THREADS).count("<heap nr=") == 1


def test_free_pieces_stay_in_the_heap() -> None:
    pages = BLOCKS * (256 << 10) // resource.getpagesize()
    assert int(printed(TUNED + PIECES)) < 2 * pages < int(printed(PIECES))
