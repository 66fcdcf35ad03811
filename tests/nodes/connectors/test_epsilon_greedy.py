"""Epsilon-greedy exploration: how often which action is taken, by a schedule over steps."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from numbered_module import NumberedModule, logits_of, numbered_envs

from rollflow.nodes import ConnectorV2, EpsilonGreedy, Linear, Rollout
from rollflow.stream import Columns, ConnectorError


def chosen(epsilon: Any, logits: Any, explore: bool = True, step: int = 0) -> tuple[np.ndarray, np.ndarray]:
    piece = EpsilonGreedy(None, spaces.Discrete(len(logits[0])), schedule=epsilon)
    count = len(logits)
    batch: dict[str, Any] = {
        "action_dist_inputs": np.array(logits),
        "actions": np.full(count, 1),
        "action_logp": np.full(count, -5.0, np.float32),
    }
    shared = {"generator": torch.Generator().manual_seed(0), "step": step}
    batch = piece(rl_module=None, batch=batch, episodes=[], explore=explore, shared_data=shared)
    return batch["actions"], batch["action_logp"]


def test_a_line_goes_from_begin_to_end() -> None:
    schedule = Linear(1.0, 0.2, 8)
    assert [schedule(step) for step in (0, 2, 8, 100)] == pytest.approx([1.0, 0.8, 0.2, 0.2])


def test_without_epsilon_the_best_action_is_taken_for_certain() -> None:
    actions, logp = chosen(0, [[0.0, 3.0, 2.0], [9.0, 3.0, 2.0]])
    assert actions.tolist() == [1, 0]
    assert logp.tolist() == [0.0, 0.0]


def test_frequencies_and_log_probabilities_are_those_of_epsilon_greedy() -> None:
    actions, logp = chosen(0.4, [[0.0, 3.0, -np.inf, 2.0]] * 30_000)
    shares = np.bincount(actions, minlength=4) / len(actions)
    # Best with 0.6, and 0.4 over the three that are allowed.
    wanted = [0.4 / 3, 0.6 + 0.4 / 3, 0.0, 0.4 / 3]
    np.testing.assert_allclose(shares, wanted, atol=0.01)
    np.testing.assert_allclose(np.exp(logp), np.array(wanted)[actions], rtol=1e-5)


def test_without_exploration_nothing_changes() -> None:
    actions, logp = chosen(1.0, [[0.0, 3.0, 2.0]] * 5, explore=False)
    assert (actions.tolist(), logp.tolist()) == ([1] * 5, [-5.0] * 5)


def test_the_schedule_counts_steps() -> None:
    logits = [[0.0, 1.0]] * 20_000
    means = [float(chosen(Linear(1.0, 0.0, 10), logits, step=step)[0].mean()) for step in (0, 5, 10)]
    assert means == pytest.approx([0.5, 0.75, 1.0], abs=0.015)


@pytest.mark.parametrize("schedule", [-0.1, 1.5, "often"])
def test_a_schedule_out_of_bounds_is_refused(schedule: Any) -> None:
    with pytest.raises(ValueError, match="expected a number from 0 to 1, or a function of steps"):
        EpsilonGreedy(schedule=schedule)


def test_what_it_can_not_work_with_is_refused() -> None:
    with pytest.raises(ConnectorError, match=r"the schedule gives 2\.0 at step 3, expected 0 … 1"):
        chosen(lambda step: 2.0, [[0.0, 1.0]], step=3)
    piece = EpsilonGreedy(None, spaces.Box(-1, 1, (2,)), schedule=0.1)
    with pytest.raises(ConnectorError, match="is for one Discrete action"):
        piece(rl_module=None, batch={"action_dist_inputs": np.zeros((1, 4))}, episodes=[], explore=True)


class OneByOne(ConnectorV2):
    """A piece of somebody's that works episode by episode, so that the batch comes in list form."""

    def __call__(self, *, batch: Any, **kwargs: Any) -> Any:
        return batch


@pytest.mark.parametrize(
    ("where", "pieces"), [("inline", []), ("inline", [OneByOne()]), ("processes", []), ("rollouts", [])]
)
def test_every_place_follows_the_schedule_by_itself(where: Any, pieces: list[ConnectorV2]) -> None:
    _, makers = numbered_envs(4, lengths=(3, 8))
    explores = EpsilonGreedy(schedule=Linear(1.0, 0.0, 10))
    options: Any = {"module": NumberedModule(), "fragment_length": 40, "num_fragments": 1, "seed": 0}
    with Rollout(
        makers, lanes=1, where=where, module_to_env_connector=lambda env: [explores, *pieces], **options
    ) as rollout:
        fragment = next(iter(rollout.fragments()))
    actions = fragment.column(Columns.ACTIONS)
    best = logits_of(torch.tensor(fragment.column("seen")).float()).argmax(-1).numpy()
    assert (actions[10:] == best[10:]).all()
    assert (actions[:5] != best[:5]).any()
    assert (np.exp(fragment.column(Columns.ACTION_LOGP)[10:]) == 1).all()
    assert ((0 <= actions) & (actions < 7)).all()
