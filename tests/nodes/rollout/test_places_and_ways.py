"""One meaning: wherever a rollout is, and however it is read, the same fragments come, and each step once."""

import gc
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import product
from typing import Any

import drawn_agents
import drawn_rollouts
import gymnasium as gym
import numpy as np
import pytest
import torch
from fragment_equality import assert_alike, in_time
from gymnasium.vector import AutoresetMode
from hypothesis import Phase, given, settings, strategies as st
from leftovers import processes_of, shared_mappings
from numbered_module import NumberedModule
from property_examples import examples
from remote_hosts import BrokenWire, hosting, listening
from ways import WAYS
from whole_episodes import assert_same, joined, steps_of

from rollflow import ConnectorV2, Forward, RemoteEnvs, RemoteRollouts
from rollflow.nodes import EnvHost, RolloutHost

pytestmark = pytest.mark.wait_times(first_pause_s=0.001)

HOSTS = {"hosts": (RemoteEnvs, EnvHost), "rollouts on hosts": (RemoteRollouts, RolloutHost)}
PLACES = ["inline", "threads", "processes", "rollouts", *HOSTS]
JOINT: dict[str, dict[str, Any]] = {
    "together": {"forward": Forward(max_batch=64)},
    "waiting": {"forward": Forward(max_batch=64, max_wait=1e-3)},
}
PASSES: dict[str, list[dict[str, Any]]] = {
    "inline": [{}, {"debug": True}, *JOINT.values()],
    "threads": [{}, *JOINT.values()],
    "processes": [{"workers": 1}, {"workers": 2}, {"workers": 2, **JOINT["together"]}],
    "rollouts": [{"workers": 1}, {"workers": 2}],
}
"""Options of a rollout in a place, with which it gives the same."""


class Sines(ConnectorV2):
    """Rewrites observations into another dtype and shape."""

    def recompute_output_observation_space(self, observation_space: Any, action_space: Any) -> Any:
        return gym.spaces.Box(-1, 1, (2, 3), np.float32)

    def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
        for episode in episodes:
            at = episode.get_observations(-1)
            at = at["at"] if isinstance(at, dict) else at
            episode.set_observations(new_data=np.sin([at, 2 * at]).astype(np.float32), at_indices=-1)
        return batch


class Flat(NumberedModule):
    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return super()._forward({"obs": batch["obs"].reshape(len(batch["obs"]), -1)[:, :3]})


class OneAgent:
    """Drawn rollouts of one agent."""

    drawn = st.tuples(drawn_rollouts.drawn_settings, st.booleans())
    resets: tuple[dict[str, Any], ...] = ({}, *({"autoreset_mode": mode} for mode in AutoresetMode))
    example = drawn_rollouts.Setting(4, 2, 5, 1, True, 6, 0, 7), False
    ending = ((drawn_rollouts.Setting(3, 2, 4, 1, False, 5, 0, 7), False),)  # in which several episodes end

    @staticmethod
    def ends(drawn: Any) -> bool:
        return drawn[0].longest <= 2 * drawn[0].fragment_length

    @staticmethod
    def acting(drawn: Any) -> dict[str, Any]:
        _, rewrites = drawn
        return {
            "module": Flat() if rewrites else NumberedModule(),
            "env_to_module_connector": (lambda env: Sines()) if rewrites else None,
        }

    @staticmethod
    def makers(drawn: Any) -> Any:
        return drawn_rollouts.makers_of(drawn[0])

    @staticmethod
    def publish(rollout: Any, number: int) -> None:
        rollout.publish({"weight": torch.tensor(float(number))})

    @classmethod
    def rollout(cls, drawn: Any, env: Any, **options: Any) -> Any:
        return drawn_rollouts.rollout_of(drawn[0], env, **{**cls.acting(drawn), "lanes": drawn[0].lanes, **options})


class SeveralAgents:
    """Drawn rollouts of several agents."""

    drawn = drawn_agents.drawn_settings
    resets: tuple[dict[str, Any], ...] = ({},)
    example = drawn_agents.Drawn(3, 2, 3, 1, 9, False, 5, 1, False, 1)
    ending = tuple(drawn_agents.Drawn(3, 2, 3, 1, 5, at_once, 4, 1, False, 1) for at_once in (False, True))
    makers = staticmethod(drawn_agents.makers_of)
    publish = staticmethod(drawn_agents.publish_next)

    @staticmethod
    def ends(drawn: Any) -> bool:
        return bool(drawn.length <= 2 * drawn.fragment_length)

    @staticmethod
    def acting(drawn: Any) -> dict[str, Any]:
        mapping = drawn_agents.mapping_of(drawn)
        return {"module": drawn_agents.modules_of(drawn), "agent_to_module_mapping_fn": mapping}

    @staticmethod
    def rollout(drawn: Any, env: Any, **options: Any) -> Any:
        return drawn_agents.made(drawn, env=env, **{"num_fragments": 3, **options})[1]


Kind = type[OneAgent] | type[SeveralAgents]
KINDS = [OneAgent, SeveralAgents]


@contextmanager
def rollout_at(place: str, kind: Kind, drawn: Any, *, cuts: Any = (), **options: Any) -> Iterator[Any]:
    """A rollout in a place, three fragments of each lane, or as many as `num_fragments` says.

    cuts    bytes after which one connection to a host after the other breaks
    """
    makers = kind.makers(drawn)
    if place not in HOSTS:
        yield kind.rollout(drawn, makers, where=place, **options)
        return
    remote, host = HOSTS[place]
    lanes = drawn[0].lanes if kind is OneAgent else drawn.lanes
    envs: Any = listening(remote)
    left = list(cuts)
    wire = BrokenWire(envs.addresses[0], lambda: left.pop() if left else None)
    acting = kind.acting(drawn) if host is RolloutHost else {}
    with closing(wire), hosting(wire.address, makers, lanes=lanes, kind=host, **acting):  # type: ignore[type-var]
        yield kind.rollout(drawn, envs, lanes=None, **options)


def fragments_at(place: str, kind: Kind, drawn: Any, **options: Any) -> list[Any]:
    """The fragments of a rollout that gives all of its steps, in the lanes' order."""
    with rollout_at(place, kind, drawn, **options) as made, made as rollout:
        fragments = list(rollout.fragments())
        assert rollout.num_steps == sum(fragment.num_steps for fragment in fragments)
    assert rollout.lost == {}
    return in_time(fragments)


@pytest.mark.hypothesis  # which are drawn within
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_place_gives_the_fragments_that_are_made_inline_from_the_same_seed(kind: Kind, place: str) -> None:
    ways = st.sampled_from(PASSES.get(place, [{}]))
    phases = [Phase.explicit, Phase.generate]  # a smaller example would take as long

    @given(drawn=kind.drawn, prefetch=st.integers(0, 2), options=ways)
    @settings(max_examples=examples(14 if place in ("inline", "threads") else 10), phases=phases)
    def holds(drawn: Any, prefetch: int, options: Any) -> None:
        there = fragments_at(place, kind, drawn, prefetch=prefetch, **options)
        assert_alike(there, fragments_at("inline", kind, drawn))

    holds()


@pytest.mark.hypothesis
@pytest.mark.slow
@pytest.mark.parametrize("place", HOSTS)
@pytest.mark.parametrize("kind", KINDS)
def test_connections_that_break_anywhere_lose_nothing_and_change_nothing(kind: Kind, place: str) -> None:
    @given(drawn=kind.drawn, prefetch=st.integers(0, 2), cuts=st.lists(st.integers(1, 12_000), max_size=30))
    @settings(max_examples=examples(15), phases=[Phase.explicit, Phase.generate])
    def holds(drawn: Any, prefetch: int, cuts: list[int]) -> None:
        there = fragments_at(place, kind, drawn, prefetch=prefetch, cuts=cuts)
        assert_alike(there, fragments_at("inline", kind, drawn))

    holds()


def drained(kind: Kind, place: str, way: str) -> list[Any]:
    """The first fragments of a rollout that is drained after the third of them, when new weights are published."""
    with rollout_at(place, kind, kind.example, num_fragments=None) as rollout:
        fragments = WAYS[way](rollout, 3, lambda number: kind.publish(rollout, number) if number == 3 else None)
    assert sum(fragment.num_steps for fragment in fragments) == rollout.num_steps
    assert rollout.lost == {}
    return in_time(fragments[:3])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_way_of_reading_gives_the_same_and_every_step_until_a_drain(kind: Kind, place: str, way: str) -> None:
    gc.collect()  # of what other tests have left
    before, mapped = processes_of(), shared_mappings()
    inline = {(each.lane, each.sequence): each for each in fragments_at("inline", kind, kind.example)}
    there = drained(kind, place, way)
    assert_alike(there, [inline[each.lane, each.sequence] for each in there])
    assert processes_of() <= before
    del there
    gc.collect()
    if place == "processes":  # whole rollouts lend theirs to fragments
        assert shared_mappings() <= mapped


@pytest.mark.hypothesis
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_place_gives_the_same_episodes_whole_and_none_of_their_steps_is_lost(kind: Kind, place: str) -> None:
    resets = kind.resets if place not in HOSTS else ({},)  # hosts have a mode of their own

    def check_whole(drawn: Any, way: str, prefetch: int, options: dict[str, Any]) -> int:
        chunks = [chunk for part in fragments_at("inline", kind, drawn, **options) for chunk in part.episodes()]
        expected = joined(chunks)
        with rollout_at(place, kind, drawn, prefetch=prefetch, **options) as rollout:
            parts = in_time(WAYS[way](rollout, None, lambda number: None, complete_episodes=True))
        whole = [episode for part in parts for episode in part.episodes()]
        is_whole = {id_ for id_, episode in expected.items() if episode.is_done and steps_of(episode)}
        assert len(whole) == len(is_whole)
        assert {episode.id_ for episode in whole} == is_whole
        for episode in whole:
            assert_same(episode, expected[episode.id_], without=["serial"])  # lanes take turns at the modules
        open_steps = sum(steps_of(episode) for id_, episode in expected.items() if id_ not in is_whole)
        assert rollout.lost == ({"incomplete": open_steps} if open_steps else {})
        assert sum(map(steps_of, whole)) == sum(part.num_steps for part in parts) == rollout.num_steps - open_steps
        return len(whole)

    for drawn, options in product(kind.ending, resets):
        assert check_whole(drawn, "loop", 1, options) > 3

    ways = st.sampled_from(["loop"] * 3 + ["asyncio", "trio"])
    drawn_endings = kind.drawn.filter(kind.ends)

    @given(drawn=drawn_endings, prefetch=st.integers(0, 2), options=st.sampled_from(resets), way=ways)
    @settings(max_examples=examples({"inline": 40, "threads": 20}.get(place, 10), quick=2), phases=[Phase.generate])
    def holds(drawn: Any, prefetch: int, options: Any, way: str) -> None:
        check_whole(drawn, way, prefetch, options)

    holds()


@pytest.mark.parametrize("way", ["alone", "ahead", *JOINT])
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_reader_did_not_get_is_counted_as_lost(kind: Kind, way: str) -> None:
    options: dict[str, Any] = {"alone": {}, "ahead": {"prefetch": 2}, **JOINT}[way]
    with rollout_at("inline", kind, kind.example, num_fragments=None, **options) as made, made as rollout:
        got = next(iter(rollout.fragments())).num_steps
    assert rollout.num_steps > got
    assert rollout.lost == {"closed": rollout.num_steps - got}
