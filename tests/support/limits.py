"""The one limit on how long a test waits. It ends a hang and says nothing on speed: a busy machine
may be twenty times slower than an idle one."""

HANG = 600.0
"""Seconds. Less than pytest's own limit, so that the test itself says what it waited for."""
GONE = 60.0
"""Seconds for processes to disappear that were told to end. Less than a process of a test runs by
itself."""
