"""Certificates for tests, made on the spot: a CA, and files of a certificate of it and its key."""

from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True)
class Files:
    """Paths of PEM files."""

    certificate: str
    key: str
    ca: str

    @property
    def internal(self) -> dict[str, str]:
        """As options of a process."""
        return {
            "internal_tls_certificate": self.certificate,
            "internal_tls_key": self.key,
            "internal_tls_ca": self.ca,
        }


class Authority:
    """A CA with a folder for what it issues."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ca = trustme.CA(key_type=trustme.KeyType.ECDSA)
        folder.mkdir(exist_ok=True)
        self._ca.cert_pem.write_to_path(folder / "ca.pem")

    def issue(self, name: str, *hosts: str) -> Files:
        """A certificate for these hosts; the files are written anew where there are some of this name."""
        issued = self._ca.issue_cert(*(hosts or ("127.0.0.1", "localhost")), key_type=trustme.KeyType.ECDSA)
        certificate, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        key.write_bytes(issued.private_key_pem.bytes())
        key.chmod(0o600)
        return Files(str(certificate), str(key), str(self._folder / "ca.pem"))
