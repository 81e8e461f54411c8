"""Checks that commands run before they start anything, and the error for missing packages."""

import os
from typing import Any

from secateur.api_keys import check_api_keys
from secateur.config import EngineArgs, resolve_model
from secateur.errors import ConfigError, SecateurError
from secateur.flags import engine_args_from
from secateur.install import install_command
from secateur.tls import check_tls


def checked(flags: dict[str, Any], **more: Any) -> EngineArgs:
    """Return valid engine arguments whose local files exist. Raises ConfigError."""
    flags = {**flags, **{key: value for key, value in more.items() if value is not None}}
    for name in ("api_key_file", "ssl_certfile", "ssl_keyfile"):  # the service may run in another folder
        if flags.get(name) is not None:
            flags[name] = os.path.abspath(os.path.expanduser(flags[name]))
    args = engine_args_from(flags)
    if flags.get("api_key") is None and args.api_key_file is None and (key := os.environ.get("SECATEUR_API_KEY")):
        args = args.model_copy(update={"api_key": key})
    is_local = not os.environ.get("RAY_ADDRESS")  # on a cluster, the file is on another machine
    if args.api_key_file is not None and is_local:
        check_api_keys(args.api_key_file)
    if args.ssl_certfile is not None and args.ssl_keyfile is not None and is_local:
        check_tls(args.ssl_certfile, args.ssl_keyfile)
    resolve_model(args.model)
    if args.speculative_config is not None and args.speculative_config.model is not None:
        resolve_model(args.speculative_config.model)
    return args


def check_none_given(engine: dict[str, Any]) -> None:
    """Raise ConfigError if engine flags are given beside --base-url, where they have no effect."""
    if given := sorted(name for name, value in engine.items() if value is not None):
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ConfigError(f"{flags}: for a service started here, which --base-url replaces; remove one of them")


def needs_extra(error: ModuleNotFoundError, *, or_base_url: bool = False) -> SecateurError:
    """Return the error for a missing package of the extra `serve`; with `or_base_url` it suggests --base-url too."""
    return SecateurError(
        f"this command needs {error.name!r}, which is not installed: {install_command('serve')}"
        + (" (or talk to a running service with --base-url)" if or_base_url else "")
    )
