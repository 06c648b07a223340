"""Starts a job: connects to its hosts while its engine is imported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from dtrain.runs.request import Request
from dtrain.transport.questions import Ask
from dtrain.transport.select import Transports

if TYPE_CHECKING:
    from dtrain.engines.contract import Engine
    from dtrain.session.caller import Caller


def connect(
    request: Request, ask: Ask | None = None, notice: Callable[[str], None] = lambda _text: None
) -> Transports:
    """The transports of ``request``, which begin to connect to its hosts. Raises LimitError."""
    cluster = request.spec().cluster
    transports = Transports(request.base, ask, notice)
    if cluster.slurm is not None:
        transports.prepare(cluster.hosts[:1])
    else:
        transports.connect_early(cluster.hosts)
    return transports


@contextmanager
def starting(
    request: Request, caller: Caller, transports: Transports | None = None, *, signals: bool
) -> Iterator[Engine]:
    """The engine that starts ``request``. Signals stop the job if ``signals`` is true.
    ``transports`` are the result of `connect` if it was called before."""
    from dtrain.session.stopping.signals import on_signals, stop_by_signal

    with ExitStack() as stack:
        if signals:
            stack.enter_context(on_signals(lambda number: stop_by_signal(caller.control, number)))
        if transports is None:
            transports = connect(request, caller.ask, caller.observer.notice)
        from dtrain.engines.select import engine

        yield stack.enter_context(engine(request, caller, transports))
