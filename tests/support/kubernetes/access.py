"""Who may do what: certificates, tokens, the kubeconfig, and denied permissions."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
import sys
import uuid
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from support.kubernetes.errors import ApiError
from support.kubernetes.kinds import Kind

USER = "test"


class Access:
    """The token in ``token_file`` is what the kubeconfig's exec plugin returns."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.token_file = folder / "token"
        self.denied: set[tuple[str, str]] = set()
        """Verbs and resources, ``("get", "pods/log")``."""
        self._valid = ""
        self.renew()

    def renew(self) -> None:
        """Accept a new token alone, and write it where clients find it."""
        self.expire()
        self.token_file.write_text(self._valid)

    def expire(self) -> None:
        """Refuse the token that clients have."""
        self._valid = uuid.uuid4().hex

    def authenticate(self, header: str) -> None:
        """Raises ApiError 401."""
        if header != f"Bearer {self._valid}":
            raise ApiError(401, "Unauthorized", "Unauthorized")

    def allows(self, verb: str, resource: str) -> bool:
        return (verb, resource) not in self.denied

    def authorize(self, verb: str, kind: Kind, sub: str, namespace: str) -> None:
        """Raises ApiError 403."""
        resource = f"{kind.plural}/{sub}" if sub else kind.plural
        if not self.allows(verb, resource):
            where = f'in the namespace "{namespace}"' if kind.namespaced else "at the cluster scope"
            raise ApiError(
                403,
                "Forbidden",
                f'{kind.resource} is forbidden: User "{USER}" cannot {verb} resource "{resource}"'
                f' in API group "{kind.group}" {where}',
            )

    def write_kubeconfig(self, url: str, namespace: str) -> Path:
        plugin = self.folder / "token-plugin"
        plugin.write_text(
            f"#!{sys.executable} -S\n"
            "import json, pathlib\n"
            f"token = pathlib.Path({str(self.token_file)!r}).read_text()\n"
            'kind = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential"}\n'
            'print(json.dumps(kind | {"status": {"token": token}}))\n'
        )
        plugin.chmod(0o755)
        login = {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": str(plugin),
            "interactiveMode": "Never",
        }
        cluster = {"server": url, "certificate-authority": str(self.folder / "ca.pem")}
        context = {"cluster": "test", "user": USER, "namespace": namespace}
        path = self.folder / "kubeconfig"
        text = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": cluster}],
            "contexts": [{"name": "test", "context": context}],
            "users": [{"name": USER, "user": {"exec": login}}],
        }
        path.write_text(yaml.safe_dump(text))
        return path

    def server_context(self) -> ssl.SSLContext:
        """TLS of the server, with a certificate for 127.0.0.1."""
        authority = ec.generate_private_key(ec.SECP256R1())
        key = ec.generate_private_key(ec.SECP256R1())
        root = _certificate("test CA", authority, "test CA", authority, ca=True)
        leaf = _certificate("test API server", key, "test CA", authority, ca=False)
        pem = serialization.Encoding.PEM
        (self.folder / "ca.pem").write_bytes(root.public_bytes(pem))
        private = key.private_bytes(
            pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        chain = self.folder / "server.pem"
        chain.write_bytes(leaf.public_bytes(pem) + private)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(chain)
        return context


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    signer: ec.EllipticCurvePrivateKey,
    *,
    ca: bool,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.timezone.utc)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=2))
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
    )
    if ca:
        usage = {"key_cert_sign": True, "crl_sign": True}
    else:
        usage = {"digital_signature": True}
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        builder = builder.add_extension(x509.SubjectAlternativeName([address]), critical=False)
    every = dict.fromkeys(
        [
            "digital_signature",
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "key_cert_sign",
            "crl_sign",
            "encipher_only",
            "decipher_only",
        ],
        False,
    )
    builder = builder.add_extension(x509.KeyUsage(**{**every, **usage}), critical=True)
    return builder.sign(signer, hashes.SHA256())
