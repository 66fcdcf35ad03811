"""A policy adapted to another environment: it does there what it did, on the fields that are the same."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, strategies as st

from rollflow.nodes import (
    AdaptActions,
    AdaptObservations,
    ConnectorV2,
    DefaultModule,
    FlattenObservations,
    FrameStacking,
    MeanStdFilter,
    PrevActionsPrevRewards,
    RandomModule,
)
from rollflow.nodes.connectors.alpha import (
    ConnectorContext,
    register_lambda_action_connector,
    register_lambda_agent_connector,
)
from rollflow.policy import Choices, OnnxPolicy, Policy, UnsettledFields
from rollflow.stream import ConnectorError

SMALL = {"fcnet_hiddens": (8,), "lstm_cell_size": 4}
SPEED, TURN = spaces.Box(-3.0, 3.0, (), np.float32), spaces.Box(-1.0, 1.0, (2,), np.float32)
OLD_SEEN = spaces.Dict({"place": spaces.Box(-1.0, 1.0, (2,), np.float32), "speed": SPEED})
OLD_DONE = spaces.Dict({"fire": spaces.Discrete(2), "turn": TURN})


def box(*bounds: tuple[float, float], dtype: Any = np.float32) -> spaces.Box:
    """A vector whose numbers have these bounds."""
    low, high = (np.array([each[end] for each in bounds], dtype) for end in (0, 1))
    return spaces.Box(low, high, dtype=dtype)


def world(observations: Any = OLD_SEEN, actions: Any = OLD_DONE) -> SimpleNamespace:
    """An environment's spaces."""
    return SimpleNamespace(observation_space=observations, action_space=actions)


def policy_for(observations: Any = OLD_SEEN, actions: Any = OLD_DONE, pieces: Any = None, **config: Any) -> Policy:
    """A policy of a default module over flat observations."""
    pieces = [FlattenObservations()] if pieces is None else pieces
    module = DefaultModule
    if config:

        def module(seen: Any, chosen: Any) -> Any:
            return DefaultModule(seen, chosen, model_config=SMALL | config)

    return Policy(module, pieces, observation_space=observations, action_space=actions)


def settled(policy: Policy, environment: Any, **choices: Any) -> Policy:
    """The adapted policy, with choices."""
    return policy.adapted(environment, choices=Choices(**choices))


BOUNDS = [(-1.0, 1.0), (-2.0, 2.0), (0.0, 5.0), (-np.inf, np.inf), (0.0, 1.0)]


@given(st.permutations(range(len(BOUNDS))), st.lists(st.integers(0, 5), max_size=3), st.data())
def test_numbers_that_moved_and_numbers_that_came_are_matched_by_their_bounds(
    order: list[int], came: list[int], data: st.DataObject
) -> None:
    old = policy_for(box(*BOUNDS), spaces.Discrete(3), [])
    bounds: list[Any] = [BOUNDS[place] for place in order]
    places: list[int | None] = list(order)
    for count, at in enumerate(came):
        bounds.insert(at, (-10.0 - count, 10.0))
        places.insert(at, None)
    adapted = old.adapted(world(box(*bounds), spaces.Discrete(3)))
    rows = np.array(data.draw(st.lists(st.lists(st.floats(0, 1, width=32), min_size=5, max_size=5), min_size=1)))
    new = np.full((len(rows), len(bounds)), 7.0, np.float32)
    for place, was in enumerate(places):
        if was is not None:
            new[:, place] = rows[:, was]
    adapted.act_batch(new)
    old.act_batch(rows.astype(np.float32))
    np.testing.assert_array_equal(adapted.outputs["action_dist_inputs"], old.outputs["action_dist_inputs"])


def test_parts_that_came_or_are_in_another_order_or_precision_need_no_word() -> None:
    new = world(
        spaces.Dict(
            {
                "speed": spaces.Box(-3.0, 3.0, (), np.float64),
                "camera": spaces.Box(0, 255, (4, 4, 3), np.uint8),
                "place": OLD_SEEN["place"],
            }
        )
    )
    old = policy_for()
    adapted = old.adapted(new)
    seen = {"place": np.array([0.25, -0.5], np.float32), "speed": np.float32(1.5)}
    for came in (new.observation_space.sample(), new.observation_space.sample()):
        done = adapted.act({**came, "place": seen["place"], "speed": np.float64(1.5)})
        expected = old.act(seen)
        assert done["fire"] == expected["fire"]
        np.testing.assert_array_equal(done["turn"], expected["turn"])


class Shown(RandomModule):
    """Module that shows what it sees: its action is the observation."""

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"actions": batch["obs"]}


def shown(observations: Any, new: Any, given: Any, **choices: Any) -> Any:
    """What the module sees of an observation of the new space."""
    policy = Policy(Shown, observation_space=observations, action_space=observations)
    return settled(policy, world(new, observations), **choices).act(given)


def test_numbers_are_scaled_kept_filled_and_taken_as_it_is_chosen() -> None:
    old = box((-1.0, 1.0), (0.0, 10.0), (0.0, 1.0))
    new = box((0.0, 4.0), (0.0, 20.0), (-5.0, 5.0))
    given = np.array([3.0, 6.0, 0.5], np.float32)
    seen = shown(old, new, given, scale=["observation[0]"], keep=["observation[1]", "observation[2]"])
    np.testing.assert_allclose(seen, [0.5, 6.0, 0.5])
    seen = shown(
        old, new, given, take={"observation": [2, 1, None]}, fill={"observation[2]": 0.25}, keep=["observation"]
    )
    np.testing.assert_allclose(seen, [0.5, 6.0, 0.25])
    image = np.arange(4, dtype=np.uint8).reshape(2, 2)
    pixels = spaces.Box(0, 255, (2, 2), np.uint8), spaces.Box(0.0, 1.0, (2, 2), np.float32)
    np.testing.assert_allclose(shown(pixels[1], pixels[0], image, scale=["observation"]), image / 255, rtol=1e-6)


def test_a_part_takes_the_place_of_another_one_by_name() -> None:
    old = policy_for()
    new = spaces.Dict({"place": OLD_SEEN["place"], "velocity": SPEED})
    with pytest.raises(UnsettledFields, match=r"take=.*velocity.* or fill=") as caught:
        old.adapted(world(new))
    assert len(caught.value.questions) == 1
    seen = {"place": np.zeros(2, np.float32), "velocity": np.float32(2.0)}
    for name in ("speed", "observation['speed']"):
        adapted = settled(old, world(new), take={name: ["velocity"]})
        adapted.act(seen)
        old.act({"place": seen["place"], "speed": seen["velocity"]})
        np.testing.assert_array_equal(adapted.outputs["action_dist_inputs"], old.outputs["action_dist_inputs"])


def test_actions_get_the_fields_that_came_and_lose_those_that_went() -> None:
    new = spaces.Dict({"turn": spaces.Box(-2.0, 2.0, (3,), np.float64), "wait": spaces.Discrete(4)})
    old = policy_for()
    choices = {"take": {"turn": [0, 1, None]}, "fill": {"turn[2]": 0.5, "wait": 3}, "scale": ["turn"]}
    adapted = settled(old, world(OLD_SEEN, new), **choices)
    seen = OLD_SEEN.sample()
    done, before = adapted.act(seen), old.act(seen)
    assert done["wait"] == 3
    assert done.keys() == {"turn", "wait"}
    np.testing.assert_allclose(done["turn"], [*(2.0 * before["turn"]), 0.5], rtol=1e-6)
    assert new.contains({**done, "wait": np.int64(done["wait"])})


def test_actions_that_are_kept_stay_within_the_environments_bounds() -> None:
    wide, narrow = box((-2.0, 2.0), (-2.0, 2.0)), box((-1.0, 1.0), (-0.5, 3.0))
    policy = Policy(Shown, observation_space=wide, action_space=wide)
    adapted = settled(policy, world(wide, narrow), keep=["action"])
    assert adapted.act(np.array([1.5, -1.5], np.float32)).tolist() == [1.0, -0.5]
    assert adapted.act(np.array([-0.5, 2.0], np.float32)).tolist() == [-0.5, 2.0]


def test_parts_of_a_tuple_are_matched_by_what_they_are() -> None:
    pair = spaces.Tuple([SPEED, spaces.Discrete(3)])
    old = policy_for(pair)
    for parts, place in ([spaces.Discrete(3), SPEED], 1), ([spaces.MultiBinary(2), spaces.Discrete(3), SPEED], 2):
        new = spaces.Tuple(parts)
        adapted, seen = old.adapted(world(new)), new.sample()
        adapted.act(seen)
        old.act((seen[place], seen[place - 1]))
        np.testing.assert_array_equal(adapted.outputs["action_dist_inputs"], old.outputs["action_dist_inputs"])
    with pytest.raises(UnsettledFields, match=r"which of 3 is observation\[0\]; expected take=.*observation\[0\]"):
        policy_for(spaces.Tuple([SPEED, SPEED])).adapted(world(spaces.Tuple([SPEED, SPEED, SPEED])))


class NewCartPole(gym.Env[Any, Any]):
    """CartPole with two numbers more to see, and one more action to give."""

    observation_space, action_space = spaces.Box(-10, 10, (6,), np.float32), spaces.MultiDiscrete([2, 2])

    def __init__(self) -> None:
        self.old = gym.make("CartPole-v1")

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        observation, infos = self.old.reset(seed=seed)
        return np.hstack((observation, [8.0, 6.0])).astype(np.float32), infos

    def step(self, action: Any) -> Any:
        assert action[1] == 1
        observation, *others = self.old.step(int(action[0]))
        return np.hstack((observation, [8.0, 6.0])).astype(np.float32), *others


POLE: dict[str, Any] = {
    "take": {"observation": [0, 1, 2, 3], "action": [0, None]},
    "fill": {"action[1]": 1},
    "keep": ["observation"],
}


@pytest.mark.parametrize("lstm", [False, True])
def test_an_adapted_policy_plays_as_it_did_and_is_saved_as_any_other(lstm: bool, tmp_path: Path) -> None:
    env = gym.make("CartPole-v1")
    pieces = [MeanStdFilter(update_stats=False), PrevActionsPrevRewards(n_prev_actions=2), FlattenObservations()]
    old = policy_for(env.observation_space, env.action_space, [*pieces, FrameStacking(num_frames=2)], use_lstm=lstm)
    old.trained_on = {"env": "CartPole-v1"}
    adapted = settled(old, NewCartPole(), **POLE)
    adapted.save(tmp_path / "a", program=True)
    loaded = Policy.load(tmp_path / "a")
    loaded.save(tmp_path / "b")
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()
    assert loaded.trained_on == old.trained_on
    before = old.evaluate("CartPole-v1", 3)
    np.testing.assert_array_equal(loaded.evaluate(NewCartPole, 3).returns, before.returns)


@pytest.mark.slow
def test_an_adapted_policy_has_an_onnx_program(tmp_path: Path) -> None:
    old = policy_for(pieces=[FlattenObservations(), MeanStdFilter(update_stats=False)])
    new = world(
        spaces.Dict({"place": spaces.Box(0.0, 4.0, (2,), np.float32), "speed": SPEED, "more": spaces.Discrete(3)}),
        spaces.Dict({"fire": spaces.Discrete(2), "turn": spaces.Box(-1.0, 1.0, (3,), np.float32)}),
    )
    choices = {"take": {"turn": [1, None, 0]}, "fill": {"turn[1]": 0.5}, "scale": ["place"]}
    adapted = settled(old, new, **choices)
    adapted.save(tmp_path / "p", onnx=True)
    small = OnnxPolicy.load(tmp_path / "p")
    for _ in range(8):
        seen = new.observation_space.sample()
        np.testing.assert_allclose(small.act(seen)["turn"], adapted.act(seen)["turn"], atol=1e-5)


# What does not fit


@pytest.mark.parametrize(
    ("observations", "text"),
    [
        (spaces.Dict({"place": OLD_SEEN["place"]}), r"nothing comes for observation\['speed'\]"),
        (spaces.Box(-1.0, 1.0, (3,), np.float32), r"nothing comes for observation\['place'\]"),
        (
            spaces.Dict({"place": spaces.Box(-1.0, 1.0, (3,), np.float32), "speed": SPEED}),
            r"do not say which of 3 numbers that come are its 2; expected take=.*\[0, 1\]",
        ),
        (
            spaces.Dict({"place": OLD_SEEN["place"], "speed": spaces.Box(-9.0, 9.0, (), np.float32)}),
            r"keep=\[\"observation\['speed'\]\"\] or scale=",
        ),
        (
            spaces.Dict({"place": spaces.Box(-1.0, 1.0, (2, 2), np.float32), "speed": SPEED}),
            r"has shape \[2\], and comes with \[2, 2\]; expected connectors of your own",
        ),
    ],
)
def test_what_is_not_clear_is_refused_with_the_answers(observations: Any, text: str) -> None:
    with pytest.raises(UnsettledFields, match=text):
        policy_for().adapted(world(observations))


@pytest.mark.parametrize(
    ("actions", "text"),
    [
        (spaces.Discrete(5), r"nothing comes for action, in Discrete\(5\)"),
        (spaces.Dict({"fire": spaces.Discrete(1), "turn": TURN}), r"keep=\[\"action\['fire'\]\"\]"),
        (spaces.Dict({"fire": spaces.Discrete(2), "turn": spaces.MultiDiscrete([2, 2])}), "is in MultiDiscrete"),
    ],
)
def test_actions_that_are_not_clear_are_refused(actions: Any, text: str) -> None:
    with pytest.raises(UnsettledFields, match=text):
        policy_for().adapted(world(actions=actions))


@pytest.mark.parametrize(
    ("choices", "text"),
    [
        ({"fill": {"nowhere": 1.0}}, "fill of 'nowhere': nothing is to be settled"),
        ({"keep": ["observation"]}, "keep of 'observation': nothing is to be settled"),
    ],
)
def test_choices_without_use_are_refused(choices: Any, text: str) -> None:
    with pytest.raises(ConnectorError, match=text):
        settled(policy_for(), world(), **choices)


def test_choices_that_can_not_be_are_refused() -> None:
    env = gym.make("CartPole-v1")
    old = policy_for(env.observation_space, env.action_space, [])
    for option, value, text in (
        ("take", {"observation[3]": [4], "action": [0, None]}, r"which of 6 numbers that come are its 4"),
        ("take", {"observation": [0, 1, 2, 6], "action": [0, None]}, r"observation\[3\] is 6, expected the place of"),
        ("take", {"observation": [0, 1], "action": [0, None]}, "has 2 parts, expected 4 numbers"),
        ("fill", {"action[1]": 2}, r"fill of action\[1\] is 2, expected a value in"),
    ):
        with pytest.raises(ConnectorError, match=text):
            settled(old, NewCartPole(), **{**POLE, option: value})
    kept = spaces.Discrete(1)
    with pytest.raises(UnsettledFields, match=r"action is in Discrete\(1\)"):
        settled(old, world(env.observation_space, kept), keep=["action"])
    with pytest.raises(ConnectorError, match="observation_space of the environment is None"):
        old.adapted(SimpleNamespace())


# Connectors of one's own


class Halved(ConnectorV2):
    """Piece that drops the last two numbers of an observation."""

    def recompute_output_observation_space(self, input_observation_space: Any, input_action_space: Any) -> Any:
        return gym.make("CartPole-v1").observation_space

    def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
        for episode in self.single_agent_episode_iterator(episodes):
            episode.set_observations(new_data=episode.get_observations(-1)[:4], at_indices=-1)
            episode.observation_space = self.observation_space
        return batch


FourOfSix = register_lambda_agent_connector(
    "FourOfSix in test_adapted", lambda data: {**data, "new_obs": data["new_obs"][:4]}
)
WithOne = register_lambda_action_connector(
    "WithOne in test_adapted", lambda actions, states, fetches: (np.hstack((actions, [1])), states, fetches)
)


def test_connectors_of_ones_own_stand_around_the_policys() -> None:
    env = gym.make("CartPole-v1")
    old = policy_for(env.observation_space, env.action_space, [MeanStdFilter(update_stats=False)])
    ctx = ConnectorContext(observation_space=env.observation_space, action_space=env.action_space)
    before = old.evaluate("CartPole-v1", 2).returns
    for agent_connectors in ([Halved()], [FourOfSix(ctx)]):
        adapted = old.adapted(NewCartPole(), agent_connectors, [WithOne(ctx)])
        np.testing.assert_array_equal(adapted.evaluate(NewCartPole, 2).returns, before)
    with pytest.raises(ConnectorError, match=r"observations in .* come out of .*, but the policy takes shape \[4\]"):
        old.adapted(NewCartPole(), [FlattenObservations()], [WithOne(ctx)])
    with pytest.raises(ConnectorError, match=r"the environment takes shape \[2\]"):
        old.adapted(NewCartPole(), [Halved()], [AdaptActions(space=spaces.Discrete(3), fields={"action": "action"})])


def test_a_piece_refuses_fields_that_are_not_there() -> None:
    old, new = box((0, 1), (0, 2)), box((0, 1), (0, 2), (0, 3))
    for fields, text in (
        ({"observation[0]": "observation[0]"}, r"field observation\[1\] has no origin"),
        ({"observation": "observation"}, r"has shape \[3\], expected \[2\]"),
        ({"observation": 0.5, "speed": 1.0}, r"fields \['speed'\] are not in"),
        (
            {"observation[0]": 1.0, "observation[1]": "observation[7]"},
            r"comes from observation\[7\], which is not there",
        ),
    ):
        with pytest.raises(ConnectorError, match=text):
            AdaptObservations(new, None, space=old, fields=fields)
