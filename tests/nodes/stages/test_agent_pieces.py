"""Connector pieces of several agents: the episodes that they see, and the fate of what they write."""

from itertools import pairwise
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from agent_logs import steps_of
from drawn_agents import Drawn, drawn_settings, made, mapping_of, run
from fragment_equality import chunks_of
from hypothesis import example, given, settings, strategies as st
from piece_forms import ByEpisodes
from property_examples import examples
from serial_module import at_of

from rollflow import ConnectorV2, DefaultModelConfig, FrameStacking, MeanStdFilter, RLModule
from rollflow.nodes import FlattenObservations, LambdaConnector, PrevActionsPrevRewards
from rollflow.nodes.connectors.common.batches import TensorToNumpy
from rollflow.stream import ColumnError, EpisodeError
from rollflow.stream.data.tree import leaves_of

few = settings(max_examples=examples(25))
COUNT = st.integers(1, 5)
# Fragments are cut before the plain agent comes: its column has another type than in the fragments before.
COMES_LATE = Drawn(
    envs=1,
    lanes=1,
    agents=3,
    nested=2,
    length=2,
    at_once=False,
    fragment_length=1,
    lookback=0,
    by_episode=False,
    seed=1,
)


class Noting(ConnectorV2):
    """Keeps who was shown, with all ids, and which observations they had."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, ...]] = []

    def __call__(self, *, batch: dict[str, Any], episodes: Any, **kwargs: Any) -> dict[str, Any]:
        for episode in self.single_agent_episode_iterator(episodes):
            ids = episode.id_, episode.multi_agent_episode_id, episode.agent_id, episode.module_id
            at = tuple(at_of(episode.get_observations(-1)).tolist())
            self.seen.append((*ids, at, episode.t, episode.is_done))
            with pytest.raises(EpisodeError):
                episode.add_env_reset(None)
        return batch


@few
@given(drawn_settings, COUNT)
def test_a_piece_sees_every_observation_once_as_its_agents(drawn: Drawn, count: int) -> None:
    pieces: list[Noting] = []

    def noting(part: Any) -> Noting:
        pieces.append(Noting())
        return pieces[-1]

    envs, rollout = made(drawn, env_to_module_connector=noting)
    fragments = run(rollout, count)
    module_of = mapping_of(drawn)
    seen = [each for piece in pieces for each in piece.seen]
    parents = {chunk.id_: chunk.multi_agent_episode_id for chunk in chunks_of(fragments)}
    for id_, parent, agent, module_id, at, t, _ in seen:
        assert agent == f"agent {at[1]}"
        assert module_id == module_of(agent, type("Episode", (), {"id_": parent}))
        assert t in (at[4], at[4] + 1)
        assert parents.get(id_, parent) == parent
    observed = [at for env in envs for told in env.log for at in told.observations.values()]
    ongoing = [each[4] for each in seen if not each[6]]
    assert len(set(ongoing)) == len(ongoing)
    steps = [step for env in envs for step in steps_of(env.log)[0]]
    ends = [(step.next_at, step.at[4] + 1) for step in steps if any(step[4:]) and step.next_at != step.at]
    assert sorted((each[4], each[5]) for each in seen if each[6]) == sorted(ends)
    assert {each[4] for each in seen} <= set(observed)
    assert len(seen) >= sum(len(told.actions) for env in envs for told in env.log)


def marks(dtype: Any = None, added: float = 0, space: Any = None) -> LambdaConnector:
    """A piece that adds a million to the slot in every observation: marked twice, or not at all, one would show.

    dtype    of the bare numbers that it leaves; None: it leaves observations in the form that they have
    space    of those, as pieces declare it; None: the one before
    """

    def mark(episodes: Any) -> None:
        for episode in ConnectorV2.single_agent_episode_iterator(episodes):
            new = marked(episode.get_observations(-1))
            new = new if dtype is None else (at_of(new) + added).astype(dtype)
            episode.set_observations(new_data=new, at_indices=-1)

    return LambdaConnector(mark, observation_space=space)


def marked(observation: Any) -> Any:
    at = np.array(at_of(observation))
    at[0] += 1_000_000
    return {**observation, "at": at} if isinstance(observation, dict) else at


FLOATS = gym.spaces.Box(0, 2**31, (5,), np.float64)
AS_FLOATS: dict[str, Any] = {"dtype": np.float64, "space": lambda in_obs, in_act: FLOATS}


@few
@given(drawn_settings, COUNT, st.sampled_from([{}, AS_FLOATS]))
@example(COMES_LATE, 3, AS_FLOATS)
def test_pieces_rewrite_every_observation_once(drawn: Drawn, count: int, form: dict[str, Any]) -> None:
    envs, rollout = made(drawn, env_to_module_connector=lambda part: marks(**form))
    emitted = []
    for chunk in chunks_of(run(rollout, count)):
        at = np.asarray(at_of(chunk.get_observations()))
        np.testing.assert_array_equal(chunk.get_extra_model_outputs("seen"), at[:-1])
        assert (at[:, 0] >= 1_000_000).all()
        unmarked = (at - [1_000_000, 0, 0, 0, 0]).astype(int).tolist()
        emitted += pairwise(map(tuple, unmarked))
    assert sorted(emitted) == sorted((step.at, step.next_at) for env in envs for step in steps_of(env.log)[0])


@few
@given(drawn_settings, COUNT)
@example(COMES_LATE, 3)
def test_joint_pieces_leave_the_column_of_agents_that_come_late_in_their_type(drawn: Drawn, count: int) -> None:
    def spaces(in_obs: Any, in_act: Any) -> Any:
        return gym.spaces.Dict(dict.fromkeys(in_obs.spaces, FLOATS))

    _, rollout = made(drawn, joint_connector=lambda env: marks(np.float64, space=spaces))
    for chunk in chunks_of(run(rollout, count)):
        at = np.asarray(at_of(chunk.get_observations()))
        assert at.dtype == np.float64
        assert (at[:, 0] >= 1_000_000).all()
        np.testing.assert_array_equal(chunk.get_extra_model_outputs("seen"), at[:-1])


class SumsUp(RLModule):
    """Acts by whatever it sees."""

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        total = sum(leaf.double().reshape(len(leaf), -1).sum(1) for leaf in leaves_of(batch["obs"]))
        return {"action_dist_inputs": torch.sin(total[:, None] + torch.arange(7)).float(), "vf_preds": total.float()}


PIECES: dict[str, Any] = {
    "none": list,
    "flatten": FlattenObservations,
    "filter": MeanStdFilter,
    "previous": lambda: PrevActionsPrevRewards(n_prev_actions=2, n_prev_rewards=2),
    "frames": lambda: FrameStacking(num_frames=3),
    "mapped": lambda: [FlattenObservations(), MeanStdFilter(), FrameStacking(num_frames=2)],
}


@pytest.mark.parametrize("name", PIECES)
@settings(max_examples=examples(8))
@given(drawn=drawn_settings, count=COUNT)
def test_pieces_do_the_same_by_columns_and_by_episodes(name: str, drawn: Drawn, count: int) -> None:
    nested = drawn.agents if name in ("flatten", "mapped") else 0
    drawn = drawn._replace(lanes=1, nested=nested, lookback=drawn.lookback + 2)
    told = []
    for by_episodes in (False, True):

        def pieces(part: Any, first: Any = by_episodes) -> list[ConnectorV2]:
            made_now = PIECES[name]()
            return [ByEpisodes()] * first + (made_now if isinstance(made_now, list) else [made_now])

        kind = "nested" if nested else "plain"
        modules = {f"{kind} {place}": SumsUp() for place in range(2)}
        acts: Any = {"module_to_env_connector": lambda part: ByEpisodes()} if by_episodes else {}
        _, rollout = made(drawn, env_to_module_connector=pieces, module=modules, **acts)
        told.append([leaves(fragment) for fragment in run(rollout, count, publish=False)])
    for mine, theirs in zip(*told, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def leaves(fragment: Any) -> list[Any]:
    """All arrays of all chunks."""

    def trees_of(chunk: Any) -> tuple[Any, ...]:
        outputs = {name: each.data for name, each in chunk.extra_model_outputs.items()}
        return chunk.get_observations(), chunk.get_actions(), chunk.get_rewards(), outputs

    return [leaf for chunk in chunks_of([fragment]) for tree in trees_of(chunk) for leaf in leaves_of(tree)]


@pytest.mark.parametrize("by_episode", [False, True])
@settings(max_examples=examples(8))
@given(drawn=drawn_settings, count=COUNT)
def test_a_stateful_modules_state_is_its_agents_own(by_episode: bool, drawn: Drawn, count: int) -> None:
    drawn = drawn._replace(nested=0, by_episode=by_episode, lookback=max(1, drawn.lookback))
    _, rollout = made(drawn, module={"plain 0": Remembers(), "plain 1": Remembers()})
    for chunk in chunks_of(run(rollout, count, publish=False)):
        at = chunk.get_observations(slice(0, len(chunk)))
        state = chunk.get_extra_model_outputs("state_out")["steps"][:, 0]
        np.testing.assert_array_equal(state, at[:, 4] + 1)


class Remembers(RLModule):
    """Its state counts the agent's steps."""

    def is_stateful(self) -> bool:
        return True

    def get_initial_state(self) -> dict[str, Any]:
        return {"steps": torch.zeros(1)}

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        obs = batch["obs"]
        steps = batch["state_in"]["steps"] + 1
        logits = torch.zeros((*obs.shape[:-1], 7))
        return {"action_dist_inputs": logits, "state_out": {"steps": steps}}


def test_a_recurrent_modules_batches_are_the_same_by_columns_and_by_episodes() -> None:
    drawn = Drawn(2, 1, 3, 0, 9, False, 5, 1, False, 3)
    acts: Any = {"module": {"plain 0": None, "plain 1": None}, "env_to_module_connector": lambda part: MeanStdFilter()}
    config = DefaultModelConfig(use_lstm=True, lstm_cell_size=4, max_seq_len=3)
    _, rollout = made(drawn, model_config=config, **acts)
    fragments = run(rollout, 4, publish=False)
    batches = [rollout.learner.batch_of([fragment]) for fragment in fragments]
    assert sum(len(batch) for batch in batches) > len(batches)
    for fragment, batch in zip(fragments, batches, strict=True):
        for module_id, columnar in batch.items():
            episodes = list(fragment.agent_episodes(module_id))
            pipeline = rollout.learner.pipeline_of(module_id)
            by_episode = pipeline(rl_module=rollout.module[module_id], episodes=episodes)
            assert columnar.keys() == by_episode.keys()
            for one, other in zip(leaves_of(columnar), leaves_of(by_episode), strict=True):
                torch.testing.assert_close(one, other)


FLAT = COMES_LATE._replace(envs=2, nested=0, length=4, fragment_length=3, lookback=1, seed=0)


def test_agents_integer_columns_take_whole_number_floats_and_refuse_fractions() -> None:
    """Pieces that write floats without saying so."""
    _, rollout = made(FLAT, env_to_module_connector=lambda part: marks(np.float64))
    chunks = chunks_of(run(rollout, 3))
    assert chunks
    for chunk in chunks:
        observations = chunk.get_observations()
        assert observations.dtype == np.int64
        assert (observations[:, 0] >= 1_000_000).all()
    _, rollout = made(FLAT, env_to_module_connector=lambda part: marks(np.float64, added=0.5))
    with pytest.raises(ColumnError, match=r"column 'obs': got float64\[.*\], expected int64"):
        run(rollout, 3)


def test_logits_of_agents_may_be_arrays_before_actions_are_sampled() -> None:
    def actions(*pieces: ConnectorV2) -> list[Any]:
        _, rollout = made(FLAT, module={"plain 0": SumsUp(), "plain 1": SumsUp()})
        for pipeline in rollout.module_to_env:
            for piece in pieces:
                pipeline.prepend(piece)
        return [leaf for each in run(rollout, 3, publish=False) for leaf in leaves(each)]

    plain = actions()
    assert plain
    for one, other in zip(actions(TensorToNumpy()), plain, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
