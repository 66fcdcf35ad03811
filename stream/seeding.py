"""One integer seeds a whole run: every slot, module and node draws from a generator of its own.

A generator is named, not numbered in order of creation, so that adding a node does not reshuffle the others.
"""

import zlib

import numpy as np


def fresh_seed() -> int:
    """A seed from the operating system, for a run that was given none; print it to repeat the run."""
    return int(np.random.SeedSequence().generate_state(1)[0])


def generator_for(seed: int, name: str, index: int = 0) -> np.random.Generator:
    """The generator of the thing called `name`, number `index` of its kind."""
    return np.random.default_rng(_sequence(seed, name, index))


def seed_for(seed: int, name: str, index: int = 0) -> int:
    """An integer in 0 … 2**32 - 1 for what seeds itself: an environment's slot, a torch generator."""
    return int(_sequence(seed, name, index).generate_state(1)[0])


def _sequence(seed: int, name: str, index: int) -> np.random.SeedSequence:
    return np.random.SeedSequence([seed, zlib.crc32(name.encode()), index])
