import pytest

from support.runs import Workers


@pytest.fixture
def workers(tmp_path):
    return Workers(tmp_path)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
