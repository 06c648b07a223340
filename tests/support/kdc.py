"""A real Kerberos server (MIT's krb5kdc), for this user, one other, and the host gpu01."""

from __future__ import annotations

import getpass
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from support.ports import free_port

REALM = "DTRAIN.TEST"
PASSWORD = "ticket"  # noqa: S105 (no secret)
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"


@dataclass(frozen=True)
class Kdc:
    """Its clients and the sshd need ``environment``."""

    folder: Path
    environment: Mapping[str, str]
    user: ClassVar[str] = getpass.getuser()

    def kinit(self, user: str) -> None:
        """Get a ticket of this user or of ``other``."""
        self._run("kinit", user, text=PASSWORD)

    def kdestroy(self) -> None:
        self._run("kdestroy", "-q")

    def _run(self, *command: str, text: str = "") -> str:
        done = subprocess.run(
            command,
            input=text + "\n",
            capture_output=True,
            text=True,
            env={**os.environ, **self.environment, "PATH": PATH},
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout


@contextmanager
def running_kdc(folder: Path, address: str = "127.0.0.1") -> Iterator[Kdc]:
    port = free_port(address)
    (folder / "krb5.conf").write_text(
        f"""
[libdefaults]
    default_realm = {REALM}
    dns_lookup_realm = false
    dns_lookup_kdc = false
    dns_uri_lookup = false
    dns_canonicalize_hostname = false
    qualify_shortname = ""
    forwardable = true
[realms]
    {REALM} = {{
        kdc = {address}:{port}
    }}
[logging]
    kdc = FILE:{folder}/kdc.log
"""
    )
    (folder / "kdc.conf").write_text(
        f"""
[kdcdefaults]
    kdc_listen = {address}:{port}
    kdc_tcp_listen = {address}:{port}
[realms]
    {REALM} = {{
        database_name = {folder}/principal
        key_stash_file = {folder}/stash
    }}
"""
    )
    environment = {
        "KRB5_CONFIG": str(folder / "krb5.conf"),
        "KRB5_KDC_PROFILE": str(folder / "kdc.conf"),
        "KRB5_KTNAME": str(folder / "keytab"),
        "KRB5CCNAME": f"FILE:{folder}/tickets",
        "KRB5RCACHENAME": "none:",  # or it is a file in /var/tmp
    }
    kdc = Kdc(folder, environment)
    kdc._run("kdb5_util", "create", "-s", "-r", REALM, "-P", "master")
    queries = (
        f"addprinc -pw {PASSWORD} {kdc.user}",
        f"addprinc -pw {PASSWORD} other",
        "addprinc -randkey host/gpu01",
        f"ktadd -k {folder}/keytab host/gpu01",
    )
    kdc._run("kadmin.local", text="\n".join(queries))
    # It leaves the foreground once it listens.
    kdc._run("krb5kdc", "-P", str(folder / "pid"))
    try:
        yield kdc
    finally:
        os.kill(int((folder / "pid").read_text()), 15)
