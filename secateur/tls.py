"""The files of `--ssl-certfile` and `--ssl-keyfile`, checked before anything starts."""

from __future__ import annotations

import ssl

from secateur.config import read_text
from secateur.errors import ConfigError, Problem

CERTIFICATE, KEY = "ssl_certfile", "ssl_keyfile"


def check_tls(certfile: str, keyfile: str) -> None:
    """Raise ConfigError unless the files hold a PEM certificate, or a chain, and its key without a password."""
    if "-----BEGIN CERTIFICATE-----" not in read_text(certfile, CERTIFICATE):
        raise ConfigError(Problem(CERTIFICATE, f"{certfile} holds no PEM certificate (-----BEGIN CERTIFICATE-----)"))
    if "PRIVATE KEY-----" not in read_text(keyfile, KEY):
        raise ConfigError(Problem(KEY, f"{keyfile} holds no PEM key (-----BEGIN PRIVATE KEY-----)"))

    def no_password() -> str:  # OpenSSL would ask on the terminal
        raise ConfigError(Problem(KEY, f"{keyfile} is encrypted; write it without a password: openssl pkey -in FILE"))

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            told = f"{keyfile} is not the key of {certfile}; give the key that the certificate was made with"
            raise ConfigError(Problem(KEY, told)) from None
        raise ConfigError(Problem(CERTIFICATE, f"OpenSSL cannot use {certfile} with {keyfile}: {error}")) from None
