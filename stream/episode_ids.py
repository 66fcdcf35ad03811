"""Names of episodes."""

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EpisodeIds:
    """Names a lane's episodes: unique to the run, and the same in every run of one seed.

    prefix    of the lane, and of no other
    """

    prefix: str

    def __call__(self, slot: int, number: int) -> str:
        """The id of the episode of a slot that had so many before."""
        return hashlib.blake2b(f"{self.prefix}/{slot}/{number}".encode(), digest_size=16).hexdigest()
