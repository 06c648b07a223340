"""Queries OpenSSH for the options of a host with ``ssh -G``.

This way OpenSSH itself evaluates `Match exec`, tokens and canonical names.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from dtrain.records import dataclass
from dtrain.transport.memory_file import STDIN, memory_file
from dtrain.transport.ssh_config_names import HostPatterns, OptionValues, patterns, renamed
from dtrain.transport.ssh_options import ALIASES, Options, SshConfigError
from dtrain.transport.threads import fulfil

TIMEOUT = 30.0
"""Seconds for one query: `Match exec` can run any program, and names may need DNS."""
MESSAGE_SIZE = 1 << 20  # two lines for each configuration file and host pattern
PATH_SIZE = 200
"""Bytes of a path that ssh's messages show."""
PARALLEL = 2 * (os.cpu_count() or 1)

_Stamp = tuple[int, int, int] | None
_Arguments = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Answer:
    values: OptionValues
    stamps: Mapping[str, _Stamp]
    """Of the files that ssh has read."""
    patterns: HostPatterns | None
    """See `dtrain.transport.ssh_config_names.patterns`."""


@dataclass(frozen=True, slots=True)
class ConfigText:
    """The configuration file that ``-F /dev/stdin`` names."""

    text: str = ""
    before: str = ""
    """Lines in front of the text."""
    file: str = ""
    """Where the text is from, for errors; empty if only files that it includes have errors."""

    def located(self, error: str) -> str:
        """ssh's message with the file and the line where the user finds the error."""
        if not self.file:
            return error
        return re.sub(
            rf"{STDIN}(:? line )(\d+)",
            lambda place: f"{self.file}{place[1]}{int(place[2]) - self.before.count(chr(10))}",
            error,
        )


def option_lines(user: str | None, jump: str | None) -> str:
    """The options ``-l`` and ``-J`` as lines of a configuration file."""
    lines = ""
    if user:
        # In quotes, ssh reads two backslashes as one, and one before another character as itself.
        escaped = re.sub(r"\\(?=\\)", r"\\\\", user)
        lines += f'User "{escaped}"\n'
    if jump:
        jumps = ",".join(spec.strip() for spec in jump.split(","))
        lines += f"ProxyJump {jumps}\n"
    return lines


class SshQuery:
    """Runs ``ssh -G`` for hosts, once for all whose names the configuration treats alike.
    Thread-safe.

    Caches an answer until one of its configuration files changes.
    """

    def __init__(
        self, program: str, config: ConfigText | None = None, timeout: float = TIMEOUT
    ) -> None:
        config = config or ConfigText()
        self._program = program
        self._located = config.located
        self._config = os.fsencode(config.before + config.text)
        self._timeout = timeout
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(PARALLEL)
        self._answers: dict[tuple[_Arguments, str], Future[_Answer]] = {}
        self._samples: dict[tuple[object, ...], str] = {}
        """The first name with the same arguments, and with the same arguments and patterns."""

    def options(self, host: str, arguments: Sequence[str], files: Sequence[Path]) -> Options:
        """The options that ``ssh ARGUMENTS HOST`` would use.

        The cached answer depends on ``files`` and on the files that ssh reports. Raises
        SshConfigError with ssh's own message.
        """
        defaults = self._answer("host", ("-F", "none"), ()).values
        return Options(self._answer(host, tuple(arguments), files).values, defaults)

    def _answer(self, host: str, arguments: _Arguments, files: Sequence[Path]) -> _Answer:
        query, key = (host, arguments, files), (arguments, host)
        with self._lock:
            known = self._answers.get(key)
            if known and known.done() and (known.exception() or _changed(known.result().stamps)):
                known = None
            mine = known is None
            if known is None:
                known = self._answers[key] = Future()
        if mine:
            fulfil(known, lambda: self._shared(*query) or self._ask(*query))
        return known.result()

    def _shared(self, host: str, arguments: _Arguments, files: Sequence[Path]) -> _Answer | None:
        """The answer for a name that the configuration treats like ``host``, if there is one."""
        sample = self._sample(host, (arguments,))
        if sample == host:
            return None
        try:
            answer = self._answer(sample, arguments, files)
            found = answer.patterns
            mine = found and found.matched(host)
            if found is None or mine is None:
                return None
            if found.matched(sample) != mine:
                sample = self._sample(host, (arguments, found, mine))
                if sample == host:
                    return None
                answer = self._answer(sample, arguments, files)
        except SshConfigError:  # it names the other host
            return None
        values = renamed(answer.values, sample, host) if answer.patterns == found else None
        return replace(answer, values=values) if values else None

    def _sample(self, host: str, group: tuple[object, ...]) -> str:
        """The name that ssh is asked for, for all of a group."""
        with self._lock:
            return self._samples.setdefault(group, host)

    def _ask(self, host: str, arguments: _Arguments, files: Sequence[Path]) -> _Answer:
        stamps = {str(path): _stamp(path) for path in files}
        with self._slots:
            try:
                output, messages, status = self._run(host, arguments)
            except OSError as error:
                hint = "free memory or raise the limits on processes and open files (ulimit -a)"
                limits = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
                raise SshConfigError(
                    f"cannot run {self._program}: {error.strerror}",
                    hint if error.errno in limits else "",
                ) from error
        lines = messages.decode(errors="replace").splitlines()
        if status != 0:
            raise SshConfigError(
                self._located(_complaint(lines)) or f"`ssh -G {host}` exited with status {status}"
            )
        reported = [
            Path(match[1])
            for line in lines
            if (match := re.fullmatch(r"debug1: Reading configuration data (.*)", line))
            and match[1] != STDIN
        ]
        # ssh may have read ``files`` before they changed.
        stamps = {str(path): _stamp(path) for path in reported} | stamps
        complete = len(messages) < MESSAGE_SIZE  # or they may lack a file
        found = self._patterns(reported) if complete else None
        return _Answer(_parse(output), stamps, None if _changed(stamps) else found)

    def _patterns(self, files: Sequence[Path]) -> HostPatterns | None:
        """The patterns in all files that ssh has read."""
        try:
            # A pipe has no second reading, and a path as long as this may have been cut off.
            if not all(path.is_file() and len(bytes(path)) < PATH_SIZE for path in files):
                return None
            texts = [os.fsdecode(path.read_bytes()) for path in files]
        except OSError:
            return None
        return patterns([*texts, os.fsdecode(self._config)])

    def _run(self, host: str, arguments: tuple[str, ...]) -> tuple[str, bytes, int]:
        """The output, the messages and the status of ssh."""
        command = [self._program, "-v", "-G", *arguments, "--", host]
        # A command of `Match exec` may leave a background process that keeps stderr open.
        with memory_file(self._config) as config, memory_file() as messages:
            process = subprocess.Popen(
                command,
                stdin=config,
                stdout=subprocess.PIPE,
                stderr=messages,
                start_new_session=True,
            )
            try:
                output, _ = process.communicate(timeout=self._timeout)
            except subprocess.TimeoutExpired:
                raise SshConfigError(
                    f"`ssh -G {host}` did not finish within {self._timeout:g} s",
                    "run it by hand: a command of `Match exec` or a name server may hang",
                ) from None
            finally:
                if process.poll() is None:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                if process.stdout:
                    process.stdout.close()
            messages.seek(0)
            shown = messages.read(MESSAGE_SIZE)
        return output.decode(errors="surrogateescape"), shown, process.returncode


def _parse(output: str) -> OptionValues:
    values: dict[str, tuple[str, ...]] = {}
    # Not `splitlines`: values may contain the other line separators of Unicode.
    for line in output.rstrip("\n").split("\n"):
        keyword, _, value = line.partition(" ")
        keyword = ALIASES.get(keyword.lower(), keyword.lower())
        values[keyword] = (*values.get(keyword, ()), value.strip())
    return values


def _complaint(lines: list[str]) -> str:
    """ssh's own message among its debugging output."""
    noise = re.compile(r"debug\d: |OpenSSH_|Pseudo-terminal will not|.*terminating, \d+ bad conf")
    return "; ".join(line.strip() for line in lines if line.strip() and not noise.match(line))[
        :1000
    ]


def _stamp(path: Path) -> _Stamp:
    try:
        status = path.stat()
    except OSError:
        return None
    # ctime covers contents, owner and mode.
    return status.st_ctime_ns, status.st_size, status.st_ino


def _changed(stamps: Mapping[str, _Stamp]) -> bool:
    return any(_stamp(Path(path)) != stamp for path, stamp in stamps.items())
