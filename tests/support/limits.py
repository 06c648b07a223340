"""The limit on a test's waits. It ends a hang and does not measure speed: a busy machine
may be twenty times slower than an idle one."""

HANG = 600.0
"""Seconds. Less than pytest's own limit, so that the test itself reports the wait."""
GONE = 60.0
"""Seconds for stopped processes to disappear. Less than a process of a test runs by
itself."""
