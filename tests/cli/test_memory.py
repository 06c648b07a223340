"""The heap that all threads share."""

import subprocess
import sys

from support.limits import HANG

THREADS = """
import ctypes, sys, threading

if sys.argv[1] == "shared":
    from dtrain_cli.memory import share_heap

    share_heap()
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


def heaps(which: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", THREADS, which],
        capture_output=True,
        text=True,
        timeout=HANG,
        check=True,
    )
    return done.stdout.count("<heap nr=")


def test_all_threads_share_a_heap():
    assert heaps("separate") > 1
    assert heaps("shared") == 1
