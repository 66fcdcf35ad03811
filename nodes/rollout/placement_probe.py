"""Probe of a rollout: costs of its environments and of the rest of a vector step, and what can go to processes."""

import copy
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import cycle, pairwise
from statistics import median
from typing import Any, NamedTuple

import cloudpickle
import gymnasium as gym
import numpy as np
import torch

from rollflow.nodes.connectors.learner.values import device_of
from rollflow.nodes.env.env_source import EnvSource, LaneMaker, count_of, lane_makers
from rollflow.nodes.env.multi_agent.agent_environments import agent_makers
from rollflow.nodes.env.observation_check import Deviations
from rollflow.nodes.env.stepping import LaneVectorEnv, Stepped, seeds_for
from rollflow.nodes.env.workers.worker_process import core_count
from rollflow.nodes.rollout.step_costs import Line, Machine, StepCosts
from rollflow.nodes.stages.ring import STAGES
from rollflow.nodes.work_timing import in_turns, slow_down
from rollflow.stream.data.errors import EnvError, StateError
from rollflow.stream.data.infos import SlotInfos
from rollflow.stream.data.packing import pack

Trial = Callable[..., Any]  # (environments, fragment_length) -> an inline Rollout of the module and the connectors

_SLOW_S, _TRIES = 5e-3, 3  # a vector step that takes so long each time is measured by itself
_ROWS = 64  # faster ones, so many at a time at most
_KEPT_STEPS, _KEPT_S = 32, 0.1  # of an environment, to be played again
_TIMES = 4096  # of steps, that are kept
_UNEVEN_STEPS, _UNEVEN_S = 100, 0.3  # of an environment, whose times are kept at least


class ProbeResult(NamedTuple):
    """Costs that were measured, and places that are ruled out.

    ruled_out    place -> why it can't be
    agents       in each environment
    """

    measured: StepCosts
    ruled_out: dict[str, str]
    agents: int = 1


class RecordedEnv(gym.Wrapper[Any, Any, Any, Any]):
    """An environment that plays recorded steps again: a vector step then costs all but the environment's part."""

    def __init__(self, env: gym.Env[Any, Any], first: Any, steps: Sequence[Any], at: int) -> None:
        super().__init__(env)
        self._first, self._steps, self._at = first, steps, at

    def reset(self, **kwargs: Any) -> Any:
        return self._first

    def step(self, action: Any) -> Any:
        self._at += 1
        return self._steps[self._at % len(self._steps)]

    def close(self) -> None:
        """Do nothing: the probe closes the environment."""


def probe(
    env: EnvSource, num_envs: int | None, trial: Trial, *, sizes: Sequence[int], length: int, device: Any = None
) -> ProbeResult:
    """Step one environment for a moment, and all else of a vector step without it. Raises what they raise.

    sizes     numbers of slots that are measured, beside one and all of them
    length    of fragments, which have costs of their own
    device    where the module is to act; None: where it is
    """
    sizes = sorted({1, *sizes, count_of(env, num_envs)})
    maker = lane_makers(env, num_envs, 1)[0]
    with ExitStack() as opened:
        tried = partial(_Trial, trial=trial, rows=min(length, _ROWS), opened=opened)
        if not maker.is_side_by_side:
            return _probe_vectorized(maker, sizes, tried, device, opened)
        return _probe_plain(LaneMaker(1, spec=maker.spec, makers=maker.makers[:1]), sizes, tried, device, opened)


def _probe_plain(
    maker: LaneMaker, sizes: list[int], tried: Callable[[Any], "_Trial"], device: Any, opened: ExitStack
) -> ProbeResult:
    """Probe plain environments: one that steps, and others that play again what it gave."""
    began = time.perf_counter()
    made: Any = maker.make()
    opened.callback(made.close)
    [env] = made.envs
    first = copy.deepcopy(env.reset(seed=0))
    start_s = time.perf_counter() - began
    steps = _recorded(env)

    def played(slots: int) -> Any:
        return [lambda at=at: RecordedEnv(env, first, steps, at) for at in range(slots)]

    trials = [tried(played(slots)) for slots in sizes]
    alone = _OneEnv(env)
    of_env, *rest = in_turns([alone, *trials])
    alone.time_more()
    ruled_out = trials[0].ruled_out() | _ruled_out(maker, [info for *_, info in steps], trials[0].rollout, device)
    # What puts a vector step together goes where the environments go.
    joining = [each.share_of_envs() * took.least for each, took in zip(trials, rest, strict=True)]
    envs = [size * of_env.seconds + seconds for size, seconds in zip(sizes, joining, strict=True)]
    others = [took.least - seconds for took, seconds in zip(rest, joining, strict=True)]
    measured = StepCosts(
        sizes[-1],
        line(sizes, envs),
        of_env.waits * sizes[-1] * of_env.seconds / envs[-1],
        line(sizes, others),
        start_s,
        stages=_stages(sizes, others, trials),
        spread=_spread(alone.times),
        step_bytes=trials[-1].step_bytes,
        machine=_machine(trials[-1]),
    )
    return ProbeResult(measured, ruled_out)


def _probe_vectorized(
    maker: LaneMaker, sizes: list[int], tried: Callable[[Any], "_Trial"], device: Any, opened: ExitStack
) -> ProbeResult:
    """Probe vector environments of several sizes, alone and with all else of a vector step."""
    began = time.perf_counter()
    made = [opened.enter_context(closing(LaneMaker(slots, spec=maker.spec).make())) for slots in sizes]
    start_s = (time.perf_counter() - began) / sum(sizes)
    trials = [tried(env) for env in made]
    alone = [_OneVectorEnv(env) for env in made]
    took = in_turns([*alone, *trials])
    of_envs, whole = took[: len(sizes)], took[len(sizes) :]
    # What records the steps of environments goes with them.
    recorded = [each.share_of_envs() * both.least for each, both in zip(trials, whole, strict=True)]
    envs = [max(env.seconds, seconds) for env, seconds in zip(of_envs, recorded, strict=True)]
    rest = [max(0.0, both.least - seconds) for both, seconds in zip(whole, envs, strict=True)]
    ruled_out = trials[0].ruled_out() | _ruled_out(maker, [], trials[0].rollout, device)
    measured = StepCosts(
        sizes[-1],
        line(sizes, envs),
        of_envs[-1].waits * of_envs[-1].seconds / envs[-1],
        line(sizes, rest),
        start_s,
        stages=_stages(sizes, rest, trials),
        spread=_spread(alone[-1].times),
        is_apart=False,
        step_bytes=trials[-1].step_bytes,
        machine=_machine(trials[-1]),
    )
    return ProbeResult(measured, ruled_out)


def probe_agents(
    env: Any, num_envs: int | None, trial: Trial, *, sizes: Sequence[int], length: int, device: Any = None
) -> ProbeResult:
    """Run environments of several agents for a moment, with all else of a vector step. Arguments are as for `probe`.

    Which agents act is theirs to say, so they are not stepped alone: the rollout's own meters part the time.
    """
    [makers] = agent_makers(env, num_envs, 1)
    sizes = sorted({1, *sizes, count_of(env, num_envs)})
    with ExitStack() as opened:
        began = time.perf_counter()
        made: Any = makers.makers
        trials = [_Trial(list(made[:size]), trial, min(length, _ROWS), opened) for size in sizes]
        start_s = (time.perf_counter() - began) / sum(sizes)
        if trials[-1].rollout.environments.num_lanes > 1:
            raise EnvError(
                "each callable makes a vector environment, which is a lane by itself; expected another where"
            )
        took = in_turns(trials)
        shares = [each.share_of_envs() for each in trials]
        envs = line(sizes, [each.seconds * share for each, share in zip(took, shares, strict=True)])
        rest = line(sizes, [each.least * (1 - share) for each, share in zip(took, shares, strict=True)])
        ruled_out = trials[0].ruled_out() | _ruled_out(makers, trials[-1].infos(), trials[0].rollout, device)
        waits = min(1.0, took[-1].waits / max(shares[-1], 1e-9))
        agents = sum(len(part.agents) for part in trials[0].rollout.environments.parts)
        machine = _machine(trials[-1])
        return ProbeResult(StepCosts(sizes[-1], envs, waits, rest, start_s, machine=machine), ruled_out, agents)


class _OneEnv:
    """An environment that is stepped by random actions, and reset when an episode has ended.

    times    seconds of its last calls
    """

    steps = 1

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        self._env, self._actions = env, _actions(env.action_space)
        self.times: deque[float] = deque(maxlen=_TIMES)

    def time_more(self) -> None:
        """Step on where there were few steps: how uneven they are is seen in many."""
        until = time.perf_counter() + _UNEVEN_S
        while len(self.times) < _UNEVEN_STEPS and time.perf_counter() < until:
            self()

    def __call__(self) -> None:
        began = time.perf_counter()
        _, _, terminated, truncated, _ = self._env.step(next(self._actions))
        if terminated or truncated:
            self._env.reset()
        self.times.append(time.perf_counter() - began)


class _OneVectorEnv:
    """A vector environment that rollflow has not put together, stepped by random actions; `times` as of one."""

    steps = 1

    def __init__(self, env: Any) -> None:
        self._env = LaneVectorEnv(env, deviations=Deviations(is_logged=False))
        self._actions = _actions(env.action_space)
        self._env.reset(seeds_for(0, 0, env.num_envs))
        self.times: deque[float] = deque(maxlen=_TIMES)

    def __call__(self) -> None:
        began = time.perf_counter()
        Stepped(*self._env.step(next(self._actions)))
        self.times.append(time.perf_counter() - began)


class _Trial:
    """An inline rollout over some environments.

    rows    steps of a fragment, where they are fast
    """

    def __init__(self, env: Any, trial: Trial, rows: int, opened: ExitStack) -> None:
        for self.steps in (1, rows):
            self.rollout = opened.enter_context(trial(env, fragment_length=self.steps))
            self._fragments = iter(self.rollout.fragments())
            self._busy: list[dict[str, float]] = []
            self()  # the first steps set things up
            if min(self._seconds() for _ in range(_TRIES)) > _SLOW_S:
                break

    def __call__(self) -> None:
        self._newest = next(self._fragments)
        self._busy.append({node.name: node.busy_s for node in self.rollout.report().nodes})

    def _seconds(self) -> float:
        began = time.perf_counter()
        self()
        return time.perf_counter() - began

    def share_of_envs(self) -> float:
        """The share of the time that its environments have taken."""
        return self.shares(STAGES)["env"]

    def shares(self, stages: Sequence[str]) -> dict[str, float]:
        """Stage -> its share of the time that some stages take, by the medians of their times in each fragment."""
        there = [stage for stage in stages if stage in self._busy[0]]
        taken = {stage: median(now[stage] - then[stage] for then, now in pairwise(self._busy)) for stage in there}
        return {stage: seconds / sum(taken.values()) for stage, seconds in taken.items()}

    @property
    def step_bytes(self) -> float:
        """Bytes of one transition of its newest fragment."""
        return float(self._newest.nbytes / self.steps / self.rollout.environments.num_envs)

    def infos(self) -> list[Any]:
        """The infos of the newest fragment, of several agents."""
        return [infos.dicts for part in self._newest.parts for infos in part.infos if isinstance(infos, SlotInfos)]

    def ruled_out(self) -> dict[str, str]:
        """Place -> why it is ruled out, where connectors have a state that can't be sent and merged."""
        pipelines = [pipeline for _, pipeline in self.rollout.replica().named_pipelines]
        try:
            before = [pipeline.get_state() for pipeline in pipelines]
            self()
            for pipeline, state in zip(pipelines, before, strict=True):
                pipeline.merge_states([state, pipeline.get_state()])
        except StateError as error:
            return {"rollouts": str(error)}
        return {}


def _recorded(env: gym.Env[Any, Any]) -> list[Any]:
    """Some steps after a reset."""
    actions = _actions(env.action_space)
    steps: list[Any] = []
    until = time.perf_counter() + _KEPT_S
    while not steps or (len(steps) < _KEPT_STEPS and time.perf_counter() < until):
        observation, reward, terminated, truncated, info = env.step(next(actions))
        steps.append((copy.deepcopy(observation), reward, terminated, truncated, dict(info)))
        if terminated or truncated:
            env.reset()
    return steps


def _actions(space: gym.Space[Any]) -> Iterator[Any]:
    space = copy.deepcopy(space)  # whose generator may be that of all environments of a class
    space.seed(0)
    return cycle([space.sample() for _ in range(16)])


def line(slots: Sequence[int], seconds: Sequence[float]) -> Line:
    """Interpolation of seconds between numbers of slots; beyond the largest one it goes on as before that."""
    if len(slots) == 1:
        return lambda count: seconds[0]
    slope = max(0.0, (seconds[-1] - seconds[-2]) / (slots[-1] - slots[-2]))
    return lambda count: float(np.interp(count, slots, seconds)) + slope * max(0, count - slots[-1])


def _machine(trial: _Trial) -> Machine:
    """This machine, as it is for the vector steps of a rollout."""
    return Machine(core_count(), beside=slow_down(trial))


def _stages(sizes: Sequence[int], rest: Sequence[float], trials: Sequence[_Trial]) -> dict[str, Line]:
    """Stage -> its part of the seconds that all but the environments' part of a vector step takes."""
    shares = [each.shares(STAGES[1:]) for each in trials]
    return {
        stage: line(sizes, [of[stage] * seconds for of, seconds in zip(shares, rest, strict=True)])
        for stage in STAGES[1:]
    }


def _spread(times: Sequence[float]) -> list[float]:
    """Times over their mean."""
    mean = sum(times) / len(times)
    return [each / mean for each in times]


def _ruled_out(maker: Any, infos: Sequence[Any], rollout: Any, device: Any) -> dict[str, str]:
    """Place -> why not all of the rollout can go there."""
    try:
        cloudpickle.dumps(maker)
        pack(list(infos), "infos")
    except Exception as error:
        why = f"the environment can't go to another process: {error}"
        return {"processes": why, "rollouts": why}
    replica = rollout.replica()
    for module in replica.modules.values():
        on = device_of(module) if device is None else torch.device(device)
        if on.type != "cpu":
            return {"rollouts": f"the module acts on {on}, where a copy for each worker is none the faster"}
    try:
        cloudpickle.dumps(replica)
    except Exception as error:
        return {"rollouts": f"the module and the connectors can't go to another process: {error}"}
    return {}


@contextmanager
def generators_kept() -> Iterator[None]:
    """Leave the shared generators of random numbers, of Python, numpy and torch, as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
