"""The agent queries NCCL's RAS service."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from dtrain.node.agent import nccl_ras
from dtrain.node.agent.nccl_ras import MAX_ANSWER, address_in, query
from support.ras import MISMATCH, RasServer

ME = [os.getpid()]


@pytest.fixture
def server() -> Iterator[RasServer]:
    server = RasServer()
    yield server
    server.close()


@pytest.mark.parametrize(
    ("environment", "address"),
    [
        ({}, ("127.0.0.1", 28028)),
        ({b"NCCL_RAS_ENABLE": b"0"}, None),
        ({b"NCCL_RAS_ENABLE": b"1"}, ("127.0.0.1", 28028)),
        ({b"NCCL_RAS_ADDR": b"localhost:1234"}, ("127.0.0.1", 1234)),
        ({b"NCCL_RAS_ADDR": b"[::1]:1234"}, ("::1", 1234)),
        ({b"NCCL_RAS_ADDR": b"host:0"}, None),
        ({b"NCCL_RAS_ADDR": b"host:99999"}, None),
        ({b"NCCL_RAS_ADDR": "host:٣".encode()}, None),
    ],
)
def test_the_address(environment: dict[bytes, bytes], address: tuple[str, int] | None) -> None:
    assert address_in(environment) == address


def test_the_report_of_the_job(server: RasServer) -> None:
    assert query(server.address, ME) == MISMATCH
    assert server.asked == ["client protocol 2", "timeout 5", "verbose status"]


def test_the_service_of_another_job_is_not_asked(server: RasServer) -> None:
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert query(server.address, [other.pid]) == ""
        assert "verbose status" not in server.asked
    finally:
        other.communicate()


def test_nobody_listens() -> None:
    server = RasServer()
    server.close()
    assert query(server.address, ME) == ""
    assert query(("no such\0host", 1), ME) == ""


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0" * 10**7, b"SERVER PROTOCOL 2\nNO\n"]
)
def test_another_program_there_is_harmless(answer: bytes) -> None:
    server = RasServer(answer=answer)
    assert query(server.address, ME) == ""
    server.close()


def test_an_endless_report_is_cut() -> None:
    server = RasServer("x" * (1 << 22))
    assert query(server.address, ME) == "x" * MAX_ANSWER
    server.close()


def test_a_service_that_does_not_answer_takes_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_ras, "LIMIT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert query(silent.getsockname(), ME) == ""
