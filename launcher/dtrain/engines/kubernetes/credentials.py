"""Access to an API server: its address, connections and credentials, from the official client.

The package ``kubernetes`` is imported here only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import ssl
import sys
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

import yaml

from dtrain.diagnostics import AuthError, UsageError
from dtrain.messages.decode import excerpt
from dtrain.records import dataclass

HINT = "log in again: `kubectl get pods` must work"
START_SECONDS = 60.0
"""Seconds in which a server must answer each step to start a program."""
_NAMESPACE_FILE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"
_MAX_WORDS = 500
_CONNECTIONS = 1 << 12
"""Connections that are kept open. urllib3 warns on stderr about each one that it closes because
there are more: each pod has one for its log."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a kubeconfig or a service account gave at one moment. Any thread may use it."""

    server: str
    """URL of the API server."""
    context: str | None
    """The context of the kubeconfig; None for a service account."""
    namespace: str | None
    """The namespace of the context."""
    problem: str
    """Why the login program of the kubeconfig has failed; empty if it has not."""
    pool: Any = field(repr=False)
    """Connections with the certificates of the login."""
    _configuration: Any = field(repr=False)

    @property
    def host(self) -> str:
        return urllib.parse.urlsplit(self.server).hostname or self.server

    def headers(self) -> dict[str, str]:
        """The headers that authenticate a request. Raises AuthError."""
        if self.problem:
            raise AuthError(self.host, "logging in", self.problem, hint=HINT)
        try:
            with _logged_errors():
                settings = self._configuration.auth_settings().values()
        except Exception as error:  # noqa: BLE001 (a plugin may raise anything)
            raise AuthError(self.host, "logging in", _words(error), hint=HINT) from None
        # Files with a token often end with a newline.
        found = {
            setting["key"]: setting["value"].strip()
            for setting in settings
            if setting["in"] == "header" and setting["value"]
        }
        if not all(text.isascii() and text.isprintable() for text in found.values()):
            # Refused here: an error of the HTTP library would show the token.
            wrong = "the token cannot be sent: it has line breaks or special characters"
            raise AuthError(self.host, "logging in", wrong, hint=HINT)
        return found

    def web_socket(self, url: str, protocols: str) -> Any:
        """Raises AuthError, what the package ``websocket`` raises, and OSError.

        As `create_websocket` of the official client, which waits forever for an answer.
        """
        import certifi
        import websocket
        from kubernetes.stream.ws_client import websocket_proxycare

        known = self._configuration
        secure: dict[str, Any] = {"cert_reqs": ssl.CERT_NONE}
        if known.verify_ssl:
            authorities = known.ssl_ca_cert or certifi.where()
            secure = {"cert_reqs": ssl.CERT_REQUIRED, "ca_certs": authorities}
            if known.assert_hostname is not None:
                secure["check_hostname"] = known.assert_hostname
        secure["certfile"], secure["keyfile"] = known.cert_file, known.key_file
        secure["server_hostname"] = known.tls_server_name
        headers = {**self.headers(), "sec-websocket-protocol": protocols}
        options = {"header": [f"{name}: {value}" for name, value in headers.items()]}
        if known.proxy or known.proxy_headers:
            options = websocket_proxycare(options, known, url, headers)
        found: Any = websocket.WebSocket(sslopt=secure)
        found.connect(url, timeout=START_SECONDS, **options)
        return found


def log_in(context: str | None) -> Credentials:
    """Read the kubeconfig, or the service account if this process runs in a pod.

    Raises UsageError without a usable kubeconfig, or without the package.
    """
    try:
        import urllib3
        from kubernetes.client import rest

        from kubernetes import client, config
    except ImportError:
        raise UsageError(
            "a launch on Kubernetes needs the Python package kubernetes",
            hint=f"install kubernetes>=31 for the Python that runs dtrain: {sys.executable}",
        ) from None
    configuration = client.Configuration()
    configuration.connection_pool_maxsize = _CONNECTIONS
    namespace: str | None
    problem = ""
    try:
        if context is None and _in_pod():
            config.load_incluster_config(client_configuration=configuration)
            namespace = Path(_NAMESPACE_FILE).read_text().strip()
        else:
            with _logged_errors() as logged:
                context, namespace = _load_kubeconfig(context, configuration)
            problem = "; ".join(logged)[:_MAX_WORDS]
    except (
        config.ConfigException, OSError, yaml.YAMLError,
        # A value of another type than the package expects.
        TypeError, ValueError, KeyError, AttributeError,
    ) as error:  # fmt: skip
        raise UsageError(
            f"the kubeconfig cannot be used: {excerpt(str(error))}",
            hint="`kubectl config get-contexts` lists the contexts; set"
            " cluster.kubernetes.context or KUBECONFIG",
        ) from None
    if not configuration.verify_ssl:
        # urllib3 warns on stderr about each request; the kubeconfig asks for it.
        urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
    server = str(configuration.host).rstrip("/")
    try:
        pool = rest.RESTClientObject(configuration).pool_manager
    except ImportError:
        raise UsageError(
            "the kubeconfig has a SOCKS proxy, which needs the Python package PySocks",
            hint=f"install PySocks for the Python that runs dtrain: {sys.executable}",
        ) from None
    return Credentials(server, context, namespace, problem, pool, configuration)


def _in_pod() -> bool:
    """Whether the service account is used: this process runs in a pod without a kubeconfig."""
    return (
        "KUBERNETES_SERVICE_HOST" in os.environ
        and "KUBECONFIG" not in os.environ
        and not Path(os.path.expanduser("~/.kube/config")).exists()  # noqa: PTH111 (pathlib raises)
    )


def _load_kubeconfig(context: str | None, configuration: Any) -> tuple[str, str | None]:
    """Fill ``configuration``. Returns the context and its namespace, if it has one.

    Raises UsageError, and what the package raises.
    """
    from kubernetes import config

    # The package reads the variable only when it is imported.
    file = os.environ.get("KUBECONFIG")
    location = file or config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION
    files = [Path(one).expanduser() for one in location.split(os.pathsep) if one]
    if not any(one.exists() for one in files):
        raise UsageError(
            f"there is no kubeconfig: {location} does not exist",
            hint="save the kubeconfig of your cluster as ~/.kube/config, or set KUBECONFIG to its"
            " path",
        )
    contexts, active = config.list_kube_config_contexts(file)
    named = {one["name"]: one for one in contexts}
    if context is not None and context not in named:
        raise UsageError(
            f"the kubeconfig has no context {excerpt(context)}",
            hint=f"cluster.kubernetes.context must be one of: {excerpt(', '.join(named))}",
        )
    config.load_kube_config(file, context=context, client_configuration=configuration)
    chosen = named.get(context, active)
    merged = config.kube_config.KubeConfigMerger(location).config
    name = chosen["context"].get("user")
    if user := merged.value.get("users") and merged["users"].get_with_name(name, safe=True):
        _refuse_impersonation(name, user.value.get("user") or {})
    return chosen["name"], chosen["context"].get("namespace")


def _refuse_impersonation(name: str, user: Mapping[str, Any]) -> None:
    """Raise UsageError if kubectl would act as another user: the package would not."""
    wanted = [key for key in user if key == "as" or key.startswith("as-")]
    if wanted:
        raise UsageError(
            f"the kubeconfig's user {excerpt(name)} impersonates another one"
            f" ({excerpt(', '.join(wanted))}), which dtrain does not support",
            hint="set cluster.kubernetes.context to one whose user has its own rights",
        )


@contextlib.contextmanager
def _logged_errors() -> Iterator[list[str]]:
    """The errors that the package logs. It does not raise those of a login program, and its log
    would go to stderr."""
    collector = _Collector()
    logger = logging.getLogger()
    logger.addHandler(collector)
    try:
        yield collector.texts
    finally:
        logger.removeHandler(collector)


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(" ".join(record.getMessage().split()))


def _words(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_WORDS]
