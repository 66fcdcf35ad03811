"""Whole episodes: `complete_episodes=True` for `fragments()` and `batches()`."""

from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
from ending_agent_envs import DoomedAgents
from ending_envs import Doomed
from kill_runs import TWO
from numbered_agents import NumberedAgents
from numbered_env import NumberedEnv, numbered_envs
from numbered_module import NumberedModule
from pettingzoo.classic.tictactoe import tictactoe
from serial_module import SerialModule
from whole_episodes import assert_same, joined, steps_of

from rollflow import (
    DatasetSink,
    DatasetSource,
    DefaultModelConfig,
    FrameStacking,
    GeneralAdvantageEstimation,
    MultiAgentRollout,
    Replay,
    Rollout,
)
from rollflow.nodes import AddNextObservationsFromEpisodesToTrainBatch
from rollflow.nodes.connectors.learner.train_columns import AddInfosFromEpisodesToTrainBatch
from rollflow.sinks import Episodes
from rollflow.stream.data.errors import RunError

ONE: dict[str, Any] = {"model_config": DefaultModelConfig(fcnet_hiddens=[4])}
SEVERAL: dict[str, Any] = ONE | TWO


@pytest.mark.parametrize("where", ["inline", "threads", "processes", "rollouts"])
@pytest.mark.parametrize("kind", [Rollout, MultiAgentRollout])
def test_a_batch_is_of_the_episodes_that_its_fragments_have_ended(kind: Any, where: Any) -> None:
    pieces = lambda *spaces: [  # noqa: E731
        AddNextObservationsFromEpisodesToTrainBatch(),
        AddInfosFromEpisodesToTrainBatch(),
        GeneralAdvantageEstimation(gamma=1.0, lambda_=1.0),
    ]
    makers: Any = [partial(NumberedEnv, slot, lengths=(3, 30)) for slot in range(4)]
    if kind is MultiAgentRollout:
        makers = [partial(NumberedAgents, slot, agents=3, nested=0, length=11, at_once=True) for slot in range(4)]
    seen: list[tuple[int, ...]] = []
    num_steps = 0
    options: Any = {"fragment_length": 7, "num_fragments": 12, "learner_connector": pieces, "seed": 3}
    with kind(makers, lanes=2, where=where, **options, **(ONE if kind is Rollout else SEVERAL)) as rollout:
        for batches in rollout.batches(complete_episodes=True):
            for batch in [batches] if kind is Rollout else batches.values():
                *episode, step = batch["obs"].unbind(1)
                firsts = (step == 0).nonzero()[:, 0]
                ends = batch["terminateds"] | batch["truncateds"]
                assert step[0] == 0
                assert ends[-1]
                assert torch.equal(firsts[1:], ends.nonzero()[:-1, 0] + 1)  # every one begins where the last ended
                assert (step[1:][~ends[:-1]] == step[:-1][~ends[:-1]] + 1).all()
                assert torch.equal(batch["new_obs"][:, -1], step + 1)
                if kind is Rollout:
                    assert [info["number"] for info in batch["infos"]] == (10_000 * episode[1] + step).tolist()
                assert batch["advantages"].isfinite().all()
                seen += zip(*(each[firsts].tolist() for each in episode), strict=True)
                num_steps += len(step)
        steps = rollout.num_steps
    assert len(seen) == len(set(seen))
    assert steps == 12 * 7 * 4 * (1 if kind is Rollout else 3) == num_steps + rollout.lost["incomplete"]
    assert set(rollout.lost) == {"incomplete"}
    assert rollout.returns.count * (1 if kind is Rollout else 3) == len(seen)


def test_games_that_agents_play_in_turns_come_whole() -> None:
    with MultiAgentRollout(tictactoe.env, num_envs=3, fragment_length=4, num_fragments=9, seed=3) as rollout:
        parts = list(rollout.fragments(complete_episodes=True))
        steps = rollout.num_steps
    games = [game for part in parts for game in part.episodes()]
    assert len({game.id_ for game in games}) == len(games) == rollout.returns.count
    for game in games:
        moves = [step for step in range(len(game)) for _ in game.get_actions(step, env_steps=True)]
        assert moves == list(range(len(game)))
        assert game.agent_ids == {"player_1", "player_2"}
    assert sum(part.num_steps for part in parts) + rollout.lost["incomplete"] == steps


def test_whole_episodes_of_several_agents_go_where_fragments_do(tmp_path: Path) -> None:
    makers = [partial(NumberedAgents, slot, agents=3, nested=1, length=9) for slot in range(2)]
    sink, replay = DatasetSink(tmp_path / "data"), Replay(2_000, sampler=Episodes(), seed=0)
    module = {"nested": None, "plain": None}
    mapping = lambda agent, episode: "nested" if agent == "agent 0" else "plain"  # noqa: E731
    options: dict[str, Any] = {"module": module, "agent_to_module_mapping_fn": mapping, "fragment_length": 5}
    with MultiAgentRollout(makers, num_fragments=9, seed=1, **options) as rollout, sink:
        parts = list(rollout.fragments(complete_episodes=True))
        for part in parts:
            sink(part)
            replay(part)
        learner = [rollout.learner.batch_of([part]) for part in parts]
    assert repr(parts[0]).startswith("<WholeMultiAgentEpisodes ")
    whole = {episode.id_: episode for part in parts for episode in part.episodes()}
    assert {episode.id_ for episode in DatasetSource(tmp_path / "data").episodes()} == whole.keys()
    steps = sum(part.num_steps for part in parts)
    assert len(replay) == steps == sum(len(batch["rewards"]) for each in learner for batch in each.values())


class Wide(SerialModule):
    """Has an output `more` of a width of its own; without one where the width is 0."""

    def __init__(self, width: int) -> None:
        super().__init__(float(width))
        self.width = width

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        outputs = super()._forward(batch, **kwargs)
        more = torch.full((len(outputs["weight"]), self.width), float(self.width))
        return outputs | ({"more": more} if self.width else {})


def test_modules_with_other_outputs_leave_no_step_out_of_whole_episodes() -> None:
    def parts_of(**loop: Any) -> tuple[list[Any], MultiAgentRollout]:
        def module_of(agent: str, episode: Any) -> Any:
            return int(episode.id_, 16) % 3

        makers = [partial(NumberedAgents, slot, agents=4, nested=0, length=14) for slot in range(2)]
        options: Any = {
            "module": {each: Wide(each % 2 * 2) for each in range(3)},
            "agent_to_module_mapping_fn": module_of,
        }
        rollout = MultiAgentRollout(makers, fragment_length=3, num_fragments=40, seed=1, **options)
        with rollout:
            return list(rollout.fragments(**loop)), rollout

    expected = joined(chunk for part in parts_of()[0] for chunk in part.episodes())
    parts, rollout = parts_of(complete_episodes=True)
    whole = [episode for part in parts for episode in part.episodes()]
    for episode in whole:
        assert_same(episode, expected[episode.id_], without=["serial"])
    assert len({episode.agent_episodes[agent].module_id for episode in whole for agent in episode.agent_ids}) == 3
    assert sum(map(steps_of, whole)) + rollout.lost.get("incomplete", 0) == rollout.num_steps


def test_pieces_that_look_back_see_zeros_before_an_episode() -> None:
    stacks = lambda *spaces: FrameStacking(num_frames=3, as_learner_connector=True)  # noqa: E731
    options: Any = {"fragment_length": 4, "num_fragments": 3, "learner_connector": stacks, "seed": 0}
    options["env_to_module_connector"] = lambda env: FrameStacking(num_frames=3)
    with Rollout(partial(NumberedEnv, 1, lengths=(6, 6)), **options) as rollout:
        first, second = rollout.batches(complete_episodes=True)
    assert first["obs"][:, 2::3].tolist() == [[max(0, step - 2), max(0, step - 1), step] for step in range(6)]
    assert torch.equal(second["obs"][:, 2::3], first["obs"][:, 2::3])


def test_stateful_modules_begin_every_episode_with_the_initial_state() -> None:
    config, env = DefaultModelConfig(use_lstm=True, max_seq_len=4), partial(NumberedEnv, 1, lengths=(6, 6))
    with Rollout(env, model_config=config, fragment_length=5, num_fragments=4, seed=0) as rollout:
        for batch in rollout.batches(complete_episodes=True):
            assert batch["seq_lens"].tolist() == [4, 2]
            for leaf in batch["state_in"].values():
                assert not leaf[0].any()
                assert leaf[1].any()


def test_what_is_held_is_the_open_episodes_alone() -> None:
    makers = numbered_envs(2, lengths=(50, 50))[1]
    with Rollout(makers, module=NumberedModule(), fragment_length=10, num_fragments=11, seed=0) as rollout:
        sizes = [fragment.num_steps for fragment in rollout.fragments(complete_episodes=True)]
        assert sizes == [100, 100]
    assert rollout.lost == {"incomplete": 20}


@pytest.mark.parametrize("where", ["processes", "rollouts"])
@pytest.mark.parametrize(("kind", "step"), [(Rollout, 33), (MultiAgentRollout, 3), (MultiAgentRollout, 17)])
def test_an_episode_whose_worker_is_lost_ends_as_truncated(kind: Any, step: int, where: Any, tmp_path: Path) -> None:
    if kind is Rollout:
        maker: Any = partial(Doomed, 0, tmp_path, "raise", step, 1, lengths=(20, 20))
        module: Any = NumberedModule()
    else:
        maker = partial(DoomedAgents, 0, tmp_path, fate="raise", step=step, lives=1, agents=3, nested=0, length=20)
        module = None
    with kind(maker, where=where, module=module, fragment_length=8, num_fragments=9, seed=0) as rollout:
        parts = list(rollout.fragments(complete_episodes=True))
        steps = rollout.num_steps
    whole = [episode for part in parts for episode in part.episodes()]
    [lost] = [episode for episode in whole if "lost" in episode.custom_data]
    assert "it broke" in lost.custom_data["lost"]
    assert (lost.is_truncated, lost.is_terminated) == (True, False)
    assert len({episode.id_ for episode in whole}) == len(whole)
    for episode in whole:
        assert episode.is_done
        if kind is Rollout:
            assert episode is lost or len(episode) == 20
            assert episode.get_observations(0)[2] == 0
        else:
            assert all(agent.is_done for agent in episode.agent_episodes.values())
    assert sum(map(steps_of, whole)) == sum(part.num_steps for part in parts)
    assert sum(map(steps_of, whole)) + rollout.lost.get("incomplete", 0) == steps


def test_loops_of_both_kinds_do_not_mix() -> None:
    with Rollout(numbered_envs(1)[1], module=NumberedModule(), fragment_length=8, seed=0) as rollout:
        for _ in rollout.batches(complete_episodes=True):
            break
        with pytest.raises(RunError, match="an earlier loop over the rollout had complete_episodes=True, expected"):
            next(iter(rollout.batches()))
        assert next(iter(rollout.fragments(complete_episodes=True))).num_steps


@pytest.mark.parametrize(
    ("rollout", "flag", "told"),
    [
        (partial(Rollout, "CartPole-v1", max_lag=1), True, "complete_episodes with max_lag=1: an episode may span"),
        *((partial(Rollout, "CartPole-v1"), flag, f"is {flag!r}, expected True or False") for flag in ("yes", 1, None)),
    ],
    ids=["max_lag", "text", "number", "none"],
)
@pytest.mark.parametrize("loop", ["batches", "fragments"])
def test_what_has_no_whole_episodes_is_refused(rollout: Any, flag: Any, told: str, loop: str) -> None:
    with rollout() as made, pytest.raises(ValueError, match=told):
        getattr(made, loop)(complete_episodes=flag)


def test_observations_of_a_dict_space_stay_one() -> None:
    makers = numbered_envs(1, nested=True, lengths=(5, 5))[1]
    with Rollout(makers, module=NumberedModule(), fragment_length=3, num_fragments=4, seed=0) as rollout:
        [whole, _] = rollout.fragments(complete_episodes=True)
        assert isinstance(whole.observation_space, gym.spaces.Dict)
        assert repr(whole) == "<WholeEpisodes 1 of lane 0: 1 episodes, 5 steps>"
        [episode] = whole.episodes()
        assert [step for _, _, step in episode.get_observations()["at"].tolist()] == list(range(6))
