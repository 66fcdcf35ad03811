"""Our connector pieces beside Ray's on multi-agent episodes: the same batches, and the same episodes afterwards."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from both import assert_same
from drawn_plays import ACTIONS, OBSERVATIONS, played
from drawn_turns import Told
from gymnasium import spaces
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from pieces import LEARNER, LEARNS, STATES, Module, Named, Values, ray_modules, rows, singles_of
from plays import observed_plays
from property_examples import examples
from ray.rllib.connectors.connector_v2 import ConnectorV2 as RayConnectorV2
from ray.rllib.connectors.env_to_module.observation_preprocessor import (
    MultiAgentObservationPreprocessor as RayMultiAgentPreprocessor,
    SingleAgentObservationPreprocessor as RaySingleAgentPreprocessor,
)
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode as RayEpisode

from rollflow import ConnectorV2, MultiAgentEpisode, nodes

FILTERED = [HealthCheck.filter_too_much, HealthCheck.too_slow]
several_plays = st.lists(
    # Where all agents are done and some of them truncated, Ray has the episode terminated, and them too.
    observed_plays.filter(lambda told: not (told.is_over and any(each.is_truncated for each in told.agents.values()))),
    min_size=1,
    max_size=3,
)


class Modules(dict[str, Module]):
    """Modules by id, as pieces ask for them."""

    framework = "torch"
    model_config: dict[str, Any] = {"max_seq_len": 3}  # noqa: RUF012

    def is_stateful(self) -> bool:
        return any(each.is_stateful() for each in self.values())


def stateful_modules(m: bool, n: bool) -> Modules:
    return Modules(m=_State(m), n=_State(n))


class _State(Module):
    def get_initial_state(self) -> dict[str, Any]:
        return {"h": np.array([-1.0, -2.0], np.float32)}


def run(pieces: list[Any], episodes: list[Any], rl_module: Any, **given_: Any) -> tuple[Any, dict[str, Any]]:
    batch, shared = copy.deepcopy(given_.get("batch", {})), given_.get("shared_data", {})
    for piece in pieces:
        piece.input_action_space, piece.input_observation_space = ACTIONS, OBSERVATIONS
        batch = piece(rl_module=rl_module, batch=batch, episodes=episodes, explore=True, shared_data=shared)
    return batch, shared


def both_played(tolds: list[Told], numpy: bool = False) -> tuple[list[Any], list[Any]]:
    return tuple(  # type: ignore[return-value]
        [played(told, f"e{place}", made, numpy) for place, told in enumerate(tolds)]
        for made in (MultiAgentEpisode, RayEpisode)
    )


def by_agents(batch: dict[str, Any]) -> dict[str, Any]:
    """Column -> agent -> single items; without the place in the list, which Ray adds to the ids, and empty lists."""
    made: dict[str, Any] = {}
    for column, data in batch.items():
        for (episode_id, *rest), items in data.items():
            singles = [single for item in items for single in singles_of(item)]
            if singles:
                made.setdefault(column, {})[(episode_id.split("_")[0], *rest)] = singles
    return made


def check(both: tuple[list[Any], list[Any]], episodes: tuple[list[Any], list[Any]], module: Any, **how: Any) -> None:
    """The batches are the same, agent by agent, and so are the last observations afterwards."""
    answers = [by_agents(run(pieces, each, module)[0]) for pieces, each in zip(both, episodes, strict=True)]
    assert_same(*answers, **{"dtypes": False, "rtol": 1e-6, **how})
    for mine, other in zip(*episodes, strict=True):
        seen = [{key: each.get_observations(-1) for key, each in one.agent_episodes.items()} for one in (mine, other)]
        assert_same(*seen, **{"dtypes": False, "rtol": 1e-6, **how})


@pytest.mark.parametrize("names", [LEARNER, [("ComputeReturnsToGo", {"gamma": 0.5})]], ids=["columns", "returns to go"])
@given(tolds=several_plays, numpy=st.booleans())
@settings(max_examples=examples(100), suppress_health_check=FILTERED)
def test_train_batches_have_the_same_items_of_every_agent(names: list[Named], tolds: list[Told], numpy: bool) -> None:
    check(rows(*names), both_played(tolds, numpy), stateful_modules(False, False))


@given(tolds=several_plays, m=st.booleans(), n=st.booleans())
@settings(max_examples=examples(100), suppress_health_check=FILTERED)
def test_rows_and_states_are_the_same_for_stateful_modules(tolds: list[Told], m: bool, n: bool) -> None:
    episodes = both_played(tolds, numpy=True)
    assume(all(len(each) for episode in episodes[0] for each in episode.agent_episodes.values()))  # Ray needs a step
    check(rows(*LEARNER, *STATES), episodes, stateful_modules(m, n))


def plus(self: Any, observation: Any, episode: Any) -> Any:
    return observation + len(episode)


def minus(self: Any, observations: Any, episode: Any) -> Any:
    return {agent_id: each - sum(observations.values()) for agent_id, each in observations.items()}


def preprocessors(preprocess: Any, *bases: Any) -> tuple[list[Any], list[Any]]:
    ours, theirs = ([type("Preprocesses", (base,), {"preprocess": preprocess})()] for base in bases)
    return ours, theirs


ACTING: dict[str, Callable[[], tuple[list[Any], list[Any]]]] = {
    "AddObservations": lambda: rows("AddObservationsFromEpisodesToBatch"),
    "Flatten": lambda: rows("FlattenObservations", multi_agent=True),
    "FlattenSome": lambda: rows("FlattenObservations", multi_agent=True, agent_ids=["b"]),
    "MeanStd": lambda: rows("MeanStdFilter", multi_agent=True),
    "SingleAgentPreprocessor": lambda: preprocessors(
        plus, nodes.SingleAgentObservationPreprocessor, RaySingleAgentPreprocessor
    ),
    "MultiAgentPreprocessor": lambda: preprocessors(
        minus, nodes.MultiAgentObservationPreprocessor, RayMultiAgentPreprocessor
    ),
}


@pytest.mark.parametrize("name", ACTING)
@given(tolds=several_plays)
@settings(max_examples=examples(60), suppress_health_check=FILTERED)
def test_agents_that_stepped_are_seen_alike(name: str, tolds: list[Told]) -> None:
    [ours], [theirs] = pieces = ACTING[name]()
    check(pieces, both_played(tolds), stateful_modules(False, False), rtol=1e-4)
    assert ours.observation_space == theirs.observation_space


@given(tolds=several_plays, m=st.booleans(), n=st.booleans())
@settings(max_examples=examples(60), suppress_health_check=FILTERED)
def test_states_of_agents_are_seen_alike(tolds: list[Told], m: bool, n: bool) -> None:
    pieces = rows("AddObservationsFromEpisodesToBatch", "AddTimeDimToBatchAndZeroPad", "AddStatesFromEpisodesToBatch")
    check(pieces, both_played(tolds), stateful_modules(m, n))


@given(tolds=several_plays, count=st.integers(1, 3))
@settings(max_examples=examples(60), suppress_health_check=FILTERED)
def test_earlier_steps_are_shown_alike(tolds: list[Told], count: int) -> None:
    options: Any = {"multi_agent": True, "n_prev_actions": count, "n_prev_rewards": count}
    [ours], [theirs] = pieces = rows("PrevActionsPrevRewards", **options)
    episodes = both_played(tolds)
    for row, each in zip(pieces, episodes, strict=True):
        run(row, each, None)
    assert ours.observation_space == theirs.observation_space
    for mine, other in zip(*episodes, strict=True):
        seen = [one.get_observations(-1) for one in (mine, other)]
        for each in seen[1].values():  # f32[n, A] there, which does not lie in their own space
            each["prev_n_actions"] = each["prev_n_actions"].reshape(-1)
        assert_same(*seen, dtypes=False, rtol=1e-6)


@given(tolds=several_plays, places=st.lists(st.integers(0, 9), min_size=9, max_size=9))
@settings(max_examples=examples(60), suppress_health_check=FILTERED)
def test_the_iterator_pairs_the_same_items(tolds: list[Told], places: list[int]) -> None:
    episodes = both_played(tolds)
    keys = [
        (episode.id_, agent_id, each.module_id)
        for episode in episodes[0]
        for agent_id, each in episode.agent_episodes.items()
    ]
    column = {key: [place] for key, place in zip(keys, places, strict=False)}
    for stepped_only in (True, False):
        paired = []
        for base, each in zip((ConnectorV2, RayConnectorV2), episodes, strict=True):
            iterated = base.single_agent_episode_iterator(each, stepped_only, column)
            paired.append({(one.multi_agent_episode_id, one.agent_id): item for one, item in iterated})
        assert_same(*paired)


# By modules and back. One module for each agent: Ray lists the agents of an episode in no fixed order.


EACH = ray_modules("abc", OBSERVATIONS["a"], ACTIONS["a"])
MAPPING: dict[str, Any] = {
    "rl_module_specs": dict.fromkeys("abc"),
    "agent_to_module_mapping_fn": lambda agent_id, episode: agent_id,
}
MAPPED: Named = ("AgentToModuleMapping", MAPPING | LEARNS)


def each_its_own(tolds: list[Told], numpy: bool = False) -> tuple[list[Any], list[Any]]:
    made = both_played(tolds, numpy)
    for episode in [*made[0], *made[1]]:
        for agent_id, each in episode.agent_episodes.items():
            each.module_id = agent_id
    return made


@given(tolds=several_plays, numpy=st.booleans())
@settings(max_examples=examples(60), suppress_health_check=FILTERED)
def test_train_batches_by_modules_are_the_same(tolds: list[Told], numpy: bool) -> None:
    made = []
    # Without infos, which Ray batches where they are arrays; an agent without a step has nothing to batch.
    befores, rests = rows(*LEARNER[:3]), rows(MAPPED, ("BatchIndividualItems", {"multi_agent": True}))
    for before, rest, each in zip(befores, rests, each_its_own(tolds, numpy), strict=True):
        batch, _ = run(before, each, EACH)
        batch = {column: {key: items for key, items in data.items() if len(items)} for column, data in batch.items()}
        batch = {column: data for column, data in batch.items() if data}
        by_module, _ = run(rest, each, EACH, batch=batch)
        made.append({module: columns for module, columns in by_module.items() if len(columns["obs"])})  # as we do
    assert_same(*made, dtypes=False, rtol=1e-6)


@given(tolds=several_plays, gamma=st.sampled_from([0.0, 0.9]), lambda_=st.sampled_from([0.5, 1.0]))
@settings(max_examples=examples(40), suppress_health_check=FILTERED)
def test_value_targets_of_each_module_are_the_same_numbers(tolds: list[Told], gamma: float, lambda_: float) -> None:
    """Ray's need a step more at each agent's end, which the mask takes out again."""
    ours, theirs = each_its_own(tolds, numpy=True)
    for episode in [*ours, *theirs]:
        for each in episode.agent_episodes.values():
            each.extra_model_outputs.pop("vf_preds", None)  # they work values out anew
    assume(all(len(each) for episode in ours for each in episode.agent_episodes.values()))
    options: Any = {"gamma": gamma, "lambda_": lambda_}
    targets, _ = run([nodes.GeneralAdvantageEstimation(**options)], ours, Modules.fromkeys("abc", Values()))
    batched: list[Named] = [("BatchIndividualItems", {"multi_agent": True}), "NumpyToTensor"]
    estimated = ("GeneralAdvantageEstimation", options)
    _, pieces = rows("AddOneTsToEpisodesAndTruncate", *LEARNER[:2], MAPPED, *batched, estimated)
    made, _ = run(pieces, theirs, EACH)
    for module, columns in made.items():
        mine = [
            single
            for (_, agent_id, _), items in targets["value_targets"].items()
            for item in items
            for single in singles_of(item)
            if agent_id == module
        ]
        masked = np.asarray(columns["value_targets"])[np.asarray(columns["loss_mask"])]
        assert_same(np.array(mine), masked, rtol=1e-4, dtypes=False)


@given(tolds=several_plays, actions=st.lists(st.integers(0, 2), min_size=3, max_size=3))
@settings(max_examples=examples(100), suppress_health_check=FILTERED)
def test_actions_come_back_to_the_environments_alike(tolds: list[Told], actions: list[int]) -> None:
    made = []
    batched: list[Named] = [("BatchIndividualItems", {"multi_agent": True}), "NumpyToTensor"]
    befores = rows("AddObservationsFromEpisodesToBatch", ("AgentToModuleMapping", MAPPING), *batched)
    clipped: Named = ("NormalizeAndClipActions", {"normalize_actions": False, "clip_actions": True})
    apart = ("TensorToNumpy", "UnBatchToIndividualItems", "ModuleToAgentUnmapping")
    afters = rows(*apart, clipped, "ListifyDataForVectorEnv")
    for before, after, each in zip(befores, afters, each_its_own(tolds), strict=True):
        shared: dict[str, Any] = {}
        batch, _ = run(before, each, EACH, shared_data=shared)
        assume(batch)  # where nobody is to act, Ray has no actions to clip
        outputs = {
            module: {"actions": columns["obs"][:, 0] * 0 + actions["abc".index(module)]}
            for module, columns in batch.items()
        }
        acted, _ = run(after, each, EACH, batch=outputs, shared_data=shared)
        made.append({"seen": batch, "acted": acted["actions"]})
    assert_same(*made, dtypes=False)


@given(tolds=several_plays, num_frames=st.integers(1, 3), learner=st.booleans())
@settings(max_examples=examples(60), suppress_health_check=FILTERED)
def test_frames_are_stacked_alike(tolds: list[Told], num_frames: int, learner: bool) -> None:
    options: Any = {"num_frames": num_frames, "multi_agent": True, "as_learner_connector": learner}
    episodes = both_played(tolds)
    for episode in [*episodes[0], *episodes[1]]:
        for each in episode.agent_episodes.values():
            each.observation_space = spaces.Box(-np.inf, np.inf, (1, 2, 1), np.float32)
            for i in range(len(each) + 1):
                each.set_observations(new_data=each.get_observations(i).reshape(1, 2, 1), at_indices=i)
            if learner:
                each.to_numpy()
    answers = []
    for [piece], each in zip(rows("FrameStacking", **options), episodes, strict=True):
        batch = piece(rl_module=stateful_modules(False, False), batch={}, episodes=each, explore=True, shared_data={})
        answers.append(by_agents(batch))
    assert_same(*answers, dtypes=False)
