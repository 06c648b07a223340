"""Keyboard-interactive: a server's questions as a second factor, and instead of a key."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import paramiko
import pytest

from dtrain.diagnostics import AuthError
from dtrain.spec.model import Host, Ssh
from dtrain.transport import authentication
from dtrain.transport import ssh as ssh_module
from dtrain.transport.ssh import SshTransport
from support.limits import HANG
from support.ssh_server import CODE, Login, SshServer, TwoFactor
from support.sshd import Sshd, generate_key, host_on, running_sshd

pytestmark = pytest.mark.sshd


class Person:
    """Answers questions and records them."""

    def __init__(self, *answers: str | None) -> None:
        self._answers = list(answers)
        self.prompts: list[tuple[str, bool]] = []

    def __call__(
        self, prompt: str, /, *, echo: bool = False, unwanted: Callable[[], bool] = lambda: False
    ) -> str | None:
        self.prompts.append((prompt, echo))
        return self._answers.pop(0)


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generate_key(tmp_path_factory.mktemp("key") / "key")


@pytest.fixture
def serve(key: Path, tmp_path: Path) -> Callable[..., tuple[SshServer, Host]]:
    public = base64.b64decode(Path(f"{key}.pub").read_text().split()[1])

    def serve(login: type[Login], **ssh: object) -> tuple[SshServer, Host]:
        server = SshServer(public)
        server.login = login
        known = tmp_path / "known"
        known.write_text(server.host_key_line)
        settings = Ssh(
            user="ml", port=server.port, identity=str(key), known_hosts=str(known), **ssh
        )  # type: ignore[arg-type]
        return server, Host("gpu01", "127.0.0.1", ssh=settings)

    return serve


Serve = Callable[..., tuple[SshServer, Host]]
Make = Callable[..., SshTransport]
ASKED = [("ml@gpu01: Two steps\nml@gpu01: Name: ", True), ("ml@gpu01: Code: ", False)]


@pytest.mark.parametrize(
    "methods",
    [
        ("publickey", "keyboard-interactive"),
        ("keyboard-interactive",),
        ("keyboard-interactive", "publickey"),
    ],
)
def test_questions_are_answered(
    make_transport: Make, serve: Serve, methods: tuple[str, ...]
) -> None:
    person = Person("me", CODE)
    server, host = serve(type("", (TwoFactor,), {"methods": methods}))
    with server:
        connection = make_transport(ask=person).connect(host)
        assert connection.start("exit 3").wait(HANG) == 3
        assert person.prompts == ASKED
        connection.close()


@pytest.mark.netns
@pytest.mark.parametrize("methods", ["publickey,keyboard-interactive", "keyboard-interactive"])
def test_a_real_sshd_asks_through_pam(make_transport: Make, tmp_path: Path, methods: str) -> None:
    check = tmp_path / "check"
    check.write_text(f'#!/bin/sh\nread -r code\n[ "$code" = "{CODE}" ]\n')
    check.chmod(0o755)
    stack = f"""
        auth required pam_exec.so quiet expose_authtok {check}
        auth required pam_permit.so
        account required pam_permit.so
        session required pam_permit.so
    """
    settings = {
        "UsePAM": "yes",
        "KbdInteractiveAuthentication": "yes",
        "AuthenticationMethods": methods,
    }
    person = Person("wrong", CODE)
    with running_sshd(tmp_path, settings=settings, pam=stack) as sshd:
        connection = make_transport(ask=person).connect(host_on(sshd))
        assert connection.start("exit 3").wait(HANG) == 3
        connection.close()
        assert person.prompts == [(f"{sshd.user}@gpu01: Password: ", False)] * 2
        sshd.wait_for_log("Accepted keyboard-interactive/pam")


def test_a_wrong_answer_can_be_corrected(make_transport: Make, serve: Serve) -> None:
    person = Person("me", "wrong", "me", CODE)
    server, host = serve(TwoFactor)
    with server:
        make_transport(ask=person).connect(host).close()
        assert person.prompts == ASKED * 2
        assert server.connections == 1


def test_three_wrong_answers_end_it(make_transport: Make, serve: Serve) -> None:
    person = Person(*["me", "secret"] * 3)
    server, host = serve(TwoFactor)
    with server, pytest.raises(AuthError) as caught:
        make_transport(ask=person).connect(host)
    assert caught.value.reason == (
        "it accepted a key but also requires keyboard-interactive "
        "(keyboard-interactive: it accepted no answer)"
    )
    assert "secret" not in str(caught.value.__dict__) + str(caught.value.__context__)
    assert server.connections == 1


def test_the_user_does_not_answer(make_transport: Make, serve: Serve) -> None:
    person = Person(None)
    server, host = serve(TwoFactor)
    with server, pytest.raises(AuthError, match="keyboard-interactive: the user gave no answer"):
        make_transport(ask=person).connect(host)
    assert len(person.prompts) == 1


@pytest.mark.parametrize(
    ("methods", "reason"),
    [
        (
            ("publickey", "keyboard-interactive"),
            "it accepted a key but also requires keyboard-interactive",
        ),
        (("keyboard-interactive",), "it accepts no keys, only keyboard-interactive"),
    ],
)
def test_without_a_terminal_the_error_names_the_required_methods(
    transport: SshTransport, serve: Serve, methods: tuple[str, ...], reason: str
) -> None:
    server, host = serve(type("", (TwoFactor,), {"methods": methods}))
    with server, pytest.raises(AuthError) as caught:
        transport.connect(host)
    assert reason in caught.value.reason
    assert "there is no terminal to answer its questions" in caught.value.reason
    assert "run dtrain in a terminal" in caught.value.hint


@pytest.mark.parametrize("line", ["BatchMode yes", "KbdInteractiveAuthentication no"])
def test_the_configuration_can_forbid_questions(
    make_transport: Make, serve: Serve, home: Path, line: str
) -> None:
    (home / ".ssh" / "config").write_text(f"{line}\n")
    person = Person()
    server, host = serve(TwoFactor)
    with server, pytest.raises(AuthError, match="ssh's configuration forbids questions"):
        make_transport(ask=person).connect(host)
    assert person.prompts == []


def test_methods_with_hostile_names(transport: SshTransport, serve: Serve) -> None:
    name = "\x1b]0;owned\x07pass\u202eword" + "x" * 100_000
    server, host = serve(type("", (TwoFactor,), {"methods": (name,)}))
    with server, pytest.raises(AuthError, match=r"it accepts no keys, only passwordx*$") as caught:
        transport.connect(host)
    assert len(caught.value.reason) < 100


def test_many_hosts_behind_a_jump_host_ask_once(
    make_transport: Make, serve: Serve, sshd: Sshd, tmp_path: Path
) -> None:
    person = Person("me", CODE)
    server, _ = serve(TwoFactor)
    with server:
        known = tmp_path / "both"
        known.write_text(server.host_key_line + sshd.known_hosts.read_text())
        jump = f"ml@127.0.0.1:{server.port}"
        hosts = [
            host_on(sshd, f"gpu{n}", known_hosts=str(known), jump=jump, identity=str(sshd.identity))
            for n in range(8)
        ]
        server.authorized = base64.b64decode(Path(f"{sshd.identity}.pub").read_text().split()[1])
        transport = make_transport(ask=person)
        with ThreadPoolExecutor(8) as pool:
            for connection in pool.map(transport.connect, hosts):
                assert connection.start("exit 6").wait(HANG) == 6
    assert [prompt for prompt, _ in person.prompts] == [
        "ml@127.0.0.1: Two steps\nml@127.0.0.1: Name: ",
        "ml@127.0.0.1: Code: ",
    ]


def test_a_jump_host_that_nobody_answers_asks_once(
    make_transport: Make, serve: Serve, sshd: Sshd
) -> None:
    person = Person(None)
    server, bastion = serve(TwoFactor)
    host = host_on(
        sshd,
        known_hosts=bastion.ssh.known_hosts,
        jump=f"ml@127.0.0.1:{server.port}",
        identity=bastion.ssh.identity,
    )
    transport = make_transport(ask=person)
    with server:
        for _ in range(3):
            with pytest.raises(AuthError, match=r"cannot reach its jump host: .*no answer"):
                transport.connect(host)
    assert len(person.prompts) == server.connections == 1


def test_a_host_that_comes_just_after_nobody_answered_a_jump_host(
    make_transport: Make, serve: Serve, sshd: Sshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    person = Person(None)
    server, bastion = serve(TwoFactor)
    jump = f"ml@127.0.0.1:{server.port}"
    ssh = {"known_hosts": bastion.ssh.known_hosts, "identity": bastion.ssh.identity}
    later: list[BaseException] = []

    class Observed(Future[Any]):
        def set_exception(self, exception: BaseException | None) -> None:
            super().set_exception(exception)
            try:
                transport.connect(host_on(sshd, "gpu02", jump=jump, **ssh))
            except Exception as error:  # noqa: BLE001
                later.append(error)

    monkeypatch.setattr(ssh_module, "Future", Observed)
    transport = make_transport(ask=person)
    with server, pytest.raises(AuthError, match="no answer"):
        transport.connect(host_on(sshd, "gpu01", jump=jump, **ssh))
    assert [type(error) for error in later] == [AuthError]
    assert len(person.prompts) == 1


def test_the_first_of_two_jump_hosts_asks_once_and_again_later(
    make_transport: Make, serve: Serve, sshd: Sshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later, as when hosts reconnect during a run."""
    person = Person(None, None)
    server, first = serve(TwoFactor)
    jumps = f"ml@127.0.0.1:{server.port},{sshd.user}@127.0.0.1:{sshd.port}"
    ssh = {"known_hosts": first.ssh.known_hosts, "identity": first.ssh.identity}
    host = host_on(sshd, jump=jumps, **ssh)
    transport = make_transport(ask=person)
    with server:
        for later in (False, False, True):
            if later:
                monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + 61.0)
            with pytest.raises(AuthError, match="no answer") as caught:
                transport.connect(host)
            assert caught.value.asked
            assert caught.value.jump == "127.0.0.1"
            assert len(person.prompts) == server.connections == 1 + later


class HangsUpOnKeys(TwoFactor):
    """Drops the client whose answers it has just accepted."""

    methods = ("keyboard-interactive", "publickey")

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        self.server.drop_connections()
        return paramiko.AUTH_FAILED


def test_a_server_that_hangs_up_after_the_answers_asks_once(
    make_transport: Make, serve: Serve
) -> None:
    person = Person("me", CODE)
    server, host = serve(HangsUpOnKeys)
    with server, pytest.raises(AuthError, match="it closed the connection during its questions"):
        make_transport(ask=person).connect(host)
    assert person.prompts == ASKED
    assert server.connections == 1


class FallsSilent(TwoFactor):
    """Sends text without a question, and no verdict after that."""

    methods = ("keyboard-interactive",)

    def query(self) -> paramiko.InteractiveQuery:
        return paramiko.InteractiveQuery("Wait", "")

    def check_auth_interactive_response(self, responses: list[str]) -> int:
        self.server.stopping.wait(HANG)
        return paramiko.AUTH_FAILED


def test_a_server_that_does_not_judge_answers(
    make_transport: Make, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authentication, "RESPONSE_TIMEOUT", 0.5)
    server, host = serve(FallsSilent)
    with server, pytest.raises(AuthError, match="it did not respond in time"):
        make_transport(ask=Person()).connect(host)


class Hostile(TwoFactor):
    """Sends the requests in ``queries`` in order, then repeats the first."""

    methods = ("keyboard-interactive",)
    queries: ClassVar[list[paramiko.InteractiveQuery]]

    def query(self) -> paramiko.InteractiveQuery:
        return self.queries[len(self.heard) % len(self.queries)]

    def check_auth_interactive_response(
        self, responses: list[str]
    ) -> paramiko.InteractiveQuery | int:
        self.heard.append(responses)
        return self.query()


def hostile(*queries: paramiko.InteractiveQuery) -> type[Login]:
    return type("", (Hostile,), {"queries": list(queries)})


def test_hostile_text_is_cleaned_and_marked_with_the_host(
    make_transport: Make, serve: Serve
) -> None:
    text = (
        "\x1b[2J\x1b]0;owned\x07\r\nPassphrase for /home/ml/.ssh/id_rsa\u202e:\x9b1m " + "x" * 9000
    )
    person = Person(None)
    server, host = serve(hostile(paramiko.InteractiveQuery("a\nb" * 5000, text, (text, False))))
    with server, pytest.raises(AuthError, match="the user gave no answer"):
        make_transport(ask=person).connect(host)
    ((prompt, _),) = person.prompts
    lines = prompt.splitlines()
    assert all(line.startswith("ml@gpu01: ") for line in lines)
    assert lines[-1].startswith("ml@gpu01: Passphrase for /home/ml/.ssh/id_rsa: xxx")
    assert prompt.replace("\n", "").isprintable()
    assert len(lines) < 100 and max(map(len, lines)) < 250


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        (paramiko.InteractiveQuery("", "", *[("?", True)] * 100), "more than 8 questions at once"),
        (paramiko.InteractiveQuery("", "", ("?", True)), "asked more than 10 times in a row"),
        (paramiko.InteractiveQuery("", "text alone"), "asked more than 10 times in a row"),
    ],
)
def test_endless_questions_end(
    make_transport: Make, serve: Serve, query: paramiko.InteractiveQuery, reason: str
) -> None:
    person = Person(*["answer"] * 50)
    server, host = serve(hostile(query))
    with server, pytest.raises(AuthError, match=reason):
        make_transport(ask=person).connect(host)
    assert len(person.prompts) <= 10


def test_endless_partial_success_ends(make_transport: Make, serve: Serve) -> None:
    methods = ("keyboard-interactive",) * 1000
    person = Person(*["me", CODE] * 1000)
    server, host = serve(type("", (TwoFactor,), {"methods": methods}))
    with server, pytest.raises(AuthError, match="it accepted keyboard-interactive but"):
        make_transport(ask=person).connect(host)
    assert len(person.prompts) == 6


def test_a_server_that_hangs_up_ends_the_question(make_transport: Make, serve: Serve) -> None:
    server, host = serve(TwoFactor)
    asked = threading.Event()

    def ask(prompt: str, /, *, echo: bool = False, unwanted: Callable[[], bool]) -> str | None:
        asked.set()
        server.drop_connections()
        waiting = threading.Event()
        while not unwanted():
            waiting.wait(0.01)
        return None

    with server, pytest.raises(AuthError, match="it closed the connection during its questions"):
        make_transport(ask=ask).connect(host)
    assert asked.is_set()
    assert server.connections == 1


def test_one_question_at_a_time(make_transport: Make, serve: Serve) -> None:
    server, host = serve(TwoFactor)
    open_now = 0
    most = 0

    def ask(prompt: str, /, **_options: object) -> str | None:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        answer = "me" if "Name" in prompt else CODE
        threading.Event().wait(0.02)
        open_now -= 1
        return answer

    transport = make_transport(ask=ask)
    with server, ThreadPoolExecutor(6) as pool:
        for connection in pool.map(transport.connect, [host] * 6):
            connection.close()
    assert most == 1
