"""Rollouts of numbered agents that are drawn by chance, run in every way that there is."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import ways
from fragment_equality import in_time
from hypothesis import strategies as st
from numbered_agents import NumberedAgents, numbered_agents
from property_examples import strategies
from serial_module import SerialModule

from rollflow import MultiAgentRollout
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment


class Drawn(NamedTuple):
    """Random settings of a rollout."""

    envs: int
    lanes: int
    agents: int
    nested: int
    length: int
    at_once: bool
    fragment_length: int
    lookback: int
    by_episode: bool
    seed: int


parts_drawn = strategies(envs=(1, 3), lanes=(1, 3), agents=(1, 4), nested=(0, 2), length=(1, 14), at_once=bool)
parts_drawn |= strategies(fragment_length=(1, 9), lookback=(0, 3), by_episode=bool, seed=(0, 2**32 - 1))
drawn_settings = st.builds(Drawn, **parts_drawn).filter(
    lambda drawn: drawn.lanes <= drawn.envs and drawn.nested <= drawn.agents
)


def envs_of(drawn: Drawn) -> tuple[list[NumberedAgents], list[Callable[[], NumberedAgents]]]:
    return numbered_agents(
        drawn.envs, agents=drawn.agents, nested=drawn.nested, length=drawn.length, at_once=drawn.at_once
    )


def mapping_of(drawn: Drawn) -> Callable[[Any, Any], str]:
    """Two modules for each kind of spaces: by the agent, or by the episode as well."""

    def module_of(agent: str, episode: Any) -> str:
        number = int(agent.split()[1])
        kind = "nested" if number < drawn.nested else "plain"
        return f"{kind} {(number + (int(episode.id_, 16) if drawn.by_episode else 0)) % 2}"

    return module_of


def modules_of(drawn: Drawn) -> dict[str, SerialModule]:
    kinds = ["nested"] * (drawn.nested > 0) + ["plain"] * (drawn.nested < drawn.agents)
    names = [f"{kind} {place}" for kind in kinds for place in range(2)]
    return {name: SerialModule(shift) for shift, name in enumerate(names)}


def made(drawn: Drawn, **options: Any) -> tuple[list[NumberedAgents], MultiAgentRollout]:
    """The environments, and a rollout over them."""
    envs, makers = envs_of(drawn)
    shape: Any = {"fragment_length": drawn.fragment_length, "lookback": drawn.lookback, "seed": drawn.seed}
    options = {"module": modules_of(drawn), "lanes": drawn.lanes, **shape, **options}
    rollout = MultiAgentRollout(options.pop("env", makers), agent_to_module_mapping_fn=mapping_of(drawn), **options)
    return envs, rollout


def run(rollout: MultiAgentRollout, count: int, *, publish: bool = True) -> list[MultiAgentFragment]:
    """`count` fragments, then what a drain gives. Before each, one of the modules gets a new version of its weight."""
    return ways.WAYS["loop"](rollout, count, partial(publish_next, rollout) if publish else lambda number: None)


def makers_of(drawn: Drawn, kind: type[NumberedAgents] = NumberedAgents) -> list[Any]:
    options: dict[str, Any] = {"nested": drawn.nested, "length": drawn.length, "at_once": drawn.at_once}
    return [partial(kind, slot, agents=drawn.agents, **options) for slot in range(drawn.envs)]


def fragments_of(drawn: Drawn, **options: Any) -> list[MultiAgentFragment]:
    """Three fragments of every lane, in the lanes' order."""
    _, rollout = made(drawn, **{"env": makers_of(drawn), "num_fragments": 3, **options})
    with rollout:
        fragments = in_time(list(rollout.fragments()))
        assert rollout.num_steps == sum(fragment.num_steps for fragment in fragments)
    assert rollout.lost == {}
    return fragments


def publish_next(rollout: MultiAgentRollout, number: int) -> None:
    """A weight that says its version, for one module after the other."""
    names = list(rollout.module)
    name = names[number % len(names)]
    rollout.publish({name: {"weight": torch.tensor(float(rollout.policy_versions[name] + 1))}})


WAYS: dict[str, Callable[[MultiAgentRollout, int], list[MultiAgentFragment]]] = {
    way: lambda rollout, count, read=read: read(rollout, count, partial(publish_next, rollout))
    for way, read in ways.WAYS.items()
    if way != "graph on trio"
}
"""Rollout, how many fragments to take before it is drained -> the fragments. After each there is a new weight."""
