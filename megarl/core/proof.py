"""Prove that a peer has a key, by an HMAC of a random challenge: the key itself is never sent."""

from __future__ import annotations

import hashlib
import hmac
import secrets


def challenge() -> str:
    return secrets.token_hex(16)


def prove(key: str, challenge: str, side: str) -> str:
    """Return the proof of one ``side`` of a connection; it is not valid for the other side."""
    return hmac.new(key.encode(), _bytes(f"megarl {side} {challenge}"), hashlib.sha256).hexdigest()


def is_proof(given: object, key: str, challenge: str, side: str) -> bool:
    return hmac.compare_digest(_bytes(str(given)), _bytes(prove(key, challenge, side)))


def _bytes(text: str) -> bytes:
    """Encode text, also with surrogates, which JSON may contain."""
    return text.encode("utf-8", "surrogatepass")
