"""Pools of environments that answer for whichever are ready, in EnvPool's asynchronous form."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from rollflow.nodes.env.observation_check import Deviations, LaneCheck
from rollflow.nodes.env.stepping import autoreset_mode
from rollflow.stream.data.errors import EnvError
from rollflow.stream.data.infos import SlotInfos, copied, info_of
from rollflow.stream.data.tree import Tree
from rollflow.stream.fragments.ready_lane import joined_answers

_BOOKKEEPING = ("env_id", "players", "elapsed_step")  # of infos: no environment's own


class SlotAnswers(NamedTuple):
    """Answers for K slots, as `ReadyLane.record_step` takes them."""

    observations: Tree  # any[K, ...]
    rewards: NDArray[Any]  # number[K]
    terminateds: NDArray[np.bool_]  # bool[K]
    truncateds: NDArray[np.bool_]  # bool[K]
    infos: Mapping[str, Any]  # gymnasium's vector form, over the K slots
    slots: NDArray[np.int64]  # i64[K]


class AsyncPool:
    """A vector environment that also has `async_reset`, `send` and `recv`, as a lane takes it.

    `send(actions, ids)` has the environments of these ids make a step each, and `recv()` gives the answers of the next
    `config["batch_size"]` that are ready, in new arrays, with their ids in `info["env_id"]`. An environment resets in
    the step after an end.

    deviations    of what it gives
    where         place, at the beginning of texts about those

    Raises EnvError for another autoreset mode, for a wrapper, which `send` and `recv` would pass by, and where the
    environments are not so many batches.
    """

    def __init__(self, env: Any, *, deviations: Deviations, where: str = "") -> None:
        self.env, self.num_envs = env, env.num_envs
        self._pool = env.unwrapped
        self._size = int(self._pool.config["batch_size"])
        if env is not env.unwrapped:
            raise EnvError(
                f"{where}{type(env).__name__} wraps an asynchronous pool, whose send and recv would pass it by; "
                "expected the pool itself, and connector pieces in place of a wrapper"
            ).see("environment")
        if self.num_envs % self._size:
            raise EnvError(
                f"{where}num_envs is {self.num_envs} and batch_size is {self._size}: answers come in batches of that "
                "size alone, and all are awaited where a fragment ends; expected num_envs to be a multiple of it"
            ).see("environment")
        if (mode := autoreset_mode(env)) is not AutoresetMode.NEXT_STEP:
            raise EnvError(f"{where}autoreset_mode is {mode}, expected NEXT_STEP of environments with send and recv")
        self._check = LaneCheck(env.single_observation_space, deviations, where)

    def reset(self, seeds: Sequence[int] | None) -> tuple[Tree, Mapping[str, Any]]:
        """Reset every slot: the first observations any[N, ...], and infos. Seeds are the pool's own, of its making."""
        self._pool.async_reset()
        answers = [self.receive() for _ in range(self.num_envs // self._size)]
        _, observations = joined_answers([(each.slots, each.observations) for each in answers])
        infos = SlotInfos(count=self.num_envs)
        self._check.rows(observations)
        for each in answers:
            for place, slot in enumerate(each.slots.tolist() if each.infos else ()):
                infos.of_slots[slot] = copied(info_of(each.infos, place))
        return observations, infos

    def step(self, actions: tuple[NDArray[np.int64], Tree]) -> SlotAnswers:
        """Send actions: slots, i64[K], and a tree of arrays any[K, ...]. Receive the answers that are ready next."""
        slots, values = actions
        self._pool.send(values, slots)
        return self.receive()

    def receive(self) -> SlotAnswers:
        """Receive the answers that are ready next, of slots that are under way."""
        observations, rewards, terminateds, truncateds, infos = self._pool.recv()
        kept = {name: value for name, value in infos.items() if name not in _BOOKKEEPING}
        return SlotAnswers(observations, rewards, terminateds, truncateds, kept, infos["env_id"].astype(np.int64))

    def close(self) -> None:
        """Close the environments."""
        self.env.close()


def is_asynchronous(env: Any) -> bool:
    """True if a vector environment, or what it wraps, answers for some of its environments at a time."""
    config = getattr(env.unwrapped, "config", None)
    has_form = all(hasattr(env.unwrapped, name) for name in ("async_reset", "send", "recv"))
    return has_form and isinstance(config, Mapping) and 0 < config.get("batch_size", 0) < env.num_envs
