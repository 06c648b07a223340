"""Draws the state of a run as lines for a screen of any size. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from rich.text import Text

from dtrain.framing import clean
from dtrain.messages.telemetry import GpuSample
from dtrain.records import dataclass
from dtrain.runs.shown_state import BAD, ShownState
from dtrain.wording import counted, short
from dtrain_cli.views import names
from dtrain_cli.views.board import STALE, Board, HostRow, state, summary
from dtrain_cli.views.troubles import FULL, GpuTrouble, summaries

_BARS = " ▁▂▃▄▅▆▇█"
_MAX_NAME = 24
_PAIR = 13
"""Width of a cell with two rates."""
_RANKS = 22
"""Width of a cell with the use of the ranks."""
_SEPARATOR = "─"
_STALL, _SLOW = "white on red", "black on yellow"
"""Styles of ranks that stand still, and of slow ones."""
_LEAST_TREND = 3
"""Minimum points of a curve."""
_LEAST_OUTPUT = 3
"""Minimum lines of output below the table."""


def draw(board: Board, output: Sequence[Text], columns: int, rows: int, now: float) -> list[Text]:
    """Exactly ``rows`` lines, none wider than ``columns``. ``output``: the workers' last lines. If
    not all fit, the first ones are left out."""
    troubles = board.troubles()
    head = _head(board, columns, now)[: max(1, rows - _LEAST_OUTPUT)]
    free = rows - len(head) - 1
    shown_troubles = (
        first(words(board, troubles, now), max(1, rows // 8), columns) if free > 8 else []
    )
    free -= len(shown_troubles)
    table = _table(board, troubles, columns, now, free - max(_LEAST_OUTPUT, rows // 4))
    lines = [*head, *table, *shown_troubles]
    if len(lines) < rows:
        lines.append(Text(f"{_SEPARATOR * 2} output ".ljust(columns, _SEPARATOR), "dim"))
    left = max(0, rows - len(lines))
    # Not ``output[-left:]``: for 0 rows, that would be all lines.
    lines += output[len(output) - min(left, len(output)) :]
    return fitted(lines, columns, rows)


def fitted(lines: list[Text], columns: int, rows: int) -> list[Text]:
    """Exactly ``rows`` lines, none wider than ``columns``."""
    lines = [*lines[:rows], *(Text() for _ in range(rows - len(lines)))]
    for line in lines:
        line.rstrip()
        line.truncate(columns, overflow="ellipsis")
    return lines


def snapshot(board: Board, now: float) -> str:
    """The dashboard as text, with all hosts and without output."""
    columns = 120
    troubles = board.troubles()
    table = _table(board, troubles, columns, now, len(board.hosts) + 1)
    lines = [*_head(board, columns, now), *table, *words(board, troubles, now)]
    return "".join(f"{line.plain.rstrip()}\n" for line in lines)


def words(board: Board, troubles: Mapping[str, Mapping[int, GpuTrouble]], now: float) -> list[Text]:
    """One line for each kind of problem, the worst first: a stall, slow ranks, GPU troubles."""
    kinds = ((board.attempt.stall_at(now), _STALL), (board.attempt.slow, _SLOW))
    ranks = [(str(one), style) for one, style in kinds if one]
    return [Text(f" {clean(text)}", style) for text, style in (*ranks, *summaries(troubles))]


def first(lines: list[Text], most: int, columns: int) -> list[Text]:
    """At most ``most`` of the lines. The last of them counts those that are left out."""
    if len(lines) > most:
        more = f" and {len(lines) - most} more"
        lines[most - 1].truncate(columns - len(more), overflow="ellipsis")
        lines[most - 1].append(more)
    return lines[:most]


def _head(board: Board, columns: int, now: float) -> list[Text]:
    states = {name: host.state for name, host in board.hosts.items()}
    parts = [names.duration(now - board.began)]
    if len(set(states.values())) > 1:
        parts.insert(0, state(states.values()))
    if board.attempt.number > 1:
        parts.append(f"attempt {board.attempt.number}")
    parts.append(summary(states, board.workers))
    bad = set(states.values()) & set(BAD)
    run = Text(f" {clean(board.run)} ", "bold reverse")
    now_is = Text(f" {' · '.join(parts)}", "bold red" if bad else "bold")
    fits = run.cell_len + now_is.cell_len <= columns
    lines = [Text.assemble(run, now_is)] if fits else [run, now_is]
    if text := board.progress.fitted(columns - 1):
        lines.append(_progress(board, text, columns))
    if text := totals(board, columns - 1):
        lines.append(Text(f" {text}"))
        room = min(len(board.trend), columns - lines[-1].cell_len - 8)
        if room >= _LEAST_TREND:
            trend = board.trend[-room:]
            lines[-1].append(f"  busy {''.join(_bar(use / 100) for use in trend)}", "green")
    return lines


def _progress(board: Board, text: str, columns: int) -> Text:
    line = Text(f" {clean(text)}")
    last = board.progress.last
    room = columns - line.cell_len - 2
    if last is not None and last.total and room >= 12:
        part = min(1.0, last.step / last.total)
        width = min(room - 6, 40)
        done = round(part * width)
        line.append("  ")
        line.append("━" * done, "green")
        line.append("─" * (width - done), "dim")
        line.append(f" {part:4.0%}")
    return line


def totals(board: Board, columns: int, most: int = 4) -> str:
    """``64 GPUs: 96% busy (31 to 100), memory 88%, 38.2 kW · network ↓6M ↑6M B/s``: the parts that
    fit."""
    parts = []
    gpus = board.gpus()
    used = [gpu.use for gpu in gpus if gpu.use is not None]
    if used:
        words = [f"{fmean(used):.0f}% busy ({min(used):.0f} to {max(used):.0f})"]
        if memory := [gpu.memory for gpu in gpus if gpu.memory is not None]:
            words.append(f"memory {fmean(memory):.0%}")
        if power := [gpu.power for gpu in gpus if gpu.power is not None]:
            words.append(f"{sum(power) / 1000:.1f} kW")
        parts.append(f"{counted(len(gpus), 'GPU')}: {', '.join(words)}")
    samples = [host.sample for host in board.hosts.values() if host.sample is not None]
    for title, key, received, sent in (
        ("InfiniBand", "infiniband", "↓", "↑"),
        ("network", "network", "↓", "↑"),
        ("disk", "disk", "read ", "write "),
    ):
        pairs = [pair for one in samples if (pair := getattr(one, key)) is not None]
        if pairs and (key != "disk" or not used):
            ins, outs = map(sum, zip(*pairs, strict=True))
            parts.append(f"{title} {received}{short(ins)} {sent}{short(outs)} B/s")
    del parts[most:]
    while len(parts) > 1 and len(" · ".join(parts)) > columns:
        parts.pop()
    return " · ".join(parts)


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    width: int
    cell: Callable[[HostRow], tuple[str, str]]
    """Text and style."""
    mean: Callable[[Sequence[HostRow]], str] = lambda hosts: ""
    """One text for hosts whose cells differ."""


def _table(
    board: Board,
    troubles: Mapping[str, Mapping[int, GpuTrouble]],
    columns: int,
    now: float,
    rows: int,
) -> list[Text]:
    """The hosts, in at most ``rows`` lines; before they have names, what they wait for."""
    if board.hosts_known:
        return _Table(board, troubles, columns, now).lines(rows)
    return [Text(f" {clean(board.detail)}")] if board.detail else []


class _Table:
    """A line for each host. If not all fit, hosts that are alike share one line."""

    def __init__(
        self,
        board: Board,
        troubles: Mapping[str, Mapping[int, GpuTrouble]],
        columns: int,
        now: float,
    ) -> None:
        self._board, self._troubles, self._now = board, troubles, now
        self._screen = columns
        self._ranks: dict[str, str] = {}
        """The styles of hosts with slow ranks, or ranks that stand still."""
        for one, style in ((board.attempt.slow, _SLOW), (board.attempt.stall, _STALL)):
            self._ranks |= dict.fromkeys(one.hosts, style) if one is not None else {}
        widest = max((len(clean(name)) for name in board.hosts), default=0)
        self._width = min(_MAX_NAME, max(len(f"{len(board.hosts)} alike"), widest), columns // 4)
        self._choose_columns(columns - self._width - 1)

    def _choose_columns(self, room: int) -> None:
        """Those for which there is something to show and ``room``."""
        hosts = self._board.hosts.values()
        gpus = max((len(host.gpus) for host in hosts), default=0)
        self._columns = [
            _percent("CPU", _cpu, "yellow"),
            _percent("MEM", _memory, "black on magenta"),
        ]
        if any(host.state != ShownState.RUNNING for host in hosts):
            self._columns.insert(0, _Column("STATE", 12, _state))
        room -= sum(column.width for column in self._columns)
        self._cell = next(
            (cell for cell in _CELLS if gpus and (cell.width + 1) * gpus + 1 <= room), None
        )
        room -= (self._cell.width + 1) * gpus + 1 if self._cell is not None else 0
        for title, key in (("IB ↓↑", "infiniband"), ("NETWORK ↓↑", "network"), ("DISK", "disk")):
            known = any(getattr(host.sample, key, None) is not None for host in hosts)
            if known and room >= _PAIR:
                self._columns.append(_pair(title, key))
                room -= _PAIR
        known = any(host.sample and host.sample.storage for host in hosts)
        full = any((_storage(host) or 0.0) > FULL for host in hosts)
        if known and room >= 6 and (full or room >= _RANKS + 6):
            self._columns.append(_percent("FULL", _storage, "black on magenta", FULL, 6))
            room -= 6
        if room >= _RANKS and any(host.sample and host.sample.ranks for host in hosts):
            self._columns.append(_Column("RANK: CPU RAM FILES", _RANKS, _ranks))

    def lines(self, most: int) -> list[Text]:
        hosts = list(self._board.hosts.values())
        if not any(host.state or host.sample for host in hosts):
            return []
        most -= 1  # the titles
        if most < min(2, len(hosts)):  # a line for the hosts that are alike, and one for the others
            return []
        if len(hosts) <= most:
            rows = [self._line(host) for host in hosts]
        else:
            rows = self._folded(hosts, most)
        return [self._titles(), *rows]

    def _titles(self) -> Text:
        line = f" {'HOST':<{self._width}}"
        for column in self._columns:
            line += f"{column.title:>{column.width}}"
        if self._cell is not None:
            line += "  " + self._cell.title
        return Text(line, "dim")

    def _folded(self, hosts: list[HostRow], most: int) -> list[Text]:
        """One line for the hosts that are alike, and a line for each of the others."""
        kinds: dict[tuple[str, int], list[HostRow]] = {}
        for host in hosts:
            kinds.setdefault((host.state, len(host.gpus)), []).append(host)
        usual = max(kinds.values(), key=len)
        # A trouble that most hosts have does not set a host apart.
        common = sum(host.name in self._troubles for host in usual) > len(usual) / 2
        ranks = self._ranks if len(self._ranks) <= len(usual) / 2 else {}
        alike = [
            host
            for host in usual
            if (common or host.name not in self._troubles)
            and host.name not in ranks
            and not self._is_old(host)
        ]
        odd = [host for host in hosts if host not in alike]
        odd.sort(
            key=lambda host: (
                host.state not in BAD,
                host.name not in ranks,
                host.name not in self._troubles,
            )
        )
        lines = [self._group(alike)] if len(alike) > 1 else [self._line(host) for host in alike]
        room = most - len(lines)
        if len(odd) <= room:
            return [*lines, *map(self._line, odd)]
        shown = room - 1
        more = Text(f" … {counted(len(odd) - shown, 'more host')}")
        return [*lines, *map(self._line, odd[:shown]), more]

    def _line(self, host: HostRow) -> Text:
        old = self._is_old(host)
        line = self._name(clean(host.name), "dim" if old else self._ranks.get(host.name, ""))
        for column in self._columns:
            text, style = column.cell(host)
            line.append(f"{text:>{column.width}}", "dim" if old else style)
        if old:
            note = f"  no data for {names.duration(self._now - host.sampled)}"
            room = max(self._width + 1, self._screen - len(note))
            line.truncate(room, overflow="ellipsis")
            line.append(note, "dim")
        elif self._cell is not None:
            line.append("  ")
            troubles = self._troubles.get(host.name, {})
            for gpu in host.gpus:
                _append(line, self._cell, gpu, troubles.get(gpu.index))
        return line

    def _group(self, hosts: list[HostRow]) -> Text:
        """The means of hosts that are alike, GPU by GPU."""
        samples = [host.sample for host in hosts if host.sample is not None]
        name = f"{len(hosts)} alike"
        line = self._name(name, "bold")
        for column in self._columns:
            cells = [column.cell(host) for host in hosts]
            same = len(set(cells)) == 1
            text = cells[0][0] if same else column.mean(hosts)
            line.append(f"{text:>{column.width}}", cells[0][1] if same else "")
        if self._cell is not None and samples:
            line.append("  ")
            for gpus in zip(*(host.gpus for host in hosts), strict=False):
                _append(line, self._cell, _mean_gpu(gpus), None)
        return line

    def _name(self, name: str, style: str) -> Text:
        text = Text(f" {name}")
        text.truncate(self._width + 1, overflow="ellipsis", pad=True)
        return Text.assemble((text.plain, style))  # the style of the name alone

    def _is_old(self, host: HostRow) -> bool:
        return host.sample is not None and self._now - host.sampled > STALE


@dataclass(frozen=True, slots=True)
class _Cell:
    """One way to draw a GPU."""

    width: int
    title: str
    draw: Callable[[GpuSample, str], str]
    """The text from a sample and the mark of a trouble."""


def _append(line: Text, cell: _Cell, gpu: GpuSample, trouble: GpuTrouble | None) -> None:
    mark = trouble.mark if trouble is not None else " "
    style = trouble.style if trouble is not None else _shade(gpu.use)
    line.append(cell.draw(gpu, mark).rjust(cell.width), style)
    line.append(" ")


def _use(gpu: GpuSample) -> str:
    return "  –" if gpu.use is None else f"{gpu.use:3.0f}"


def _bar(part: float | None) -> str:
    return "?" if part is None else _BARS[min(8, max(0, round(part * 8)))]


def _gigabytes(gpu: GpuSample) -> str:
    if gpu.memory_used is None or gpu.memory_total is None:
        return "–"
    return f"{gpu.memory_used / 1024:.0f}/{gpu.memory_total / 1024:.0f}G"


def _with_clock(gpu: GpuSample, mark: str) -> str:
    clock = "" if gpu.clock is None else f"{gpu.clock:.0f}MHz"
    limit = "" if gpu.power_limit is None else f"of {gpu.power_limit:.0f}"
    return f"{_whole(gpu, '')}{limit:>6} {clock:>7} {mark}"


def _whole(gpu: GpuSample, mark: str) -> str:
    heat = "" if gpu.temperature is None else f"{gpu.temperature:.0f}°"
    power = "" if gpu.power is None else f"{gpu.power:.0f}W"
    return f"{_use(gpu)}% {_gigabytes(gpu):>8} {heat:>4} {power:>5} {mark}"


_CELLS = (
    _Cell(41, "GPUS: BUSY, MEMORY, HEAT, POWER, CLOCK", _with_clock),
    _Cell(26, "GPUS: BUSY, MEMORY, HEAT, POWER", _whole),
    _Cell(14, "GPUS: BUSY, MEMORY", lambda gpu, mark: f"{_use(gpu)}% {_gigabytes(gpu):>8}{mark}"),
    _Cell(5, "GPUS: % BUSY, MEMORY", lambda gpu, mark: f"{_use(gpu)}{_bar(gpu.memory)}{mark}"),
    _Cell(
        3,
        "GPUS: BUSY, MEMORY",
        lambda gpu, mark: (
            f"{_bar(None if gpu.use is None else gpu.use / 100)}{_bar(gpu.memory)}{mark}"
        ),
    ),
)
"""The widest first."""


def _shade(use: float | None) -> str:
    if use is None or use < 10:
        return "dim"
    return "green" if use >= 50 else ""


def _state(host: HostRow) -> tuple[str, str]:
    return host.state or "waiting", "red" if host.state in BAD else ""


def _percent(
    title: str,
    part: Callable[[HostRow], float | None],
    full: str,
    limit: float = 0.95,
    width: int = 5,
) -> _Column:
    """A column for a fraction, in the style ``full`` above ``limit``."""

    def cell(host: HostRow) -> tuple[str, str]:
        found = part(host)
        return ("", "") if found is None else (f"{found:.0%}", full if found > limit else "")

    def mean(hosts: Sequence[HostRow]) -> str:
        known = [found for host in hosts if (found := part(host)) is not None]
        return f"{fmean(known):.0%}" if known else ""

    return _Column(title, width, cell, mean)


def _cpu(host: HostRow) -> float | None:
    sample = host.sample
    if sample is None or sample.cpu is None or not sample.cpus:
        return None
    return sample.cpu / sample.cpus


def _memory(host: HostRow) -> float | None:
    return _part(host.sample.memory if host.sample is not None else None)


def _storage(host: HostRow) -> float | None:
    """How full the disk with the run's folder is."""
    return _part(host.sample.storage if host.sample is not None else None)


def _part(amounts: tuple[float, float] | None) -> float | None:
    return amounts[0] / amounts[1] if amounts is not None and amounts[1] else None


def _ranks(host: HostRow) -> tuple[str, str]:
    """The most that a rank of the host uses."""
    ranks = host.sample.ranks if host.sample is not None else ()
    if not ranks:
        return "", ""
    cpus = max(rank.cpu or 0.0 for rank in ranks)
    memory, files = max(rank.memory for rank in ranks), max(rank.files for rank in ranks)
    return f"{cpus:.1f} {short(memory)} {files}", ""


def _pair(title: str, key: str) -> _Column:
    """A column for two rates."""

    def cell(host: HostRow) -> tuple[str, str]:
        pair = getattr(host.sample, key, None)
        return ("", "") if pair is None else (f"{short(pair[0])} {short(pair[1])}", "")

    def mean(hosts: Sequence[HostRow]) -> str:
        pairs = [pair for host in hosts if (pair := getattr(host.sample, key, None)) is not None]
        return " ".join(short(fmean(rates)) for rates in zip(*pairs, strict=True))

    return _Column(title, _PAIR, cell, mean)


def _mean_gpu(gpus: Sequence[GpuSample]) -> GpuSample:
    def mean(key: str) -> float | None:
        values = [value for gpu in gpus if (value := getattr(gpu, key)) is not None]
        return fmean(values) if values else None

    amounts = ("use", "memory_used", "memory_total", "power", "power_limit", "temperature", "clock")
    means: dict[str, Any] = {key: mean(key) for key in amounts}
    return replace(gpus[0], **means)
