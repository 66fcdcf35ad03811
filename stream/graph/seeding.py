"""Seeds: one integer seeds a run, and every slot, module and node has a random generator of its own.

A generator follows from a name, not from the order of creation, so that adding a node does not change the others.
"""

import zlib
from collections.abc import Sequence

import numpy as np


def fresh_seed() -> int:
    """A seed from the operating system, for a run without one; print it to repeat the run."""
    return int(np.random.SeedSequence().generate_state(1)[0])


def joint_seed(seeds: Sequence[int]) -> int:
    """One seed that follows from several."""
    return int(np.random.SeedSequence(list(seeds)).generate_state(1)[0])


def generator_for(seed: int, name: str, index: int = 0) -> np.random.Generator:
    """The random generator for `name`, number `index` of its kind."""
    return np.random.default_rng(_sequence(seed, name, index))


def seed_for(seed: int, name: str, index: int = 0) -> int:
    """An integer in 0 … 2**32 - 1 that seeds `name`, such as a torch generator; see `env_seed_for` for environments."""
    return int(_sequence(seed, name, index).generate_state(1)[0])


def env_seed_for(seed: int, name: str, index: int = 0) -> int:
    """An integer in 0 … 2**31 - 1 that an environment is reset with: many simulators keep seeds as int32."""
    return seed_for(seed, name, index) & 0x7FFFFFFF


def _sequence(seed: int, name: str, index: int) -> np.random.SeedSequence:
    return np.random.SeedSequence([seed, zlib.crc32(name.encode()), index])
