"""Settings of this process for launches on many hosts."""

import sys
from contextlib import ExitStack

import pytest

from dtrain.engines.ssh.many_hosts import prepared_for


def test_launches_that_overlap_leave_the_switch_interval_as_it_was() -> None:
    usual = sys.getswitchinterval()
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(prepared_for(100))
        second.enter_context(prepared_for(50))
        assert sys.getswitchinterval() == pytest.approx(0.03)
        first.close()
        assert sys.getswitchinterval() == pytest.approx(0.01)
        second.close()
        assert sys.getswitchinterval() == pytest.approx(usual)
