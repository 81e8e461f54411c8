"""The files and folders that the settings of a service name, checked before anything starts."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from secateur.api_keys import check_api_keys
from secateur.config import EngineArgs, read_text
from secateur.errors import ConfigError, Problem

BATCH_DIR, CERTIFICATE, KEY = "batch_dir", "ssl_certfile", "ssl_keyfile"


def check_files(args: EngineArgs) -> None:
    """Raise ConfigError unless the keys, the batch folder and the certificate that `args` names can be used."""
    if args.api_key_file:
        check_api_keys(args.api_key_file)
    if args.batch_dir:
        check_batch_dir(args.batch_dir)
    if args.ssl_certfile and args.ssl_keyfile:
        check_tls(args.ssl_certfile, args.ssl_keyfile)


def check_batch_dir(path: str | Path) -> None:
    """Raise ConfigError if the folder can be neither used nor made. Makes nothing."""
    found = Path(path)
    while not found.exists() and found != found.parent:
        found = found.parent
    if not found.is_dir():
        raise ConfigError(Problem(BATCH_DIR, f"{found} is a file; name a folder, which is made if it does not exist"))
    if not os.access(found, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(Problem(BATCH_DIR, f"{found} is not writable; change its owner, or name another folder"))


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
