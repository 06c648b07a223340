"""When a relay or a supervisor that does not answer is given up."""

from __future__ import annotations

from dtrain.session.relays.liveness import SUPERVISOR_SILENCE, RelayLiveness, SupervisorLiveness


def test_a_relay_is_given_up_after_its_unanswered_pings() -> None:
    relay = RelayLiveness()
    relay.wait()
    assert [relay.ping(2) for _ in range(4)] == [False, False, True, False]
    assert relay.given_up


def test_any_output_resets_the_count() -> None:
    relay = RelayLiveness()
    for _ in range(3):
        relay.wait()
        assert not relay.ping(2)
        assert not relay.ping(2)
        relay.hear()
    assert not relay.given_up


def test_a_relay_is_quiet_until_its_next_output() -> None:
    """A network that was just cut says nothing about the job."""
    relay = RelayLiveness()
    relay.wait()
    assert [relay.ping(9) or relay.quiet for _ in range(3)] == [False, True, True]
    relay.hear()
    assert not relay.quiet


def test_pings_do_not_count_while_the_reader_is_busy() -> None:
    relay = RelayLiveness()
    relay.wait()
    relay.hear()
    assert not any(relay.ping(0) for _ in range(9))


def test_a_relay_that_was_given_up_stays_so() -> None:
    """Its connection is being closed, so what it sent at that moment does not count."""
    relay = RelayLiveness()
    relay.wait()
    assert relay.ping(0)
    relay.hear()
    relay.wait()
    assert relay.given_up


def test_before_the_start_no_relay_is_given_up() -> None:
    relay = RelayLiveness()
    relay.wait()
    assert not any(relay.ping(None) for _ in range(99))


def test_a_silent_supervisor_is_reported_once_and_lost_in_the_end() -> None:
    supervisor = SupervisorLiveness("node0", timeout=60.0)
    assert supervisor.hear(7, SUPERVISOR_SILENCE - 1) == ("", None)
    notice, error = supervisor.hear(7, SUPERVISOR_SILENCE)
    assert "process 7) on node0 does not answer" in notice
    assert "kill -CONT 7" in notice
    assert error is None
    assert supervisor.hear(7, 60.0) == ("", None)
    _, error = supervisor.hear(7, 61.0)
    assert "has not answered for 61 s" in str(error)
    assert "answers again" in supervisor.hear(7, 0.0)[0]
