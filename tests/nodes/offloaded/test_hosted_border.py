"""Hosts check each message of a rollout, and its place in the order that the protocol promises."""

import logging
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numbered_module import NumberedEnv, NumberedModule
from raw_gateway import RawGateway
from remote_hosts import BrokenWire, hosting, listening, serving
from remote_rollouts import hosted, makers, rollout_over

from rollflow import MeanStdFilter, RemoteRollouts, Rollout
from rollflow.nodes import RolloutHost
from rollflow.nodes.env.env_source import lane_makers
from rollflow.nodes.offloaded.rollout_host import RolloutLane, RolloutSession
from rollflow.nodes.offloaded.rollout_settings import RolloutSettings
from rollflow.stream.data.errors import WireError
from rollflow.stream.wire import Fragment, LaneGrant, Settings, Turn, Weights

GOOD: dict[str, Any] = {
    "fragment_length": 4,
    "lookback": 1,
    "seed": 0,
    "explore": True,
    "flat": False,
    "threads": 1,
    "module": {"default_policy": "NumberedModule"},
    "model_config": {"default_policy": None},
    "pieces": {"env_to_module": [], "module_to_env": []},
}
WEIGHT = {"weight": np.zeros((), np.float32)}


@pytest.mark.parametrize(
    ("news", "told"),
    [
        ([Settings({})], "settings: TypeError: .* missing 9 required .*'fragment_length'"),
        ([Settings(GOOD), Weights(0, {"a": np.zeros((), "f4")}, {"a": "float32"}, {})], "weights: ValueError"),
        ([Settings(GOOD), Weights(0, {"a": np.zeros(2, "u2")}, {"a": "nosuch"}, {})], "weights 'a': dtype 'nosuch'"),
    ],
)
def test_a_host_that_is_told_nonsense_says_so_and_listens_on(news: list[Any], told: str, tmp_path: Path) -> None:
    made = RolloutHost([lambda: NumberedEnv(0)], module=NumberedModule())
    with made as host, serving(host, f"unix:{tmp_path}/host") as address:
        first = RawGateway(address)
        first.welcome()
        for each in news:
            first.connection.tell(each)
        first.flush()
        with pytest.raises(WireError, match=told):
            raise first.refusal()
        second = RawGateway(address)
        second.welcome()
        second.connection.tell(Settings(GOOD | {"pieces": pieces()}))
        second.connection.tell(Weights(0, WEIGHT, {}, {}))
        second.connection.ask(Turn(0, 1))
        assert isinstance(second.next_event(), Fragment)
        second.end()


def pieces() -> dict[str, list[str]]:
    with Rollout([lambda: NumberedEnv(0)], module=NumberedModule()) as rollout:
        lines = {"env_to_module": rollout.env_to_module, "module_to_env": rollout.module_to_env}
    return {name: [piece.name for piece in line.connectors] for name, line in lines.items()}


class Listens(RolloutHost):
    """Takes down what comes, in its order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.heard: list[list[str]] = []
        super().__init__(*args, **kwargs)

    def _welcomed(self, welcome: Any) -> None:
        self.heard.append([])
        super()._welcomed(welcome)

    def _take(self, news: Any) -> None:
        self.heard[-1].append(news.kind)
        super()._take(news)


@pytest.mark.wait_times(first_pause_s=0.001)
@pytest.mark.slow
def test_after_every_reconnect_settings_and_states_come_before_weights() -> None:
    """Also where the connection comes back while the rollout stands still."""
    envs = listening(RemoteRollouts)
    left = iter(range(6_000, 10_000_000, 1_237))
    wire = BrokenWire(envs.addresses[0], lambda: next(left))
    hosts: list[Listens] = []

    def made(*args: Any, **kwargs: Any) -> Listens:
        hosts.append(Listens(*args, **kwargs))
        return hosts[-1]

    filters: Any = {"env_to_module_connector": lambda env: MeanStdFilter(), "module": None}
    try:
        with (
            hosting(wire.address, "CartPole-v1", kind=made, num_envs=2, **filters),  # type: ignore[arg-type]
            rollout_over(envs, model_config={"fcnet_hiddens": (4,)}, **filters) as rollout,
        ):
            fragments = iter(rollout.fragments())
            while len(hosts[0].heard) < 8:
                next(fragments)
                rollout.publish(rollout.module.state_dict())
                if wire.cuts > len(hosts[0].heard) - 1:  # let the gateway take the host back by itself
                    hosts[0]._wakeup.ring()
    finally:
        wire.close()
    for heard in hosts[0].heard:
        told = [kind for kind in heard if kind != "cut"]
        assert told[:1] in ([], ["settings"])
        assert "weights" not in told or told.index("weights") > 0
    assert any("states" in heard for heard in hosts[0].heard)
    for heard in hosts[0].heard[1:]:
        if "weights" in heard and "states" in heard:
            assert heard.index("states") < heard.index("weights")


def lane_with(act: Callable[..., Any]) -> RolloutLane:
    [maker] = lane_makers([lambda: NumberedEnv(0)], None, None)
    return RolloutLane(maker, act)


def test_what_the_next_rollout_tells_is_not_taken_by_the_one_before() -> None:
    begun, go_on = threading.Event(), threading.Event()
    real = RolloutHost([lambda: NumberedEnv(0)], module=NumberedModule())
    seen: list[Any] = []

    def act(env: Any, settings: RolloutSettings) -> tuple[Any, Any]:
        acting, how = real._acting_for(env, settings)
        seen.append(acting)
        if len(seen) == 1:
            begun.set()
            go_on.wait()
        dict(acting.named_pipelines)["env_to_module"].set_state = partial(seen.append)
        return acting, how

    lane = lane_with(act)
    settings = RolloutSettings(**GOOD | {"pieces": pieces()})

    def begin(states: dict[str, Any] | None) -> Any:
        told = RolloutSession(settings)
        lane.begin(LaneGrant(0, 1, 0, 0), told)
        if states is not None:
            told.states = states
        told.publish(0, {"weight": NumberedModule().weight.detach()})
        return lane.session

    answers: list[Any] = []
    first = begin(None)
    thread = threading.Thread(target=lambda: answers.append(lane.answer(Turn(0, 1), first)))
    thread.start()
    begun.wait()
    second = begin({"env_to_module": {"mine": 1}, "module_to_env": {}})
    go_on.set()
    thread.join()
    assert answers == [None]
    assert isinstance(lane.answer(Turn(0, 1), second), Fragment)
    assert seen[2:] == [{"mine": 1}]
    real.close()


class Clinging(NumberedEnv):
    """Raises once, and then can't be closed at the first try."""

    has_raised = False

    def step(self, action: Any) -> Any:
        if not Clinging.has_raised and self.life == 5:
            Clinging.has_raised = self.is_broken = True
            raise RuntimeError("it broke")
        return super().step(action)

    is_broken = False

    def close(self) -> None:
        if self.is_broken:
            self.is_broken = False
            raise OSError("it can't be closed")
        super().close()


@pytest.mark.wait_times(first_pause_s=0.001)
def test_an_environment_that_has_failed_and_can_not_be_closed_is_made_anew(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Clinging, "has_raised", False)
    clinging = [partial(Clinging, 0, lengths=(9, 9))]
    with hosted(clinging, num_fragments=3) as (rollout, _), caplog.at_level(logging.WARNING):
        fragments = list(rollout.fragments())
    assert [fragment.num_rows for fragment in fragments] == [5, 8, 8]
    assert "environments can't be closed: OSError: it can't be closed" in caplog.text


def test_forward_passes_are_compiled_where_they_are_done() -> None:
    with hosted(makers(0), on={"compile_forward": {"backend": "eager"}}) as (rollout, _):
        fragment = next(iter(rollout.fragments()))
    assert fragment.num_rows == 8
