"""Ctrl-C in a loop over a rollout: another loop goes on, and no transition is lost without being counted."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from lost_agents import not_emitted
from numbered_agents import NumberedAgents
from numbered_module import NumberedEnv, NumberedModule

from rollflow.nodes import ConnectorV2, MultiAgentRollout, MultiRLModule, Rollout
from rollflow.nodes.env.stepping import nothing
from rollflow.stream import RunError

Raise = Callable[[], None]


def press() -> None:
    """Raise KeyboardInterrupt once, as Ctrl-C does."""
    signal.raise_signal(signal.SIGINT)


def raise_itself() -> None:
    raise KeyboardInterrupt


class Interrupts:
    """Calls `way` at the calls of `here` with the numbers in `at`."""

    def __init__(self, way: Raise, at: set[int]) -> None:
        self.way, self.at, self.calls = way, at, 0

    def here(self) -> None:
        self.calls += 1
        if self.calls in self.at:
            self.way()


class InterruptedEnv(NumberedEnv):
    """Is interrupted before, or after, it has made a step, or in a reset."""

    interrupts: Interrupts
    point = ""

    def step(self, action: Any) -> Any:
        if self.point == "before the step":
            self.interrupts.here()
        stepped = super().step(action)
        if self.point == "after the step":
            self.interrupts.here()
        return stepped

    def reset(self, **kwargs: Any) -> Any:
        if self.point == "reset" and self.episode >= 0:
            self.interrupts.here()
        return super().reset(**kwargs)


class InterruptedModule(NumberedModule):
    """Is interrupted in its forward pass."""

    interrupts: Interrupts | None = None

    def __deepcopy__(self, memo: Any) -> "InterruptedModule":
        return self

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        output = super()._forward(batch, **kwargs)
        if self.interrupts is not None:
            self.interrupts.here()
        return output


class InterruptedPiece(ConnectorV2):
    """Is interrupted when it is called."""

    def __init__(self, interrupts: Interrupts) -> None:
        super().__init__()
        self.interrupts = interrupts

    def __call__(self, *, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        self.interrupts.here()
        return batch


POINTS = ["before the step", "after the step", "reset", "forward", "env_to_module", "module_to_env", "body", "learner"]
# Of four slots; a reset after an interrupt is interrupted in its turn, and then no step is under way.
UNDER_WAY = {"before the step": 12, "after the step": 12, "reset": 8}
WAYS: dict[str, dict[str, Any]] = {
    "inline": {},
    "not flat": {"flat_forward": False},
    "threads": {"where": "threads", "lanes": 3},
    "one pass for all": {"where": "threads", "lanes": 3, "max_batch": 4},
    "ahead": {"prefetch": 2},
    "event loop": {"where": "threads", "lanes": 3, "forward_in_thread": True},
}
ELSEWHERE = {"threads", "one pass for all", "ahead", "event loop"}  # what steps, or acts, is in another thread


def press_for_reader(reading: threading.Event) -> None:
    """Press Ctrl-C in another thread than the reader's, once this reads: it is the one to be interrupted."""
    reading.wait()
    os.kill(os.getpid(), signal.SIGINT)


def interrupted_rollout(point: str, interrupts: Interrupts, **options: Any) -> tuple[Rollout, list[InterruptedEnv]]:
    envs = [InterruptedEnv(slot) for slot in range(4)]
    for env in envs:
        env.interrupts, env.point = interrupts, point
    module = InterruptedModule(envs[0].observation_space, envs[0].action_space)
    module.interrupts = interrupts if point == "forward" else None
    for name, place in (("env_to_module", "env_to_module"), ("module_to_env", "module_to_env"), ("learner", "learner")):
        if point == name:
            options[f"{place}_connector"] = lambda *spaces: InterruptedPiece(interrupts)
    makers = [lambda env=env: env for env in envs]
    return Rollout(makers, module=module, fragment_length=8, seed=0, **options), envs


def read_on(
    rollout: Any, rounds: int, in_body: Raise, *, batches: bool = False, begin: Raise = nothing
) -> tuple[list[Any], int]:
    """Read so many rounds, in a new loop after each interrupt; the fragments, and how many interrupts there were."""
    read: list[Any] = []
    count = 0
    while True:
        try:
            begin()
            for item in rollout.batches() if batches else rollout.fragments():
                read.append(item)
                if len(read) >= rounds:
                    return read, count
                in_body()
            raise AssertionError("the loop has ended, expected it to go on")
        except KeyboardInterrupt:
            count += 1


def check_numbers(fragments: list[Any], envs: list[InterruptedEnv], rollout: Rollout) -> None:
    """Every fragment has come, and what the environments have made stands in one of them or is counted."""
    for lane in {fragment.lane for fragment in fragments}:
        numbers = [fragment.sequence for fragment in fragments if fragment.lane == lane]
        assert numbers == list(range(len(numbers)))
    handed = [
        (int(chunk.get_observations(0)[0]), float(reward))
        for fragment in fragments
        for chunk in fragment.episodes()
        for reward in chunk.get_rewards()
    ]
    assert len(set(handed)) == len(handed)
    made = {(env.slot, entry[3]) for env in envs for entry in env.log}
    assert set(handed) <= made
    lost = rollout.lost
    under_way = lost.get("interrupted", 0)
    assert len(made) <= len(handed) + sum(lost.values()) <= len(made) + under_way


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("point", POINTS)
def test_another_loop_goes_on_and_nothing_is_lost_without_being_counted(point: str, way: str) -> None:
    is_elsewhere = point not in ("body", "learner") and (
        (way in ELSEWHERE and point in POINTS[:3]) or way in ("ahead", "event loop")
    )
    reading = threading.Event()

    if is_elsewhere:  # Python raises no KeyboardInterrupt in other threads: their reader is the one to be interrupted
        interrupts = Interrupts(partial(press_for_reader, reading), {5})
    else:
        interrupts = Interrupts(press, {1, 2} if point in ("body", "learner") else {3, 4, 11})
    rollout, envs = interrupted_rollout(point, interrupts, **WAYS[way])
    with rollout:
        in_body = interrupts.here if point == "body" else nothing
        fragments, count = read_on(rollout, 30, in_body, batches=point == "learner", begin=reading.set)
    assert count == len(interrupts.at)
    if point != "learner":
        check_numbers(fragments, envs, rollout)
    if way in ("inline", "not flat"):
        assert rollout.lost.get("interrupted", 0) == UNDER_WAY.get(point, 0)


@settings(max_examples=30, deadline=None)
@given(gaps=st.lists(st.integers(2_000, 6_000), min_size=1, max_size=12))
def test_it_goes_on_from_whatever_line_it_was_interrupted_at(gaps: list[int]) -> None:
    interrupts = Interrupts(press, set(accumulate(gaps)))
    rollout, envs = interrupted_rollout("", interrupts)
    tracing = Tracing(interrupts)
    with rollout:
        try:
            fragments, count = read_on(rollout, 12, nothing, begin=tracing.begin)
        finally:
            sys.settrace(None)
    assert count == sum(line <= interrupts.calls for line in interrupts.at)
    assert count, "no line of a round's gathering was traced"
    check_numbers(fragments, envs, rollout)


class Tracing:
    """Has lines of rollflow's own count while a round is gathered."""

    def __init__(self, interrupts: Interrupts) -> None:
        self.interrupts = interrupts

    def begin(self) -> None:
        """Trace, once more where an interrupt has ended that."""
        self.is_gathering = False
        sys.settrace(self._trace)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith("rollflow."):
            return None
        if frame.f_code.co_name == "gather":
            self.is_gathering = event != "return"
        if self.is_gathering and event == "line":
            self.interrupts.here()
        return self._trace


@pytest.mark.parametrize("complete_episodes", [False, True])
def test_a_round_whose_batch_was_broken_off_is_handed_out_again(complete_episodes: bool) -> None:
    rollout, _ = interrupted_rollout("learner", Interrupts(press, {2, 3}), num_fragments=5)
    steps, count, has_ended = 0, 0, False
    with rollout:
        while not has_ended:
            try:
                for batch in rollout.batches(complete_episodes=complete_episodes):
                    steps += len(batch["rewards"])
                has_ended = True
            except KeyboardInterrupt:
                count += 1
    assert count == 2
    assert rollout.lost.keys() <= {"incomplete"}
    assert steps + rollout.lost.get("incomplete", 0) == rollout.num_steps


@pytest.mark.parametrize("point", ["before the step", "forward"])
def test_it_goes_on_after_a_keyboard_interrupt_that_is_raised_by_other_means(point: str) -> None:
    interrupts = Interrupts(raise_itself, {2, 7})
    rollout, envs = interrupted_rollout(point, interrupts)
    with rollout:
        fragments, count = read_on(rollout, 10, nothing)
    assert count == 2
    check_numbers(fragments, envs, rollout)


def test_an_episode_that_was_interrupted_ends_as_truncated_and_says_why() -> None:
    rollout, _ = interrupted_rollout("before the step", Interrupts(press, {14}))
    with rollout:
        fragments, _ = read_on(rollout, 3, nothing)
    lost = [chunk for each in fragments for chunk in each.episodes() if "lost" in chunk.custom_data]
    assert lost
    assert all(chunk.custom_data["lost"] == "the step was interrupted" for chunk in lost)
    assert all(chunk.is_truncated and not chunk.is_terminated for chunk in lost)


def test_where_a_piece_was_broken_off_it_says_that_it_can_not_go_on() -> None:
    rollout, _ = interrupted_rollout("env_to_module", Interrupts(raise_itself, {6}))
    with rollout:
        with pytest.raises(KeyboardInterrupt):
            list(rollout.fragments())
        for _ in range(2):
            with pytest.raises(RunError, match="can't go on: it was interrupted in node 'env_to_module'"):
                list(rollout.fragments())


@pytest.mark.parametrize("way", ["inline", "ahead", "event loop"])
def test_after_an_error_it_says_that_it_can_not_go_on(way: str) -> None:
    def fail() -> None:
        raise ZeroDivisionError("no more")

    rollout, _ = interrupted_rollout("forward", Interrupts(fail, {6}), **WAYS[way])
    with rollout:
        with pytest.raises(ZeroDivisionError, match="no more"):
            list(rollout.fragments())
        for _ in range(2):
            with pytest.raises(RunError, match="can't go on: it has failed with ZeroDivisionError: no more"):
                list(rollout.batches())
    assert set(rollout.lost) <= {"failed"}  # although the block has ended without it


def test_a_second_interrupt_is_raised_at_once_and_then_it_says_that_it_can_not_go_on() -> None:
    def press_twice() -> None:
        press()
        press()
        raise AssertionError("the second one was held back as well")

    rollout, _ = interrupted_rollout("module_to_env", Interrupts(press_twice, {6}))
    with rollout:
        with pytest.raises(KeyboardInterrupt):
            list(rollout.fragments())
        with pytest.raises(RunError, match="can't go on: Ctrl-C came twice"):
            list(rollout.fragments())


def test_the_handler_of_others_is_left_alone() -> None:
    came = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        rollout, _ = interrupted_rollout("forward", Interrupts(press, {6}), num_fragments=4)
        with rollout:
            assert len(list(rollout.fragments())) == 4
    finally:
        signal.signal(signal.SIGINT, before)
    assert came == [signal.SIGINT]


class InterruptedAgents(NumberedAgents):
    """Is interrupted before, or after, it has made a step."""

    interrupts: Interrupts
    point = ""

    def step(self, actions: Any) -> Any:
        if self.point == "before the step":
            self.interrupts.here()
        stepped = super().step(actions)
        if self.point == "after the step":
            self.interrupts.here()
        return stepped


@pytest.mark.parametrize("way", ["inline", "lanes", "threads", "one pass for all"])
@pytest.mark.parametrize("point", ["before the step", "after the step", "forward", "body"])
def test_several_agents_go_on_as_well(point: str, way: str) -> None:
    envs = [InterruptedAgents(slot, nested=0) for slot in range(3)]
    is_elsewhere = way in ELSEWHERE and point.endswith("step")
    reading = threading.Event()

    interrupts = Interrupts(press, {2, 3} if point == "body" else {4, 5, 12})  # the block begins with a pass a lane
    if is_elsewhere:
        interrupts = Interrupts(partial(press_for_reader, reading), {5})
    module = InterruptedModule(envs[0].observation_spaces["agent 0"], envs[0].action_spaces["agent 0"])
    module.interrupts = interrupts if point == "forward" else None
    for env in envs:
        env.interrupts, env.point = interrupts, point
    rollout = MultiAgentRollout(
        [lambda env=env: env for env in envs],
        module=MultiRLModule({"m": module}),
        agent_to_module_mapping_fn=lambda agent, episode: "m",
        fragment_length=8,
        seed=0,
        **(
            {"lanes": 3}
            if way == "lanes"
            else {**WAYS[way], "max_batch": 8}
            if way == "one pass for all"
            else WAYS[way]
        ),
    )
    lanes = rollout.environments.num_lanes
    with rollout:
        in_body = interrupts.here if point == "body" else nothing
        fragments, count = read_on(rollout, 10 * lanes, in_body, begin=reading.set)
    assert count == len(interrupts.at)
    for lane in range(lanes):
        assert [each.sequence for each in fragments if each.lane == lane] == list(range(10))
    missing, lost = not_emitted(fragments, [env.log for env in envs]), rollout.lost
    assert missing <= sum(lost.values()) <= missing + lost.get("interrupted", 0)
