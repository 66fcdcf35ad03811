"""`where="auto"`: each place that can be used is run for a moment on copies, the fastest wins, and nothing is left."""

import multiprocessing
import random
import threading
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from numbered_agents import NumberedAgents
from numbered_module import NumberedModule
from piece_forms import Breaks
from serial_module import SerialModule
from small_env import SmallEnv

from rollflow import Forward, MultiAgentRollout, Rollout, Watch
from rollflow.nodes import ArrayStep, LambdaConnector, MetricsLogger, MultiAgentVectorEnv
from rollflow.nodes.rollout import race
from rollflow.stream import EnvError, ModuleError

HERE = ("inline", "threads")


class Given(SmallEnv):
    observation_space, action_space = gym.spaces.Box(-1, 1, (3,), np.float32), gym.spaces.Discrete(7)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "_RUN_S", 0.01)


@pytest.fixture
def _without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "PLACES", HERE)


def placement(env: Any, **options: Any) -> str:
    """The reason that a rollout gives for its place, after a short run there."""
    options = {"module": NumberedModule(), "num_envs": 4, "fragment_length": 2, "num_fragments": 1} | options
    with Rollout(env, where="auto", seed=0, **options) as rollout:
        fragments = list(rollout.fragments())
        assert len(fragments) == rollout.environments.num_lanes
        assert rollout.explain().endswith(rollout.placement)
    return rollout.placement


@pytest.mark.parametrize(
    ("rates", "fastest"),
    [
        ({"inline": 10.0, "threads": 50.0, "processes": 20.0}, "threads"),
        ({"inline": 97.0, "threads": 100.0}, "inline"),
        ({"threads": 90.0, "processes": 100.0, "rollouts": 104.0}, "processes"),
        ({"inline": 10.0}, "inline"),
    ],
    ids=str,
)
def test_the_fastest_place_wins_unless_a_simpler_one_is_about_as_fast(rates: dict[str, float], fastest: str) -> None:
    assert race.Result(rates, dict.fromkeys(rates, 1), {}).fastest == fastest


@pytest.mark.slow
def test_every_place_runs_and_explain_has_the_figures() -> None:
    told = placement(Given)
    for where in race.PLACES:
        assert f" {where} (" in told
    assert "not where" not in told
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_every_place_runs_with_several_agents() -> None:
    makers = [partial(NumberedAgents, slot, agents=2, nested=0, at_once=True) for slot in range(4)]
    with MultiAgentRollout(makers, where="auto", module=SerialModule(), num_fragments=1, seed=0) as rollout:
        assert list(rollout.fragments())
    assert all(f" {where} (" in rollout.placement for where in race.PLACES)


@pytest.mark.usefixtures("_without_processes")
@pytest.mark.parametrize("options", [{}, {"lanes": 2}, {"forward": Forward(max_batch=4)}, {"workers": 1}], ids=str)
def test_what_is_asked_for_is_tried_and_made(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[dict[str, Any]] = []
    trial_of = race.trial_of

    def recording(*args: Any) -> Any:
        make = trial_of(*args)

        def trial(env: Any, **how: Any) -> Rollout:
            tried.append(how)
            return make(env, **how)

        return trial

    monkeypatch.setattr("rollflow.nodes.rollout.placement.trial_of", recording)
    told = placement(Given, prefetch=1, fragment_length=8, **options)
    _, *raced = tried
    assert [how["where"] for how in raced] == list(HERE)
    assert all(how["lanes"] == options.get("lanes") and how["workers"] is None for how in raced)
    assert all(how["forward"] == options.get("forward", Forward()) and how["prefetch"] == 1 for how in raced)
    assert ("workers=1 is not used" in told) == ("workers" in options)


class OnlyInMainThread(Given):
    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if threading.current_thread() is not threading.main_thread():
            raise OSError("no window here")
        return super().step(action)


@pytest.mark.usefixtures("_without_processes")
def test_a_place_that_fails_is_not_chosen_and_the_reason_is_told() -> None:
    told = placement(OnlyInMainThread)
    assert told.startswith("where='inline': steps/s in a short run each: inline (1 lanes) ")
    assert "not where='threads': it raised " in told
    assert "no window here" in told


class ClosesBadly(Given):
    def close(self) -> None:
        raise OSError("closed already")


@pytest.mark.usefixtures("_without_processes")
def test_an_error_in_closing_a_trial_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    rollout = Rollout(ClosesBadly, module=NumberedModule(), where="auto", num_envs=2)
    with pytest.raises(OSError, match="closed already"):
        rollout.environments.close()
    assert "where='auto': closing a trial raised OSError: closed already" in caplog.text
    assert "not where='" not in rollout.placement


def test_an_interrupt_ends_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(rollout: Any) -> float:
        assert rollout.is_running
        raise KeyboardInterrupt

    monkeypatch.setattr(race, "_rate", interrupted)
    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        Rollout(Given, module=NumberedModule(), where="auto", num_envs=2)
    assert set(threading.enumerate()) <= before


def test_ready_vector_environments_stay_inline() -> None:
    with Rollout(gym.make_vec("CartPole-v1", num_envs=3), where="auto") as rollout:
        assert "where='inline': these vector environments are here already" in rollout.explain()

    spaces = NumberedAgents(0, agents=1, nested=0)

    class Ready(MultiAgentVectorEnv):
        num_envs, possible_agents = 1, ("agent 0",)
        observation_spaces, action_spaces = spaces.observation_spaces, spaces.action_spaces

        def reset_arrays(self, seeds: Any) -> Any:
            raise NotImplementedError

        def step_arrays(self, actions: Any) -> ArrayStep:
            raise NotImplementedError

    several = MultiAgentRollout(Ready(), where="auto", module=SerialModule())
    several.close()
    assert several.placement == "where='inline': these vector environments are here already"


# Nothing is left of it


class Policy(torch.nn.Module):
    """Counts batches while training, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 7)

    def forward_exploration(self, batch: Any) -> Any:
        return {"action_dist_inputs": self.linear(self.norm(batch["obs"])) + torch.randn(1)}

    forward_inference = forward_exploration


@pytest.mark.usefixtures("_without_processes")
@pytest.mark.parametrize("how", ["instance", "function"])
def test_modules_pieces_and_random_numbers_stay_as_they_were(how: str) -> None:
    class Draws(Given):
        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            np.random.random(random.randint(1, 3))
            return super().step(action)

    module, pieces = Policy(), [Breaks(at=0), Breaks(at=0)]  # which count their calls
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)

    def generators() -> list[Any]:
        spaces = Given.action_space.np_random.bit_generator.state
        return [str(torch.get_rng_state()), str(np.random.get_state()), str(random.getstate()), str(spaces)]

    before = generators()
    acts: Any = {"module": module if how == "instance" else lambda observations, actions: module}
    acts["env_to_module_connector"] = lambda env: pieces[0]
    acts["module_to_env_connector"] = lambda env: [pieces[1]]
    rollout = Rollout(Draws, where="auto", num_envs=4, **acts)
    rollout.environments.close()
    assert "inline (1 lanes)" in rollout.placement
    assert generators() == before
    assert module.training
    assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())
    assert [piece.calls for piece in pieces] == [0, 0]
    assert rollout.env_to_module[0] is pieces[0]


@pytest.mark.usefixtures("_without_processes")
@pytest.mark.parametrize(("takes_long", "num_envs", "per_place"), [(False, 2, 2), (True, 32, 4)])
def test_every_environment_is_closed_and_fewer_are_tried_where_they_take_long_to_make(
    takes_long: bool, num_envs: int, per_place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if takes_long:
        monkeypatch.setattr(race, "_STARTS_S", 0.0)
        monkeypatch.setattr(race, "core_count", lambda: 1)
    made: list[Any] = []

    class Closes(Given):
        closed = 0

        def __init__(self) -> None:
            made.append(self)

        def close(self) -> None:
            self.closed += 1

    rollout = Rollout(Closes, module=NumberedModule(), where="auto", num_envs=num_envs)
    rollout.environments.close()
    assert [env.closed for env in made] == [1] * (1 + per_place * len(HERE) + num_envs)


# Places that are ruled out


class Locked(NumberedModule):
    """Can be copied, but not pickled."""

    def setup(self) -> None:
        self.lock = threading.Lock()

    def __deepcopy__(self, memo: Any) -> "Locked":
        return Locked(self.observation_space, self.action_space)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"forward": Forward(max_batch=4)}, "max_batch and max_wait of Forward are for a pass"),
        ({"watch": Watch(metrics=object())}, "metrics of type object can't be merged"),
        ({"module": lambda *spaces: Locked()}, "it raised "),
    ],
    ids=["max_batch", "metrics", "module"],
)
def test_whole_rollouts_are_ruled_out_by_what_they_can_not_do(
    options: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(race, "PLACES", ("inline", "rollouts"))
    assert f"not where='rollouts': {why}" in placement(Given, **options)


def test_a_module_on_a_device_is_not_copied_to_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "PLACES", ("inline", "rollouts"))
    monkeypatch.setattr(race, "device_of", lambda module: torch.device("cuda:0"))
    assert "not where='rollouts': the module acts on cuda:0, where a copy for each worker is not" in placement(Given)


def test_an_environment_that_can_not_be_pickled_stays_in_this_process() -> None:
    lock = threading.Lock()

    def make() -> Any:
        assert not lock.locked()
        return Given()

    told = placement(make)
    for where in ("processes", "rollouts"):
        assert f"not where='{where}': it raised " in told
    assert "cannot pickle" in told


# What can't be measured


def test_what_can_not_be_measured_stays_inline_and_says_so() -> None:
    class Once(Policy):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("there is one alone")

    def log(metrics: Any) -> None:
        assert metrics.rare

    metrics = type("Rare", (MetricsLogger,), {"rare": True})()
    told = placement(Given, watch=Watch(metrics=metrics), env_to_module_connector=lambda env: LambdaConnector(log))
    assert told.startswith("where='inline': nothing could be measured: AttributeError: 'MetricsLogger' object has no")
    with pytest.raises(ModuleError, match="module 'Once' can't be copied: there is one alone"):
        placement(Given, module=Once())


def test_errors_are_those_of_the_rollout_itself() -> None:
    def fails() -> Any:
        raise OSError("no such simulator")

    with pytest.raises(EnvError, match="raised OSError: no such simulator"):
        Rollout(fails, where="auto")
    with pytest.raises(EnvError, match="environment 'Nowhere-v0' can't be made"):
        Rollout("Nowhere-v0", where="auto")
    with pytest.raises(ModuleError, match="module is object, which has no method forward_exploration"):
        Rollout(Given, module=object(), where="auto")
    with pytest.raises(ValueError, match="max_batch is 1, expected at least 2: a lane's slots go together"):
        Rollout(Given, module=NumberedModule(), where="auto", num_envs=2, lanes=1, forward=Forward(max_batch=1))
