"""Starts processes, and explains why a program cannot be executed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import signal

from dtrain.node.agent.presentation import present
from dtrain.node.agent.sweep import PR_SET_PDEATHSIG, PR_SET_PTRACER
from dtrain.node.agent.wire import RefusedError, shown
from dtrain.node.files import close_others
from dtrain.node.numa import load_syscall

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, NoReturn

    from dtrain.node.agent.open_files import Limits
    from dtrain.node.numa import Binding


def spawn(
    argv: list[bytes],
    environment: dict[bytes, bytes],
    workdir: bytes,
    outputs: tuple[int, int],
    extra: dict[int, int] | None = None,
    prctl: Callable[..., int] | None = None,
    binding: Binding | None = None,
    open_files: Limits | None = None,
    main: Callable[[], NoReturn] | None = None,
) -> tuple[int, OSError | None]:
    """Start a program in its own session. Returns its process id, and the error if it could not be
    executed. Raises OSError if this host starts no more processes.

    Its stdin is /dev/null, its stdout and stderr are ``outputs``. It inherits no other descriptors
    than those in ``extra`` (number there -> number here). With ``prctl``, it dies with us.
    ``open_files`` are its limits, if not ours.

    ``main`` runs in place of the program, in a copy of this process: a new Python would need 30 ms
    to start and to import the same modules. Other processes see ``argv`` and ``environment`` there,
    too; see `can_present`.
    """
    me = os.getpid()
    syscall = load_syscall() if binding is not None else None
    reading, writing = os.pipe()
    before = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
    try:
        pid = os.fork()
    except OSError:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(reading)
        os.close(writing)
        raise
    if pid == 0:
        try:
            os.setsid()
            if prctl is not None:
                prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
                if os.getppid() != me:
                    os._exit(126)
                # Our py-spy may read its stack where Yama allows that to ancestors only (Ubuntu).
                # A new program keeps the permission, its children do not get it.
                prctl(PR_SET_PTRACER, me, 0, 0, 0)
            if binding is not None:
                binding.apply(syscall)
            _reset_signals()
            null = os.open(os.devnull, os.O_RDONLY)
            wanted = {0: null, 1: outputs[0], 2: outputs[1], **(extra or {})}
            writing = _arrange(wanted, writing)
            if open_files is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, open_files)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            os.chdir(workdir)
            if main is None:
                raise execute(argv, environment)
            _become(argv, environment)
            os.close(writing)
            main()
        except OSError as error:
            os.write(writing, b"%d %s" % (error.errno or 0, os.fsencode(error.filename or argv[0])))
        except BaseException as error:  # noqa: BLE001
            os.write(writing, b"%d %s" % (errno.EINVAL, repr(error).encode()))
        finally:
            os._exit(127)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.close(writing)
    with open(reading, "rb") as pipe:
        failure = pipe.read()
    if not failure:
        return pid, None
    code, _, subject = failure.partition(b" ")
    return pid, OSError(int(code), os.strerror(int(code)), shown(subject))


def _arrange(wanted: dict[int, int], kept: int) -> int:
    """Give descriptors the numbers of ``wanted`` (new number -> present one), and close all others
    but ``kept``. Returns the new number of that one, which a program does not inherit."""
    # Move all up first: one may have the number that another one gets.
    least = max(wanted) + 1
    aside = {to: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, least) for to, fd in wanted.items()}
    kept = fcntl.fcntl(kept, fcntl.F_DUPFD_CLOEXEC, least)
    close_others(kept, *aside.values())
    for to, fd in aside.items():
        os.dup2(fd, to)
        os.close(fd)
    return kept


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):  # the C library's own
            signal.signal(signum, signal.SIG_DFL)


def _become(argv: list[bytes], environment: dict[bytes, bytes]) -> None:
    """Give this copy of a process what a new Python would have. Raises OSError."""
    if not present(argv, environment):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), "PR_SET_MM_MAP")
    for name in set(os.environb) - set(environment):
        del os.environb[name]
    os.environb.update(environment)
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signum, signal.SIG_IGN)


def execute(argv: list[bytes], environment: dict[bytes, bytes]) -> OSError:
    """Replace this process by ``argv``, searched on PATH as by a shell. Returns only on failure,
    with the error."""
    failure: OSError | None = None
    for path in search(argv[0], environment):
        try:
            os.execve(path, argv, environment)
        except OSError as error:
            error.filename = path
            if failure is None or failure.errno in (errno.ENOENT, errno.ENOTDIR):
                failure = error
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EACCES):
                break
    if failure is not None and failure.errno != errno.EACCES and b"/" not in argv[0]:
        failure.filename = argv[0]
    return failure or OSError(errno.ENOENT, "", argv[0])


def search(program: bytes, environment: dict[bytes, bytes]) -> list[bytes]:
    """The paths that ``program`` may have, in order."""
    if b"/" in program:
        return [program]
    folders = environment.get(b"PATH", os.fsencode(os.defpath)).split(b":")
    return [os.path.join(folder or b".", program) for folder in folders]


def cannot_start(error: Exception) -> RefusedError:
    """The refusal of a host that starts no more processes or threads."""
    return RefusedError(
        "agent",
        "cannot start a process: %s" % (getattr(error, "strerror", None) or error),
        "free memory there, or raise the limits of processes and open files: `ulimit -u`,"
        " `ulimit -n`, pids.max of the container",
    )


def missing(failure: OSError) -> bool:
    return failure.errno == errno.ENOENT and not os.path.exists(str(failure.filename))


def why_not_executed(failure: OSError, program: bytes, environment: dict[bytes, bytes]) -> str:
    words = "%s: %s" % (failure.filename, os.strerror(failure.errno or 0))
    if str(failure.filename) not in map(shown, (program, *search(program, environment))):
        return "cannot run %s: %s" % (shown(program), words)  # such as the working folder
    words = "cannot run " + words
    if failure.errno == errno.ENOENT:
        if not missing(failure):
            return words + " (the interpreter in its first line does not exist)"
        if b"/" not in program:
            return words + " on PATH (%s)" % shown(environment.get(b"PATH", b""))
    return words
