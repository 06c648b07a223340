"""How long a host may be unreachable, by a clock that the test controls."""

from __future__ import annotations

from dtrain.diagnostics import AuthError, ConnectError
from dtrain.engines.ssh.outage import STABLE, Contact, Outage


def test_attaching_alone_does_not_end_an_outage() -> None:
    outage = Outage()
    for now in range(100, 140, 4):
        outage.begin(now)
        assert not outage.reachable
        outage.attached(now + 1)
        outage.answered(now + 2)
        assert outage.reachable
    outage.attempt(140)
    assert outage.attempted == 40


def test_a_relay_that_attaches_and_falls_silent_does_not_end_an_outage() -> None:
    outage = Outage()
    for now in range(100, 400, 30):
        outage.begin(now)
        outage.attached(now + 1)
    outage.attempt(400)
    assert outage.attempted == 300


def test_time_without_an_attempt_does_not_count() -> None:
    """The relay breaks while the launcher stands still, soon after an earlier outage."""
    outage = Outage()
    outage.begin(100)
    outage.attempt(101)
    outage.attached(102)
    outage.begin(3700)
    assert outage.attempted == 1


def test_progress_and_a_stable_relay_end_it() -> None:
    outage = Outage()
    outage.attempt(5)
    assert outage.attempted < 0
    outage.begin(10)
    outage.attached(12)
    outage.progressed()
    outage.attempt(13)
    assert outage.attempted < 0
    outage.begin(14)
    outage.attempt(15)
    assert outage.attempted == 1
    outage.attached(16)
    outage.answered(16 + STABLE)
    outage.begin(30)
    assert outage.attempted == 0


def test_a_host_is_lost_only_if_the_launcher_reached_another_after_the_limit() -> None:
    contact = Contact(399)
    outage = Outage(contact)
    assert not outage.is_over(300, decided=True)
    outage.begin(100)
    outage.attempt(399)
    assert not outage.is_over(300, decided=True)
    outage.attempt(400)
    assert not outage.is_over(300)
    assert outage.is_over(300, decided=True)
    contact.last = 400
    assert outage.is_over(300)


def test_a_network_that_comes_back_after_the_limit_may_soon_be_gone_again() -> None:
    contact = Contact(100)
    outage = Outage(contact)
    outage.begin(100)
    outage.attempt(399)
    contact.made(405, 300)  # another host
    outage.attempt(406)
    assert not outage.is_over(300)
    assert outage.attempted == 1  # no reason to think that this machine is cut off
    outage.attached(407)
    contact.made(407, 300)
    outage.begin(409)
    assert not outage.is_over(300)
    contact.made(704, 300)
    outage.attempt(705)
    assert not outage.is_over(300)
    contact.made(705, 300)
    assert outage.is_over(300)


def test_a_host_may_be_lost_sooner_than_others_answer_pings() -> None:
    contact = Contact()
    outage = Outage(contact)
    for now in range(100, 110, 5):
        contact.made(now, 2)
    outage.begin(106)
    contact.made(110, 2)
    outage.attempt(111)
    assert outage.is_over(2)


def test_a_host_that_refuses_logins_is_lost_although_it_is_seldom_heard() -> None:
    contact = Contact(100)
    outage = Outage(contact)
    outage.begin(100)
    for now in range(160, 400, 65):
        outage.attempt(now)
        contact.made(now + 5, 30)
    assert outage.is_over(30)


def test_delays_grow_until_there_is_progress() -> None:
    outage = Outage()
    outage.begin(0)
    delays = [outage.delays.next(None) for _ in range(7)]
    assert delays == [0.25, 0.5, 1, 2, 4, 5, 5]
    outage.progressed()
    assert outage.delays.next(None) == 0.25


def test_a_refused_login_is_repeated_slowly() -> None:
    outage = Outage()
    outage.begin(0)
    refused = AuthError("gpu01", "logging in", "it refused every key")
    assert [outage.delays.next(refused) for _ in range(5)] == [10, 20, 40, 60, 60]
    assert outage.delays.next(ConnectError("gpu01", "connecting", "refused")) == 0.25
    outage.progressed()
    assert outage.delays.next(refused) == 10
