"""Pieces before a learner: what they add by hand-worked numbers, and the same from columns as from episodes."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, note, strategies as st
from numbered_module import NumberedModule, numbered_envs
from piece_forms import MODES, OneByOne, equal
from property_examples import strategies

from rollflow import ConnectorV2, Fragment, GeneralAdvantageEstimation, RLModule, Rollout, SingleAgentEpisode, VTrace
from rollflow.nodes import (
    AddNextObservationsFromEpisodesToTrainBatch,
    ClipRewards,
    ComputeReturnsToGo,
    DefaultModule,
    LambdaConnector,
    LearnerConnectorPipeline,
    NStepReturns,
)
from rollflow.nodes.connectors.common.batches import BatchIndividualItems
from rollflow.nodes.connectors.common.episode_columns import LAST_OBSERVATIONS, AddObservationsFromEpisodesToBatch
from rollflow.nodes.connectors.learner.train_columns import (
    AddColumnsFromEpisodesToTrainBatch,
    AddInfosFromEpisodesToTrainBatch,
    AddOneTsToEpisodesAndTruncate,
    discounted_sums,
)
from rollflow.stream import ConnectorError, ModuleError
from rollflow.stream.data.tree import map_tree
from rollflow.stream.fragments.fragment import FragmentEpisodes


def episode(rewards: list[float], *, values: Any = None, logp: float = -math.log(2), **ends: bool) -> Any:
    """Observations 0, 1, 2, …, actions 0, infos {"at": observation}, each action with log-probability `logp`."""
    made = SingleAgentEpisode()
    made.add_env_reset(0, {"at": 0})
    for t, reward in enumerate(rewards):
        flags = ends if t == len(rewards) - 1 else {}
        extra = {"action_logp": logp} if values is None else {"vf_preds": values[t]}
        made.add_env_step(t + 1, 0, reward, {"at": t + 1}, extra_model_outputs=extra, **flags)
    return made


def batch_of(piece: ConnectorV2, *episodes: Any, module: Any = None, batch: Any = None) -> dict[str, Any]:
    """The piece's batch, batched."""
    given, listed = {} if batch is None else batch, list(episodes)
    added = piece(rl_module=module, batch=given, episodes=listed)
    return BatchIndividualItems()(rl_module=module, batch=added, episodes=listed)


# Next observations and infos


def test_empty_infos_of_two_chunks_of_one_episode_are_batched() -> None:
    whole = SingleAgentEpisode(observations=[0, 1, 2], actions=[0, 0], rewards=[1, 1], len_lookback_buffer=0)
    assert batch_of(AddInfosFromEpisodesToTrainBatch(), whole[:1], whole[1:])["infos"] == [{}, {}]


# Returns


def test_returns_to_go_by_hand() -> None:
    # 4, then 2 + 4 / 2 = 4, then 1 + 4 / 2 = 3; the second chunk, though it was cut, has nothing after it
    batch = batch_of(ComputeReturnsToGo(gamma=0.5), episode([1, 2, 4], terminated=True), episode([8, 2]))
    assert batch["returns_to_go"].tolist() == [3, 4, 4, 9, 2]
    assert batch["returns_to_go"].dtype == np.float32


@pytest.mark.parametrize("form", [np.asarray, torch.from_numpy])
@given(st.lists(st.integers(0, 9), max_size=6), st.integers(0, 2**32 - 1))
def test_discounted_sums_are_those_of_each_chunk_step_by_step(form: Any, lengths: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    values, discounts = (rng.normal(size=sum(lengths)).astype(np.float32) for _ in range(2))
    expected, end = np.zeros_like(values), 0
    for length in lengths:
        end += length
        carry = np.float32(0.0)
        for t in range(end - 1, end - length - 1, -1):
            carry = expected[t] = values[t] + discounts[t] * carry
    sums: Any = discounted_sums(form(values), form(discounts), np.array(lengths, np.int64))
    assert type(sums) is type(form(values))
    np.testing.assert_array_equal(sums, expected)


@pytest.mark.parametrize(
    ("steps", "rewards", "following", "ended", "spans"),
    [
        (2, [1 + 1, 2 + 2, 4, 8 + 1, 2], [2, 3, 3, 2, 2], [False, True, True, False, False], [2, 2, 1, 2, 1]),
        (9, [1 + 1 + 1, 2 + 2, 4, 8 + 1, 2], [3, 3, 3, 2, 2], [True, True, True, False, False], [3, 2, 1, 2, 1]),
    ],
)
@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_returns_of_several_steps_by_hand(
    steps: int, rewards: list[int], following: list[int], ended: list[bool], spans: list[int], end: str
) -> None:
    batch = batch_of(NStepReturns(n_step=steps, gamma=0.5), episode([1, 2, 4], **{end: True}), episode([8, 2]))
    assert (batch["rewards"].tolist(), batch["new_obs"].tolist()) == (rewards, following)
    flags = {"terminateds": [False] * 5, "truncateds": [False] * 5, f"{end}s": ended}
    assert {name: batch[name].tolist() for name in flags} == flags
    assert batch["n_step"].tolist() == spans
    assert [batch[name].dtype for name in ("rewards", "n_step")] == [np.float32, np.int64]


def test_one_step_returns_are_the_transitions_themselves() -> None:
    chunks = [episode([1, 2, 4], truncated=True), episode([8, 2], terminated=True), episode([3])]
    batch = batch_of(NStepReturns(n_step=1), *chunks)
    expected = batch_of(AddNextObservationsFromEpisodesToTrainBatch(), *chunks)
    expected |= batch_of(AddColumnsFromEpisodesToTrainBatch(), *chunks)
    for name in ("rewards", "new_obs", "terminateds", "truncateds"):
        equal(batch[name], expected[name])
    assert batch["n_step"].tolist() == [1] * 6


def test_several_steps_replace_single_ones_that_the_batch_has() -> None:
    pieces = [AddColumnsFromEpisodesToTrainBatch(), NStepReturns(n_step=2, gamma=0.5)]
    pipeline = LearnerConnectorPipeline(connectors=pieces)
    chunks = [episode([1, 2, 4], terminated=True)]
    batch = BatchIndividualItems()(rl_module=None, batch=pipeline(rl_module=None, episodes=chunks), episodes=chunks)
    assert batch["rewards"].tolist() == [2, 4, 4]
    assert batch["terminateds"].tolist() == [False, True, True]


# Clipped rewards


def test_rewards_are_clipped_and_the_episodes_keep_theirs() -> None:
    played = episode([-3, 0.5, 7])
    assert batch_of(ClipRewards(low=-1, high=2), played)["rewards"].tolist() == [-1, 0.5, 2]
    assert batch_of(ClipRewards(high=2), played)["rewards"].tolist() == [-3, 0.5, 2]
    assert batch_of(ClipRewards(sign=True), played)["rewards"].tolist() == [-1, 1, 1]
    assert batch_of(ClipRewards(sign=True), played)["rewards"].dtype == np.float32
    assert played.get_rewards() == [-3, 0.5, 7]


@pytest.mark.parametrize(
    ("behind", "column", "gamma"),
    [
        (ComputeReturnsToGo, "returns_to_go", 0.5),
        (partial(NStepReturns, n_step=3), "rewards", 0.5),
        (GeneralAdvantageEstimation, "value_targets", 0.0),
    ],
)
def test_pieces_behind_see_the_clipped_rewards(behind: Any, column: str, gamma: float) -> None:
    pipeline = LearnerConnectorPipeline.default(custom_pieces=[ClipRewards(sign=True), behind(gamma=gamma)])
    batch = pipeline(rl_module=Tens(), episodes=[episode([9, -9, 4], terminated=True)])
    assert batch[column].tolist() == [1 - gamma + gamma**2, -1 + gamma, 1]


def test_rewards_in_the_batch_are_clipped_where_they_stand() -> None:
    chunks = [episode([9, -9]), episode([4])]
    in_list_form: dict[str, Any] = AddColumnsFromEpisodesToTrainBatch()(rl_module=None, batch={}, episodes=chunks)
    assert batch_of(ClipRewards(sign=True), *chunks, batch=in_list_form)["rewards"].tolist() == [1, -1, 1]
    batched = batch_of(ClipRewards(sign=True), *chunks, batch={"rewards": torch.tensor([9.0, 0.0, -2.0])})
    assert torch.equal(batched["rewards"], torch.tensor([1.0, 0.0, -1.0]))


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        ({"rewards": np.zeros(3)}, "column 'rewards' has 3 items, expected 2: one for each step"),
        ({"rewards": np.zeros(2), "n_step": np.ones(2)}, r"sums over several steps already: .* stand before NStepRet"),
    ],
)
def test_rewards_that_are_not_one_for_each_step_are_refused(batch: Any, told: str) -> None:
    with pytest.raises(ConnectorError, match=told):
        ClipRewards(sign=True)(rl_module=None, batch=batch, episodes=[episode([9, -9])])


# V-trace


class Tens(RLModule):
    """Values an observation at ten times its number, and chooses between two actions by fixed odds."""

    def __init__(self, chance: float = 0.5, values: bool = True) -> None:
        super().__init__(action_space=spaces.Discrete(2))
        self.chance = chance
        self.values = values

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        logits = torch.tensor([self.chance, 1 - self.chance]).log().expand(len(batch["obs"]), 2)
        output = {"action_dist_inputs": logits}
        return {**output, "vf_preds": 10.0 * batch["obs"].float()} if self.values else output


class TensApart(Tens):
    """Has no values in its forward pass."""

    def __init__(self) -> None:
        super().__init__(values=False)

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> torch.Tensor:
        return 10.0 * batch["obs"].float()


def traced(*episodes: Any, module: Any = None, piece: Any = VTrace, **kwargs: Any) -> tuple[list[float], list[float]]:
    batch = batch_of(piece(gamma=0.5, **kwargs), *episodes, module=module or Tens())
    assert sorted(batch) == ["advantages", "value_targets"]
    assert batch["advantages"].dtype == batch["value_targets"].dtype == np.float32
    return batch["value_targets"].tolist(), batch["advantages"].tolist()


estimated = partial(traced, piece=GeneralAdvantageEstimation, lambda_=0.5, normalize_advantages=False)
VALUED: dict[str, Any] = {"rewards": [1.0, 1.0, 1.0], "values": [2.0, 4.0, 6.0]}


@pytest.mark.parametrize(
    ("worked", "told", "ends", "targets", "advantages"),
    [
        # all ratios are 1, so the targets are the returns: 4,  2 + 4 / 2 = 4,  1 + 4 / 2 = 3; the values 0, 10, 20
        (traced, {"rewards": [1, 2, 4]}, ["terminated"], [3, 4, 4], [3, -6, -16]),
        # a chunk that goes on is worth its last observation's value:
        # 4 + 30 / 2 = 19,  2 + 19 / 2 = 11.5,  1 + 11.5 / 2 = 6.75
        (traced, {"rewards": [1, 2, 4]}, ["truncated", ""], [6.75, 11.5, 19], [6.75, 1.5, -1]),
        # deltas 1 + 2 - 2 = 1,  1 + 3 - 4 = 0,  1 + 0 - 6 = -5;  each advantage adds a quarter of the next
        (estimated, VALUED, ["terminated"], [2.0 + 1.0 - 0.25 * 1.25, 2.75, 1.0], [1.0 - 0.25 * 1.25, -1.25, -5.0]),
        # the last delta is 1 + 0.5 * 30 - 6 = 10
        (estimated, VALUED, ["truncated", ""], [3.625, 6.5, 16.0], [1.0 + 0.25 * 2.5, 2.5, 10.0]),
        # values that were not recorded are computed, also that of the observation behind the chunk, 20:
        # deltas 1 + 5 - 0 = 6,  1 + 10 - 10 = 1
        (estimated, {"rewards": [1.0, 1.0]}, [""], [6.25, 11.0], [6.25, 1.0]),
    ],
)
def test_targets_and_advantages_by_hand(worked: Any, told: Any, ends: Any, targets: Any, advantages: Any) -> None:
    for end in ends:
        assert worked(episode(**told, **({end: True} if end else {}))) == (targets, advantages)


def test_values_apart_from_the_forward_pass_are_asked_for() -> None:
    assert traced(episode([1, 2, 4]), module=TensApart()) == traced(episode([1, 2, 4]))


# The action's probability was 1/2, and is now 1/4 or 1: ratios of 1/2 and 2.
# Values 0, 10 and 0 after the end: deltas before ratios 1 + 5 - 0 = 6 and 4 + 0 - 10 = -6.
OFF_POLICY: dict[str, tuple[float, dict[str, float], list[float], list[float]]] = {
    # vs_1 = 10 - 3 = 7; vs_0 = 0 + 3 + 1/2 · 1/2 · (7 - 10) = 2.25; advantages 1/2 (1 + 3.5) and 1/2 (4 - 10)
    "less likely now": (0.25, {}, [2.25, 7], [2.25, -3]),
    # every ratio is clipped to 1: the returns 1 + 4 / 2 = 3 and 4
    "likelier now": (1.0, {}, [3, 4], [3, -6]),
    # vs_1 = 10 - 12 = -2; vs_0 = 12 + 1/2 · 2 · (-2 - 10) = 0; advantages 2 (1 - 1) and 2 (4 - 10)
    "without clips": (1.0, dict.fromkeys(("rho_clip", "c_clip", "pg_rho_clip"), math.inf), [0, -2], [0, -12]),
    # vs_1 = 10 - 12; vs_0 = 12 + 1/2 · 1 · (-12) = 6; advantages 1 (1 - 1) and 1 (4 - 10)
    "corrections unclipped": (1.0, {"rho_clip": 2.0}, [6, -2], [0, -6]),
    # vs_1 = 10 - 6 = 4; vs_0 = 6 + 1/2 · 2 · (4 - 10) = 0
    "traces unclipped": (1.0, {"c_clip": 2.0}, [0, 4], [3, -6]),
    # as "likelier now", the advantages doubled
    "advantages unclipped": (1.0, {"pg_rho_clip": 3.0}, [3, 4], [6, -12]),
}


@pytest.mark.parametrize("case", OFF_POLICY)
def test_off_policy_targets_by_hand(case: str) -> None:
    chance, clips, targets, advantages = OFF_POLICY[case]
    given = traced(episode([1, 4], terminated=True), module=Tens(chance), **clips)
    assert given == (pytest.approx(targets), pytest.approx(advantages))


@pytest.mark.parametrize(
    ("piece", "advantages"),
    [
        # 4 + 60 / 2 = 34,  2 + 34 / 2 = 19,  1 + 19 / 2 = 10.5; the values 0, 20, 40
        (VTrace(gamma=0.5), [10.5, -1, -6]),
        # 1 + 20 / 2 - 0,  2 + 40 / 2 - 20,  4 + 60 / 2 - 40
        (GeneralAdvantageEstimation(gamma=0.5, lambda_=0.0, normalize_advantages=False), [11, 2, -6]),
    ],
)
def test_observations_that_another_piece_made_are_taken_from_it(piece: ConnectorV2, advantages: list[float]) -> None:
    batch, shared = {"obs": np.array([0, 2, 4])}, {"last_observations": np.array([6])}
    batch = piece(rl_module=Tens(), batch=batch, episodes=[episode([1, 2, 4])], shared_data=shared)
    assert batch["advantages"].tolist() == advantages


class Stateful(Tens):
    def get_initial_state(self) -> Any:
        return {"h": torch.zeros(2)}


class Silent(Tens):
    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"actions": torch.zeros(len(batch["obs"]))}


class Unsqueezed(Tens):
    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        output = super()._forward(batch)
        return {**output, "vf_preds": output["vf_preds"][:, None]}


class NoValues:
    forward_train = Tens(values=False).forward_train
    get_train_action_dist_cls = Tens().get_train_action_dist_cls


@pytest.mark.parametrize(
    ("module", "told"),
    [
        (Stateful(), r"VTrace can't be used with a stateful module yet, and 'Stateful' is one"),
        (object(), r"but 'object' has no forward_train\(\)"),
        (Silent(), r"Silent.forward_train gave \['actions'\], expected 'action_dist_inputs' among them"),
        (NoValues(), r"VTrace needs values, but module 'NoValues' has no compute_values\(batch\)"),
        (Tens(values=False), r"Tens.forward_train gave \['action_dist_inputs'\], expected 'vf_preds'"),
        (Unsqueezed(), r"Unsqueezed.forward_train: 'vf_preds' has shape \[2, 1\], expected \[2\]: one number for each"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_module_that_lacks_something_is_refused(module: Any, told: str) -> None:
    with pytest.raises(ModuleError, match=told):
        traced(episode([1, 2]), module=module)


BARE = SingleAgentEpisode(observations=[0, 1], actions=[0], rewards=[1.0], len_lookback_buffer=0)


@pytest.mark.parametrize(
    ("given", "batch", "told"),
    [
        (BARE, {}, r"VTrace needs 'action_logp', .* but the episodes have none; .*: none"),
        (episode([1, 2]), {"rewards": np.ones((2, 1))}, r"'rewards' has shape \[2, 1\], expected \[2\]: one"),
        (episode([1, 2], logp=np.zeros(1)), {}, r"'action_logp' has shape \[2, 1\], expected \[2\]: one"),  # type: ignore[arg-type]
    ],
    ids=["no log-probabilities", "rewards", "log-probabilities"],
)
def test_numbers_that_are_missing_or_have_an_axis_too_many_are_refused(given: Any, batch: Any, told: str) -> None:
    with pytest.raises((ConnectorError, ModuleError), match=told):
        batch_of(VTrace(), given, module=Tens(), batch=batch)


def test_several_steps_at_once_are_refused_of_a_stateful_module() -> None:
    with pytest.raises(ModuleError, match="NStepReturns over 2 steps can't be used with a stateful module"):
        batch_of(NStepReturns(n_step=2), episode([1]), module=Stateful())
    assert batch_of(NStepReturns(n_step=1), episode([1]), module=Stateful())["n_step"].tolist() == [1]


# Advantages


def test_episodes_do_not_reach_into_each_other() -> None:
    first = episode([1.0, 1.0], values=[2.0, 4.0], terminated=True)
    second = episode([3.0], values=[5.0], terminated=True)
    assert estimated(first, second)[1] == estimated(first)[1] + estimated(second)[1]


def test_advantages_may_be_normalised_over_the_batch() -> None:
    targets, advantages = estimated(episode(**VALUED, terminated=True), normalize_advantages=True)
    assert np.mean(advantages) == pytest.approx(0.0, abs=1e-6)
    assert np.std(advantages) == pytest.approx(1.0)
    assert targets[2] == 1.0


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (0.0, "GeneralAdvantageEstimation needs values, but module 'object' has no compute_values"),
        (np.zeros(1), r"'vf_preds' has shape \[1, 1\], expected \[1\]: one number for each step"),
    ],
    ids=["none", "an axis too many"],
)
def test_values_that_are_missing_or_of_another_shape_are_refused(value: Any, told: str) -> None:
    with pytest.raises(ModuleError, match=told):
        estimated(episode([1.0], values=[value]), module=object())


@pytest.mark.parametrize("piece", [GeneralAdvantageEstimation, VTrace])
def test_values_that_are_no_numbers_are_refused_with_their_step(piece: Any) -> None:
    class Sick(DefaultModule):
        def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            output = super()._forward(batch, **kwargs)
            values = output["action_dist_inputs"].detach().sum(-1)
            if len(values) > 1:  # not the value behind one chunk
                values[1] = torch.nan
            return {**output, "vf_preds": values}

        _forward_train = _forward

    message = r"episode '\w+', step \d+ of its chunk: the module's 'vf_preds' is nan, expected a finite one"
    with (
        pytest.raises(ModuleError, match=message),
        Rollout("CartPole-v1", num_envs=2, module=Sick, learner_connector=lambda obs, act: piece()) as rollout,
    ):
        next(rollout.batches())


# One more step


@pytest.mark.parametrize("numpy", [False, True], ids=["lists", "arrays"])
def test_every_episode_gets_one_more_step(numpy: bool) -> None:
    chunks = [episode([1, 2], terminated=True), episode([3], truncated=True), episode([4])]
    if numpy:
        chunks = [chunk.to_numpy() for chunk in chunks]
    batch = batch_of(AddOneTsToEpisodesAndTruncate(), *chunks)
    assert batch["loss_mask"].tolist() == [True, True, False, True, False, True, False]
    assert batch["terminateds"].tolist() == [False, True, False, False, False, False, False]
    assert batch["truncateds"].tolist() == [False, False, False, True, False, False, False]
    assert {batch[name].dtype.name for name in batch} == {"bool"}
    assert [len(chunk) for chunk in chunks] == [3, 2, 2]
    assert [chunk.is_terminated for chunk in chunks] == [True, False, False]
    assert [chunk.is_truncated for chunk in chunks] == [False, True, True]
    first = chunks[0]
    assert list(first.get_observations()) == [0, 1, 2, 2]
    assert first.get_infos() == [{"at": 0}, {"at": 1}, {"at": 2}, {"at": 2}]
    assert list(first.get_rewards()) == [1, 2, 0]
    assert list(first.get_actions()) == [0, 0, 0]
    assert len(first.get_extra_model_outputs("action_logp")) == 3


def test_an_episode_without_a_step_stays_as_it_is() -> None:
    new = SingleAgentEpisode(observations=[5])
    batch = batch_of(AddOneTsToEpisodesAndTruncate(), new, episode([4]))
    assert batch["loss_mask"].tolist() == [True, False]
    assert (len(new), new.is_done) == (0, False)


def test_a_fragments_chunk_makes_way_for_a_copy_which_later_pieces_see() -> None:
    fragments, module = fragments_of(slots=3, fragment_length=9, num_fragments=1)
    sealed = list(fragments[0].episodes())
    chunks, lengths = list(sealed), [len(chunk) for chunk in sealed]
    pipeline = LearnerConnectorPipeline.default(custom_pieces=[AddOneTsToEpisodesAndTruncate()])
    batch = pipeline(rl_module=module, episodes=chunks)
    ends = np.cumsum([length + 1 for length in lengths]) - 1
    assert [len(chunk) for chunk in sealed] == lengths
    assert torch.nonzero(~batch["loss_mask"])[:, 0].tolist() == ends.tolist()
    assert {len(column) for column in batch.values()} == {sum(lengths) + len(lengths)}
    assert batch["obs"][ends].tolist() == [chunk.get_observations(-1).tolist() for chunk in sealed]
    assert batch["rewards"][ends].tolist() == [0.0] * len(ends)
    assert batch["terminateds"][ends - 1].tolist() == [chunk.is_terminated for chunk in sealed]
    assert batch["truncateds"][ends - 1].tolist() == [chunk.is_truncated for chunk in sealed]
    assert not (batch["terminateds"] | batch["truncateds"])[ends].any()


@pytest.mark.parametrize("piece", [GeneralAdvantageEstimation, VTrace, lambda: NStepReturns(n_step=2)])
def test_pieces_that_value_what_comes_after_refuse_an_added_step(piece: Any) -> None:
    shared: dict[str, Any] = {}
    episodes = [SingleAgentEpisode(observations=[0, 1], actions=[0], rewards=[1.0], len_lookback_buffer=0)]
    batch = AddOneTsToEpisodesAndTruncate()(rl_module=None, batch={}, episodes=episodes, shared_data=shared)
    with pytest.raises(ConnectorError, match="take AddOneTsToEpisodesAndTruncate out of the pipeline"):
        piece()(rl_module=NumberedModule(), batch=batch, episodes=episodes, shared_data=shared)


def test_read_only_episodes_that_are_in_no_list_are_refused() -> None:
    fragments, _ = fragments_of(slots=1, fragment_length=4, num_fragments=1)
    with pytest.raises(ConnectorError, match="they come as FragmentEpisodes, expected a list"):
        AddOneTsToEpisodesAndTruncate()(rl_module=None, batch={}, episodes=fragments[0].episodes())


# Refused arguments


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: ComputeReturnsToGo(gamma=1.5), "gamma is 1.5, expected a number from 0 to 1"),
        (lambda: NStepReturns(n_step=2, gamma=-0.1), "gamma is -0.1, expected a number from 0 to 1"),
        (lambda: GeneralAdvantageEstimation(gamma=1.1), "gamma is 1.1, expected a number from 0 to 1"),
        (lambda: GeneralAdvantageEstimation(lambda_=-0.1), "lambda_ is -0.1, expected a number from 0 to 1"),
        (lambda: VTrace(gamma=math.nan), "gamma is nan, expected a number from 0 to 1"),
        (lambda: NStepReturns(n_step=0), "n_step is 0, expected a whole number from 1 on"),
        (lambda: NStepReturns(n_step=1.5), "n_step is 1.5, expected a whole number from 1 on"),  # type: ignore[arg-type]
        (lambda: ClipRewards(), "neither low nor high nor sign is given"),
        (lambda: ClipRewards(low=1, sign=True), "sign=True leaves nothing to clip, but low is 1 and high is None"),
        (lambda: ClipRewards(low=2, high=1), "low is 2 and high is 1, expected low < high"),
        (lambda: ClipRewards(high=math.nan), "high is nan, expected low < high"),
        (lambda: VTrace(rho_clip=-1), "rho_clip is -1, expected a number from 0 on"),
        (lambda: VTrace(c_clip=math.nan), "c_clip is nan, expected a number from 0 on"),
        (lambda: VTrace(pg_rho_clip=-1), "pg_rho_clip is -1, expected a number from 0 on"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(make: Callable[[], ConnectorV2], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()


# Columns and episodes


class Off(NumberedModule):
    """Another policy than the one that acted, and another opinion of observations."""

    def _forward_train(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        output = self._forward(batch)
        return {"action_dist_inputs": output["action_dist_inputs"] * -2.0, "vf_preds": output["vf_preds"].sin()}


PIECES: dict[str, Callable[[], list[ConnectorV2]]] = {
    "next observations": lambda: [AddNextObservationsFromEpisodesToTrainBatch()],
    "infos": lambda: [AddInfosFromEpisodesToTrainBatch()],
    "returns to go": lambda: [ComputeReturnsToGo(gamma=0.9)],
    "one step": lambda: [NStepReturns(n_step=1, gamma=0.9)],
    "three steps": lambda: [NStepReturns(n_step=3, gamma=0.9)],
    "clipped": lambda: [ClipRewards(low=2.0, high=5.0)],
    "signs": lambda: [ClipRewards(sign=True)],
    "V-trace": lambda: [VTrace(gamma=0.9, rho_clip=1.5)],
    "advantages": lambda: [GeneralAdvantageEstimation(gamma=0.9, lambda_=0.8)],
    "several": lambda: [
        ClipRewards(high=5.0),
        VTrace(gamma=0.9),
        ComputeReturnsToGo(gamma=0.9),
        NStepReturns(n_step=2, gamma=0.9),
    ],
}


def fragments_of(
    *,
    slots: int,
    mode: AutoresetMode = AutoresetMode.NEXT_STEP,
    nested: bool = False,
    module: Any = None,
    **options: Any,
) -> tuple[list[Fragment], Any]:
    _, makers = numbered_envs(slots, lengths=(1, 6), nested=nested)
    env = SyncVectorEnv(makers, autoreset_mode=mode)
    with Rollout(env, module=module or NumberedModule(), seed=3, **options) as rollout:
        return list(rollout.fragments()), rollout.module


parts_drawn = strategies(slots=(1, 5), mode=st.sampled_from(MODES), nested=bool, fragment_length=(1, 9))
settings_drawn = st.fixed_dictionaries({**parts_drawn, **strategies(lookback=[0, 1, 5], num_fragments=(1, 3))})


def equal_batches(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.pop("infos", None) == other.pop("infos", None)
    equal(one, other)


class OnDevice(FragmentEpisodes):
    """Chunks whose columns are tensors, as those of fragments on a device."""

    device = torch.device("cpu")


for read in ("gather", "last", "last_observations", "preceding", "recent_observations"):
    of_arrays = getattr(FragmentEpisodes, read)
    setattr(OnDevice, read, lambda *given, made=of_arrays: map_tree(torch.from_numpy, made(*given)))


def check_columns_and_episodes(name: str, fragments: list[Fragment], module: Any) -> None:
    """Hold the batches that a piece makes of columns, of episodes one by one, and of tensors against each other."""
    columns = FragmentEpisodes(fragments)
    batches: list[dict[str, Any]] = []
    for pieces, episodes in (
        (PIECES[name](), columns),
        (PIECES[name](), list(columns)),
        ([*PIECES[name](), OneByOne()], columns),
        (PIECES[name](), OnDevice(fragments)),
    ):
        pipeline = LearnerConnectorPipeline.default(custom_pieces=pieces)
        batches.append(pipeline(rl_module=module, episodes=episodes))
    *others, of_tensors = batches[1:]
    for batch in others:
        equal_batches(dict(batches[0]), dict(batch))
    # Exponentials, and sums over a batch, are rounded otherwise by torch.
    bound = 1e-5 if name in ("V-trace", "several", "advantages") else 0.0
    expected = {column: values for column, values in batches[0].items() if column != "infos"}
    torch.testing.assert_close({c: of_tensors[c] for c in expected}, expected, rtol=bound, atol=bound)
    lengths = {len(column) for column in batches[0].values() if not isinstance(column, dict)}
    assert lengths == {int(columns.lengths.sum())}


@given(options=settings_drawn)
def test_columns_and_episodes_give_the_same(options: dict[str, Any]) -> None:
    fragments, module = fragments_of(module=Off(), **options)
    for name in PIECES:
        note(f"piece: {name}")
        check_columns_and_episodes(name, fragments, module)


@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
def test_pieces_may_stand_after_the_tensors_too(name: str, nested: bool) -> None:
    fragments, module = fragments_of(slots=3, nested=nested, module=Off(), fragment_length=9, num_fragments=2)
    columns = FragmentEpisodes(fragments)
    first = LearnerConnectorPipeline.default(custom_pieces=PIECES[name]())(rl_module=module, episodes=columns)
    for episodes in (columns, list(columns)):
        pipeline = LearnerConnectorPipeline.default()
        for piece in PIECES[name]():
            pipeline.append(piece)
        last = pipeline(rl_module=module, episodes=episodes)
        if name != "infos":  # those are a list before and after
            equal_batches(dict(first), dict(last))


@given(options=settings_drawn)
def test_next_observations_and_infos_are_those_of_the_step_after_and_before(options: dict[str, Any]) -> None:
    fragments, module = fragments_of(**options)
    pieces = [AddInfosFromEpisodesToTrainBatch(), AddNextObservationsFromEpisodesToTrainBatch()]
    pipeline = LearnerConnectorPipeline.default(custom_pieces=pieces)
    batch = pipeline(rl_module=module, episodes=FragmentEpisodes(fragments))
    before, after = (batch[name]["at"] if options["nested"] else batch[name] for name in ("obs", "new_obs"))
    assert torch.equal(after, before + torch.tensor([0, 0, 1]))
    assert [info["number"] for info in batch["infos"]] == (10_000 * before[:, 1] + before[:, 2]).tolist()


@pytest.mark.parametrize("name", ["next observations", "returns to go", "three steps", "clipped"])
def test_a_piece_that_does_not_call_the_module_needs_none_and_makes_no_view_of_it(name: str) -> None:
    views = []

    class Counting:
        def eval(self) -> None:
            views.append(self)

    given: dict[str, Any] = {"batch": {}, "episodes": [episode([1, 2, 4])]}
    assert PIECES[name]()[0](**given)
    LearnerConnectorPipeline.default(custom_pieces=PIECES[name]())(rl_module=Counting(), **given)
    assert views == []


def double(batch: Any, episodes: Any, shared_data: Any) -> None:
    """Make twice each observation of `obs`, and of each chunk's last one."""
    for each in episodes:
        ConnectorV2.add_n_batch_items(batch, "obs", 2 * each.get_observations(slice(0, len(each))), len(each), each)
    shared_data[LAST_OBSERVATIONS] = np.stack([2 * each.get_observations(-1) for each in episodes])


MAKES_NEXT: list[Any] = [AddNextObservationsFromEpisodesToTrainBatch, lambda: NStepReturns(n_step=1)]


@pytest.mark.parametrize("make", MAKES_NEXT)
def test_next_observations_are_made_as_the_batchs_observations_were(make: Callable[[], ConnectorV2]) -> None:
    fragments, module = fragments_of(slots=3, module=Off(), fragment_length=9, num_fragments=2)
    columns = FragmentEpisodes(fragments)
    plain, doubled = (
        LearnerConnectorPipeline.default(custom_pieces=[*pieces, make()])(rl_module=module, episodes=columns)
        for pieces in ([], [LambdaConnector(double)])
    )
    assert torch.equal(doubled["obs"], 2 * plain["obs"])
    assert torch.equal(doubled["new_obs"], 2 * plain["new_obs"])


@pytest.mark.parametrize("make", [*MAKES_NEXT, VTrace, GeneralAdvantageEstimation])
def test_next_observations_of_another_kind_than_the_batchs_are_refused(make: Callable[[], ConnectorV2]) -> None:
    class Sums(RLModule):
        def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            rows = batch["obs"].reshape(len(batch["obs"]), -1)
            return {"action_dist_inputs": torch.zeros(len(rows), 2), "vf_preds": rows.sum(1)}

    batch = {"obs": np.zeros((3, 4))}
    told = r"column 'obs' has items \[4\], made by a piece, but the episodes' observations are \[\]"
    with pytest.raises(ConnectorError, match=told):
        make()(rl_module=Sums(None, spaces.Discrete(2)), batch=batch, episodes=[episode([1, 2, 4])])


@pytest.mark.parametrize("name", ["next observations", "returns to go", "three steps"])
def test_a_piece_that_wants_steps_is_refused_behind_rows_of_several(name: str) -> None:
    batch = {"obs": np.zeros((2, 2)), "seq_lens": np.array([2, 1])}
    told = r"the batch has rows of several: .* stands before AddTimeDimToBatchAndZero"
    with pytest.raises(ConnectorError, match=told):
        PIECES[name]()[0](rl_module=Tens(), batch=batch, episodes=[episode([1, 2, 4])])


ADDED = {"next observations": "new_obs", "infos": "infos", "returns to go": "returns_to_go", "one step": "n_step"}
ADDED |= {"three steps": "n_step", "V-trace": "advantages"}


@pytest.mark.parametrize("name", ADDED)
def test_a_column_of_the_batch_stays_as_it_is(name: str) -> None:
    there = np.zeros(3)
    batch = PIECES[name]()[0](rl_module=Tens(), batch={ADDED[name]: there}, episodes=[episode([1, 2, 4])])
    assert batch[ADDED[name]] is there


@pytest.mark.parametrize("name", PIECES)
def test_no_episodes_add_nothing(name: str) -> None:
    batch: dict[str, Any] = {}
    for piece in PIECES[name]():
        for episodes in ([], FragmentEpisodes([])):
            batch = piece(rl_module=Tens(), batch=batch, episodes=episodes)
    assert batch == {}


@pytest.mark.parametrize("name", PIECES)
def test_a_chunk_without_a_step_adds_no_row(name: str) -> None:
    chunks = [episode([1, 2]), SingleAgentEpisode(observations=[5]), episode([4], terminated=True)]
    pieces = [*PIECES[name](), AddObservationsFromEpisodesToBatch(as_learner_connector=True)]
    given = LearnerConnectorPipeline.default(custom_pieces=pieces)(rl_module=Tens(), episodes=chunks)
    alone = LearnerConnectorPipeline.default(custom_pieces=pieces)(rl_module=Tens(), episodes=chunks[::2])
    assert {len(column) for column in given.values()} == {3}
    for column in alone:
        assert list(given[column]) == list(alone[column])


def test_chunks_of_one_episode_are_kept_in_order_also_without_a_step() -> None:
    whole, other = episode([1, 2]), episode([3])
    rest = whole.cut()
    batch = LearnerConnectorPipeline.default()(rl_module=None, episodes=[whole, other, rest])
    assert (batch["obs"].tolist(), batch["rewards"].tolist()) == ([0, 1, 0], [1, 2, 3])
    more = SingleAgentEpisode(whole.id_, observations=[7, 8], actions=[0], rewards=[4.0], len_lookback_buffer=0)
    each = {"mine": {(whole.id_,): [1, 2, 4], (other.id_,): [3]}}
    batch = LearnerConnectorPipeline.default()(rl_module=None, batch=each, episodes=[whole, other, more])
    assert batch["mine"].tolist() == batch["rewards"].tolist() == [1, 2, 3, 4]
    one_each = {"mine": {(whole.id_,): [10, 30], (other.id_,): [20]}}
    pipeline = LearnerConnectorPipeline.default()
    assert pipeline(rl_module=None, batch=one_each, episodes=[whole, other, more])["mine"].tolist() == [10, 20, 30]
    wrong = {"mine": {(whole.id_,): [1, 2, 4, 5], (other.id_,): [3]}}
    with pytest.raises(ConnectorError, match=r"column 'mine' has 4 items under .*, expected one for each step of that"):
        pipeline(rl_module=None, batch=wrong, episodes=[whole, other, more])


@pytest.mark.parametrize("name", ["returns to go", "three steps", "V-trace"])
@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_told_with_its_place(name: str, reward: float) -> None:
    chunks = [episode([1, 2]), episode([4, reward, 1])]
    with pytest.raises(ConnectorError, match=f"episode '{chunks[1].id_}', step 1 of its chunk: the reward is {reward}"):
        PIECES[name]()[0](rl_module=Tens(), batch={}, episodes=chunks)


@pytest.mark.parametrize("rows", [2, 4, 6])
def test_a_column_of_another_length_is_refused(rows: int) -> None:
    chunks = [episode([1, 2]), episode([4])]
    pipeline = LearnerConnectorPipeline.default()
    with pytest.raises(ConnectorError, match=f"column 'mine' has {rows + 3} rows beside 'obs' with 3 of 2 chunks"):
        pipeline(rl_module=None, batch={"mine": [0] * (rows + 3)}, episodes=chunks)
    assert pipeline(rl_module=None, batch={"mine": [7, 8]}, episodes=chunks)["mine"].tolist() == [7, 8], "one each"


def test_episodes_that_were_only_reset_make_no_rows() -> None:
    batch = LearnerConnectorPipeline.default()(rl_module=None, episodes=[SingleAgentEpisode(observations=[1])] * 2)
    assert all(len(column) == 0 for column in batch.values())
