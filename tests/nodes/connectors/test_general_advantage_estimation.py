import math
from typing import Any

import numpy as np
import pytest
import torch
from numbered_module import NumberedModule, numbered_envs
from piece_forms import OneByOne

from rollflow import FrameStacking, GeneralAdvantageEstimation, RLModule, Rollout, SingleAgentEpisode, VTrace
from rollflow.nodes import ClipRewards, DefaultModule
from rollflow.stream import ModuleError


class Tens(RLModule):
    """Values an observation at ten times its number."""

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> torch.Tensor:
        return 10.0 * batch["obs"].float()


def episode(rewards: list[float], values: list[float] | None, **ends: bool) -> SingleAgentEpisode:
    """Observations 0, 1, 2, …"""
    made = SingleAgentEpisode()
    made.add_env_reset(0)
    for t, reward in enumerate(rewards):
        extra = {} if values is None else {"vf_preds": values[t]}
        flags = ends if t == len(rewards) - 1 else {}
        made.add_env_step(t + 1, 0, reward, extra_model_outputs=extra, **flags)
    return made


def run(*episodes: SingleAgentEpisode, module: Any = None, **kwargs: Any) -> tuple[list[float], list[float]]:
    piece = GeneralAdvantageEstimation(gamma=0.5, lambda_=0.5, **{"normalize_advantages": False, **kwargs})
    batch = piece(rl_module=module or Tens(), batch={}, episodes=list(episodes))
    columns = [np.concatenate([np.concatenate(items) for items in batch[name].values()]) for name in batch]
    assert list(batch) == ["advantages", "value_targets"]
    return columns[0].tolist(), columns[1].tolist()


def test_three_steps_by_hand_up_to_a_termination() -> None:
    # deltas 1 + 2 - 2 = 1,  1 + 3 - 4 = 0,  1 + 0 - 6 = -5;  each advantage adds a quarter of the next
    advantages, targets = run(episode([1.0, 1.0, 1.0], [2.0, 4.0, 6.0], terminated=True))
    assert advantages == [1.0 - 0.25 * 1.25, -1.25, -5.0]
    assert targets == [2.0 + advantages[0], 2.75, 1.0]


def test_a_truncated_episode_goes_on_in_its_last_observations_value() -> None:
    # the last delta is 1 + 0.5 * 30 - 6 = 10
    advantages, _ = run(episode([1.0, 1.0, 1.0], [2.0, 4.0, 6.0], truncated=True))
    assert advantages == [1.0 + 0.25 * 2.5, 2.5, 10.0]


def test_a_chunk_that_was_cut_goes_on_likewise() -> None:
    cut = run(episode([1.0, 1.0, 1.0], [2.0, 4.0, 6.0]))
    assert cut == run(episode([1.0, 1.0, 1.0], [2.0, 4.0, 6.0], truncated=True))


def test_values_that_were_not_recorded_are_computed() -> None:
    # values 0, 10 and, after the end of the chunk, 20: deltas 1 + 5 - 0 = 6,  1 + 10 - 10 = 1
    advantages, targets = run(episode([1.0, 1.0], None))
    assert advantages == [6.25, 1.0]
    assert targets == [6.25, 11.0]


def test_episodes_do_not_reach_into_each_other() -> None:
    first, second = episode([1.0, 1.0], [2.0, 4.0], terminated=True), episode([3.0], [5.0], terminated=True)
    assert run(first, second)[0] == run(first)[0] + run(second)[0]


def test_advantages_may_be_normalised_over_the_batch() -> None:
    advantages, targets = run(episode([1.0, 1.0, 1.0], [2.0, 4.0, 6.0], terminated=True), normalize_advantages=True)
    assert np.mean(advantages) == pytest.approx(0.0, abs=1e-6)
    assert np.std(advantages) == pytest.approx(1.0)
    assert targets[2] == 1.0


def test_a_module_without_values_is_refused() -> None:
    told = r"GeneralAdvantageEstimation needs values, but module 'object' has no compute_values"
    with pytest.raises(ModuleError, match=told):
        run(episode([1.0], [0.0]), module=object())


def test_it_may_stand_after_the_tensors_too() -> None:
    _, makers = numbered_envs(3)
    with Rollout(makers, module=NumberedModule(), fragment_length=9, seed=0) as rollout:
        fragment = next(iter(rollout.fragments()))
    piece = GeneralAdvantageEstimation(gamma=0.9, lambda_=0.8)
    rollout.learner_pipeline.append(piece)
    last = rollout.learner_pipeline.of_fragments([fragment], rollout.module)
    rollout.learner_pipeline.remove(GeneralAdvantageEstimation)
    rollout.learner_pipeline.prepend(piece)
    first = rollout.learner_pipeline.of_fragments([fragment], rollout.module)
    assert torch.equal(first["advantages"], last["advantages"])
    assert math.isclose(float(first["advantages"].mean()), 0.0, abs_tol=1e-6)


def test_values_with_an_axis_too_many_are_refused() -> None:
    class Unsqueezed(NumberedModule):
        def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            output = super()._forward(batch)
            return {**output, "vf_preds": output["vf_preds"][:, None]}

    _, makers = numbered_envs(3)
    gae = GeneralAdvantageEstimation()
    told = r"'vf_preds' has shape \[12, 1\], expected \[12\]"
    options: dict[str, Any] = {"learner_connector": lambda obs, act: gae, "fragment_length": 4, "seed": 0}
    with pytest.raises(ModuleError, match=told), Rollout(makers, module=Unsqueezed(), **options) as rollout:
        next(iter(rollout.batches()))


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


@pytest.mark.parametrize("in_columns", [True, False])
@pytest.mark.parametrize("recorded", [True, False])
def test_behind_a_stack_values_are_those_of_stacks(in_columns: bool, recorded: bool) -> None:
    class SumsUp(RLModule):
        """Its value is the sum of the three frames that it must see."""

        def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            assert batch["obs"].shape[1:] == (9,)
            values = {"vf_preds": batch["obs"].float().sum(1)} if recorded else {}
            return {"actions": torch.zeros(len(batch["obs"]), dtype=torch.int64), **values}

        def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> torch.Tensor:
            assert batch["obs"].shape[1:] == (9,)
            return batch["obs"].float().sum(1)

    pieces = [FrameStacking(num_frames=3, as_learner_connector=True)]
    gae = GeneralAdvantageEstimation(gamma=1.0, lambda_=0.0, normalize_advantages=False)
    with Rollout(
        numbered_envs(2)[1],
        module=SumsUp(),
        fragment_length=9,
        num_fragments=2,
        env_to_module_connector=lambda env: FrameStacking(num_frames=3),
        learner_connector=lambda obs_space, act_space: [*pieces, gae, *([] if in_columns else [OneByOne()])],
    ) as rollout:
        for fragment in rollout.fragments():
            batch = rollout.learner_pipeline.of_fragments([fragment], rollout.module)
            values, begin = batch["obs"].sum(1).float().numpy(), 0
            for chunk in fragment.episodes():
                end = begin + len(chunk)
                last = [chunk.get_observations(i) for i in range(-min(3, len(chunk) + chunk.t_started + 1), 0)]
                after = 0.0 if chunk.is_terminated else float(np.sum(last))
                expected = chunk.get_rewards() + np.append(values[begin + 1 : end], after)
                np.testing.assert_allclose(batch["value_targets"][begin:end], expected)
                begin = end


@pytest.mark.parametrize("in_columns", [True, False])
def test_rewards_that_a_piece_before_has_changed_are_the_ones_that_count(in_columns: bool) -> None:
    gae = GeneralAdvantageEstimation(gamma=0.0, normalize_advantages=False)
    with Rollout(
        numbered_envs(2)[1],
        module=NumberedModule(),
        num_fragments=1,
        learner_connector=lambda obs_space, act_space: [
            ClipRewards(high=3.0),
            gae,
            *([] if in_columns else [OneByOne()]),
        ],
    ) as rollout:
        batch = next(iter(rollout.batches()))
    np.testing.assert_allclose(batch["value_targets"], batch["rewards"], atol=1e-5)
    assert float(batch["rewards"].max()) == 3.0


def test_discounts_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match=r"gamma is 1\.1, expected a number from 0 to 1"):
        GeneralAdvantageEstimation(gamma=1.1)
    with pytest.raises(ValueError, match=r"lambda_ is -0\.1, expected a number from 0 to 1"):
        GeneralAdvantageEstimation(lambda_=-0.1)
