"""Plain facts about a host, for `dtrain check`. One file, Python 3.8, standard library alone.

The launcher sends this file over stdin as it sends the agent, and then orders as lines of JSON;
each is answered by one line of JSON, after `PREAMBLE`:

    {"op": "clock"}                        -> {"time": seconds since the epoch}
    {"op": "gather", ...}                  -> {"facts": {...}, "listening": {...}}
    {"op": "dial", "targets": [...]}       -> {"dialed": [...]}
    {"op": "run", ...}                     -> {"said": [...], "status": ...}

Nothing is judged here: what a fact means is decided in `dtrain/check/`. Every probe runs in a
thread of its own with a time limit, so that a dead file server or a driver that hangs costs its
own fact alone; a probe that fails or does not answer is a fact too: ``{"error": reason}``.

Nothing stays behind. When the launcher hangs up, what was started here is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import pwd
import queue
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

TYPE_CHECKING = False  # importing typing would cost as much as importing json
if TYPE_CHECKING:
    from typing import Any, BinaryIO, Callable, Iterator

    Json = dict[str, Any]

PREAMBLE = b"\x00dtrain-facts-1\n"
LIMIT = 20.0
"""Seconds that a probe may take, unless it says otherwise."""
BULK = 256 << 10
"""Bytes that each dialed connection carries, so that a path that swallows large packets shows."""
AT_ONCE = 32
"""Connections that one host dials at a time."""
MAX_OUTPUT = 4 << 20

LISTENING: list[socket.socket] = []
CHILDREN: set[int] = set()
"""Process groups that were started here and may still run."""


def read(path: str, limit: int = 1 << 20) -> str:
    """A small file as text without the white space around it. Raises OSError."""
    with open(path, "rb") as file:
        return file.read(limit).decode("utf-8", "backslashreplace").strip()


def text_of(path: str) -> str | None:
    try:
        return read(path)
    except OSError:
        return None


def number(text: str | None) -> int | None:
    """The first number in ``text``."""
    found = re.search(r"-?\d+", text or "")
    return int(found[0]) if found else None


def listed(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def expand(path: str) -> str:
    """``~/`` is the home folder, and what is relative starts there."""
    home = os.path.expanduser("~")
    return os.path.normpath(os.path.join(home, os.path.expanduser(path)))


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


# Programs


def end_group(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    CHILDREN.discard(pid)


def run(
    argv: list[str],
    limit: float = LIMIT,
    *,
    cwd: str | None = None,
    environment: dict[str, str] | None = None,
    feed: bytes = b"",
    pipes: tuple[int, ...] = (),
) -> tuple[int | None, str, str]:
    """Run a program to its end: its status (None when it took longer than ``limit`` seconds and
    was killed), stdout and stderr. Raises OSError when it cannot be executed.

    What it leaves in the background may hold its output open: that is not waited for.
    """
    process = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE if feed else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=cwd,
        env=environment,
        pass_fds=pipes,
        start_new_session=True,
    )
    CHILDREN.add(process.pid)
    for fd in pipes:
        os.close(fd)
    try:
        if process.stdin:
            with contextlib.suppress(OSError):
                process.stdin.write(feed)
                process.stdin.close()
        assert process.stdout and process.stderr
        parts: dict[int, list[bytes]] = {process.stdout.fileno(): [], process.stderr.fileno(): []}
        deadline = time.monotonic() + limit
        open_fds = set(parts)
        sizes = 0
        while time.monotonic() < deadline:
            ended = process.poll() is not None
            ready = select.select(list(open_fds), [], [], 0 if ended else 0.05)[0]
            for fd in ready:
                data = os.read(fd, 1 << 16)
                if data and sizes < MAX_OUTPUT:
                    sizes += len(data)
                    parts[fd].append(data)
                elif not data:
                    open_fds.discard(fd)
            if ended and not ready:
                break
            if not open_fds:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
                break
        out, err = (b"".join(part).decode("utf-8", "backslashreplace") for part in parts.values())
        return process.poll(), out, err
    finally:
        end_group(process.pid)
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream:
                stream.close()


def program(name: str) -> str | None:
    """Where a program is, on PATH or where vendors put theirs."""
    folders = os.environ.get("PATH", os.defpath).split(":")
    folders += ["/usr/bin", "/usr/local/bin", "/usr/sbin", "/usr/lib/wsl/lib", "/opt/rocm/bin"]
    for folder in folders:
        path = os.path.join(folder, name)
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return None


def plain() -> dict[str, str]:
    """Our environment, in which programs speak English."""
    return {**os.environ, "LC_ALL": "C", "LANGUAGE": ""}


# The machine


def machine(_request: Json) -> Json:
    release = os.uname()
    return {
        "hostname": socket.gethostname(),
        "boot": text_of("/proc/sys/kernel/random/boot_id"),
        "network": os.stat("/proc/self/ns/net").st_ino,
        "kernel": release.release,
        "architecture": release.machine,
        "system": system_name(),
        "libc": libc(),
        "container": container(),
        "wsl": "microsoft" in release.release.lower(),
        "user": user_name(os.geteuid()),
        "home": os.path.expanduser("~"),
        "locale": next(
            (os.environ[name] for name in ("LC_ALL", "LC_CTYPE", "LANG") if os.environ.get(name)),
            "",
        ),
        "python": "%d.%d.%d" % sys.version_info[:3],
        "cpus": len(os.sched_getaffinity(0)),
        "numa_nodes": sum(
            bool(re.fullmatch(r"node\d+", name)) for name in listed("/sys/devices/system/node")
        ),
        "governors": governors(),
        "frequency_driver": text_of("/sys/devices/system/cpu/cpu0/cpufreq/scaling_driver"),
    }


def system_name() -> str:
    found = re.search(r'(?m)^PRETTY_NAME="?(.*?)"?$', text_of("/etc/os-release") or "")
    return found[1] if found else ""


def libc() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (OSError, ValueError):  # musl has no such name
        return ""


def container() -> str:
    if os.path.exists("/run/.containerenv"):
        return "podman"
    if os.path.exists("/.dockerenv"):
        return "docker"
    found = re.search(r"(docker|kubepods|lxc|containerd)", text_of("/proc/1/cgroup") or "")
    return found[1] if found else ""


def governors() -> dict[str, int]:
    """How many CPUs have which frequency governor."""
    found: dict[str, int] = {}
    base = "/sys/devices/system/cpu"
    for name in listed(base):
        if re.fullmatch(r"cpu\d+", name):
            governor = text_of("%s/%s/cpufreq/scaling_governor" % (base, name))
            if governor:
                found[governor] = found.get(governor, 0) + 1
    return found


def memory(_request: Json) -> Json:
    """In bytes. A cgroup may allow less than the machine has."""
    rows = dict(line.split(":", 1) for line in read("/proc/meminfo").splitlines() if ":" in line)
    found = {name: (number(rows.get(key)) or 0) << 10 for name, key in MEMINFO}
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        limit = text_of(path)
        if limit and limit.isdecimal() and int(limit) < found["total"]:
            found["limit"] = int(limit)
    return found


MEMINFO = (("total", "MemTotal"), ("available", "MemAvailable"))


def leftovers(_request: Json) -> Json:
    """Processes of earlier runs of this user: what dtrain started bears the run's name."""
    runs: dict[str, list[int]] = {}
    for name in listed("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if os.stat("/proc/" + name).st_uid != os.geteuid():
                continue
            with open("/proc/%s/environ" % name, "rb") as file:
                found = re.search(rb"(?:^|\0)DTRAIN_RUN_ID=([^\0]+)", file.read(1 << 20))
            if found:
                runs.setdefault(found[1].decode("utf-8", "backslashreplace"), []).append(int(name))
    return runs


# Storage


def mounts() -> list[tuple[str, str, str, str]]:
    """Mount point, type, source and options of every file system."""
    found = []
    for line in (text_of("/proc/self/mountinfo") or "").splitlines():
        head, _, tail = line.partition(" - ")
        left, right = head.split(), tail.split()
        if len(left) > 5 and len(right) > 1:
            point = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), left[4])
            found.append((point, right[0], right[1], left[5] + "," + "".join(right[2:3])))
    return found


def storage(request: Json) -> Json:
    """The file system under each folder that the job will use."""
    table = mounts()
    return {name: folder(path, table) for name, path in request["folders"].items()}


def folder(path: str, table: list[tuple[str, str, str, str]]) -> Json:
    wanted = there = expand(path)
    while not os.path.isdir(there) and there != "/":
        there = os.path.dirname(there)
    status = os.statvfs(there)
    inside = os.path.realpath(there) + "/"
    mount = max(
        (one for one in table if inside.startswith(one[0].rstrip("/") + "/")),
        key=lambda one: len(one[0]),
        default=("", "", "", ""),
    )
    return {
        "path": wanted,
        "exists": there == wanted,
        "nearest": there,
        "total": status.f_blocks * status.f_frsize,
        "free": status.f_bavail * status.f_frsize,
        "inodes": status.f_files,
        "inodes_free": status.f_favail,
        "mount": mount[0],
        "type": mount[1],
        "source": mount[2],
        "inode": os.stat(there).st_ino,
        "not_writable": why_not_writable(there),
    }


def why_not_writable(path: str) -> str:
    """Empty when a file can be made there: permissions alone do not tell of a file server's."""
    name = os.path.join(path, ".dtrain-check-%d-%s" % (os.getpid(), os.urandom(4).hex()))
    try:
        os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        os.unlink(name)
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return ""


CODE = (".py", ".yaml", ".yml", ".json", ".toml", ".sh", ".cfg", ".ini")
MAX_FILES = 400
MAX_CODE = 1 << 20


def script(request: Json) -> Json:
    """The script and the code beside it, as digests."""
    workdir = expand(request["workdir"])
    found: Json = {"workdir": workdir, "workdir_exists": os.path.isdir(workdir)}
    if request.get("script"):
        path = os.path.normpath(os.path.join(workdir, request["script"]))
        found.update(path=path, exists=os.path.isfile(path))
        if found["exists"]:
            found["digest"] = digest(path)
    # A home folder holds much that is no part of the job.
    if request.get("code") and workdir != os.path.expanduser("~"):
        found["code"] = dict(code_below(workdir))
    return found


def digest(path: str) -> str:
    made = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            made.update(block)
    return made.hexdigest()


def code_below(workdir: str) -> Iterator[tuple[str, str]]:
    left = MAX_FILES
    for place, folders, files in os.walk(workdir):
        folders[:] = sorted(one for one in folders if not one.startswith((".", "__pycache__")))
        if place[len(workdir) :].count("/") >= 3:
            folders.clear()
        for name in sorted(files):
            path = os.path.join(place, name)
            with contextlib.suppress(OSError):
                if name.endswith(CODE) and os.stat(path).st_size <= MAX_CODE:
                    yield os.path.relpath(path, workdir), digest(path)[:16]
                    left -= 1
            if left == 0:
                return


# The job's own interpreter

STAGE = (
    "import json,os;d=json.load(os.fdopen(%d));e=dict(os.environ);e.update(d['environment']);"
    "os.execvpe(d['argv'][0],d['argv'],e)"
)


def in_job(request: Json, argv: list[str], limit: float) -> Json:
    """Run ``argv`` as the job's processes are run: in its folder, after the setup lines, and with
    the environment laid over theirs. What it wrote to the descriptor that DTRAIN_SAY names comes
    back in ``said``, line by line."""
    workdir = expand(request["workdir"])
    if not os.path.isdir(workdir):
        workdir = os.path.expanduser("~")
    say, told = os.pipe()
    setup = request.get("setup") or []
    environment = {**request["environment"], "DTRAIN_SAY": str(told)}
    argv = [expand(argv[0]) if argv[0].startswith("~/") else argv[0], *argv[1:]]
    lines: list[str] = []
    listener = threading.Thread(target=hear, args=(say, lines), daemon=True)
    listener.start()
    try:
        if setup:
            status, out, err = after_setup(setup, told, argv, environment, workdir, limit)
        else:
            everything = {**os.environ, **environment}
            status, out, err = run(argv, limit, cwd=workdir, environment=everything, pipes=(told,))
    except OSError as error:
        os.close(told)
        return {"status": 127, "said": [], "output": "%s: %s" % (argv[0], error.strerror)}
    listener.join(1.0)
    steps = [int(line[6:]) for line in lines if line.startswith("setup ")]
    said = [line for line in lines if not line.startswith("setup ")]
    found: Json = {"status": status, "said": said, "output": (out + err).strip()[-4000:]}
    if setup and (not steps or steps[-1] <= len(setup)):
        found["failed_setup"] = steps[-1] if steps else 1
    return found


def after_setup(
    setup: list[str],
    told: int,
    argv: list[str],
    environment: dict[str, str],
    workdir: str,
    limit: float,
) -> tuple[int | None, str, str]:
    """`run` through a shell that has run the setup lines, and told of each. Raises OSError."""
    giving, given = os.pipe()  # what the last stage reads, and where it is written
    plan = json.dumps({"environment": environment, "argv": argv}).encode()
    threading.Thread(target=pour, args=(given, plan), daemon=True).start()
    shell = program("bash") or "/bin/sh"
    command = [shell, "-c", setup_script(setup, told, giving)]
    return run(command, limit, cwd=workdir, pipes=(told, giving))


def pour(fd: int, data: bytes) -> None:
    with contextlib.suppress(OSError), os.fdopen(fd, "wb") as file:
        file.write(data)


def hear(fd: int, lines: list[str]) -> None:
    with contextlib.suppress(OSError), os.fdopen(fd, errors="backslashreplace") as file:
        for line in file:
            lines.append(line.rstrip("\n"))


def quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def setup_script(setup: list[str], told: int, giving: int) -> str:
    """A shell script that runs the setup lines, says how far it came, and becomes `STAGE`."""
    lines = []
    for step, line in enumerate(setup, 1):
        lines.append("echo setup %d >/proc/self/fd/%d" % (step, told))
        lines.append("eval %s || exit 1" % quoted(line))
    lines.append("echo setup %d >/proc/self/fd/%d" % (len(setup) + 1, told))
    stage = [sys.executable, "-ESs", "-c", STAGE % giving]
    lines.append("exec " + " ".join(map(quoted, stage)))
    return "\n".join(lines)


# Runs on any Python since 2.7, as far as saying that it is too old.
GUARD = (
    "import sys;v=sys.version_info;"
    "v<(3,8) and sys.exit('Python %d.%d is too old: 3.8 is the oldest' % v[:2]);"
    "exec(sys.argv.pop(1))"
)


def interpreter(request: Json) -> Json:
    """What the job's Python says of itself: see `interpreter.py`, whose text the launcher sent."""
    asked = request["interpreter"]
    argv = [request["python"], "-c", GUARD, asked["source"], json.dumps(asked["options"])]
    answer = in_job(request, argv, asked["limit"])
    said = answer.pop("said")
    for line in said:
        with contextlib.suppress(ValueError):
            answer.update(json.loads(line))
    if "python" in answer:
        # What setup prints when all is well may be anybody's secret.
        del answer["output"]
    return answer


# Names and the network


def resolve(name: str) -> Json:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return {"error": str(error)}
    return {"addresses": list(dict.fromkeys(str(entry[4][0]) for entry in found))}


def names(request: Json) -> Json:
    """Where names lead on this host, and what its own and the first host's addresses are called."""
    wanted = list(dict.fromkeys(request["addresses"].values()))
    answers = at_once(resolve, wanted)
    found: Json = {
        "own": resolve(socket.gethostname()),
        "hosts": {host: answers[address] for host, address in request["addresses"].items()},
    }
    reached: Json = next(iter(answers.values()), {})
    first = reached.get("addresses") or []
    if first:
        begun = time.monotonic()
        with contextlib.suppress(OSError):
            found["first_is_called"] = socket.getnameinfo((first[0], 0), 0)[0]
        found["reverse_seconds"] = round(time.monotonic() - begun, 3)
    return found


def at_once(function: Callable[[Any], Any], items: list[Any]) -> dict[Any, Any]:
    """The answers of ``function`` by item, several being worked on at a time."""
    found: dict[Any, Any] = {}
    left = iter(items)
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                item = next(left, None)
            if item is None:
                return
            found[item] = function(item)

    threads = [threading.Thread(target=work, daemon=True) for _ in items[:AT_ONCE]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


SIOCGIFADDR, SIOCGIFNETMASK = 0x8915, 0x891B


def interfaces() -> dict[str, Json]:
    """Every network interface with its addresses (the first IPv4 one and all IPv6 ones)."""
    found: dict[str, Json] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            base = "/sys/class/net/" + name
            addresses = []
            with contextlib.suppress(OSError):
                asked = struct.pack("256s", os.fsencode(name))
                addresses.append(socket.inet_ntoa(fcntl.ioctl(sock, SIOCGIFADDR, asked)[20:24]))
            flags = int(text_of(base + "/flags") or "0", 16)
            speed = number(text_of(base + "/speed"))
            found[name] = {
                "addresses": addresses,
                "up": bool(flags & 1),
                "state": text_of(base + "/operstate"),
                "mtu": number(text_of(base + "/mtu")),
                # Megabits per second; -1 and nothing for what has no speed.
                "speed": speed if speed and speed > 0 else None,
                "virtual": not os.path.exists(base + "/device"),
            }
    for line in (text_of("/proc/net/if_inet6") or "").splitlines():
        fields = line.split()
        # Link-local addresses (scope 0x20) mean nothing without the interface's name.
        if fields[-1] in found and fields[3] != "20":
            raw = bytes.fromhex(fields[0])
            found[fields[-1]]["addresses"].append(socket.inet_ntop(socket.AF_INET6, raw))
    return found


def network(request: Json) -> Json:
    there = interfaces()
    owner: dict[str, str] = {}
    for name, one in there.items():
        owner.update(dict.fromkeys(one["addresses"], name))
    routes: dict[str, str | None] = {}
    for host, address in request["addresses"].items():
        if host != request["host"]:
            routes[host] = owner.get(source_towards(address) or "")
    return {"interfaces": there, "routes": routes}


def source_towards(address: str) -> str | None:
    """Our own address that the kernel would use towards ``address``. Sends nothing."""
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, _, _, place in socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(place)
                return str(probe.getsockname()[0])
    return None


def infiniband(_request: Json) -> Json:
    """Every port of every RDMA device, by ``device/port``."""
    found: Json = {}
    base = "/sys/class/infiniband"
    for device in listed(base):
        for port in listed("%s/%s/ports" % (base, device)):
            place = "%s/%s/ports/%s/" % (base, device, port)
            found["%s/%s" % (device, port)] = {
                "state": (text_of(place + "state") or "").partition(": ")[2],
                "physical": (text_of(place + "phys_state") or "").partition(": ")[2],
                "rate": number(text_of(place + "rate")),
                "link": text_of(place + "link_layer"),
            }
    return found


# Ports, and dialing each other


class Listener:
    """Answers whoever dials with this host's name, then swallows `BULK` bytes and says so."""

    def __init__(self, host: str, token: str) -> None:
        self._greeting = json.dumps([token, host]).encode() + b"\n"

    def open(self, port: int) -> int:
        """Listen on all addresses; the port. Raises OSError if it is taken."""
        made = []
        try:
            for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
                try:
                    sock = socket.socket(family, socket.SOCK_STREAM)
                except OSError:
                    continue  # no IPv6 here
                made.append(sock)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                try:
                    sock.bind((address, port))
                    sock.listen(512)
                except OSError as error:
                    if family == socket.AF_INET6 and error.errno not in (13, 98):
                        continue  # IPv6 is switched off
                    raise
                port = port or sock.getsockname()[1]
        except OSError:
            for sock in made:
                sock.close()
            raise
        LISTENING.extend(made)
        for sock in made:
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()
        return port

    def _serve(self, sock: socket.socket) -> None:
        while True:
            try:
                peer, _ = sock.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(peer,), daemon=True).start()

    def _answer(self, peer: socket.socket) -> None:
        with contextlib.suppress(OSError), peer:
            peer.settimeout(30.0)
            peer.sendall(self._greeting)
            left = BULK
            while left > 0:
                data = peer.recv(min(left, 1 << 16))
                if not data:
                    return
                left -= len(data)
            peer.sendall(b".")
            # Whoever closes first keeps the port busy for a minute, and here it is the job's.
            peer.recv(1)


def stop_listening() -> None:
    """Free the job's ports. A thread that accepts keeps a socket open until it is shut down."""
    while LISTENING:
        sock = LISTENING.pop()
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()


def ports(request: Json, listener: Listener) -> Json:
    """Whether the job's ports are free. Those that are stay open, for the others to dial."""
    found: Json = {}
    for port in request["ports"]:
        try:
            listener.open(port)
            found[str(port)] = {"free": True}
        except OSError as error:
            found[str(port)] = {"free": False, "reason": error.strerror, "holder": holder(port)}
    return found


def holder(port: int) -> str:
    """Who listens on ``port``, as far as this user may know."""
    inodes: dict[str, int] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in (text_of(table) or "").splitlines()[1:]:
            fields = line.split()
            if int(fields[1].rpartition(":")[2], 16) == port and fields[3] == "0A":
                inodes["socket:[%s]" % fields[9]] = int(fields[7])
    for name in listed("/proc") if inodes else ():
        if name.isdigit():
            for fd in listed("/proc/%s/fd" % name):
                with contextlib.suppress(OSError):
                    if os.readlink("/proc/%s/fd/%s" % (name, fd)) in inodes:
                        words = (text_of("/proc/%s/cmdline" % name) or "").replace("\0", " ")
                        return "process %s (%s)" % (name, words.strip()[:120])
    return next(("a process of user %s" % user_name(uid) for uid in inodes.values()), "")


def dial(order: Json) -> list[Json]:
    """Connect to every target; what failed, and what is odd. A target is
    ``[host, kind, address, port, own address or null]``."""
    token, limit = order["token"], order["limit"]
    targets = [tuple(target) for target in order["targets"]]
    answers = at_once(lambda target: dial_one(target, token, limit), targets)
    return [
        {"host": target[0], "kind": target[1], "address": target[2], "port": target[3], **answer}
        for target, answer in answers.items()
    ]


def dial_one(target: tuple[Any, ...], token: str, limit: float) -> Json:
    host, kind, address, port, source = target
    begun = time.monotonic()
    try:
        sock = socket.create_connection((address, port), limit, (source, 0) if source else None)
    except socket.timeout:
        return {"error": "no answer within %g s" % limit}
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return {"error": reason.lower()}
    with sock:
        # Closing resets the connection: it lingers on neither side.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        found: Json = {"seconds": round(time.monotonic() - begun, 6)}
        try:
            sock.settimeout(limit)
            greeting = json.loads(line_of(sock) or b"[]")
            if greeting != [token, host]:
                other = greeting[1] if greeting[:1] == [token] else ""
                return {"error": "wrong", "answered": other}
            found["mss"] = sock.getsockopt(socket.IPPROTO_TCP, 2)
            try:
                sock.sendall(bytes(BULK))
                if sock.recv(1) != b".":
                    return {"error": "the connection was closed"}
            except socket.timeout:
                return {"error": "stalled", "mss": found["mss"]}
        except ValueError:
            return {"error": "wrong", "answered": ""}
        except OSError as error:
            return {"error": (error.strerror or str(error) or "no greeting").lower()}
        found["bulk_seconds"] = round(time.monotonic() - begun, 6)
        if kind == "interface":
            found["source"] = source_towards(address)
        return found


def line_of(sock: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n") and len(data) < 1024:
        part = sock.recv(1024 - len(data))
        if not part:
            break
        data += part
    return data


# GPUs


def gpus(_request: Json) -> Json:
    found: Json = {"pci": pci_gpus()}
    if program("nvidia-smi"):
        found.update(nvidia())
    elif program("rocm-smi"):
        found.update(rocm())
    return found


def pci_gpus() -> Json:
    """Display and accelerator devices on the bus by vendor, driver or not."""
    vendors = {"0x10de": "NVIDIA", "0x1002": "AMD"}
    found: Json = {}
    base = "/sys/bus/pci/devices"
    for device in listed(base):
        vendor = vendors.get(text_of("%s/%s/vendor" % (base, device)) or "")
        kind = text_of("%s/%s/class" % (base, device)) or ""
        if vendor and kind.startswith(("0x0300", "0x0302", "0x0380", "0x1200")):
            found[vendor] = found.get(vendor, 0) + 1
    return found


def nvidia() -> Json:
    """What `nvidia-smi -q -x` says: XML is the same in every locale."""
    tool = program("nvidia-smi") or ""
    status, out, err = run([tool, "-q", "-x"], 30.0, environment=plain())
    if status != 0:
        words = (out.strip() or err.strip() or "status %s" % status).splitlines()[0]
        return {"tool": "nvidia-smi", "error": words if status is not None else "no answer in 30 s"}
    from xml.etree import ElementTree

    root = ElementTree.fromstring(out)
    return {
        "tool": "nvidia-smi",
        "driver": root.findtext("driver_version"),
        "cuda": root.findtext("cuda_version"),
        "gpus": [nvidia_gpu(index, node) for index, node in enumerate(root.iter("gpu"))],
        "xids": xids(),
    }


def nvidia_gpu(index: int, node: Any) -> Json:
    def text(*paths: str) -> str | None:
        found = (node.findtext(path) for path in paths)
        return next((one for one in found if one and one != "N/A"), None)

    def size(path: str) -> int | None:
        found = number(text(path))
        return None if found is None else found << 20

    reasons = node.find("clocks_event_reasons")
    if reasons is None:
        reasons = node.find("clocks_throttle_reasons")
    ecc = node.find("ecc_errors/volatile")
    uncorrected = [
        number(one.text)
        for one in (ecc.iter() if ecc is not None else ())
        if re.fullmatch(r"(sram|dram)_uncorrectable(_parity|_secded)?", one.tag)
        or (one.tag == "total" and one is ecc.find("double_bit/total"))
    ]
    return {
        "index": index,
        "name": text("product_name"),
        "uuid": text("uuid"),
        "bus": node.get("id"),
        "memory": size("fb_memory_usage/total"),
        "used": size("fb_memory_usage/used"),
        "mig": text("mig_mode/current_mig"),
        "compute_mode": text("compute_mode"),
        "persistence": text("persistence_mode"),
        "temperature": number(text("temperature/gpu_temp")),
        "uncorrected": sum(value or 0 for value in uncorrected) if uncorrected else None,
        "remap_pending": text(
            "remapped_rows/remapped_row_pending", "retired_pages/pending_retirement"
        ),
        "remap_failed": text("remapped_rows/remapped_row_failure"),
        "slowed": [
            re.sub(r"^clocks_(event|throttle)_reason_", "", one.tag)
            for one in (reasons if reasons is not None else ())
            if (one.text or "").strip() == "Active"
        ],
        "link_generation": number(text("pci/pci_gpu_link_info/pcie_gen/max_link_gen")),
        "link_width": number(text("pci/pci_gpu_link_info/link_widths/current_link_width")),
        "link_width_most": number(text("pci/pci_gpu_link_info/link_widths/max_link_width")),
        "processes": [nvidia_process(one) for one in node.iter("process_info")],
    }


def nvidia_process(node: Any) -> Json:
    pid = number(node.findtext("pid")) or 0
    used = number(node.findtext("used_memory"))
    user = ""
    with contextlib.suppress(OSError):
        user = user_name(os.stat("/proc/%d" % pid).st_uid)
    return {
        "pid": pid,
        "name": node.findtext("process_name") or "",
        "user": user,
        "used": None if used is None else used << 20,
    }


def xids() -> Json:
    """How often the driver reported which Xid error since the boot, where that may be seen."""
    for argv in (["journalctl", "-k", "-b", "-q", "-o", "cat", "--no-pager"], ["dmesg"]):
        tool = program(argv[0])
        if tool is None:
            continue
        with contextlib.suppress(OSError):
            status, out, _ = run([tool, *argv[1:]], 5.0, environment=plain())
            if status == 0 and out:
                found: dict[str, int] = {}
                for place, code in re.findall(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)", out):
                    key = "%s %s" % (place, code)
                    found[key] = found.get(key, 0) + 1
                return found
    return {"error": "the kernel's log cannot be read"}


def rocm() -> Json:
    tool = program("rocm-smi") or ""
    asked = ["--showproductname", "--showmeminfo", "vram", "--showuniqueid", "--showdriverversion"]
    status, out, err = run([tool, *asked, "--json"], 30.0, environment=plain())
    start = out.find("{")
    if status != 0 or start < 0:
        words = (err.strip() or out.strip() or "status %s" % status).splitlines()[0]
        return {"tool": "rocm-smi", "error": words if status is not None else "no answer in 30 s"}
    table = json.loads(out[start:])

    def value(card: Json, *keys: str) -> str | None:
        lower = {key.lower(): text for key, text in card.items()}
        return next((lower[key] for key in keys if key in lower), None)

    cards = [key for key in table if re.fullmatch(r"card\d+", key)]
    cards.sort(key=lambda key: number(key) or 0)
    return {
        "tool": "rocm-smi",
        "driver": (table.get("system") or {}).get("Driver version"),
        "gpus": [
            {
                "index": index,
                "name": value(table[card], "card series", "card model", "card sku"),
                "uuid": value(table[card], "unique id"),
                "memory": number(value(table[card], "vram total memory (b)")),
                "used": number(value(table[card], "vram total used memory (b)")),
                "processes": [],
                "slowed": [],
            }
            for index, card in enumerate(cards)
        ],
    }


# Gathering

PROBES: dict[str, Callable[[Json], Json]] = {
    "machine": machine,
    "memory": memory,
    "leftovers": leftovers,
    "storage": storage,
    "script": script,
    "names": names,
    "network": network,
    "infiniband": infiniband,
    "gpus": gpus,
    "interpreter": interpreter,
}


def gather(request: Json) -> Json:
    """All facts asked for; ports first, because they stay open for the others to dial."""
    listener = Listener(request["host"], request["token"])
    facts: Json = {"ports": guarded(lambda order: ports(order, listener), request)}
    answers: queue.SimpleQueue[tuple[str, Json]] = queue.SimpleQueue()
    limits = dict.fromkeys(request["probes"], LIMIT)
    if "gpus" in limits:
        limits["gpus"] = 45.0
    if "interpreter" in limits:
        limits["interpreter"] = request["interpreter"]["limit"] + 5.0
    is_set_up = threading.Event()
    if "script" in limits and "interpreter" in limits and request["setup"]:
        limits["script"] += limits["interpreter"]
    else:
        is_set_up.set()
    for name in limits:

        def work(name: str = name) -> None:
            if name == "script":
                is_set_up.wait()  # the setup lines may bring it
            answers.put((name, guarded(PROBES[name], request)))
            if name == "interpreter":
                is_set_up.set()

        threading.Thread(target=work, daemon=True).start()
    begun = time.monotonic()
    while len(facts) <= len(limits):
        late = [begun + limits[name] for name in limits if name not in facts]
        try:
            name, fact = answers.get(timeout=max(0.0, min(late) - time.monotonic()))
        except queue.Empty:
            for name in limits:
                if name not in facts and time.monotonic() >= begun + limits[name]:
                    facts[name] = {"error": "no answer within %g s" % limits[name]}
            continue
        facts.setdefault(name, fact)
    listening = guarded(lambda _: {"port": listener.open(0)}, request)
    return {"facts": facts, "listening": listening}


def guarded(probe: Callable[[Json], Json], request: Json) -> Json:
    try:
        return probe(request)
    except Exception as failure:  # noqa: BLE001 - a probe that fails is a fact
        return {"error": "%s: %s" % (type(failure).__name__, failure)}


def answer(order: Json) -> Json:
    if order["op"] == "clock":
        return {"time": time.time()}
    if order["op"] == "gather":
        return gather(order)
    if order["op"] == "dial":
        return {"dialed": dial(order)}
    stop_listening()
    return guarded(lambda order: in_job(order, order["argv"], order["limit"]), order)


def main() -> None:
    """``boot`` was left in our globals by what loaded this file: the stream that it came from."""
    boot: BinaryIO = globals()["boot"]
    orders: queue.SimpleQueue[Json] = queue.SimpleQueue()

    def listen() -> None:
        for line in iter(boot.readline, b""):
            orders.put(json.loads(line))
        for pid in list(CHILDREN):
            end_group(pid)
        os._exit(0)

    out = os.fdopen(os.dup(1), "wb")
    out.write(PREAMBLE)
    out.flush()
    threading.Thread(target=listen, daemon=True).start()
    while True:
        out.write(json.dumps(answer(orders.get())).encode() + b"\n")
        out.flush()


if __name__ == "__main__":
    main()
