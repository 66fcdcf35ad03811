"""Hosts of several agents that break the protocol, or are of another kind: they are told so, and the others go on."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lost_agents import check_laws
from numbered_agents import NumberedAgents
from numbered_env import NumberedEnv
from remote_agents import Fragments, makers, rollout_over, slots_of
from remote_hosts import RawHost, hosting, listening

from rollflow import Rollout
from rollflow.nodes import EnvHost
from rollflow.stream import EnvError
from rollflow.stream.data.errors import WireError
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment
from rollflow.stream.wire import AgentRows, Reset, Step

MAKER = partial(NumberedAgents, 0, nested=0, agents=4)
# Two environments of four agents.
ZEROS = np.zeros(8, np.float32)
NOBODY = np.zeros(8, bool)


def rows(request: Any, **changed: Any) -> AgentRows:
    """An answer in which all agents have an observation of zeros, but for what is changed."""
    fields: dict[str, Any] = dict.fromkeys(
        ("rewards", "terminateds", "truncateds", "ended", "ended_truncated", "first_agent_slots", "first_obs")
    )
    if isinstance(request, Step):
        fields |= {"rewards": (ZEROS,), "terminateds": (NOBODY,), "truncateds": (NOBODY,)}
        fields |= {"ended": np.zeros(0, np.int64), "ended_truncated": np.zeros(0, bool)}
    seen = {"agent_slots": (None,), "obs": (np.zeros((8, 5), np.int64),), "infos": (), "first_infos": ()}
    return AgentRows(request.lane, request.number, **fields | seen | changed)


def some(*slots: int) -> dict[str, Any]:
    """Only these agent slots have an observation."""
    return {"agent_slots": (np.array(slots),), "obs": (np.zeros((len(slots), 5), np.int64),)}


def sends(**changed: Any) -> Callable[[RawHost], None]:
    return lambda raw: raw.send(rows(raw.next_of(Step), **changed))


MISBEHAVIOUR: dict[str, tuple[Callable[[RawHost], None], str]] = {
    "agents out of order": (sends(**some(1, 0)), r"step 2 of lane 1: obs\[0\]: its agent slots are \[1, 0\], expected"),
    "rows of one agent": (
        lambda raw: raw.send(raw.rows(raw.next_of(Step))),
        "rows 2 of lane 1, expected agent_rows or failed 2 of lane 1, the answer to step",
    ),
}


def asked_beside(raw: RawHost, kind: Any, fragments: Iterator[MultiAgentFragment], taken: Fragments) -> Any:
    """The next request, while somebody takes fragments, so that the rollout goes on."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(raw.next_of, kind)
        while not asked.done():
            taken.append(next(fragments))
        return asked.result()


@pytest.mark.parametrize("name", MISBEHAVIOUR)
def test_a_host_that_breaks_the_protocol_is_told_so_and_leaves(name: str, tmp_path: Path) -> None:
    misbehave, expected = MISBEHAVIOUR[name]
    envs = listening()
    with hosting(envs.addresses[0], makers(tmp_path, 0, 1)), rollout_over(envs, prefetch=2) as rollout:
        fragments = iter(rollout.fragments())
        taken = [next(fragments)]
        raw = RawHost(envs.addresses[0], env=partial(NumberedAgents, nested=0, agents=4))
        raw.connection.answer(request := asked_beside(raw, Reset, fragments, taken), rows(request))
        raw.flush()
        misbehave(raw)
        with pytest.raises(WireError, match=expected):
            raise raw.refusal()
        taken += [next(fragments) for _ in range(5)]
        rollout.drain()
        taken += list(fragments)
        of_others = [fragment for fragment in taken if fragment.lane == 0]
        assert slots_of(of_others) == {0, 1}
        steps = sum(fragment.num_steps for fragment in taken if fragment.lane != 0)
        assert steps == 0
        check_laws(rollout, of_others, tmp_path, 2)


HOSTS: dict[str, tuple[Any, Any, str]] = {
    "one agent": (NumberedEnv, None, "hello.role is 'env', expected 'agents': here are RemoteEnvs of a MultiAgentRo"),
    "other agents": (
        NumberedAgents,
        {"agents": 3},
        r"hello.agents is \('agent 0', .*\) in parts .*, expected those of",
    ),
    "other spaces": (
        NumberedAgents,
        {"agents": 4, "nested": 1},
        "hello.observation_space is .*, expected that of host",
    ),
}


@pytest.mark.parametrize("name", HOSTS)
def test_a_host_of_another_kind_is_refused_and_the_others_go_on(name: str, tmp_path: Path) -> None:
    kind, options, expected = HOSTS[name]
    envs = listening()
    with hosting(envs.addresses[0], makers(tmp_path, 0)), rollout_over(envs, prefetch=1) as rollout:
        fragments = iter(rollout.fragments())
        next(fragments)
        given = {} if options is None else {"nested": 0, **options}
        with EnvHost(partial(kind, 5, **given)) as other, pytest.raises(WireError, match=expected) as caught:
            other.connect(str(envs.addresses[0]))
        assert caught.value.code == "role" if options is None else "spaces"
        next(fragments)


def test_a_rollout_of_one_agent_refuses_a_host_of_several() -> None:
    envs = listening()
    with hosting(envs.addresses[0], partial(NumberedEnv, 0)), Rollout(envs, fragment_length=8, prefetch=1) as rollout:
        fragments = iter(rollout.fragments())
        next(fragments)
        told = r"hello\.role is 'agents', expected 'env': here are RemoteEnvs of a Rollout, .* of one agent; this host"
        with EnvHost(MAKER) as other, pytest.raises(WireError, match=told):
            other.connect(str(envs.addresses[0]))
        next(fragments)


class Enumerated(NumberedAgents):
    """Its agents are tuples."""

    def __init__(self) -> None:
        super().__init__(0)
        self.possible_agents = [("a", 1), *self.possible_agents]  # type: ignore[list-item]
        for spaces in (self.observation_spaces, self.action_spaces):
            spaces[self.possible_agents[0]] = spaces["agent 1"]


def test_ids_that_can_not_be_sent_are_refused_by_the_host() -> None:
    with pytest.raises(EnvError, match=r"agent \('a', 1\): its id can't be sent to another host; expected a string or"):
        EnvHost(Enumerated)
