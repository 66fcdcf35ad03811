"""Modules choose actions in one space, and environments get them in another."""

from typing import Any

import numpy as np
import pytest
import torch
from feeding_rollouts import fed, trainer
from fragment_equality import chunks_of
from gymnasium import spaces
from places import rollout_at
from small_env import SmallEnv

from rollflow import ConnectorV2, Fragment, MultiAgentRollout, RLModule, Rollout
from rollflow.nodes import DefaultModule, MultiAgentEnv
from rollflow.stream import ColumnError, ConnectorError, ModuleError

OBSERVED = spaces.Box(-1, 1, (3,), np.float32)
PAIRS = spaces.Dict({"where": spaces.Discrete(3), "how": spaces.Box(-1, 1, (2,), np.float32)})
CHOSEN = spaces.Discrete(6)


class TakesPairs(SmallEnv):
    """Its action is a Dict; the reward says what it got: `where`, and whether it came with its own `how`."""

    observation_space, action_space = OBSERVED, PAIRS
    length = 5

    def look(self) -> Any:
        return self.np_random.random(3, np.float32)

    def pay(self, action: Any) -> float:
        assert action in PAIRS
        return 10.0 * int(action["where"]) + float(action["how"][0])


class Spreads(ConnectorV2):
    """Makes a pair of a number, by columns."""

    columnar = True
    changes_episodes = False

    def __call__(self, *, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        numbers = np.asarray(batch["actions"])
        batch["actions_for_env"] = pair_of(numbers)
        return batch


class SpreadsItems(ConnectorV2):
    """Piece that spreads actions item by item, as on RLlib's pages."""

    def __call__(self, *, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        batch["actions_for_env"] = {key: [pair_of(item) for item in items] for key, items in batch["actions"].items()}
        return batch


def pair_of(number: Any) -> dict[str, Any]:
    how = np.stack([np.asarray(number) % 2, np.zeros_like(number)], -1).astype(np.float32)
    return {"where": np.asarray(number) // 2, "how": how}


class SaysSo(ConnectorV2):
    """Tells the module, as pieces before it do on RLlib's pages, in which space it is to choose."""

    def recompute_output_action_space(self, in_obs: Any, in_act: Any) -> Any:
        return CHOSEN

    def __call__(self, *, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return batch


class Chooses(RLModule):
    """Built from the environments' spaces, it has a space of its own."""

    def setup(self) -> None:
        self.action_space = CHOSEN
        self.head = torch.nn.Linear(3, 6)

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"action_dist_inputs": self.head(batch["obs"])}


DECLARED: dict[str, dict[str, Any]] = {
    "by an instance": {"module": DefaultModule(OBSERVED, CHOSEN)},
    "by a class": {"module": Chooses},
    "by a piece": {"env_to_module_connector": lambda env: SaysSo()},
}


def check(fragment: Fragment) -> None:
    """Check that the module's choice is recorded beside the action that the environment got, as its rewards show."""
    actions, got = fragment.column("actions"), fragment.column("actions_for_env")
    assert actions.dtype == np.int64
    assert fragment.layout.action_space == CHOSEN
    np.testing.assert_array_equal(got["where"], actions // 2)
    steps = 0
    for chunk in fragment.episodes():
        assert chunk.action_space == CHOSEN
        numbers = chunk.get_actions()
        np.testing.assert_array_equal(chunk.get_rewards(), 10.0 * (numbers // 2) + numbers % 2)
        assert chunk.get_actions(-1, one_hot_discrete=True).shape == (6,)
        steps += len(chunk)
    assert steps


@pytest.mark.parametrize(
    ("declared", "piece", "place"),
    [
        *((declared, piece, "inline") for declared in DECLARED for piece in (Spreads, SpreadsItems)),
        *(("by a class", Spreads, place) for place in ("threads", "processes", "rollouts", "hosts", "hosted rollouts")),
        *(("by a piece", Spreads, place) for place in ("processes", "rollouts")),
    ],
)
def test_the_modules_choice_is_recorded_and_the_environments_get_what_a_piece_makes_of_it(
    declared: str, piece: type[ConnectorV2], place: str
) -> None:
    acts = {"module_to_env_connector": lambda env: piece(), **DECLARED[declared]}
    options: Any = {"envs": {"lanes": 2}, "acts": acts, "fragment_length": 7, "num_fragments": 3, "seed": 0}
    with rollout_at(place, [TakesPairs] * 4, **options) as rollout, rollout:
        fragments = list(rollout.fragments())
    assert len(fragments) == 6
    for fragment in fragments:
        check(fragment)


def test_a_train_batch_has_what_the_module_chose() -> None:
    rollout = Rollout(TakesPairs, num_envs=2, fragment_length=8, module=Chooses, seed=0)
    rollout.module_to_env.insert_after("UnBatchToIndividualItems", Spreads())
    with rollout:
        batch = next(iter(rollout.batches()))
    assert batch["actions"].dtype == torch.int64
    torch.testing.assert_close(batch["actions_for_env"]["where"], batch["actions"] // 2)
    made = rollout.module.get_train_action_dist_cls().from_logits(batch["action_dist_inputs"])
    torch.testing.assert_close(made.logp(batch["actions"]), batch["action_logp"])


def test_a_trainer_elsewhere_is_told_of_the_modules_space() -> None:
    options: Any = {"fragment_length": 8, "num_fragments": 2, "module_to_env_connector": lambda env: Spreads()}
    stream = trainer(yields="fragments")
    with fed(stream, Rollout(TakesPairs, num_envs=2, module=Chooses, seed=0, **options), sends="fragments"):
        fragments = list(stream)
    assert len(fragments) == 2
    for fragment in fragments:
        check(fragment)


class Narrow(Spreads):
    columnar = True

    def __call__(self, *, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        batch = super().__call__(batch=batch, **kwargs)
        batch["actions_for_env"]["how"] = batch["actions_for_env"]["how"][:, :1]
        return batch


def test_a_choice_that_no_piece_makes_an_action_of_is_refused() -> None:
    rollout = Rollout(TakesPairs, num_envs=2, module=Chooses)
    text = (
        r"NormalizeAndClipActions: 'actions' are int64\[2\], expected actions in the environments' space, Dict\(.*\); "
        "where the module chooses in another space, a piece before this one makes 'actions_for_env' of 'actions': give "
        "it as module_to_env_connector"
    )
    with pytest.raises(ConnectorError, match=text), rollout:
        next(iter(rollout.fragments()))


@pytest.mark.slow
@pytest.mark.parametrize("where", ["inline", "processes"])
def test_what_environments_get_is_held_against_their_space(where: Any) -> None:
    rollout = Rollout(TakesPairs, num_envs=2, where=where, module=Chooses, module_to_env_connector=lambda env: Narrow())
    with pytest.raises(ColumnError, match="column 'actions_for_env'") as raised, rollout:
        next(iter(rollout.fragments()))
    assert any("the environments' actions are in Dict" in note for note in raised.value.__notes__)


def test_a_module_that_does_not_say_what_it_chooses_in_is_told_how_to() -> None:
    class Silent(Chooses):
        def setup(self) -> None:
            super().setup()
            self.action_space = PAIRS

        def get_exploration_action_dist_cls(self) -> Any:
            return DefaultModule(OBSERVED, CHOSEN).get_exploration_action_dist_cls()

    rollout = Rollout(TakesPairs, num_envs=2, module=Silent, module_to_env_connector=lambda env: Spreads())
    with pytest.raises(ColumnError, match="column 'actions': the structure differs") as raised, rollout:
        next(iter(rollout.fragments()))
    assert any("says so by its action_space" in note for note in raised.value.__notes__)


class PairsInTurns(MultiAgentEnv):
    """Two agents take pairs in turns, a third one a number in every step; the rewards say what they got."""

    def __init__(self) -> None:
        self.possible_agents = ["even", "odd", "always"]
        self.observation_spaces = dict.fromkeys(self.possible_agents, OBSERVED)
        self.action_spaces = {"even": PAIRS, "odd": PAIRS, "always": spaces.Discrete(4)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self._observe(), {}

    def step(self, actions: Any) -> Any:
        assert all(action in self.action_spaces[agent] for agent, action in actions.items())
        self.t += 1
        rewards = {
            agent: float(action) if agent == "always" else 10.0 * int(action["where"]) + float(action["how"][0])
            for agent, action in actions.items()
        }
        return self._observe(), rewards, {"__all__": self.t == 6}, {}, {}

    def _observe(self) -> Any:
        agents = ["always", *(["even", "odd"] if self.t == 6 else ["even" if self.t % 2 == 0 else "odd"])]
        return {agent: self.np_random.random(3, np.float32) for agent in agents}


def spreads_pairs(part: Any) -> Any:
    return Spreads() if part.action_space == PAIRS else []


def check_agents(fragments: list[Any]) -> None:
    seen = set()
    for chunk in chunks_of(fragments):
        numbers, rewards = chunk.get_actions(), chunk.get_rewards()
        is_alone = chunk.agent_id == "always"
        assert chunk.action_space == (spaces.Discrete(4) if is_alone else CHOSEN)
        np.testing.assert_array_equal(rewards, numbers if is_alone else 10.0 * (numbers // 2) + numbers % 2)
        if len(chunk):
            seen.add(chunk.agent_id)
    assert seen == {"even", "odd", "always"}


AGENTS_OPTIONS: dict[str, Any] = {"module_to_env_connector": spreads_pairs, "fragment_length": 8}
AGENTS_OPTIONS |= {"module": {"even": Chooses, "odd": Chooses, "always": None}, "num_fragments": 2, "seed": 0}


@pytest.mark.parametrize("place", ["inline", "processes", "hosts"])
def test_so_it_is_with_several_agents(place: str) -> None:
    options: Any = {"kind": MultiAgentRollout, "envs": {"lanes": 2}, **AGENTS_OPTIONS}
    with rollout_at(place, [PairsInTurns] * 4, **options) as rollout, rollout:
        check_agents(list(rollout.fragments()))


def test_modules_of_agents_with_the_same_spaces_choose_in_one() -> None:
    modules = {"even": Chooses, "odd": DefaultModule(OBSERVED, spaces.Box(-1, 1, (2,))), "always": None}
    with pytest.raises(ModuleError, match=r"modules choose in .*Discrete\(6\).*Box.*expected spaces of one"):
        MultiAgentRollout(PairsInTurns, **{**AGENTS_OPTIONS, "module": modules})
