"""Ctrl-C ends a rollout at once, wherever it comes: losses are counted, and the next loop says what has happened."""

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import anyio
import pytest
from agent_logs import steps_of
from hypothesis import given, settings, strategies as st
from lost_agents import emitted_steps
from numbered_agents import NumberedAgents
from numbered_module import NumberedEnv, NumberedModule
from places import rollout_at
from ways import graph_with

from rollflow import Forward, MultiAgentRollout, Policy, Rollout
from rollflow.nodes import LambdaConnector, MultiRLModule
from rollflow.stream import RunError

Raise = Callable[[], Any]
PRESS = partial(signal.raise_signal, signal.SIGINT)


class Interrupts:
    """Calls `way` at the call of `here` with this number."""

    def __init__(self, way: Raise, at: int) -> None:
        self.way, self.at, self.calls = way, at, 0

    def here(self) -> None:
        self.calls += 1
        if self.calls == self.at:
            self.way()


class Interrupted:
    """Mixed into an environment: is interrupted before, or after, it has made a step, or in a reset."""

    interrupts: Interrupts
    point = ""

    def step(self, action: Any) -> Any:
        if self.point == "before the step":
            self.interrupts.here()
        stepped = super().step(action)  # type: ignore[misc]
        if self.point == "after the step":
            self.interrupts.here()
        return stepped

    def reset(self, **kwargs: Any) -> Any:
        if self.point == "reset" and self.episode >= 0:  # type: ignore[attr-defined]
            self.interrupts.here()
        return super().reset(**kwargs)  # type: ignore[misc]


class InterruptedEnv(Interrupted, NumberedEnv):
    pass


class InterruptedAgents(Interrupted, NumberedAgents):
    pass


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


def rollout_of(kind: str, point: str, interrupts: Interrupts, **options: Any) -> tuple[Any, list[Any]]:
    """A rollout that is interrupted at a point, and its environments."""
    several = kind == "several agents"
    envs: list[Any] = [
        InterruptedAgents(slot, nested=0) if several else InterruptedEnv(slot) for slot in range(3 if several else 4)
    ]
    for env in envs:
        env.interrupts, env.point = interrupts, point
    spaces = (
        (envs[0].observation_spaces["agent 0"], envs[0].action_spaces["agent 0"])
        if several
        else (envs[0].observation_space, envs[0].action_space)
    )
    module = InterruptedModule(*spaces)
    module.interrupts = interrupts if point == "forward" else None
    if point in ("env_to_module", "module_to_env", "learner"):
        options[f"{point}_connector"] = lambda *spaces: LambdaConnector(interrupts.here)
    makers = [lambda env=env: env for env in envs]
    if not several:
        return Rollout(makers, module=module, **OPTIONS, **options), envs
    if options.get("forward") == ONE_PASS:
        options["forward"] = Forward(max_batch=8)
    given: Any = {"module": MultiRLModule({"m": module}), "agent_to_module_mapping_fn": lambda agent, episode: "m"}
    return MultiAgentRollout(makers, **given, **OPTIONS, **options), envs


OPTIONS: Any = {"fragment_length": 8, "seed": 0}
ONE_PASS = Forward(max_batch=4)
KINDS = ["one agent", "several agents"]
POINTS = ["before the step", "after the step", "reset", "forward", "env_to_module", "module_to_env", "learner", "hook"]
WAYS: dict[str, dict[str, Any]] = {
    "inline": {},
    "threads": {"where": "threads", "lanes": 3},
    "one pass for all": {"where": "threads", "lanes": 3, "forward": ONE_PASS},
    "slots apart": {"where": "threads", "forward": ONE_PASS},
    "ahead": {"prefetch": 2},
}
IN_READER = ("learner", "hook")  # points in the reader's thread, wherever the rest is


@contextmanager
def no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if not thread.name.startswith(("AnyIO worker", "Trio thread")):  # which wait for others' work
            thread.join(30.0)
            assert not thread.is_alive()


@pytest.fixture
def press_in_reader() -> Iterator[Raise]:
    """A function that presses Ctrl-C once, from another thread than the main one, which reads."""
    seen = threading.Event()

    def handle(number: int, frame: Any) -> None:
        if not seen.is_set():
            seen.set()
            raise KeyboardInterrupt

    def press() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        while not seen.wait(0.05):  # a signal that comes just before a wait does not end it
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, handle)
    yield press
    signal.signal(signal.SIGINT, before)


def check_ended(rollout: Any, told: BaseException, envs: list[Any], steps: int) -> None:
    """The run has ended, what is lost is counted, and every further loop says so."""
    assert all(env.closed for env in envs)
    assert rollout.lost.keys() <= {"closed", "incomplete"}
    lost, made = sum(rollout.lost.values()), rollout.num_steps + rollout.environments.unrecorded_steps
    assert steps + lost == made
    counts = rf"{steps + lost:,} transitions made or under way, {steps:,} handed out, "
    text = f"the rollout was ended by {type(told).__name__}: {counts}"
    assert any(re.match(text, note) for note in told.__notes__)
    for loop in (rollout.fragments, rollout.batches):
        with pytest.raises(RunError, match=f"{text}.*; expected a new one, Rollout"):
            next(loop())


def read(rollout: Any, *, learns: bool) -> tuple[int, list[Any], BaseException]:
    """Read until an interrupt: transitions and fragments that have come, and the interrupt."""
    steps, fragments = 0, []
    try:
        for item in rollout.batches() if learns else rollout.fragments():
            if not learns:
                fragments.append(item)
                steps += item.num_steps
            elif "m" in item:
                steps += len(item["m"]["rewards"])
            else:
                steps += len(item["rewards"])
    except (KeyboardInterrupt, SystemExit) as told:
        return steps, fragments, told
    raise AssertionError("the loop has ended, expected an interrupt")


def tell_gathering(rollout: Any, gathering: threading.Event) -> None:
    """Set an event once the rollout gathers a round for its reader."""
    missing = rollout._rounds.missing

    def told_missing(*args: Any) -> Iterator[None]:
        gathering.set()
        return missing(*args)

    rollout._rounds.missing = told_missing


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("point", POINTS)
def test_it_ends_the_run_at_once_and_counts_losses(point: str, way: str, kind: str, press_in_reader: Raise) -> None:
    is_elsewhere = point not in IN_READER and (
        way == "ahead" or (way in WAYS and "where" in WAYS[way] and point in POINTS[:3])
    )
    gathering = threading.Event()
    interrupts = Interrupts(PRESS, 21 if point in POINTS[:5] else 3)
    if is_elsewhere:  # the reader is the one to be interrupted, once it reads
        interrupts.way = lambda: gathering.wait() and press_in_reader()
    with no_thread_left():
        rollout, envs = rollout_of(kind, point, interrupts, **WAYS[way])
        if point == "hook":
            rollout.on_episode(lambda episode: interrupts.here())
        tell_gathering(rollout, gathering)
        with rollout:
            steps, fragments, told = read(rollout, learns=point == "learner")
            check_ended(rollout, told, envs, steps)
        check_ended(rollout, told, envs, steps)
    if kind == "one agent":
        made = {(env.slot, entry[3]) for env in envs for entry in env.log}
        handed = [
            (int(chunk.get_observations(0)[0]), float(reward))
            for fragment in fragments
            for chunk in fragment.episodes()
            for reward in chunk.get_rewards()
        ]
    else:
        made = {step for env in envs for step in steps_of(env.log)[0]}
        handed = emitted_steps(fragments)
    assert len(set(handed)) == len(handed)
    assert set(handed) <= made
    again, _ = rollout_of(kind, "", interrupts, **WAYS[way])
    again.load_state_dict(rollout.state_dict())
    assert again.num_steps == rollout.num_steps


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("way", ["inline", "threads", "ahead"])
def test_what_else_is_no_exception_ends_it_too_when_it_reaches_the_reader(way: str, error: type[BaseException]) -> None:
    def fail() -> None:
        raise error

    rollout, envs = rollout_of("one agent", "after the step", Interrupts(fail, 50), **WAYS[way])
    with no_thread_left(), rollout:
        steps, _, told = read(rollout, learns=False)
        assert type(told) is error
        check_ended(rollout, told, envs, steps)


@settings(max_examples=30, deadline=None)
@given(call=st.integers(1, 4_000))
def test_it_ends_the_run_at_whatever_call_it_comes(call: int) -> None:
    """The interpreter looks for signals where a function begins, or a generator goes on."""
    interrupts = Interrupts(PRESS, call)
    rollout, envs = rollout_of("one agent", "", interrupts)

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if frame.f_globals.get("__name__", "").startswith("rollflow."):
            interrupts.here()

    with rollout:
        try:
            loop = rollout.fragments()
            fragments: list[Any] = []
            sys.settrace(trace)
            while True:
                fragments.append(next(loop))  # nothing of rollflow's is called once it is there
        except KeyboardInterrupt as interrupt:
            sys.settrace(None)
            told = interrupt
    steps = sum(fragment.num_steps for fragment in fragments)
    if getattr(told, "__notes__", None):  # else it came while nothing was under way
        check_ended(rollout, told, envs, steps)
    assert steps + sum(rollout.lost.values()) == rollout.num_steps + rollout.environments.unrecorded_steps


class PressedInClose(InterruptedEnv):
    """Ctrl-C comes while it is closed."""

    def close(self) -> None:
        signal.raise_signal(signal.SIGINT)
        super().close()


@pytest.mark.parametrize("is_interrupted", [False, True])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_all_is_closed_though_ctrl_c_comes_meanwhile(prefetch: int, is_interrupted: bool) -> None:
    first = KeyboardInterrupt("first")
    envs: list[Any] = [PressedInClose(0), InterruptedEnv(1)]
    made = [lambda env=env: env for env in envs]
    rollout = Rollout(made, module=NumberedModule(), prefetch=prefetch, **OPTIONS)
    with no_thread_left(), pytest.raises(KeyboardInterrupt) as raised, rollout:
        next(rollout.fragments())
        if is_interrupted:
            raise first
    assert (raised.value is first) == is_interrupted
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert all(env.closed for env in envs)
    assert rollout.lost.keys() <= {"closed"}
    with pytest.raises(RunError, match=r"the rollout (is closed|was ended by KeyboardInterrupt)"):
        next(rollout.fragments())


@pytest.mark.slow
@pytest.mark.parametrize("place", ["threads", "ahead", "processes", "rollouts", "hosts", "hosted rollouts"])
@pytest.mark.wait_times(close_s=0.1)  # of a long fragment
def test_it_ends_a_wait(place: str, press_in_reader: Raise) -> None:
    acts: Any = {"module": NumberedModule()}
    makers = [partial(NumberedEnv, slot) for slot in range(2)]
    with rollout_at(place, makers, acts=acts, fragment_length=100_000, seed=0) as rollout:
        gathering = threading.Event()
        tell_gathering(rollout, gathering)
        pressing = threading.Thread(target=lambda: gathering.wait() and press_in_reader())
        pressing.start()
        with rollout:
            steps, _, told = read(rollout, learns=False)
            check_ended(rollout, told, [], steps)
        pressing.join()


class Waits(NumberedEnv):
    """Waits in the first step of an episode until an event is set."""

    may_go_on: threading.Event

    def step(self, action: Any) -> Any:
        if self.step_number == 0:
            self.may_go_on.wait()
        return super().step(action)


@pytest.mark.parametrize("way", ["ahead", "threads"])
def test_it_ends_a_wait_though_it_comes_just_before(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that another thread takes does not end a wait of the main one, as one that comes before it."""
    may_go_on, gathering = threading.Event(), threading.Event()
    monkeypatch.setattr(Waits, "may_go_on", may_go_on, raising=False)
    rollout = Rollout([partial(Waits, slot) for slot in range(3)], module=NumberedModule(), **OPTIONS, **WAYS[way])
    tell_gathering(rollout, gathering)

    def press() -> None:
        gathering.wait()
        time.sleep(0.1)  # until the reader waits
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        handled.wait(20)
        may_go_on.set()

    handled = threading.Event()
    pressing = threading.Thread(target=press)
    pressing.start()
    with no_thread_left(), pytest.raises(KeyboardInterrupt), rollout:
        try:
            next(rollout.fragments())
        finally:
            was_held = not may_go_on.is_set()
            handled.set()
    assert was_held
    pressing.join()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_in_the_callers_code_between_two_rounds_it_breaks_nothing(way: str, kind: str) -> None:
    rollout, envs = rollout_of(kind, "", Interrupts(PRESS, 0), **WAYS[way])
    fragments: list[Any] = []
    with rollout:
        for rounds in (4, 9):
            with pytest.raises(KeyboardInterrupt) if rounds == 4 else nullcontext():
                for fragment in rollout.fragments():
                    fragments.append(fragment)
                    if len(fragments) == 4 and rounds == 4:
                        PRESS()
                    if len(fragments) == rounds:
                        break
    numbers: dict[int, list[int]] = {}
    for fragment in fragments:
        numbers.setdefault(fragment.lane, []).append(fragment.sequence)
    assert len(fragments) == 9
    assert all(each == list(range(len(each))) for each in numbers.values())
    handed = sum(fragment.num_steps for fragment in fragments)
    assert handed + sum(rollout.lost.values()) == rollout.num_steps
    assert all(env.closed for env in envs)


def test_in_the_first_reset_it_closes_the_environments() -> None:
    rollout, envs = rollout_of("one agent", "", Interrupts(PRESS, 1))
    envs[1].episode, envs[1].point = 0, "reset"
    with no_thread_left(), pytest.raises(KeyboardInterrupt), rollout:
        raise AssertionError("the rollout was entered")
    assert all(env.closed for env in envs)
    with pytest.raises(RunError, match="was ended by KeyboardInterrupt: 0 transitions made or under way, 0 handed out"):
        next(rollout.fragments())


def test_in_an_evaluation_it_closes_the_environments() -> None:
    env = NumberedEnv(0)
    spaces: Any = {"observation_space": env.observation_space, "action_space": env.action_space}
    policy = Policy(NumberedModule(*spaces.values()), **spaces)
    made: list[Any] = []
    interrupts = Interrupts(PRESS, 7)

    def make() -> InterruptedEnv:
        made.append(InterruptedEnv(0))
        made[-1].interrupts, made[-1].point = interrupts, "before the step"
        return made[-1]

    with pytest.raises(KeyboardInterrupt):
        policy.evaluate(make, 20)
    assert made
    assert all(env.closed for env in made)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("form", ["async for", "graph"])
@pytest.mark.parametrize("way", ["inline", "threads"])
@pytest.mark.parametrize("point", ["before the step", "forward", "learner"])
def test_on_an_event_loop_it_ends_the_program(point: str, way: str, form: str, backend: str) -> None:
    is_elsewhere = point != "learner" and (form == "async for" or way != "inline")
    press = partial(os.kill, os.getpid(), signal.SIGINT) if is_elsewhere else PRESS
    interrupts = Interrupts(press, 3 if point == "learner" else 21)
    rollout, envs = rollout_of("one agent", point, interrupts, **WAYS[way])
    steps = 0

    async def looping() -> None:
        nonlocal steps
        async with rollout:
            async for batch in rollout.batches():
                steps += len(batch["rewards"])

    async def as_node() -> None:
        nonlocal steps
        async with graph_with(rollout).run() as run:
            async for batch in run["batches"]:
                steps += len(batch["rewards"])

    # A signal of another thread would strike anywhere otherwise, also between a batch and the line that counts it.
    exactly = {"restrict_keyboard_interrupt_to_checkpoints": True} if backend == "trio" and is_elsewhere else {}
    with no_thread_left(), pytest.raises(KeyboardInterrupt):
        anyio.run(looping if form == "async for" else as_node, backend=backend, backend_options=exactly)
    assert all(env.closed for env in envs)
    assert steps + sum(rollout.lost.values()) == rollout.num_steps + rollout.environments.unrecorded_steps
    with pytest.raises(RunError):
        next(rollout.fragments())


@pytest.mark.parametrize("way", ["inline", "ahead"])
def test_after_an_error_it_says_that_it_can_not_go_on(way: str) -> None:
    def fail() -> None:
        raise ZeroDivisionError("no more")

    rollout, _ = rollout_of("one agent", "forward", Interrupts(fail, 6), **WAYS[way])
    with rollout:
        with pytest.raises(ZeroDivisionError, match="no more"):
            list(rollout.fragments())
        for _ in range(2):
            with pytest.raises(RunError, match="can't go on: it has failed with ZeroDivisionError: no more"):
                list(rollout.batches())
    assert set(rollout.lost) <= {"failed"}  # although the block has ended without it
