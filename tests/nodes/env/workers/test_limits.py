"""Rollouts that come near what the system allows, or that should never have been made."""

import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import pytest
from held_envs import await_that
from numbered_module import NumberedEnv, NumberedModule
from small_env import SmallEnv

from rollflow import RLModule, Rollout, Timeouts
from rollflow.stream import EnvError, ModuleError


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    """A limit of 300 open descriptors, which may be raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
@pytest.mark.parametrize("where", ["processes", "rollouts"])
def test_many_fragments_may_be_kept(where: Literal["processes", "rollouts"], few_descriptors: None) -> None:
    makers = [partial(NumberedEnv, 0)]
    options: Any = {"module": NumberedModule(), "fragment_length": 2, "num_fragments": 400, "seed": 0}
    with Rollout(makers, where=where, **options) as rollout:
        fragments = list(rollout.fragments())
    assert [fragment.sequence for fragment in fragments] == list(range(400))
    rewards = np.concatenate([fragment.column("rewards")[:, 0] for fragment in fragments])
    with Rollout(makers, **options) as inline:
        np.testing.assert_array_equal(
            rewards, np.concatenate([fragment.column("rewards")[:, 0] for fragment in inline.fragments()])
        )


@pytest.mark.slow
def test_a_module_that_makes_a_rollout_when_it_is_imported_is_refused_by_its_workers(tmp_path: Path) -> None:
    (tmp_path / "careless.py").write_text(
        "import gymnasium as gym\n"
        "from rollflow.nodes import Rollout\n"
        "class Mine(gym.Wrapper):\n"
        "    def __init__(self): super().__init__(gym.make('CartPole-v1'))\n"
        "with Rollout(Mine, num_envs=2, where='processes', workers=1, fragment_length=4, num_fragments=1) as rollout:\n"
        "    list(rollout.batches())\n"
    )
    program = f"import sys; sys.path[:] = {[str(tmp_path), *sys.path]!r}; import careless"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "expected that to stand under if __name__ == '__main__'" in done.stderr


def test_workers_have_the_arguments_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["program", "--length", "3"])

    class Told(SmallEnv):
        def tell(self) -> dict[str, Any]:
            return {} if self.t else {"argv": list(sys.argv)}

    with Rollout(Told, where="processes", fragment_length=2, num_fragments=1) as rollout:
        [fragment] = rollout.fragments()
    assert fragment.chunk(0).get_infos(0)["argv"] == ["program", "--length", "3"]


@pytest.mark.parametrize("where", ["inline", "threads"])
def test_one_environment_in_two_places_is_refused(where: Any) -> None:
    env = NumberedEnv(0)
    vector = gym.vector.SyncVectorEnv([lambda: env])
    for given, what in (([lambda: env] * 2, "slots"), ([vector, vector], "lanes")):
        with pytest.raises(EnvError, match=f"{what} 0 and 1 were given the same environment, expected one for each"):
            Rollout(given, lanes=2, where=where, module=NumberedModule())


def test_leaving_a_rollout_that_runs_ahead_waits_for_one_step_alone() -> None:
    stepping, go_on = threading.Event(), threading.Event()
    steps = []

    class Slow(NumberedEnv):
        def step(self, action: Any) -> Any:
            if len(steps) == 12:
                stepping.set()
                go_on.wait()
            steps.append(0)
            return super().step(action)

    def release() -> None:
        stepping.wait()
        await_that(lambda: rollout._drive._is_closed)  # it is being left
        go_on.set()

    rollout = Rollout([lambda: Slow(0)], module=NumberedModule(), fragment_length=10, prefetch=1, seed=0)
    releasing = threading.Thread(target=release)
    releasing.start()
    with rollout:
        next(iter(rollout.fragments()))
        stepping.wait()
    releasing.join()
    assert len(steps) <= 14


@pytest.mark.parametrize("where", ["threads", "processes", "rollouts"])
def test_batches_are_in_the_lanes_order_whichever_comes_first(where: Any) -> None:
    options: Any = {"module": NumberedModule(), "fragment_length": 6, "num_fragments": 4, "seed": 3}
    makers = [partial(NumberedEnv, slot) for slot in range(4)]
    with Rollout(makers, lanes=4, **options) as inline:
        expected = [batch["obs"].tolist() for batch in inline.batches()]
    with Rollout(makers, lanes=4, where=where, **options) as rollout:
        assert [batch["obs"].tolist() for batch in rollout.batches()] == expected


def test_a_module_that_can_not_be_copied_is_refused_with_the_reason() -> None:
    class Locked(RLModule):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

    with pytest.raises(ModuleError, match=r"module 'Locked' can't be copied: cannot pickle .*; a copy of it acts"):
        Rollout("CartPole-v1", module=Locked())


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"fragment_length": "8"}, "fragment_length is '8', expected a whole number"),
        ({"fragment_length": 1.5}, "fragment_length is 1.5, expected a whole number"),
        ({"num_fragments": True}, "num_fragments is True, expected a whole number"),
        ({"prefetch": 1.5}, "prefetch is 1.5, expected a whole number"),
        ({"seed": "0"}, "seed is '0', expected a whole number"),
        ({"workers": "2", "where": "processes"}, "workers is '2', expected a whole number"),
        ({"num_envs": "4"}, "num_envs is '4', expected a whole number"),
        ({"lanes": 1.0}, "lanes is 1.0, expected a whole number"),
    ],
)
def test_numbers_that_are_none_are_refused_by_name(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Rollout("CartPole-v1", **given)


@pytest.mark.slow
def test_a_worker_that_only_steps_environments_needs_no_torch() -> None:
    program = f"import sys; sys.path[:] = {sys.path!r}; import rollflow.nodes.env.workers.lane_server"
    subprocess.run([sys.executable, "-c", f"{program}; assert 'torch' not in sys.modules"], check=True)


@pytest.mark.parametrize(("where", "is_told"), [("inline", True), ("threads", False)])
def test_timeouts_that_can_not_be_kept_are_told_of(where: Any, is_told: bool, caplog: pytest.LogCaptureFixture) -> None:
    Rollout("CartPole-v1", where=where, timeouts=Timeouts(step=1.0)).close()
    assert ("Timeouts(step=1.0, reset=120.0) is not used with where='inline'" in caplog.text) == is_told
