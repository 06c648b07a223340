"""The address of a host's sshd and all options of a connection to it, as one value.

The cluster file overrides ssh's configuration, which overrides the defaults. `ssh -G` evaluates
the configuration. A machine without `ssh` needs none: the cluster file is enough.

Security: ``StrictHostKeyChecking`` in ssh's configuration can make a launch stricter (``yes``
disables ``host_keys: accept-new``) but never less strict. Only the cluster file can enable
``accept-new``. Nothing disables host key checks.
"""

from __future__ import annotations

import getpass
import glob
import os
import pwd
import shlex
import shutil
import socket
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from dtrain.diagnostics import ConnectError, NodeError
from dtrain.records import dataclass
from dtrain.spec.model import Host, Ssh
from dtrain.transport.login_methods import allowed_methods
from dtrain.transport.memory_file import STDIN
from dtrain.transport.ssh_names import (
    HOST,
    USER,
    Tokens,
    canonical,
    expand,
    expand_path,
    jump_spec,
    require_safe,
    standard_tokens,
)
from dtrain.transport.ssh_options import Options, SshConfigError, check
from dtrain.transport.ssh_query import ConfigText, SshQuery, option_lines

DEFAULT_KEYS = ("id_rsa", "id_ecdsa", "id_ecdsa_sk", "id_ed25519", "id_ed25519_sk")
ALIVE_INTERVAL, ALIVE_COUNT = 15.0, 3
MAX_JUMPS = 8
SYSTEM_CONFIG = Path("/etc/ssh/ssh_config")
GLOBAL_KNOWN_HOSTS = (Path("/etc/ssh/ssh_known_hosts"), Path("/etc/ssh/ssh_known_hosts2"))

_Error = TypeVar("_Error", bound=NodeError)


@dataclass(frozen=True, slots=True)
class Algorithms:
    """The algorithms that ssh's configuration allows, preferred first; None for the default."""

    ciphers: tuple[str, ...] | None = None
    macs: tuple[str, ...] | None = None
    kex: tuple[str, ...] | None = None
    host_keys: tuple[str, ...] | None = None
    user_keys: tuple[str, ...] | None = None
    own_host_keys: tuple[str, ...] = ()
    """To sign with host keys of this machine."""
    authorities: tuple[str, ...] | None = None
    """Signature algorithms of certificate authorities."""
    rsa_bits: int = 0
    """Minimum size of an RSA key."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One sshd, and how to connect to it and verify it. Equal endpoints can share a connection."""

    host: str
    """The host's name in the cluster file, or a jump host's name as configured."""
    is_jump: bool
    address: str
    port: int
    user: str
    identities: tuple[Path, ...]
    """Key files configured for this host, in order. They may be missing."""
    default_identities: tuple[Path, ...]
    """Key files to try if none is configured."""
    identities_first: bool
    """Whether to try ``identities`` before the agent's keys: the cluster file sets them."""
    certificates: tuple[Path, ...]
    identities_only: bool
    """Whether to ignore the agent's other keys."""
    agent: str | None
    """The agent's socket."""
    via: Endpoint | None
    """The jump host."""
    proxy_command: str | None
    user_known_hosts: tuple[Path, ...]
    """dtrain appends accepted keys to the first file."""
    global_known_hosts: tuple[Path, ...]
    revoked_host_keys: tuple[Path, ...]
    """Files of revoked host keys."""
    known_names: tuple[str, ...]
    """Names of the host in known_hosts, preferred first."""
    accept_new: bool
    hash_known_hosts: bool
    timeout: float
    """Seconds for one attempt to connect and authenticate."""
    alive_interval: float
    alive_count: int
    family: int
    """AF_UNSPEC, AF_INET or AF_INET6."""
    bind_address: str | None
    """The address of this machine to connect from."""
    compression: bool
    algorithms: Algorithms
    batch_mode: bool
    """Whether dtrain must not ask the user anything."""
    methods: tuple[str, ...]
    """The allowed ways to log in, in order, see `dtrain.transport.login_methods`."""
    ticket_host: str
    """The host's name in Kerberos: as in ssh, not the address in the cluster file."""
    delegates_ticket: bool
    """Whether the host gets a Kerberos ticket of the user."""
    control_path: Path | None
    """The socket of a connection that `ssh` may hold open (ControlMaster)."""
    custom_known_hosts: bool
    config: Path | None
    """The ssh configuration file set in the cluster file."""

    @property
    def place(self) -> str:
        """``address:port``, with brackets around an IPv6 address."""
        return f"{bracketed(self.address)}:{self.port}"

    @property
    def attempted(self) -> str:
        """The attempted action, for error messages."""
        route = f" via {self.via.host}" if self.via else ""
        if self.proxy_command:
            route = " through its ProxyCommand"
        return f"connecting to {self.host} ({self.place}) as {self.user}{route}"

    @property
    def command(self) -> str:
        """The ``ssh`` command that opens the same connection, for the user to try."""
        return " ".join(["ssh", *self._arguments()])

    def error(
        self, kind: type[_Error], reason: str, *, attempted: str = "", hint: str = ""
    ) -> _Error:
        """The error of an attempt to connect, or of another one."""
        error = kind(self.host, attempted or self.attempted, reason, hint=hint)
        error.address = self.address
        return error

    def copy_id(self, key: Path | None) -> str:
        """The ``ssh-copy-id`` command that installs a key there."""
        which = ["-i", shlex.quote(str(key))] if key else []
        return " ".join(["ssh-copy-id", *which, *self._arguments(keys=False)])

    def _arguments(self, *, keys: bool = True) -> list[str]:
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
        words += ["-p", str(self.port), f"{self.user}@{self.address}"]
        return [shlex.quote(word) for word in words]


def _control_path(options: Options) -> Path | None:
    # `ssh -G` has expanded the tokens.
    path = options.get("controlpath") or ""
    return Path(path) if path.startswith("/") and "%" not in path else None


def _timeout(ssh: Ssh, options: Options) -> float:
    """The timeout of the cluster file, unless it is the default and ssh's configuration has one."""
    if ssh.connect_timeout != Ssh().connect_timeout:
        return ssh.connect_timeout
    return float(options.seconds("connecttimeout")) or ssh.connect_timeout


def _algorithms(options: Options) -> Algorithms:
    return Algorithms(
        ciphers=options.names("ciphers"),
        macs=options.names("macs"),
        kex=options.names("kexalgorithms"),
        host_keys=options.names("hostkeyalgorithms"),
        user_keys=options.names("pubkeyacceptedalgorithms"),
        own_host_keys=tuple((options.get("hostbasedacceptedalgorithms") or "").split(",")),
        authorities=options.names("casignaturealgorithms"),
        rsa_bits=options.number("requiredrsasize", 1024),
    )


def bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


class Resolver:
    """Turns hosts into endpoints. Thread-safe.

    Relative paths in the cluster file start at ``base``. ``notice`` receives messages for the
    user about ignored options. ``ssh`` is the program to query, if there is one.
    """

    def __init__(
        self,
        base: Path,
        notice: Callable[[str], None],
        *,
        ssh: str | None = shutil.which("ssh"),
    ) -> None:
        self._base = base
        self._notice = notice
        self._home = Path(os.path.expanduser("~"))  # noqa: PTH111 (Path.home() raises)
        account = _account()
        self._why_no_ssh = (
            "the `ssh` program is not installed"
            if ssh is None
            else f"`ssh` refuses to run: the user id {os.getuid()} has no account"
        )
        self._ssh = ssh if account else None
        self._included = _including(self._home / ".ssh" / "config", SYSTEM_CONFIG)
        self._queries: dict[ConfigText, SshQuery] = {}
        self._default_config: str | None = None
        if account and self._home != Path(account.pw_dir):  # ssh ignores HOME
            self._default_config = STDIN

    def resolve(self, host: Host) -> Endpoint:
        """Raises ConnectError if ssh's configuration is unreadable, invalid, or needs something
        that dtrain does not support."""
        try:
            return self._endpoint(host.name, host.address, host.ssh, ())
        except SshConfigError as error:
            raise ConnectError(
                host.name,
                "reading ssh's configuration",
                str(error),
                hint=error.hint or f"correct it, and check with `ssh -G {shlex.quote(host.name)}`",
            ) from error

    def _endpoint(
        self, name: str, address: str, ssh: Ssh, seen: tuple[str, ...], *, is_jump: bool = False
    ) -> Endpoint:
        config_path = self._path(ssh.config) if ssh.config else None
        require_safe("host name", name, HOST)
        require_safe("user name", ssh.user, USER)
        options = self._options(name, ssh, config_path)
        for text in check(options):
            self._notice(f"{name}: {text}")
        hostname = options.get("hostname") or name
        # `address` applies only if ssh's configuration does not set HostName.
        renamed = canonical(hostname) != canonical(name)
        target = hostname if renamed else address
        port = options.number("port", 22, low=1)
        local_user = _local_user()
        user = options.get("user") or local_user
        alias = options.get("hostkeyalias")
        # These values reach ProxyCommand, and so a shell.
        require_safe("host name", target, HOST)
        require_safe("HostKeyAlias", alias, HOST)
        require_safe("user name", user, USER)
        tokens = standard_tokens(
            name, target, str(port), user, alias or name, local_user, self._home
        )
        identities, defaults, first = self._identities(ssh, options, tokens, is_jump=is_jump)
        via, proxy_command = self._route(name, ssh, options, tokens, (*seen, name))
        return Endpoint(
            host=name,
            is_jump=is_jump,
            address=target,
            port=port,
            user=user,
            identities=identities,
            default_identities=defaults,
            identities_first=first,
            certificates=self._expanded(options.all("certificatefile"), tokens),
            identities_only=options.flag("identitiesonly"),
            agent=_agent(options),
            via=via,
            proxy_command=proxy_command,
            user_known_hosts=self._user_known_hosts(ssh, options),
            global_known_hosts=_files(options, "globalknownhostsfile", GLOBAL_KNOWN_HOSTS),
            revoked_host_keys=self._expanded(map(str, _files(options, "revokedhostkeys")), tokens),
            known_names=_known_names(alias, target if renamed else name, target, port),
            accept_new=self._accepts_new(name, ssh, options),
            hash_known_hosts=options.flag("hashknownhosts"),
            timeout=_timeout(ssh, options),
            alive_interval=float(options.seconds("serveraliveinterval")) or ALIVE_INTERVAL,
            alive_count=options.number("serveralivecountmax", 0) or ALIVE_COUNT,
            family=_FAMILIES[options.choice("addressfamily", "any")],
            bind_address=options.get("bindaddress"),
            compression=options.flag("compression"),
            algorithms=_algorithms(options),
            batch_mode=options.flag("batchmode"),
            methods=allowed_methods(options),
            ticket_host=options.get("gssapiserveridentity") or hostname,
            delegates_ticket=options.flag("gssapidelegatecredentials"),
            control_path=_control_path(options),
            custom_known_hosts=ssh.known_hosts is not None,
            config=config_path,
        )

    def _accepts_new(self, name: str, ssh: Ssh, options: Options) -> bool:
        """Whether to accept the key of an unknown host. ssh's configuration can only forbid it."""
        checking = options.choice("stricthostkeychecking", "ask")
        if checking in {"no", "off"} and ssh.host_keys == "strict":
            self._notice(
                f"{name}: ssh's configuration sets StrictHostKeyChecking no, but dtrain always "
                "checks host keys (`host_keys: accept-new` accepts unknown hosts)"
            )
        return ssh.host_keys == "accept-new" and checking != "yes"

    def _options(self, name: str, ssh: Ssh, config: Path | None) -> Options:
        """The options of `ssh NAME`, with the settings of the cluster file as arguments."""
        if config and not config.exists():
            raise SshConfigError(f"{config}: no such file (`ssh.config` in the cluster file)")
        if ssh.jump and ssh.jump.lower() != "none":
            for spec in ssh.jump.split(","):
                jump_spec(spec.strip())
        try:
            return self._lookup(name, ssh, config)
        except SshConfigError as error:
            # `Host *` with `ProxyJump bastion` also matches the bastion, which needs no jump.
            if "jumphost loop" not in str(error) or ssh.jump is not None:
                raise
            options = self._lookup(name, replace(ssh, jump="none"), config)
            direct = {key: value for key, value in options.values.items() if key != "proxycommand"}
            return replace(options, values=direct)

    def _lookup(self, name: str, ssh: Ssh, config: Path | None) -> Options:
        given = {"user": ssh.user, "port": ssh.port, "proxyjump": ssh.jump}
        files = [config] if config else [self._home / ".ssh" / "config", SYSTEM_CONFIG]
        if self._ssh is None:
            if files[0].is_file():
                raise SshConfigError(
                    f"{files[0]} cannot be evaluated: {self._why_no_ssh}",
                    "install OpenSSH's client, or set `user`, `port`, `identity` and `jump` under "
                    "`ssh` in the cluster file, and there `config: /dev/null`",
                )
            return Options({key: (str(value),) for key, value in given.items() if value}, {})
        file, text, before = config or self._default_config, self._included, ""
        # OpenSSH 10.6 refuses such names as arguments, but accepts them in a file.
        if "\\" in (ssh.user or "") + (ssh.jump or ""):
            file, text = STDIN, _read(config) if config else text
            before = option_lines(ssh.user, ssh.jump)
            given["user"] = given["proxyjump"] = None
        arguments = ["-F", str(file)] if file else []
        for flag, value in zip(("-l", "-p", "-J"), given.values(), strict=True):
            if value is not None:
                arguments += [flag, str(value)]
        config_file = ConfigText(text, before, str(config or ""))
        query = self._queries.setdefault(config_file, SshQuery(self._ssh, config_file))
        return query.options(name, arguments, files)

    def _route(
        self,
        name: str,
        ssh: Ssh,
        options: Options,
        tokens: Tokens,
        seen: tuple[str, ...],
    ) -> tuple[Endpoint | None, str | None]:
        """The jump host or the ProxyCommand, if any."""
        if ssh.jump and ssh.jump.lower() == "none":
            return None, None
        jumps = options.get("proxyjump") or "none"
        if jumps.lower() == "none":
            command = options.get("proxycommand") or "none"
            return None, None if command.lower() == "none" else expand(command, tokens)
        via: Endpoint | None = None
        for spec in jumps.split(","):
            user, host, port = jump_spec(spec.strip())
            if host in seen:
                if ssh.jump is not None:
                    raise SshConfigError(f"jump host {host} is its own jump host")
                # `Host *` with `ProxyJump bastion` also matches the bastion, which needs no jump.
                return via, None
            if len(seen) > MAX_JUMPS:
                raise SshConfigError(f"more than {MAX_JUMPS} jump hosts to reach {seen[0]}")
            hop = replace(ssh, user=user, port=port, jump=None if via is None else "none")
            endpoint = self._endpoint(host, host, hop, seen, is_jump=True)
            via = replace(endpoint, via=via, proxy_command=None) if via else endpoint
        return via, None

    def _identities(
        self, ssh: Ssh, options: Options, tokens: Tokens, *, is_jump: bool
    ) -> tuple[tuple[Path, ...], tuple[Path, ...], bool]:
        """The configured key files, the default ones, and whether the configured ones come before
        the agent's keys."""
        configured = options.configured("identityfile")
        named = self._expanded(options.all("identityfile") if configured else (), tokens)
        chosen = (self._path(ssh.identity),) if ssh.identity else ()
        # A jump host's own keys from ssh's configuration come before the cluster's key.
        identities = (*named, *chosen) if is_jump else (chosen or named)
        usual = options.defaults.get("identityfile", [f"~/.ssh/{key}" for key in DEFAULT_KEYS])
        defaults = () if chosen or configured else self._expanded(usual, tokens)
        return tuple(dict.fromkeys(identities)), defaults, bool(chosen) and identities == chosen

    def _expanded(self, names: Iterable[str], tokens: Tokens) -> tuple[Path, ...]:
        return tuple(
            Path(expand_path(name, tokens, self._home)) for name in names if name.lower() != "none"
        )

    def _user_known_hosts(self, ssh: Ssh, options: Options) -> tuple[Path, ...]:
        if ssh.known_hosts:
            return (self._path(ssh.known_hosts),)
        if not options.configured("userknownhostsfile"):
            return tuple(self._home / ".ssh" / name for name in ("known_hosts", "known_hosts2"))
        return _files(options, "userknownhostsfile")

    def _path(self, text: str) -> Path:
        """A path in the cluster file."""
        if text == "~" or text.startswith("~/"):
            return self._home / text[2:]
        return self._base / text


_FAMILIES = {"any": socket.AF_UNSPEC, "inet": socket.AF_INET, "inet6": socket.AF_INET6}


def _files(options: Options, keyword: str, default: tuple[Path, ...] = ()) -> tuple[Path, ...]:
    """The files of an option that accepts several."""
    if not options.all(keyword):
        return default
    # ssh prints all names on one line, without quotes.
    names = options.all(keyword)[0].split(" ")
    if any(name[:1] not in "/~" for name in names[1:]):
        raise SshConfigError(
            f"{keyword} {' '.join(names)!r} is ambiguous: a path contains a space or is relative",
            "use absolute paths without spaces, or set `known_hosts` under `ssh`",
        )
    return tuple(Path(name) for name in names if name.lower() != "none")


def _including(*configs: Path) -> str:
    """A configuration file that includes ``configs``: of an included file, ssh checks who can
    write to it."""
    return "".join(f'Include "{glob.escape(str(path))}"\n' for path in configs)


def _read(config: Path) -> str:
    try:
        return os.fsdecode(config.read_bytes())
    except OSError as error:
        raise SshConfigError(f"{config} cannot be read: {error.strerror}") from error


def _agent(options: Options) -> str | None:
    value = options.get("identityagent")
    if value is None or value == "SSH_AUTH_SOCK":
        return os.environ.get("SSH_AUTH_SOCK")
    if value.lower() == "none":
        return None
    return os.environ.get(value[1:]) if value.startswith("$") else value


def _known_names(alias: str | None, name: str, address: str, port: int) -> tuple[str, ...]:
    """ssh looks up a host by its alias only, or by its address with the port and then without.

    If the cluster file sets the address, `ssh gpu01` may have recorded the host's name instead.
    """
    if alias:
        return (alias,)
    names = []
    for known in (address.lower(), name.lower()):
        if port != 22:
            names.append(f"[{known}]:{port}")
        names.append(known)
    return tuple(dict.fromkeys(names))


def _local_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # A container may run with a uid that has no account.
        return str(os.getuid())


def _account() -> pwd.struct_passwd | None:
    try:
        return pwd.getpwuid(os.getuid())
    except KeyError:
        # ssh itself refuses to run without an account.
        return None
