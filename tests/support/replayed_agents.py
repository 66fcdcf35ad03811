"""Fragments of several agents whose steps are numbered, and what must stand in each row of a replay of them."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from drawn_agents import Drawn, made, run
from lost_agents import agent_chunks, numbers
from numbered_agents import NumberedAgents
from serial_module import SerialModule, at_of

from rollflow import MultiAgentRollout
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment

TURNS = Drawn(
    envs=3, lanes=1, agents=4, nested=1, length=12, at_once=False,
    fragment_length=5, lookback=1, by_episode=True, seed=3,
)  # fmt: skip

At = tuple[int, ...]


def fragments_of(drawn: Drawn = TURNS, count: int = 5) -> list[MultiAgentFragment]:
    _, rollout = made(drawn)
    return run(rollout, count)


def of_two_modules(one: Any = "a", other: Any = "b") -> list[MultiAgentFragment]:
    """Fragments of four steps of an agent that acts by one module, and of three that act by another."""
    envs = [partial(NumberedAgents, 0, agents=4, nested=0, at_once=True)]
    modules = {one: SerialModule(), other: SerialModule()}
    options: dict[str, Any] = {"fragment_length": 4, "num_fragments": 2, "seed": 0}

    def module_of(agent: str, episode: Any) -> Any:
        return one if agent == "agent 0" else other

    with MultiAgentRollout(envs, module=modules, agent_to_module_mapping_fn=module_of, **options) as rollout:
        return list(rollout.fragments())


def steps_by_module(fragments: Sequence[MultiAgentFragment]) -> dict[Any, dict[At, tuple[Any, ...]]]:
    """Module id -> where each of its steps was made -> what must stand in a row of it."""
    found: dict[Any, dict[At, tuple[Any, ...]]] = {}
    for _, chunk in agent_chunks(fragments):
        at, weights = at_of(chunk.get_observations()), chunk.get_extra_model_outputs("weight")
        mine = found.setdefault(chunk.module_id, {})
        for i in range(len(chunk)):
            last = i == len(chunk) - 1
            flags = last and chunk.is_terminated, last and chunk.is_truncated
            values = chunk.get_actions(i), chunk.get_rewards(i), weights[i]
            mine[numbers(at[i])] = (numbers(at[i + 1]), *map(float, values), *flags)
    return found


def rows_in(batch: dict[str, Any]) -> list[tuple[At, tuple[Any, ...]]]:
    names = "actions", "rewards", "weight", "terminateds", "truncateds"
    columns = [batch[name].tolist() for name in names]
    seen, after = (map(numbers, at_of(batch[name])) for name in ("obs", "new_obs"))
    return [(at, (new_at, *rest)) for at, new_at, *rest in zip(seen, after, *columns, strict=True)]
