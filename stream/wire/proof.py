"""How each side proves that it knows the secret, without sending it.

Both proofs cover the exact bytes of the Hello and of the Challenge, so the versions, the spaces and the random bytes of
both sides; and who it is that proves, so that one can't be sent back as the other.
"""

import hashlib
import hmac

HOST = b"rollflow host"
GATEWAY = b"rollflow gateway"


def transcript_of(hello: bytes, challenge: bytes) -> bytes:
    """SHA-256 over the frames of a Hello and a Challenge, their lengths included."""
    return hashlib.sha256(hello + challenge).digest()


def prove(secret: bytes | None, who: bytes, transcript: bytes) -> bytes:
    """HMAC-SHA256 with the secret over `who` (HOST or GATEWAY) and the transcript; nothing where there is no secret."""
    return b"" if secret is None else hmac.digest(secret, who + transcript, "sha256")


def is_proof(proof: bytes, secret: bytes | None, who: bytes, transcript: bytes) -> bool:
    """Whether this is what `prove` gives; how long it takes says nothing of how much of it is right."""
    return hmac.compare_digest(proof, prove(secret, who, transcript))
