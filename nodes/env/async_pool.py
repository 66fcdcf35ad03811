"""Pools of environments that answer for whichever are ready, in EnvPool's asynchronous form."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from rollflow.nodes.env.env_state import check_states
from rollflow.nodes.env.observation_check import CHECKED_STEPS, STEP_GIVES, Deviations, ObservationCheck, kind_of
from rollflow.nodes.env.stepping import autoreset_mode
from rollflow.stream.data.errors import EnvError, shown
from rollflow.stream.data.infos import SlotInfos, copied, info_of
from rollflow.stream.data.tree import Tree
from rollflow.stream.fragments.ready_lane import SlotAnswers, joined_answers

_BOOKKEEPING = {"env_id", "players", "elapsed_step"}  # of infos: no environment's own
# Arrays [K] of an answer: name, dtype, and the kinds of dtypes that are taken for it.
_ARRAYS = (
    ("reward", "number", "fiub"),
    ("terminated", "bool", "b"),
    ("truncated", "bool", "b"),
    ("info['env_id']", "int", "iu"),
)


class AsyncPool:
    """A vector environment that also has `async_reset`, `send` and `recv`, as a lane takes it.

    `send(actions, ids)` has the environments of these ids make a step each, and `recv()` gives the answers of the next
    `config["batch_size"]` that are ready, in new arrays, with their ids in `info["env_id"]`. An environment resets in
    the step after an end.

    deviations    of what it gives
    where         place, at the beginning of texts about those

    Raises EnvError for another autoreset mode, for a wrapper, which `send` and `recv` would pass by, and if the
    environments are not so many batches.
    """

    def __init__(self, env: Any, *, deviations: Deviations, where: str = "") -> None:
        self.env, self.num_envs = env, env.num_envs
        self._pool = env.unwrapped
        self._size = int(self._pool.config["batch_size"])
        self._shape = (self._size,)
        self._dtypes: tuple[Any, ...] = ()  # of an answer's arrays; (): none has come
        self._where = where
        self._awaited: set[int] = set()  # slots that are under way
        self._answers = 0  # since the first resets
        if env is not env.unwrapped:
            raise EnvError(
                f"{where}{type(env).__name__} wraps an asynchronous pool, whose send and recv would pass it by; "
                "expected the pool itself, and connector pieces in place of a wrapper"
            ).see("autoreset")
        if self.num_envs % self._size:
            raise EnvError(
                f"{where}num_envs is {self.num_envs} and batch_size is {self._size}: answers come in batches of that "
                "size alone, and all are awaited where a fragment ends; expected num_envs to be a multiple of it"
            ).see("autoreset")
        if (mode := autoreset_mode(env)) is not AutoresetMode.NEXT_STEP:
            raise EnvError(f"{where}autoreset_mode is {mode}, expected NEXT_STEP of environments with send and recv")
        self._check = ObservationCheck(env.single_observation_space, deviations, where)

    def reset(self, seeds: Sequence[int] | None) -> tuple[Tree, Mapping[str, Any]]:
        """Reset every slot: the first observations any[N, ...], and infos. Seeds are the pool's own, of its making."""
        self._pool.async_reset()
        self._awaited, self._answers = set(range(self.num_envs)), -self.num_envs
        answers = [self.receive() for _ in range(self.num_envs // self._size)]
        _, observations = joined_answers([(each.slots, each.observations) for each in answers], self.num_envs)
        infos = SlotInfos(count=self.num_envs)
        for each in answers:
            for place, slot in enumerate(each.slots.tolist() if each.infos else ()):
                infos.of_slots[slot] = copied(info_of(each.infos, place))
        self._check.slots(observations)
        return observations, infos

    def step(self, actions: tuple[NDArray[np.int64], Tree]) -> SlotAnswers:
        """Send actions: slots, i64[K], and a tree of arrays any[K, ...]. Receive the answers that are ready next."""
        slots, values = actions
        self._awaited.update(slots.tolist())
        self._pool.send(values, slots)
        return self.receive()

    def receive(self) -> SlotAnswers:
        """Receive the answers that are ready next, of slots that are under way. Raises EnvError for anything else."""
        answer = self._pool.recv()
        try:
            observations, rewards, terminateds, truncateds, infos = answer
            ids, shape = infos["env_id"], self._shape
            dtypes: tuple[Any, ...] = rewards.dtype, terminateds.dtype, truncateds.dtype, ids.dtype
            is_known = shape == rewards.shape == terminateds.shape == truncateds.shape == ids.shape
        except Exception:
            is_known, dtypes = False, ()
        if not is_known or dtypes != self._dtypes:
            self._check_form(answer)
            self._dtypes = dtypes
        slots = ids.astype(np.int64)
        came = set(slots.tolist())
        if len(came) < self._size or not came <= self._awaited:
            raise self._wrong_ids(slots)
        self._awaited -= came
        step, self._answers = self._answers // self.num_envs, self._answers + self._size
        if step in CHECKED_STEPS:
            self._check.slots(observations, step, slots)
        is_all = infos.keys() <= _BOOKKEEPING
        kept = {} if is_all else {name: value for name, value in infos.items() if name not in _BOOKKEEPING}
        return SlotAnswers(observations, rewards, terminateds, truncateds, kept, slots)

    def record_actions(self) -> None:
        """Record nothing: a pool steps its environments itself."""

    def get_state(self) -> list[dict[str, Any]]:
        """Of each environment why it begins anew."""
        return [{"restart": f"{type(self.env).__name__} does not say the states of its environments"}] * self.num_envs

    def set_state(self, states: Sequence[Mapping[str, Any]], *of_others: Any) -> None:
        """Raise EnvError, with the reason that `get_state` has given."""
        check_states(states, self.num_envs)

    def close(self) -> None:
        """Close the environments."""
        self.env.close()

    def _check_form(self, answer: Any) -> None:
        """Raise EnvError for what is not five values with arrays of K values each."""
        if not isinstance(answer, tuple | list) or len(answer) != len(STEP_GIVES):
            expected = f"a tuple of {len(STEP_GIVES)}: {', '.join(STEP_GIVES)}"
            raise EnvError(f"{self._where}recv gave {kind_of(answer)}, expected {expected}").see("flags")
        infos = answer[-1]
        if not isinstance(infos, Mapping) or "env_id" not in infos:
            given = f"a dict with {shown(list(infos))}" if isinstance(infos, Mapping) else kind_of(infos)
            raise EnvError(f"{self._where}recv gave as info {given}, expected a dict with 'env_id'").see("autoreset")
        for value, (name, dtype, kinds) in zip((*answer[1:4], infos["env_id"]), _ARRAYS, strict=True):
            if not isinstance(value, np.ndarray) or value.shape != self._shape or value.dtype.kind not in kinds:
                expected = f"an array {dtype}[{self._size}], since batch_size is {self._size}"
                raise EnvError(f"{self._where}recv gave as {name} {kind_of(value)}, expected {expected}").see("flags")

    def _wrong_ids(self, slots: NDArray[np.int64]) -> EnvError:
        """The error for answers of slots that are not under way, or are there twice."""
        return EnvError(
            f"{self._where}recv gave as info['env_id'] {shown(slots.tolist())}, expected {self._size} different ones, "
            f"of the environments that have not answered since their last action: {shown(sorted(self._awaited))}"
        ).see("autoreset")


def is_asynchronous(env: Any) -> bool:
    """True if a vector environment, or what it wraps, answers for some of its environments at a time."""
    config = getattr(env.unwrapped, "config", None)
    has_form = all(hasattr(env.unwrapped, name) for name in ("async_reset", "send", "recv"))
    return has_form and isinstance(config, Mapping) and 0 < config.get("batch_size", 0) < env.num_envs
