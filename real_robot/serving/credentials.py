"""Tokens by which clients of a server prove who they are: a secret in a file, sent in the header "Authorization"."""

from __future__ import annotations

import base64
import binascii
import os
import secrets
from pathlib import Path

from embodied.errors import UserError


def token(path: Path) -> str:
    """Read the token in `path`; if missing, write a new one that only the owner can read.

    Raises:
        UserError: if other users can read it, or it is empty.
    """
    if not path.exists():
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
    if path.stat().st_mode & 0o077:
        raise UserError(f"other users can read the token in {path}; run: chmod 600 {path}")
    if not (content := path.read_text(encoding="utf-8").strip()):  # as a full disk leaves it; it would admit everybody
        raise UserError(f"there is no token in {path}; delete it")
    return content


def sent_token(header: str) -> bytes:
    """Token in the header "Authorization", b"" if there is none; the scheme Basic has it as the password."""
    scheme, _, token = header.partition(" ")
    if scheme == "Basic":
        try:
            return base64.b64decode(token, validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return b""
    # websockets 15 and 16 read what is not ASCII as surrogates
    return token.strip().encode(errors="surrogateescape") if scheme in ("Bearer", "Api-Key") else b""
