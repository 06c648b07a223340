"""Where a host's sshd is and how to talk to it: the cluster file over ssh's configuration over
defaults, put into one value.

Security-relevant choices: ``StrictHostKeyChecking`` in ssh's configuration can make a launch
stricter (``yes`` turns ``host_keys: accept-new`` off), never laxer; only the cluster file can
ask for ``accept-new``, and nothing turns host key checks off.
"""

from __future__ import annotations

import getpass
import os
import re
import shlex
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from dtrain.diagnostics import ConnectError
from dtrain.spec.model import Host, Ssh
from dtrain.transport.ssh_config import (
    Config,
    Options,
    SshConfigError,
    expand,
    split_files,
)

DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")
ALIVE_INTERVAL, ALIVE_COUNT = 15.0, 3
MAX_JUMPS = 8

_N = TypeVar("_N", int, float)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One sshd and how to reach and trust it. Equal endpoints can share a connection."""

    host: str
    """The host's name in the cluster file, or a jump host's as it was written."""
    address: str
    port: int
    user: str
    identities: tuple[Path, ...]
    """Key files to offer first, in order; they may be missing."""
    default_identities: tuple[Path, ...]
    """Key files to offer after those of the agent."""
    certificates: tuple[Path, ...]
    identities_only: bool
    """Whether the agent's other keys stay unused."""
    agent: str | None
    """The agent's socket."""
    via: Endpoint | None
    """The jump host."""
    proxy_command: str | None
    user_known_hosts: tuple[Path, ...]
    """Accepted keys are appended to the first."""
    global_known_hosts: tuple[Path, ...]
    known_names: tuple[str, ...]
    """What known_hosts may call the host, best first."""
    accept_new: bool
    hash_known_hosts: bool
    timeout: float
    """Seconds for one attempt to connect and authenticate."""
    alive_interval: float
    alive_count: int
    family: int
    """AF_UNSPEC, AF_INET or AF_INET6."""
    custom_known_hosts: bool
    config: Path | None
    """The ssh configuration that the cluster file names."""

    @property
    def place(self) -> str:
        """``address:port``, with brackets around an IPv6 address."""
        return f"{bracketed(self.address)}:{self.port}"

    @property
    def attempted(self) -> str:
        """What errors say was being done."""
        route = f" via {self.via.host}" if self.via else ""
        if self.proxy_command:
            route = " through its ProxyCommand"
        return f"connecting to {self.host} ({self.place}) as {self.user}{route}"

    @property
    def command(self) -> str:
        """The ``ssh`` command that makes the same connection, for a person to try."""
        return " ".join(["ssh", *self._arguments("-p")])

    def copy_id(self, key: Path | None) -> str:
        """The ``ssh-copy-id`` command that installs a key there."""
        which = ["-i", shlex.quote(str(key))] if key else []
        return " ".join(["ssh-copy-id", *which, *self._arguments("-p", keys=False)])

    def _arguments(self, port_flag: str, *, keys: bool = True) -> list[str]:
        words: list[str] = []
        if self.config:
            words += ["-F", str(self.config)]
        if keys and self.identities:
            words += ["-i", str(self.identities[0])]
        if self.custom_known_hosts:
            words += ["-o", f"UserKnownHostsFile={self.user_known_hosts[0]}"]
        if self.via:
            jump = self.via
            words += ["-o", f"ProxyJump={jump.user}@{bracketed(jump.address)}:{jump.port}"]
        if self.proxy_command:
            words += ["-o", f"ProxyCommand={self.proxy_command}"]
        words += [port_flag, str(self.port), f"{self.user}@{self.address}"]
        return [shlex.quote(word) for word in words]


def bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


class Resolver:
    """Turns hosts into endpoints. ``base`` is what relative paths in the cluster file start
    from; ``notice`` is told, once each, what was ignored."""

    def __init__(self, base: Path, system_config: Path, notice: Callable[[str], None]) -> None:
        self._base = base
        self._system_config = system_config
        self._notice = notice
        self._home = Path(os.path.expanduser("~"))  # noqa: PTH111 (Path.home() raises)
        self._configs: dict[Path | None, Config] = {}

    def resolve(self, host: Host) -> Endpoint:
        """Raises ConnectError when ssh's configuration cannot be read or makes no sense."""
        try:
            return self._endpoint(host.name, host.address, host.ssh, ())
        except SshConfigError as error:
            raise ConnectError(
                host.name,
                "reading ssh's configuration",
                str(error),
                hint=f"correct it until `ssh -G {shlex.quote(host.name)}` accepts it",
            ) from error

    def _endpoint(
        self, name: str, address: str, ssh: Ssh, seen: tuple[str, ...], *, is_jump: bool = False
    ) -> Endpoint:
        config_path = self._path(ssh.config) if ssh.config else None
        local_user = _local_user()
        options = self._config(config_path).lookup(name, local_user=local_user, user=ssh.user)
        hostname = options.get("hostname")
        target = expand(hostname, {"h": name}.get) if hostname else address
        port = ssh.port or _number(options, "port", int, 22, low=1)
        user = ssh.user or options.get("user") or local_user
        tokens = self._tokens(name, target, port, user, local_user)

        configured = [
            self._path(expand(value, tokens), from_config=True)
            for value in options.all("identityfile")
            if value.lower() != "none"
        ]
        chosen = [self._path(ssh.identity)] if ssh.identity else []
        # A jump host has its own keys in ssh's configuration; the cluster's key comes after.
        identities = [*configured, *chosen] if is_jump else (chosen or configured)
        via, proxy_command = self._route(name, ssh, options, tokens, (*seen, name))
        user_files, custom = self._user_known_hosts(ssh, options, tokens)
        alias = options.get("hostkeyalias")
        timeout = ssh.connect_timeout
        if timeout == Ssh().connect_timeout:
            timeout = _number(options, "connecttimeout", float, timeout, low=1)
        strict = (options.get("stricthostkeychecking") or "").lower() in {"yes", "true"}
        lax = (options.get("stricthostkeychecking") or "").lower() in {"no", "off", "false"}
        if lax and ssh.host_keys == "strict":
            self._notice(
                f"{name}: ssh's configuration says StrictHostKeyChecking no; dtrain checks host "
                "keys all the same (`host_keys: accept-new` accepts unknown hosts)"
            )
        return Endpoint(
            host=name,
            address=target,
            port=port,
            user=user,
            identities=tuple(dict.fromkeys(identities)),
            default_identities=()
            if identities
            else tuple(self._home / ".ssh" / file for file in DEFAULT_KEYS),
            certificates=tuple(
                self._path(expand(value, tokens), from_config=True)
                for value in options.all("certificatefile")
                if value.lower() != "none"
            ),
            identities_only=options.get("identitiesonly") == "yes",
            agent=self._agent(options, tokens),
            via=via,
            proxy_command=proxy_command,
            user_known_hosts=user_files,
            global_known_hosts=self._files(
                options.get("globalknownhostsfile")
                or "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2",
                tokens,
            ),
            known_names=_known_names(alias, name, target, port),
            accept_new=ssh.host_keys == "accept-new" and not strict,
            hash_known_hosts=options.get("hashknownhosts") == "yes",
            timeout=timeout,
            alive_interval=_number(options, "serveraliveinterval", float, 0.0) or ALIVE_INTERVAL,
            alive_count=_number(options, "serveralivecountmax", int, 0) or ALIVE_COUNT,
            family={"inet": socket.AF_INET, "inet6": socket.AF_INET6}.get(
                options.get("addressfamily") or "", socket.AF_UNSPEC
            ),
            custom_known_hosts=custom,
            config=config_path,
        )

    def _route(
        self,
        name: str,
        ssh: Ssh,
        options: Options,
        tokens: Callable[[str], str | None],
        seen: tuple[str, ...],
    ) -> tuple[Endpoint | None, str | None]:
        """The jump host, or else the command, that leads there."""
        jumps, command = ssh.jump, None
        if jumps is None:
            # The keyword that comes first in the configuration wins, as it does for ssh.
            for keyword in options.values:
                if keyword == "proxyjump":
                    jumps = expand(options.get(keyword) or "", tokens)
                elif keyword == "proxycommand":
                    command = options.get(keyword)
                else:
                    continue
                break
        if command and command.lower() != "none":
            return None, expand(command, tokens)
        if not jumps or jumps.lower() == "none":
            return None, None
        via: Endpoint | None = None
        for spec in jumps.split(","):
            user, host, port = _jump_spec(spec.strip(), name)
            if host in seen:
                if ssh.jump is not None:
                    raise SshConfigError(f"jump host {host} leads to itself")
                # `Host *` with `ProxyJump bastion` covers the bastion as well: not for itself.
                return via, None
            if len(seen) > MAX_JUMPS:
                raise SshConfigError(f"more than {MAX_JUMPS} jump hosts to reach {seen[0]}")
            hop = replace(ssh, user=user, port=port, jump=None if via is None else "none")
            endpoint = self._endpoint(host, host, hop, seen, is_jump=True)
            via = replace(endpoint, via=via, proxy_command=None) if via else endpoint
        return via, None

    def _config(self, path: Path | None) -> Config:
        if path not in self._configs:
            config = Config()
            if path is not None:
                if not path.exists():
                    raise SshConfigError(f"{path}: no such file (named by `config` in the cluster)")
                config.read(path, self._home)
            else:
                config.read(self._home / ".ssh" / "config", self._home)
                config.read(self._system_config, self._home, user_file=False)
            for ignored in config.ignored:
                self._notice(f"{ignored}; its settings are left out")
            self._configs[path] = config
        return self._configs[path]

    def _tokens(
        self, name: str, address: str, port: int, user: str, local_user: str
    ) -> Callable[[str], str | None]:
        hostname = socket.gethostname()
        return {
            "d": str(self._home),
            "h": address,
            "i": str(os.getuid()),
            "k": name,
            "L": hostname.split(".")[0],
            "l": hostname,
            "n": name,
            "p": str(port),
            "r": user,
            "u": local_user,
        }.get

    def _agent(self, options: Options, tokens: Callable[[str], str | None]) -> str | None:
        value = options.get("identityagent")
        if value is None or value == "SSH_AUTH_SOCK":
            return os.environ.get("SSH_AUTH_SOCK")
        if value.lower() == "none":
            return None
        if value.startswith("$"):
            return os.environ.get(value[1:].strip("{}"))
        return str(self._path(expand(value, tokens), from_config=True))

    def _user_known_hosts(
        self, ssh: Ssh, options: Options, tokens: Callable[[str], str | None]
    ) -> tuple[tuple[Path, ...], bool]:
        if ssh.known_hosts:
            return (self._path(ssh.known_hosts),), True
        named = options.get("userknownhostsfile")
        return self._files(named or "~/.ssh/known_hosts ~/.ssh/known_hosts2", tokens), False

    def _files(self, names: str, tokens: Callable[[str], str | None]) -> tuple[Path, ...]:
        return tuple(
            self._path(expand(name, tokens), from_config=True)
            for name in split_files(names)
            if name.lower() != "none"
        )

    def _path(self, text: str, *, from_config: bool = False) -> Path:
        if text == "~" or text.startswith("~/"):
            return self._home / text[2:]
        path = Path(text)
        # ssh takes relative names in its configuration from the working directory.
        return path if from_config else self._base / path


def _known_names(alias: str | None, name: str, address: str, port: int) -> tuple[str, ...]:
    """ssh looks a host up by alias alone, or by address with port and then without. The
    cluster's own name for the host serves too: `ssh gpu01` may have recorded it."""
    if alias:
        return (alias,)
    names = []
    for known in (address.lower(), name.lower()):
        if port != 22:
            names.append(f"[{known}]:{port}")
        names.append(known)
    return tuple(dict.fromkeys(names))


def _jump_spec(spec: str, host: str) -> tuple[str | None, str, int | None]:
    """Split ``[user@]host[:port]`` or ``ssh://…``; an IPv6 address with a port has brackets."""
    match = re.fullmatch(
        r"(?:ssh://)?(?:(?P<user>.+)@)?"
        r"(?:\[(?P<bracketed>[^\[\]]+)\]|(?P<v6>[^@\[\]]*:[^@\[\]]*:[^@\[\]]*)|(?P<host>[^@:\[\]]+))"
        r"(?::(?P<port>\d{1,5}))?/?",
        spec,
    )
    if not match:
        raise SshConfigError(f"{host}: {spec!r} is not a jump host ([user@]host[:port])")
    where = match["bracketed"] or match["v6"] or match["host"]
    return match["user"], where, int(match["port"]) if match["port"] else None


def _number(
    options: Options, keyword: str, convert: Callable[[str], _N], default: _N, low: float = 0
) -> _N:
    value = options.get(keyword)
    if value is None or value.lower() == "none":
        return default
    try:
        number = convert(value)
    except ValueError:
        raise SshConfigError(f"{keyword} {value!r} is not a number") from None
    if number < low:
        raise SshConfigError(f"{keyword} {value!r} is too small")
    return number


def _local_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # A container may run under a number that no account has.
        return str(os.getuid())
