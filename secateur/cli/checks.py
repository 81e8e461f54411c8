"""Checks that commands run before they start anything."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from secateur.errors import ConfigError
from secateur.flags import engine_args_from

if TYPE_CHECKING:  # pydantic takes longer to import than --help may take
    from secateur.config import EngineArgs


def checked(flags: dict[str, Any], **more: Any) -> EngineArgs:
    """Return valid engine arguments whose local files exist. Raises ConfigError."""
    from secateur.config import resolve_model
    from secateur.local_files import check_files

    flags = {**flags, **{key: value for key, value in more.items() if value is not None}}
    for name in ("api_key_file", "batch_dir", "ssl_certfile", "ssl_keyfile"):
        if flags.get(name) is not None:  # the service may run in another folder
            flags[name] = os.path.abspath(os.path.expanduser(flags[name]))
    args = engine_args_from(flags)
    if flags.get("api_key") is None and args.api_key_file is None and (key := os.environ.get("SECATEUR_API_KEY")):
        args = args.model_copy(update={"api_key": key})
    if args.admin_api_key is None and (key := os.environ.get("SECATEUR_ADMIN_API_KEY")):
        args = args.model_copy(update={"admin_api_key": key})
    if not os.environ.get("RAY_ADDRESS"):  # on a cluster, the files are on another machine
        check_files(args)
    resolve_model(args.model)
    if args.speculative_config is not None and args.speculative_config.model is not None:
        resolve_model(args.speculative_config.model)
    return args


def check_none_given(engine: dict[str, Any]) -> None:
    """Raise ConfigError if engine flags are given with --base-url, where they have no effect."""
    if given := sorted({name.removesuffix("_keys") for name, value in engine.items() if value is not None}):
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ConfigError(f"{flags}: for a service started here, which --base-url replaces; remove one of them")
