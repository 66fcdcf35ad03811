"""Rollouts and hosts that don't fit each other: both sides say what is wrong, where, and what was expected."""

from functools import partial
from typing import Any

import gymnasium as gym
import pytest
import torch
from numbered_agents import NumberedAgents
from numbered_module import NumberedEnv, NumberedModule
from own_policy_parts import Forgetful
from piece_forms import Breaks
from remote_hosts import dialled_host, end_waits_once, hosting, listening
from remote_rollouts import makers, rollout_over, rollouts_on, taken_until
from serial_module import SerialModule
from small_env import SmallEnv

from rollflow import Forward, MeanStdFilter, MultiAgentRollout, RemoteEnvs, RemoteRollouts, RLModule, Rollout, Watch
from rollflow.nodes import EnvHost, FlattenObservations, LambdaConnector, RandomModule, RolloutHost
from rollflow.stream import ConnectorError, EnvError, ModuleError
from rollflow.stream.data.errors import StateError, WireError
from rollflow.stream.wire import Limits


class Fails(NumberedModule):
    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        raise ZeroDivisionError("in the module")


class Wide(NumberedModule):
    def __init__(self) -> None:
        super().__init__()
        self.more = torch.nn.Parameter(torch.zeros(3))


class Other(RLModule):
    """Has a weight of the same name, of another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"action_dist_inputs": torch.zeros(len(batch["obs"]), 7)}


BREAKS = partial(Breaks, at=1)


def pieces(*made: Any, after: bool = False) -> dict[str, Any]:
    name = "module_to_env_connector" if after else "env_to_module_connector"
    return {name: lambda env: [piece() for piece in made]}


# What the host raises, what both say, and what is given to the host, and to the rollout
DIFFERENT: dict[str, tuple[Any, ...]] = {
    "a module that raises": (ZeroDivisionError, "in the module", {"module": Fails()}),
    "a connector that raises": (ZeroDivisionError, "no more", pieces(BREAKS), pieces(BREAKS)),
    "a connector that raises at the action": (ZeroDivisionError, "no more", *[pieces(BREAKS, after=True)] * 2),
    "a connector whose state is not declared": (
        StateError,
        "Forgetful changes 'count' while it runs but declares no state",
        *[pieces(Forgetful)] * 2,
    ),
    "a connector less": (
        ConnectorError,
        r"the env_to_module pipeline of host raw is .*; expected that of the rollout: MeanStdFilter, .*",
        {},
        pieces(MeanStdFilter),
    ),
    "a connector more": (
        ConnectorError,
        r"the module_to_env pipeline of host raw is .*Breaks.*; expected that of the rollout: .*",
        pieces(BREAKS, after=True),
    ),
    "another order": (
        ConnectorError,
        r"of host raw is MeanStdFilter, FlattenObservations, .*; expected .*: FlattenObservations, MeanStdFilter",
        pieces(MeanStdFilter, FlattenObservations),
        pieces(FlattenObservations, MeanStdFilter),
    ),
    "a connector that looks back further": (
        ConnectorError,
        "looks back 3 steps, but fragments keep 1",
        pieces(partial(LambdaConnector, lambda batch: batch, lookback=3)),
        pieces(partial(LambdaConnector, lambda batch: batch, lookback=1)),
    ),
    "weights of another shape": (
        ModuleError,
        r"weights do not fit module 'NumberedModule': .*, unknown \[\], shapes: \[.'weight' is \[\], expected \[2\]",
        {"module": Other()},
    ),
    "a weight more": (
        ModuleError,
        r"weights do not fit module 'NumberedModule': missing \['more'\], unknown \[\]",
        {"module": Wide()},
    ),
    "no module": (
        ModuleError,
        "the rollout's module is NumberedModule, and host raw was given none, expected the same",
        {"module": None},
    ),
    "a module where the rollout has the default one": (
        ModuleError,
        "the module of host raw is NumberedModule; expected that of the rollout: DefaultModule",
        {},
        {"module": None},
    ),
    "a module of another class": (
        ModuleError,
        "the module of host raw is Another; expected that of the rollout: NumberedModule",
        {"module": type("Another", (NumberedModule,), {})()},
    ),
    "a module for other observations": (
        ModuleError,
        r"module 'NumberedModule' was made for observations in Box\(.*\(9,\).*, but those that come are in Box",
        {"module": NumberedModule(gym.spaces.Box(0, 1, (9,)), gym.spaces.Discrete(7))},
    ),
}


for kind_of_module in (Fails, Wide, Other):
    kind_of_module.__name__ = "NumberedModule"  # that is what is compared first


AGENTS = [partial(NumberedAgents, 0, agents=2, nested=0)]

# The same of environments with several agents.
DIFFERENT_AGENTS: dict[str, tuple[Any, ...]] = {
    "another module": (ModuleError, "module of host .* is RandomModule; .* Serial", {"module": RandomModule}),
    "a module for another agent": (
        ModuleError,
        r"has the modules \['a'\], expected .*\['default_policy'\]",
        {"module": {"a": SerialModule()}},
    ),
    "no module for agents": (ModuleError, "is SerialModule, and host .* was given none", {"module": None}),
    "a connector for agents": (
        ConnectorError,
        "the env_to_module pipeline of host .* is Breaks, .*; expected that of the rollout",
        pieces(BREAKS),
    ),
}


def check_left_by_every_host(rollout: Any, told: str) -> None:
    rollout.environments.join_timeout = 0.3
    with rollout, pytest.raises(EnvError, match=rf"every host has left .*{told}"):
        next(iter(rollout.fragments()))


@pytest.mark.parametrize("what", [*DIFFERENT, *DIFFERENT_AGENTS])
def test_what_differs_is_told_on_both_sides(what: str) -> None:
    kind, told, of_host, of_rollout = (*(DIFFERENT | DIFFERENT_AGENTS)[what], {})[:4]
    remote = listening(RemoteRollouts)
    hosted: Any = {"envs": makers(0, 1), "lanes": 2}
    if what in DIFFERENT_AGENTS:
        hosted, of_host = {"envs": AGENTS}, {"module": SerialModule(), **of_host}
    with pytest.raises(kind, match=told):  # on the host, by `connect`
        with rollouts_on(remote.addresses[0], name="raw", **hosted, **of_host):
            if what in DIFFERENT_AGENTS:
                rollout: Any = MultiAgentRollout(remote, module=SerialModule(), fragment_length=8, seed=0)
            else:
                rollout = rollout_over(remote, **of_rollout)
            check_left_by_every_host(rollout, rf": host raw .* refuses: {kind.__name__}: .*{told}")


def test_one_that_differs_leaves_and_the_others_go_on() -> None:
    envs = listening(RemoteRollouts, hosts=2)
    with pytest.raises(ModuleError, match="weights do not fit"):
        with (
            rollouts_on(envs.addresses[0], makers(0)),
            rollouts_on(envs.addresses[0], makers(1), module=Wide()),
            rollout_over(envs) as rollout,
        ):
            fragments = iter(rollout.fragments())
            taken = taken_until(fragments, lambda taken: len(taken) > 10)
            assert all(fragment.num_steps == 8 for fragment in taken)
            rollout.drain()
            list(fragments)
    assert rollout.lost.get("workers", 0) <= 1


@pytest.mark.slow
def test_one_that_listens_tells_of_it_and_serves_the_next(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    address = f"unix:{tmp_path}/host"
    with dialled_host(address, makers(0, 1), kind=RolloutHost, module=NumberedModule()):
        other = Rollout(RemoteRollouts.connect(address), module=Wide(), seed=0)
        check_left_by_every_host(other, "ModuleError: weights do not fit")
        with rollout_over(RemoteRollouts.connect(address), num_fragments=2) as rollout:
            assert [fragment.num_steps for fragment in rollout.fragments()] == [16, 16]
    assert "ModuleError: weights do not fit module 'NumberedModule'" in caplog.text


def test_a_fragment_that_is_more_than_a_frame_takes_is_told_of_on_both_sides() -> None:
    large = type("Large", (SmallEnv,), {"observation_space": gym.spaces.Box(-1, 1, (5000,))})
    told = r"fragment: frame of \d+ bytes, expected at most 100000: gateway takes no more"
    envs = listening(RemoteRollouts, limits=Limits(max_frame=100_000))
    module = {"model_config": {"fcnet_hiddens": [4]}}
    with pytest.raises(WireError, match=told):
        with rollouts_on(envs.addresses[0], large, module=None):
            rollout = Rollout(envs, fragment_length=20, seed=0, **module)
            check_left_by_every_host(rollout, told)


# Hosts and rollouts of another kind


OF_ONE, OF_SEVERAL = "RemoteRollouts of a Rollout", "RemoteRollouts of a MultiAgentRollout"


@pytest.mark.parametrize(
    ("kinds", "envs", "expected"),
    [
        ((RemoteRollouts, Rollout, EnvHost), makers(0), "'env', expected 'rollout'"),
        ((RemoteEnvs, Rollout, RolloutHost), makers(0), "'rollout', expected 'env'"),
        (
            (RemoteRollouts, Rollout, RolloutHost),
            AGENTS,
            f"'agent_rollout', expected 'rollout': here are {OF_ONE}, .* of one agent; this host is for {OF_SEVERAL}",
        ),
        (
            (RemoteRollouts, MultiAgentRollout, RolloutHost),
            makers(0),
            f"'rollout', expected 'agent_rollout': here are {OF_SEVERAL}, .* of several agents; this .* for {OF_ONE}",
        ),
        (
            (RemoteEnvs, MultiAgentRollout, RolloutHost),
            AGENTS,
            f"'agent_rollout', expected 'agents': here are RemoteEnvs .* is for {OF_SEVERAL}",
        ),
    ],
)
def test_hosts_of_another_kind_are_refused(
    kinds: Any, envs: Any, expected: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At both ends the error says what came, where it came to, and where it goes."""
    end_waits_once(monkeypatch, lambda: "is refused" in caplog.text)
    kind, rollout_of, of_host = kinds
    hosts = listening(kind)
    module = {"module": SerialModule()} if of_host is RolloutHost else {}
    came = f"0 of 1 hosts came within 60 s, listening on {hosts.addresses[0]}; tcp://"
    with (
        pytest.raises(WireError, match=rf"gateway: refuses: hello\.role is {expected}"),
        hosting(hosts.addresses[0], envs, kind=of_host, **module),
        pytest.raises(EnvError, match=rf"{came}.*hello\.role is {expected}"),
    ):
        rollout_of(hosts, module=SerialModule())
    assert all(sock.fileno() < 0 for sock in hosts.sockets)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"num_envs": 3}, "num_envs is 3 and lanes is None, expected neither: hosts say how many"),
        ({"lanes": 2}, "num_envs is None and lanes is 2, expected neither: hosts say how many"),
        ({"where": "rollouts"}, "where is 'rollouts', but remote environments are where their hosts are"),
        ({"workers": 2}, "workers is 2, but remote environments are where their hosts are"),
        (
            {"forward": Forward(max_batch=4)},
            "max_batch and max_wait .* but RemoteRollouts have one for each; expected RemoteEnvs",
        ),
        (
            {"forward": Forward(compile=True)},
            r"Forward\(compile=…\) is for forward passes here, and .* given to each RolloutHost",
        ),
        ({"device": "cpu"}, "device is for forward passes here, and RemoteRollouts do theirs on the hosts; expected"),
        ({"debug": True}, "debug is for what runs in this process, and RemoteRollouts act on the hosts; expected"),
        ({"watch": Watch(metrics={})}, "metrics is dict, expected a MetricsLogger: every worker has one, to be merged"),
    ],
)
@pytest.mark.parametrize("kind", [Rollout, MultiAgentRollout])
def test_a_rollout_that_can_not_be_made_lets_its_hosts_go(kind: Any, options: dict[str, Any], told: str) -> None:
    envs = listening(RemoteRollouts)
    env = NumberedEnv if kind is Rollout else NumberedAgents
    hosts = rollouts_on(envs.addresses[0], [partial(env, 0)], module=RandomModule)
    with hosts, pytest.raises((ValueError, EnvError), match=told):
        kind(envs, module=RandomModule, **options)
    assert all(sock.fileno() < 0 for sock in envs.sockets)


def test_a_host_whose_lanes_differ_is_refused_before_it_dials() -> None:
    with pytest.raises(EnvError, match=r"lane 1: its observation_space is .*, expected that of lane 0"):
        RolloutHost([makers(0)[0], makers(1, nested=True)[0]], lanes=2, module=NumberedModule())


@pytest.mark.slow
def test_a_second_host_must_have_the_spaces_of_the_first() -> None:
    envs = listening(RemoteRollouts)
    with rollouts_on(envs.addresses[0], makers(0)), rollout_over(envs) as rollout:
        fragments = iter(rollout.fragments())
        next(fragments)
        with RolloutHost("CartPole-v1") as other:
            with pytest.raises(WireError, match=r"hello.observation_space.* of host '.*' is .*, expected"):
                other.connect(str(envs.addresses[0]))
        next(fragments)
