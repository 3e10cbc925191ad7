"""Certificates of a process as files: which belong together, whether they can be used, and when they have changed.

Here belong the files and what is in them, free of gRPC. Not here: channels and servers (`octavo.rpc`,
`octavo.secure_channel`). A private key is only ever read into memory, never logged and never part of an error.
"""

import logging
import os
import ssl
import stat
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

log = logging.getLogger(__name__)

_READ_TRIES = 3
Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files; an empty path is none.

    Attributes:
        certificate: this side's, with what leads to its CA behind it.
        key: the private key of `certificate`.
        ca: of whom the other side's certificate must come.
    """

    certificate: str = ""
    key: str = ""
    ca: str = ""


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """The content of `TlsFiles`; None where there is no such file."""

    certificate: bytes | None
    key: bytes | None
    ca: bytes | None

    def __repr__(self) -> str:
        return "TlsMaterial(...)"  # a key must not get into a log by way of an object


class PublicTlsOptions(Protocol):
    """Of a server that anybody may call."""

    @property
    def tls_certificate(self) -> str: ...

    @property
    def tls_key(self) -> str: ...

    @property
    def tls_client_ca(self) -> str: ...


class InternalTlsOptions(Protocol):
    """Of a process that others of the same system call, and that calls them."""

    @property
    def internal_tls_certificate(self) -> str: ...

    @property
    def internal_tls_key(self) -> str: ...

    @property
    def internal_tls_ca(self) -> str: ...


def public_tls(options: PublicTlsOptions) -> "TlsSource | None":
    """TLS of a server that asks its clients for certificates where a CA for them is named; None: no TLS.

    Raises:
        ValueError: files that do not go together, or that cannot be used; one line that names them.
    """
    certificate, key, ca = options.tls_certificate, options.tls_key, options.tls_client_ca
    if bool(certificate) != bool(key):
        given, missing = ("--tls-certificate", "--tls-key")[:: 1 if certificate else -1]
        raise ValueError(f"{given} is given without {missing}: a certificate and its key go together")
    if ca and not certificate:
        raise ValueError("--tls-client-ca is given without --tls-certificate: only a server with TLS can ask for one")
    return TlsSource(TlsFiles(certificate, key, ca)) if certificate else None


def internal_tls(options: InternalTlsOptions) -> "TlsSource | None":
    """TLS in which both sides show a certificate of one CA; None: no TLS. Raises as `public_tls`."""
    files = {
        "--internal-tls-certificate": options.internal_tls_certificate,
        "--internal-tls-key": options.internal_tls_key,
        "--internal-tls-ca": options.internal_tls_ca,
    }
    missing = [name for name, path in files.items() if not path]
    if len(missing) == len(files):
        return None
    if missing:
        raise ValueError(f"{' and '.join(missing)} missing: both sides of an internal call show a certificate")
    return TlsSource(TlsFiles(*files.values()))


class TlsSource:
    """The content of some files, read again when they change. May be asked from any thread.

    What is new but cannot be used (half written, or the key of another certificate) is logged and counted once; the
    old one stays.

    Attributes:
        num_reloads, num_failures: changes that were taken, and that could not be.

    Raises:
        ValueError: the files cannot be used now.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._stamp, self._material = _read_whole(files)
        self._refused: Stamp | None = None
        self.num_reloads = self.num_failures = 0
        _warn_if_readable_by_all(files.key)

    @property
    def asks_for_certificates(self) -> bool:
        return bool(self._files.ca)

    @property
    def is_good(self) -> bool:
        """Whether the files could be used when `latest` last looked."""
        return self._refused is None

    def latest(self) -> TlsMaterial:
        """The content as it is now, the same object as long as nothing has changed. Never raises."""
        with self._lock:
            try:
                stamp = _stamp_of(self._files)
                if stamp not in (self._stamp, self._refused):
                    self._stamp, self._material = _read_whole(self._files)
                    self._refused = None
                    self.num_reloads += 1
                    log.info("the certificate of %s has changed and is used from now on", self._files.certificate)
                elif stamp == self._stamp:
                    self._refused = None  # what could not be used is taken back
            except ValueError as error:
                self._refuse(error)
            return self._material

    def _refuse(self, error: ValueError) -> None:
        try:
            stamp = _stamp_of(self._files)
        except ValueError:
            stamp = ()
        if stamp != self._refused:
            self.num_failures += 1
            log.error("a changed certificate is not used, the one before stays: %s", error)
        self._refused = stamp


def _read_whole(files: TlsFiles) -> tuple[Stamp, TlsMaterial]:
    """All files as they are at one moment, checked."""
    for _ in range(_READ_TRIES):
        stamp = _stamp_of(files)
        material = TlsMaterial(*(_read(path) if path else None for path in (files.certificate, files.key, files.ca)))
        _check(files, material)
        if _stamp_of(files) == stamp:
            return stamp, material
    raise ValueError(f"TLS files {files.certificate or files.ca} change faster than they can be read")


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"TLS file {path} cannot be read: {error.strerror or error}") from error


def _stamp_of(files: TlsFiles) -> Stamp:
    """What differs when a file was written or replaced, also through the symbolic links of a mounted Secret."""
    found = []
    for path in (files.certificate, files.key, files.ca):
        if path:
            try:
                status = os.stat(path)
            except OSError as error:
                raise ValueError(f"TLS file {path} cannot be read: {error.strerror or error}") from error
            found.append((status.st_mtime_ns, status.st_size, status.st_ino))
    return tuple(found)


def _check(files: TlsFiles, material: TlsMaterial) -> None:
    """Whether OpenSSL takes them; whether a certificate has expired is for the other side to say."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if files.certificate:
        try:
            context.load_cert_chain(files.certificate, files.key, password=lambda: "")
        except (ssl.SSLError, OSError, ValueError) as error:
            raise ValueError(
                f"TLS files {files.certificate} and {files.key} are no certificate and its unencrypted key, in PEM "
                f"({_reason(error)})"
            ) from error
    if files.ca:
        try:
            context.load_verify_locations(cadata=(material.ca or b"").decode("ascii"))
        except (ssl.SSLError, ValueError) as error:
            raise ValueError(f"TLS file {files.ca} has no CA certificate in PEM ({_reason(error)})") from error


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or type(error).__name__


def _warn_if_readable_by_all(path: str) -> None:
    if path and os.stat(path).st_mode & stat.S_IROTH:
        log.warning("the private key %s can be read by every user of this machine; its mode should be 0600", path)
