"""Rollouts over remote environments for tests, and the laws that hold whatever becomes of the hosts."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from doomed import lives_of, rewards_by_slot
from numbered import NumberedEnv, NumberedModule

from rollflow.nodes import RemoteEnvs, Rollout
from rollflow.stream import Fragment
from rollflow.stream.wire import Limits

HASTY = Limits(heartbeat_s=0.3, grace_s=0.5, handshake_s=2.0)


def makers(*slots: int, **options: Any) -> list[Any]:
    return [partial(NumberedEnv, slot, **options) for slot in slots]


def told(*slots: int, **options: Any) -> list[Any]:
    """The same for another process."""
    return [((slot,), options) for slot in slots]


def rollout_over(envs: RemoteEnvs, **options: Any) -> Rollout:
    return Rollout(envs, module=NumberedModule(), **{"fragment_length": 8, "seed": 0, **options})


def slots_of(fragments: list[Fragment]) -> set[int]:
    return set(rewards_by_slot(fragments))


def taken_until(fragments: Iterator[Fragment], enough: Callable[[list[Fragment]], bool]) -> list[Fragment]:
    taken: list[Fragment] = []
    while not enough(taken):
        taken.append(next(fragments))
    return taken


def check_laws(fragments: list[Fragment], lost: dict[str, int], slots_lost: int) -> None:
    """Steps of a life are there from the first on, without gap or repeat; chunks join; no more is lost than is told."""
    by_slot: dict[int, list[Any]] = {}
    for fragment in sorted(fragments, key=lambda fragment: (fragment.lane, fragment.sequence)):
        for chunk in fragment.episodes():
            by_slot.setdefault(int(chunk.get_observations(0)[0]), []).append(chunk)
    for steps in rewards_by_slot(fragments).values():
        lives_of(steps)
    for chunks in by_slot.values():
        for before, after in pairwise(chunks):
            assert (before.id_ == after.id_) == (not before.is_done)
            if before.id_ == after.id_:
                assert after.t_started == before.t_started + len(before)
        for chunk in chunks:
            observations = chunk.get_observations(slice(0, None))
            assert observations[:, 2].tolist() == list(range(chunk.t_started, chunk.t_started + len(chunk) + 1))
            np.testing.assert_array_equal(chunk.get_extra_model_outputs("seen"), observations[:-1])
    assert set(lost) <= {"workers", "closed"}
    assert lost.get("workers", 0) <= slots_lost
