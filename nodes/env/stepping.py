"""One vector step, in any autoreset mode, as a lane records it.

All three of gymnasium's modes come to the same episodes. Under NEXT_STEP the step after an end only resets: a lane
assumes it if a step gives no last observations.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import iterate
from numpy.typing import NDArray
from optree import PyTreeSpec

from rollflow.nodes.env.env_state import check_states, recorded, recorded_as_needed, restored, states_of
from rollflow.nodes.env.observation_check import (
    CHECKED_STEPS,
    STEP_GIVES,
    Deviations,
    ObservationCheck,
    ObservationRows,
    check_reset,
    info_given,
    kind_of,
    misfit_of,
    refuse_misfit,
    rewards_of,
)
from rollflow.stream.data.closing import close_all
from rollflow.stream.data.errors import EnvError
from rollflow.stream.data.infos import SlotInfos, replaced, without
from rollflow.stream.data.space import is_columnar, item_of
from rollflow.stream.data.tree import Tree, concatenate_trees, leaves_of, library_of, map_tree, stack_in, structure_of
from rollflow.stream.graph.seeding import env_seed_for

logger = logging.getLogger(__name__)

_STEP_GIVES = f"if that is step's: each environment's gives ({', '.join(STEP_GIVES)}), the info a dict"
_RESET_GIVES = "if that is reset's: each environment's takes seed and options by name, and gives (observation, info)"


class Stepped(NamedTuple):
    """The results of a vector step."""

    observations: Tree  # any[N, ...]
    rewards: NDArray[Any]  # number[N]
    terminateds: NDArray[np.bool_]  # bool[N]
    truncateds: NDArray[np.bool_]  # bool[N]
    infos: Mapping[str, Any]  # gymnasium's vector form, or SlotInfos
    # Last observations any[K, ...] of the K slots that ended, in new arrays, and infos, where `observations` has the
    # next episodes' first.
    final: tuple[Tree, Mapping[str, Any]] | None = None


Turn = Callable[[], None]
Look = Callable[[int, tuple[Any, ...], str], None]  # (slot, answer of its `step` or `reset`, which of them)
Named = Callable[[int], str]  # names the slot at a place
Step = Callable[[Tree], Stepped]  # see `LaneVectorEnv.step`


def nothing() -> None:
    """Do nothing."""


class SideBySide(SyncVectorEnv):
    """Plain environments that rollflow has put side by side: no other code steps or closes them."""

    def close_extras(self, **kwargs: Any) -> None:
        """Close every environment, also if one raises; then raise the first error."""
        self.closed = True  # no more is done for those that can't be closed
        close_all((f"the environment in slot {slot}", env.close) for slot, env in enumerate(self.envs))


class LaneVectorEnv:
    """A vector environment as a lane takes it: resets by seeds, vector steps in any autoreset mode, checks of both.

    Only a `SideBySide` may be stepped without its own `step`: one that comes from elsewhere may do anything there.

    deviations    of what it gives
    where         place, at the beginning of texts about those
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], *, deviations: Deviations, where: str = "") -> None:
        self.env, self.num_envs = env, env.num_envs
        self._mode = autoreset_mode(env)
        self._is_one_by_one = isinstance(env, SideBySide)  # and not by its own `step` and `reset`
        self._gives_tensors = False
        space = env.single_observation_space
        self._check = ObservationCheck(space, deviations, where)
        # What is reset and stepped one by one: the environments, or what records their steps.
        self._each: list[Any] = list(cast("SyncVectorEnv", env).envs) if self._is_one_by_one else [env]
        self._drops_records = False
        self.tell_resets(nothing)

    def tell_resets(self, turn: Turn) -> bool:
        """Have a function called when a reset within a step begins, and when it has ended.

        False: its own `step` resets it, so that a reset can't be told from a step.
        """
        self._turn, self._steps_made = turn, 0
        if self._is_one_by_one:
            self._calls = [each.step for each in self._each], [each.reset for each in self._each]
            self._step = _one_after_the_other(self.env, *self._calls, self._mode, turn, self._check.answer)
        else:
            self._step = _STEPS[self._mode](self.env, turn)
        return self._is_one_by_one or self._mode is AutoresetMode.DISABLED

    def reset(self, seeds: Sequence[int] | None, options: Any = None) -> tuple[Tree, Mapping[str, Any]]:
        """Reset every slot with a seed of its own; see `reset_with`."""
        self.tell_resets(self._turn)  # by steps that know of no end of an episode before it
        if self._is_one_by_one:
            observations, infos = _reset_each(self.env, self._each, seeds, options, self._check.answer)
        else:
            observations, infos = reset_with(self.env, seeds, options)
            self._note_tensors(observations)
        self._check.slots(observations, dtypes=not self._is_one_by_one)
        if self._drops_records:
            self._drops_records, self._each = False, recorded_as_needed(self._each)
            self.tell_resets(self._turn)
        return observations, infos

    def record_actions(self) -> None:
        """Record the steps of environments whose state can't be read, so that others can be stepped to the same."""
        if self._is_one_by_one:
            self._each, self._drops_records = recorded(self._each), True

    def get_state(self) -> list[dict[str, Any]]:
        """The state of each environment: see `states_of`."""
        return states_of(self._each)

    def set_state(self, states: Sequence[Mapping[str, Any]], seeds: Sequence[int], ended: Sequence[int]) -> None:
        """Go on from what `get_state` gave. Raises EnvError if an environment can't.

        seeds    of a reset before: what that makes is there then
        ended    slots that the next step only resets
        """
        check_states(states, len(self._each))
        self.reset(seeds)
        self._each = list(map(restored, self._each, states, range(len(states))))
        self.tell_resets(self._turn)
        if self._is_one_by_one and self._mode is AutoresetMode.NEXT_STEP:
            for slot in ended:
                _reset_in_next_step(*self._calls, slot, self._turn)

    def step(self, actions: Tree) -> Stepped:
        """Step with actions any[N, ...]: `Stepped`, or gymnasium's tuple, which lacks `final`."""
        try:
            stepped = self._step(actions)
        except (AttributeError, TypeError, ValueError) as error:
            if not (self._is_one_by_one or isinstance(error, EnvError)):
                refuse_misfit(self.env, error)
                error.add_note(_STEP_GIVES)
                if self._gives_tensors:
                    error.add_note(
                        "it gives tensors, and was given arrays: to step it in tensors, write TorchEnvs(env)"
                    )
            raise
        if self._steps_made in CHECKED_STEPS:
            self._check.slots(stepped[0], self._steps_made, dtypes=not self._is_one_by_one)
        self._steps_made += 1
        return stepped

    def slots(self, turns: Sequence[Turn], first: int = 0) -> list["OneSlot"]:
        """Its environments, to be stepped each on its own. Raises EnvError for any but plain ones side by side.

        first    number of the first one
        turns    one for each, called when a reset within a step begins, and when it has ended
        """
        if not self._is_one_by_one:
            raise EnvError(
                f"{self.env} is a vector environment, whose slots step together; expected a callable that makes a "
                "plain one, or lanes=…, a vector environment each"
            ).see("environment")
        last_of = ObservationRows(self.env.single_observation_space)
        return [
            OneSlot(self, place, first + place, self._mode, self._check.answer, last_of, turn)
            for place, turn in enumerate(turns)
        ]

    def begun(self, place: int, state: Mapping[str, Any] | None) -> Any:
        """What is stepped of an environment that has been reset, and goes on from its state; None: from that reset.

        Raises EnvError if it can't.
        """
        if self._drops_records:
            (self._each[place],) = recorded_as_needed([self._each[place]])
        if state is not None:
            check_states([state], 1)
            self._each[place] = restored(self._each[place], state, place)
        return self._each[place]

    def close(self) -> None:
        """Close the environments."""
        self.env.close()

    def _note_tensors(self, observations: Tree) -> None:
        """Note that observations are tensors. Raises EnvError if they are not in this machine's memory."""
        tensors = [leaf for leaf in leaves_of(observations) if library_of(leaf) is not np]
        self._gives_tensors = bool(tensors)
        away = next((leaf for leaf in tensors if leaf.device.type != "cpu"), None)
        if away is not None:
            raise EnvError(
                f"{self.env}: reset gave tensors on {away.device}, expected arrays; for an environment of tensors "
                "write TorchEnvs(env)"
            ).see("environment")


SlotAnswer = tuple[Any, Any]
"""What `step` of one environment gave; and of an episode that it ended the last observation any[1, ...] and the info,
where those that it gave are of the next one's reset."""


class Beginning(NamedTuple):
    """How an environment begins."""

    seed: int  # of a reset
    state: Mapping[str, Any] | None = None  # that it goes on from, as `states_of` gave it; None: a first episode begins
    resets_next: bool = False  # whether its next step only resets it


class OneSlot:
    """One of several environments, each of which is reset and stepped on its own, in whichever thread.

    envs       has it, at a place
    look       is given the first answers
    last_of    makes rows of last observations
    turn       is called when a reset within a step begins, and when it has ended
    """

    def __init__(
        self,
        envs: LaneVectorEnv,
        place: int,
        slot: int,
        mode: AutoresetMode,
        look: Look,
        last_of: ObservationRows,
        turn: Turn,
    ) -> None:
        self.slot, self._resets_next, self._last_of, self._turn = slot, mode is AutoresetMode.NEXT_STEP, last_of, turn
        self._envs, self._place, self._look = envs, place, look
        self._steps: dict[int, Any] = {}
        self._resets: dict[int, Any] = {}

    def begin(self, asked: Beginning) -> SlotAnswer | str | None:
        """Reset it: what a step would have given. None: it goes on from its state; a text: why it can't."""
        slot, reset = self.slot, self._envs._each[self._place].reset
        answer = _reset_slot(partial(reset, seed=asked.seed, options=None), slot, nothing)
        self._look(slot, answer, "the first reset")
        try:
            env = self._envs.begun(self._place, asked.state)
        except EnvError as error:
            return str(error)
        self._steps, self._resets = {slot: env.step}, {slot: env.reset}
        _look_once(self._steps, slot, self._look, "its first step", len(STEP_GIVES))
        _look_once(self._resets, slot, self._look, "a reset", 2)
        if asked.resets_next:
            _reset_in_next_step(self._steps, self._resets, slot, self._turn)
        return None if asked.state is not None else ((answer[0], 0.0, False, False, answer[1]), None)

    def step(self, action: Tree) -> SlotAnswer:
        """Step it with an action, any[...]. What is no such answer as it should be is given on as it is."""
        slot = self.slot
        answer = self._steps[slot](action)
        try:
            _, _, terminated, truncated, info = answer
            if not (terminated or truncated):
                return answer, None
        except (TypeError, ValueError):
            return answer, None
        if self._resets_next:
            _reset_in_next_step(self._steps, self._resets, slot, self._turn)
            return answer, None
        final = self._last_of([answer[0]], lambda _: f"slot {slot}"), dict(info or {})
        observation, info = _reset_slot(self._resets[slot], slot, self._turn)
        return (observation, answer[1], terminated, truncated, info), final


def seeds_for(seed: int, first_slot: int, num_envs: int) -> list[int]:
    """Seeds of so many slots, 0 … 2**31 - 1, from the rollout's seed and the number of the first slot."""
    return [env_seed_for(seed, "env", first_slot + slot) for slot in range(num_envs)]


def reset_with(
    env: VectorEnv[Any, Any, Any], seeds: Sequence[int] | None, options: Any = None
) -> tuple[Tree, Mapping[str, Any]]:
    """Reset every slot with a seed of its own; `seeds` None: go on with the generators."""
    seed: Any = None if seeds is None else list(seeds)
    if seed is not None and takes_one_seed(env):
        seed = seed[0]
    try:
        answer = env.reset(seed=seed, options=options)
    except (AttributeError, TypeError, ValueError) as error:
        refuse_misfit(env, error)
        error.add_note(_RESET_GIVES)
        raise
    check_reset(answer, env, "a tuple (observations, infos)")
    observations, infos = answer
    return observations, infos


def takes_one_seed(env: VectorEnv[Any, Any, Any]) -> bool:
    """True if a vector environment has one generator for all of its slots, and not one for each.

    A stand-in for environments that are elsewhere says so itself.
    """
    vector = env.unwrapped
    return bool(getattr(vector, "takes_one_seed", not isinstance(vector, SyncVectorEnv | AsyncVectorEnv)))


def autoreset_mode(env: VectorEnv[Any, Any, Any]) -> AutoresetMode:
    """The environment's mode. Raises EnvError if its metadata have none."""
    mode = env.metadata.get("autoreset_mode")
    if not isinstance(mode, AutoresetMode):
        tensors = "; for an environment of tensors write TorchEnvs(env)" if hasattr(env, "device") else ""
        raise EnvError(
            f"{env}: metadata['autoreset_mode'] is {mode!r}, expected a gymnasium.vector.AutoresetMode: "
            f"without it the end of an episode can't be told from the start of the next{tensors}"
        )
    return mode


def _reset_each(
    env: VectorEnv[Any, Any, Any], envs: Sequence[Any], seeds: Sequence[int] | None, options: Any, look: Look
) -> tuple[Tree, Mapping[str, Any]]:
    """Reset the environments of a `SideBySide`, without its `reset`'s copies and infos."""
    observations: list[Tree] = []
    infos: list[Any] = []
    each_seed: Sequence[int | None] = [None] * env.num_envs if seeds is None else seeds
    for slot, (each, seed) in enumerate(zip(envs, each_seed, strict=True)):
        answer = _reset_slot(partial(each.reset, seed=seed, options=options), slot, nothing)
        look(slot, answer, "the first reset")
        observations.append(answer[0])
        infos.append(answer[1])
    space = env.single_observation_space
    return _stacked(observations, space, _structure_in(space)), _vector_infos(infos)


def _one_after_the_other(
    env: VectorEnv[Any, Any, Any], steps: list[Any], resets: list[Any], mode: AutoresetMode, turn: Turn, look: Look
) -> Step:
    """Step the environments of a `SideBySide`, without its `step`'s copies and infos.

    steps, resets    calls that step and reset each slot

    Under NEXT_STEP the next step of a slot that is done resets it; under the other modes it is reset at once.
    """
    space, seen = env.action_space, env.single_observation_space
    structure, resets_next = _structure_in(seen), mode is AutoresetMode.NEXT_STEP
    last_of = ObservationRows(seen)
    for slot in range(len(steps)):
        _look_once(steps, slot, look, "its first step", len(STEP_GIVES))
        _look_once(resets, slot, look, "a reset", 2)

    def step(actions: Tree) -> Stepped:
        taken: list[Any] = []
        try:
            each = actions if isinstance(actions, np.ndarray) else iterate(space, actions)
            for step_slot, action in zip(steps, each, strict=True):
                taken.append(step_slot(action))
        except EnvError:  # which names the slot
            raise
        except Exception as error:
            error.add_note(f"slot {len(taken)}")
            raise
        observations, rewards, terminateds, truncateds, infos = columns_of(taken)
        done = np.logical_or(terminateds, truncateds)
        final = None
        if 1 in done.tobytes():
            if resets_next:
                for slot in np.flatnonzero(done).tolist():
                    _reset_in_next_step(steps, resets, slot, turn)
            else:
                final = _begun_anew(resets, done, observations, infos, last_of, turn)
        return Stepped(
            _stacked(observations, seen, structure),
            rewards_of(rewards),
            terminateds,
            truncateds,
            _vector_infos(infos),
            final,
        )

    return step


def joiner_of_slots(space: gym.Space[Any]) -> Callable[[Sequence[int], Sequence[SlotAnswer]], Stepped]:
    """A function that joins answers of some slots, with observations in a space: of the slots, and what they gave.

    It raises EnvError, with the slot, for what is no answer.
    """
    structure = _structure_in(space)

    def joined(slots: Sequence[int], answers: Sequence[SlotAnswer]) -> Stepped:
        given, finals = zip(*answers, strict=True)

        def whose(place: int) -> str:
            return f"slot {slots[place]}"

        observations, rewards, terminateds, truncateds, infos = columns_of(given, whose)
        final = None
        if any(finals):
            last = concatenate_trees([each[0] for each in finals if each is not None])
            final = last, SlotInfos([{} if each is None else each[1] for each in finals])
        return Stepped(
            _stacked(observations, space, structure, whose),
            rewards_of(rewards, whose),
            terminateds,
            truncateds,
            _vector_infos(infos, whose),
            final,
        )

    return joined


def _vector_infos(infos: Sequence[Any], named: Named = "slot {}".format) -> Mapping[str, Any]:
    """Infos of every slot, each as its environment gave it; {} if all are empty. Raises EnvError for no dict."""
    try:
        return SlotInfos(infos) if any(infos) else {}
    except (TypeError, ValueError):
        return SlotInfos([info_given(info, named(slot)) for slot, info in enumerate(infos)])


def _reset_slot(reset: Callable[[], Any], slot: int, turn: Turn) -> tuple[Any, ...]:
    """Reset one environment: (observation, info). Raises EnvError, which names the slot, for anything else."""
    turn()
    try:
        answer = reset()
    except Exception as error:
        error.add_note(f"slot {slot}")
        if isinstance(error, TypeError | ValueError):
            error.add_note(_RESET_GIVES)
        raise
    finally:
        turn()
    check_reset(answer, f"slot {slot}")
    return tuple(answer)


def _reset_in_next_step(steps: Any, resets: Any, slot: int, turn: Turn) -> None:
    """Have the next of the calls `steps` of a slot reset it."""
    call = steps[slot]

    def begin(_: Any) -> tuple[Any, ...]:
        steps[slot] = call
        observation, info = _reset_slot(resets[slot], slot, turn)
        return observation, 0.0, False, False, info

    steps[slot] = begin


def _look_once(calls: Any, slot: int, look: Look, name: str, size: int) -> None:
    """Have the first answer of one of the calls looked at, if it is a tuple of that size; later ones cost nothing."""
    call = calls[slot]

    def looked_at(*args: Any) -> Any:
        calls[slot] = call
        answer = call(*args)
        if isinstance(answer, tuple) and len(answer) == size:
            look(slot, answer, name)
        return answer

    calls[slot] = looked_at


def columns_of(
    taken: Sequence[Any], named: Named = "slot {}".format
) -> tuple[list[Tree], Sequence[Any], NDArray[np.bool_], NDArray[np.bool_], list[Any]]:
    """The results of every slot's step, item by item. Raises EnvError, with the slot's name, for other than five."""
    try:
        observations, rewards, terminateds, truncateds, infos = zip(*taken, strict=True)
    except (TypeError, ValueError):
        for slot, answer in enumerate(taken):
            if not isinstance(answer, Sequence) or len(answer) != len(STEP_GIVES):
                expected = f"expected a tuple of {len(STEP_GIVES)}: {', '.join(STEP_GIVES)}"
                raise EnvError(f"{named(slot)}: step gave {kind_of(answer)}, {expected}").see("flags") from None
        raise
    return (
        list(observations),
        rewards,
        _flags(terminateds, "terminated", named),
        _flags(truncateds, "truncated", named),
        list(infos),
    )


def _flags(values: Sequence[Any], name: str, named: Named) -> NDArray[np.bool_]:
    try:
        flags = np.array(values, np.bool_)
    except ValueError:  # of different shapes
        flags = np.empty((0, 0), np.bool_)
    if flags.ndim == 1:
        return flags
    slot = next(slot for slot, each in enumerate(values) if np.ndim(each))
    raise EnvError(f"{named(slot)}: {name} has shape {list(np.shape(values[slot]))}, expected one bool").see("flags")


def _begun_anew(
    resets: Sequence[Callable[[], Any]],
    done: NDArray[np.bool_],
    observations: list[Tree],
    infos: list[Any],
    last_of: ObservationRows,
    turn: Turn,
) -> tuple[Tree, SlotInfos]:
    """Reset the slots that are done; return their last observations and infos.

    observations, infos    of all slots; those of the slots that are done are replaced by the resets'
    last_of                makes rows of last observations
    """
    slots = done.nonzero()[0].tolist()
    last = last_of(
        [observations[slot] for slot in slots], lambda place: f"slot {slots[place]}"
    )  # before the resets, which may write over them
    last_infos: list[dict[str, Any]] = [{}] * len(resets)
    for slot in slots:
        last_infos[slot] = dict(infos[slot] or {})
        observations[slot], infos[slot] = _reset_slot(resets[slot], slot, turn)
    return last, SlotInfos(last_infos)


def _structure_in(space: gym.Space[Any]) -> PyTreeSpec:
    """The structure of observations in a space, if an environment may give lists for arrays."""
    return structure_of(item_of(space) if is_columnar(space) else 0)


def _stacked(
    observations: list[Tree], space: gym.Space[Any], structure: PyTreeSpec, named: Named = "slot {}".format
) -> Tree:
    """One tree of new arrays any[N, ...] from the observations of all slots.

    Raises EnvError, with the slot, for observations that can't be stacked since one has no place in the space.
    """
    try:
        if isinstance(observations[0], np.ndarray):
            return np.array(observations)
        return stack_in(structure, observations)
    except (TypeError, ValueError, RuntimeError) as error:  # tensors raise others than numpy
        for slot, observation in enumerate(observations):
            if (text := misfit_of(space, observation)) is not None:
                raise EnvError(f"{named(slot)}: {text}").see("spaces") from error
        raise


def _same_step(env: VectorEnv[Any, Any, Any], turn: Turn) -> Step:
    """SAME_STEP: an ended episode's last observation is in `infos["final_obs"]`."""

    last_of = ObservationRows(env.single_observation_space)

    def step(actions: Tree) -> Stepped:
        observations, rewards, terminateds, truncateds, infos = env.step(actions)
        final = None
        if np.count_nonzero(terminateds) or np.count_nonzero(truncateds):
            slots = np.logical_or(terminateds, truncateds).nonzero()[0]
            final = _final_rows(infos, slots, last_of), infos.get("final_info", {})
        kept = without(infos, "final_obs", "final_info")
        return Stepped(observations, rewards, terminateds, truncateds, kept, final)

    return step


def _disabled(env: VectorEnv[Any, Any, Any], turn: Turn) -> Step:
    """DISABLED: nothing resets by itself; the ended episodes' slots are reset right here."""

    def step(actions: Tree) -> Stepped:
        observations, rewards, terminateds, truncateds, infos = env.step(actions)
        done = np.logical_or(terminateds, truncateds)
        if not np.count_nonzero(done):
            return Stepped(observations, rewards, terminateds, truncateds, infos)
        rewards, terminateds, truncateds = rewards.copy(), terminateds.copy(), truncateds.copy()
        last = map_tree(lambda leaf: leaf[done], observations)
        turn()
        try:
            observations, reset_infos = reset_with(env, None, {"reset_mask": done})
        finally:
            turn()
        merged = replaced(infos, reset_infos, done)
        return Stepped(observations, rewards, terminateds, truncateds, merged, (last, infos))

    return step


_STEPS: Mapping[AutoresetMode, Callable[[VectorEnv[Any, Any, Any], Turn], Step]] = {
    AutoresetMode.NEXT_STEP: lambda env, turn: cast("Step", env.step),  # without last observations
    AutoresetMode.SAME_STEP: _same_step,
    AutoresetMode.DISABLED: _disabled,
}


def _final_rows(infos: Mapping[str, Any], slots: NDArray[np.int64], last_of: ObservationRows) -> Tree:
    """The last observations any[K, ...] of slots that ended, i64[K], in new arrays."""
    try:
        final = infos["final_obs"]
    except KeyError:
        raise EnvError(
            f"slots {slots.tolist()} ended under SAME_STEP autoreset, but infos has no 'final_obs': the last "
            "observations are lost; expected infos['final_obs'], observations any[N, ...], with the last one of each "
            "slot that ended, kept by the environment before it resets. To name another autoreset mode would not "
            "bring them back, and would lose a step of each episode"
        ).see("autoreset") from None
    if all(isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject for leaf in leaves_of(final)):
        return map_tree(lambda leaf: leaf[slots], final)
    each = slots.tolist()
    return last_of([map_tree(lambda leaf, i=i: leaf[i], final) for i in each], lambda place: f"slot {each[place]}")


def close_failed(env: Any) -> None:
    """Close environments; what that raises is logged."""
    try:
        env.close()
    except Exception as error:
        logger.warning("environments can't be closed: %s: %s", type(error).__name__, error, exc_info=error)
