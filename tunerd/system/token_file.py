"""The file that holds the page's token: only its owner may read it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from tunerd.errors import ConfigError

LEAST_CHARACTERS = 16
_MAX_BYTES = 4096


def read_token(path: Path) -> str:
    """The token in a file.

    Raises:
        ConfigError: it cannot be read, others may read or write it, or it is too short to be secret.
    """
    make = f"make one: (umask 077; openssl rand -hex 32 > {path})"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"cannot read `{path}`", cause=error.strerror, hint=make) from error
    try:
        status = os.fstat(descriptor)
        content = os.read(descriptor, _MAX_BYTES) if stat.S_ISREG(status.st_mode) else b""
    finally:
        os.close(descriptor)
    if status.st_mode & 0o077 or status.st_uid not in {0, os.geteuid()}:
        raise ConfigError(
            f"others than its owner may read or change the token: `{path}`",
            cause=f"mode {stat.S_IMODE(status.st_mode):04o}, owner {status.st_uid}",
            hint=f"chmod 600 {path}",
        )
    token = content.decode("utf-8", "replace").strip()
    if len(token) < LEAST_CHARACTERS or not token.isprintable():
        raise ConfigError(
            f"the token is shorter than {LEAST_CHARACTERS} characters: `{path}`", hint=make
        )
    return token
