"""Whole rollouts of several agents on other hosts: the laws that hold of every rollout, and what is refused."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn_agents import Drawn, made, makers_of, mapping_of, modules_of
from ending_agent_envs import DoomedAgents
from fragment_equality import in_time
from lost_agents import agent_chunks, check_laws
from numbered_agents import NumberedAgents
from piece_forms import log_rows
from places import rollout_at
from remote_hosts import hosting, listening
from serial_module import SerialModule

from rollflow import MeanStdFilter, MultiAgentRollout, RemoteRollouts
from rollflow.nodes import LambdaConnector, RandomModule, RolloutHost

pytestmark = pytest.mark.wait_times(first_pause_s=0.01)

DRAWN = Drawn(2, 1, 3, 1, 6, False, 7, 2, True, 5)


def host_of(hosts: RemoteRollouts, drawn: Drawn, **options: Any) -> Any:
    """A host of drawn environments, in a thread, until it is left."""
    given = {"module": modules_of(drawn), "agent_to_module_mapping_fn": mapping_of(drawn), "lanes": drawn.lanes}
    return hosting(hosts.addresses[0], makers_of(drawn), kind=RolloutHost, **(given | options))


def over(hosts: Any, **options: Any) -> MultiAgentRollout:
    return MultiAgentRollout(hosts, **{"module": SerialModule(), "fragment_length": 8, "seed": 0, **options})


@pytest.mark.parametrize("prefetch", [0, 2])
def test_each_module_acts_with_the_weights_that_were_published_for_it(prefetch: int) -> None:
    hosts, drawn = listening(RemoteRollouts), DRAWN._replace(at_once=True)
    with host_of(hosts, drawn), made(drawn, env=hosts, lanes=None, prefetch=prefetch, num_fragments=6)[1] as rollout:
        for number, fragment in enumerate(rollout.fragments()):
            for module_id in fragment.module_ids:
                part = fragment.of_module(module_id)
                assert part.gather("weight").tolist() == part.gather("policy_version").tolist()
                if not prefetch:
                    assert set(part.gather("policy_version").tolist()) <= {number if module_id == "plain 0" else 0}
            assert rollout.publish({"plain 0": {"weight": torch.tensor(float(number + 1))}}) == {"plain 0": number + 1}


def test_environments_that_raise_on_a_host_begin_anew(tmp_path: Path) -> None:
    hosts = listening(RemoteRollouts)
    kinds: Any = {"agents": 2, "nested": 0, "at_once": True}
    doomed = [partial(DoomedAgents, 0, tmp_path, fate="raise", step=13, lives=1, **kinds)]
    host = hosting(hosts.addresses[0], doomed, kind=RolloutHost, module=SerialModule())
    with host, over(hosts, num_fragments=3) as rollout:
        fragments = in_time(list(rollout.fragments()))
        check_laws(rollout, fragments, tmp_path, 1)
        assert rollout.lost == {"workers": 2}
    assert [fragment.num_rows for fragment in fragments] == [8, 5, 8]
    assert [len(fragment.losses) for fragment in fragments] == [0, 1, 0]


@pytest.mark.parametrize("place", ["rollouts", "hosted rollouts"])
def test_what_connectors_learn_and_log_comes_together(place: str) -> None:
    acts: Any = {"module": RandomModule}
    acts["env_to_module_connector"] = lambda part: [LambdaConnector(log_rows), MeanStdFilter()]
    makers = [partial(NumberedAgents, slot, agents=2, nested=0, at_once=True, length=50) for slot in range(2)]
    options: Any = {"kind": MultiAgentRollout, "num_fragments": 3, "fragment_length": 10, "seed": 0}
    with rollout_at(place, makers, acts=acts, envs={"lanes": 2}, **options) as made_there, made_there as rollout:
        fragments = list(rollout.fragments())
    [state] = [state for name, state in rollout.env_to_module[0].get_state().items() if "MeanStdFilter" in name]
    assert len(state["sources"]) == 2
    # An episode has one observation more than steps; each has been through the pipeline when its fragment is cut.
    ids = {chunk.id_ for _, chunk in agent_chunks(fragments)}
    seen = sum(fragment.num_steps for fragment in fragments) + len(ids)
    assert sum(source["count"] for source in state["sources"].values()) == seen
    assert rollout.metrics.peek("rows") == seen
    assert len(fragments) == 6
