"""Stateful modules: the right state at every episode's start, every cut, and every row of a train batch."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, strategies as st
from numbered_module import NumberedEnv, NumberedModule, numbered_envs
from piece_forms import MODES, OneByOne, equal

from rollflow import GeneralAdvantageEstimation, RLModule, Rollout, SingleAgentEpisode
from rollflow.nodes import AddNextObservationsFromEpisodesToTrainBatch, LearnerConnectorPipeline
from rollflow.nodes.connectors.common.episode_columns import AddStatesFromEpisodesToBatch, AddTimeDimToBatchAndZeroPad
from rollflow.nodes.connectors.module_to_env.action_pieces import RemoveSingleTsTimeRankFromBatch
from rollflow.stream import ConnectorError, ModuleError
from rollflow.stream.data.tree import map_tree

FIRST, LARGEST = 7, 10_007


def remembered(before: Any, number: Any) -> Any:
    """The state after an observation: it depends on each one before, and on their order."""
    return (3 * before + number + 1) % LARGEST


class Remembers(RLModule):
    """Its state is a number made of all observations since the episode's start, and its value is that number."""

    def get_initial_state(self) -> dict[str, Any]:
        return {"memory": (torch.tensor([FIRST]),)}

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        obs = batch["obs"]
        steps = (obs["at"] if isinstance(obs, dict) else obs)[..., 2]
        state, states = batch["state_in"]["memory"][0], []
        for t in range(steps.shape[1]):
            state = remembered(state, steps[:, t : t + 1])
            states.append(state)
        every = torch.cat(states, 1)
        return {"actions": every % 7, "vf_preds": every.float(), "state_out": {"memory": (state,)}}


def rollout_of(slots: int, mode: AutoresetMode, nested: bool, max_seq_len: int = 4, **options: Any) -> Rollout:
    envs = [lambda slot=slot: NumberedEnv(slot, nested=nested) for slot in range(slots)]  # type: ignore[misc]
    module = Remembers(model_config={"max_seq_len": max_seq_len})
    return Rollout(SyncVectorEnv(envs, autoreset_mode=mode), module=module, seed=3, **options)


SIZES: dict[str, st.SearchStrategy[Any]] = {
    "slots": st.integers(1, 4),
    "mode": st.sampled_from(MODES),
    "nested": st.booleans(),
    "fragment_length": st.integers(1, 11),
    "lookback": st.sampled_from([None, 1, 4]),
    "num_fragments": st.integers(1, 4),
}


@given(one_by_one=st.booleans(), sizes=st.fixed_dictionaries(SIZES))
def test_every_step_knows_all_steps_since_its_episodes_start(one_by_one: bool, sizes: dict[str, Any]) -> None:
    pieces = [OneByOne()] if one_by_one else []
    open_states: dict[str, int] = {}
    with rollout_of(**sizes, env_to_module_connector=lambda env: pieces) as rollout:
        for fragment in rollout.fragments():
            for chunk in fragment.episodes():
                state = open_states.pop(chunk.id_, FIRST)
                assert (state == FIRST) == (chunk.t_started == 0)
                for t in range(len(chunk)):
                    observation = chunk.get_observations(t)
                    at = observation["at"] if isinstance(observation, dict) else observation
                    state = int(remembered(state, at[2]))
                    assert chunk.get_extra_model_outputs("state_out", t)["memory"][0].tolist() == [state]
                    assert chunk.get_actions(t) == state % 7
                if not chunk.is_done:
                    open_states[chunk.id_] = state


@given(max_seq_len=st.integers(1, 6), sizes=st.fixed_dictionaries(SIZES))
def test_training_goes_over_the_same_states_as_acting_did(max_seq_len: int, sizes: dict[str, Any]) -> None:
    learner = lambda obs_space, act_space: GeneralAdvantageEstimation(gamma=0.5)  # noqa: E731
    with rollout_of(**sizes, max_seq_len=max_seq_len, learner_connector=learner) as rollout:
        for fragment in rollout.fragments():
            batch = rollout.learner_pipeline.of_fragments([fragment], rollout.module)
            mask = batch["loss_mask"]
            assert mask.shape[1] == max_seq_len
            assert int(mask.sum()) == int(batch["seq_lens"].sum()) == fragment.num_steps
            again = rollout.module.forward_train(batch)
            assert torch.equal(again["vf_preds"][mask], batch["vf_preds"][mask])
            for column in ("rewards", "vf_preds", "actions", "advantages", "value_targets"):
                assert batch[column].shape[:2] == mask.shape
                assert not batch[column][~mask].any()
            assert torch.equal(mask, torch.arange(max_seq_len) < batch["seq_lens"][:, None])
            items = np.concatenate([chunk.get_rewards() for chunk in fragment.episodes()])
            np.testing.assert_array_equal(batch["rewards"][mask], items)


@given(max_seq_len=st.integers(1, 6), sizes=st.fixed_dictionaries(SIZES), with_next=st.booleans())
def test_pieces_agree_on_columns_and_one_by_one(max_seq_len: int, sizes: dict[str, Any], with_next: bool) -> None:
    with rollout_of(**sizes, max_seq_len=max_seq_len) as rollout:
        fragments = list(rollout.fragments())
    pieces = [AddNextObservationsFromEpisodesToTrainBatch()] if with_next else []
    columnar, plain = (
        LearnerConnectorPipeline.default(None, None, [*pieces, GeneralAdvantageEstimation(), *more], stateful=True)
        for more in ([], [OneByOne()])
    )
    plain.append(OneByOne())
    one, other = (pipeline.of_fragments(fragments, rollout.module) for pipeline in (columnar, plain))
    assert one.keys() == other.keys()
    assert ("next_state_in" in one) == with_next
    for column in one:
        if column in ("advantages", "value_targets"):
            np.testing.assert_allclose(one[column], other[column], rtol=1e-5, atol=1e-5)
        else:
            equal(map_tree(torch.Tensor.numpy, one[column]), map_tree(torch.Tensor.numpy, other[column]))


# By hand


def chunk(steps: int, *, t_started: int = 0, lookback: int = 0) -> SingleAgentEpisode:
    """Observations are the step's number, and the state after each is ten times that."""
    numbers = range(t_started - lookback, t_started + steps)
    given: Any = {"observations": [float(number) for number in [*numbers, t_started + steps]], "t_started": t_started}
    given |= {"actions": [0 for _ in numbers], "rewards": [1.0 for _ in numbers]}
    states = {"state_out": [np.array([10.0 * number]) for number in numbers]}
    return SingleAgentEpisode(f"from {t_started}", extra_model_outputs=states, len_lookback_buffer=lookback, **given)


class Two(RLModule):
    """Has rows of two steps, and a state that begins with -1."""

    def setup(self) -> None:
        self.model_config = {"max_seq_len": 2}

    def get_initial_state(self) -> Any:
        return np.array([-1.0])


def test_stateless_modules_get_no_time_axis() -> None:
    for piece in (AddTimeDimToBatchAndZeroPad(), AddStatesFromEpisodesToBatch(), RemoveSingleTsTimeRankFromBatch()):
        batch = {"obs": np.arange(3)}
        assert piece(rl_module=RLModule(), batch=batch, episodes=[chunk(1)], shared_data={}) == {"obs": batch["obs"]}


# What is refused


def test_a_chunk_that_goes_on_without_lookback_is_refused() -> None:
    with pytest.raises(ConnectorError, match="'from 5': the chunk from step 5 on has no lookback"):
        LearnerConnectorPipeline.default(stateful=True)(rl_module=Two(), episodes=[chunk(2, t_started=5)])
    with pytest.raises(ValueError, match="lookback is 0, expected at least 1: a stateful module"):
        rollout_of(1, AutoresetMode.NEXT_STEP, nested=False, lookback=0)


def test_a_chunk_without_states_is_refused() -> None:
    bare = SingleAgentEpisode("bare", observations=[0, 1], actions=[0], rewards=[0.0], len_lookback_buffer=0)
    with pytest.raises(ConnectorError, match=r"'bare' has no extra model output 'state_out'.*it has: none"):
        AddStatesFromEpisodesToBatch(as_learner_connector=True)(rl_module=Two(), batch={}, episodes=[bare])


def test_an_output_without_time_axis_is_refused() -> None:
    class Flat(Remembers):
        def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            return super()._forward(batch) | {"vf_preds": torch.zeros(len(batch["obs"]))}

    with (
        pytest.raises(ConnectorError, match=r"column 'vf_preds' has shape \[2\], expected \[N, 1, ...\]"),
        Rollout([lambda: NumberedEnv(0), lambda: NumberedEnv(1)], module=Flat()) as rollout,
    ):
        next(iter(rollout.batches()))


def test_values_of_a_stateful_module_must_be_recorded() -> None:
    ended = chunk(2)
    ended.is_terminated = True
    with pytest.raises(ModuleError, match="let 'Two' give 'vf_preds' in its forward passes"):
        GeneralAdvantageEstimation()(rl_module=Two(), batch={}, episodes=[ended])


@pytest.mark.parametrize(
    ("initial", "stateful"),
    [
        ({}, False),
        (None, False),
        ({"a": {}}, False),
        (torch.zeros(1), True),
        (np.zeros(3), True),
        ({"a": (0.0,)}, True),
    ],
)
def test_a_module_is_stateful_if_its_initial_state_has_a_leaf(initial: Any, stateful: bool) -> None:
    class Has(RLModule):
        def get_initial_state(self) -> Any:
            return initial

    assert Has().is_stateful() is stateful


@pytest.mark.parametrize(
    ("state_out", "told"),
    [
        (None, "module 'Gives' has an initial state, but its forward pass gave no 'state_out'"),
        (torch.zeros(2, 4), r"gave 'state_out' float32\[4\], expected {'h': 'float32\[1\]'}, as its get_initial_state"),
        ({"h": torch.zeros(2, 4)}, r"gave 'state_out' {'h': 'float32\[4\]'}, expected {'h': 'float32\[1\]'}"),
        ({"h": torch.zeros(2, 1, dtype=torch.float64)}, r"{'h': 'float64\[1\]'}, expected {'h': 'float32\[1\]'}"),
        ({"g": torch.zeros(2, 1)}, r"{'g': 'float32\[1\]'}, expected {'h': 'float32\[1\]'}"),
    ],
)
@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_state_unlike_the_initial_one_is_refused(state_out: Any, told: str, one_by_one: bool) -> None:
    class Gives(NumberedModule):
        def get_initial_state(self) -> Any:
            return {"h": torch.zeros(1)}

        def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            output = {"actions": torch.zeros(2, 1, dtype=torch.int64)}
            return output if state_out is None else {**output, "state_out": state_out}

    pieces = [OneByOne()] if one_by_one else []
    rollout = Rollout(numbered_envs(2, lengths=(9, 12))[1], module=Gives(), env_to_module_connector=lambda env: pieces)
    with pytest.raises(ModuleError, match=told), rollout:
        next(iter(rollout.fragments()))


@pytest.mark.parametrize("numpy", [False, True])
def test_rows_of_chunks_that_share_an_id_stay_beside_each_other(numpy: bool) -> None:
    first, other, second = chunk(3), chunk(1), chunk(2, t_started=3, lookback=1)
    other.id_, second.id_ = "other", first.id_
    episodes = [first, other, second, other.cut(1)]
    if numpy:
        for episode in episodes:
            episode.to_numpy()
    batch = LearnerConnectorPipeline.default(stateful=True)(rl_module=Two(), episodes=episodes)
    assert batch["obs"].tolist() == [[0, 1], [2, 0], [0, 0], [3, 4]]
    assert batch["seq_lens"].tolist() == [2, 1, 1, 2]
    assert batch["loss_mask"].tolist() == [[True, True], [True, False], [True, False], [True, True]]
    assert batch["state_in"].tolist() == [[-1], [10], [-1], [20]]
