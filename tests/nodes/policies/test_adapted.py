"""A policy adapted to another environment: it does there what it did, on the fields that are the same."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from drawn_policies import Repeats
from extras import needs
from gymnasium import spaces
from gymnasium.wrappers import TransformAction, TransformObservation
from hypothesis import given, strategies as st

from rollflow import ConnectorV2, FrameStacking, MeanStdFilter, Policy
from rollflow.nodes import AdaptActions, DefaultModule, FlattenObservations, LambdaConnector, PrevActionsPrevRewards
from rollflow.nodes.connectors.pipelines.adapting import check_fits
from rollflow.policy import OnnxPolicy
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


def test_fields_that_are_the_same_need_no_word_and_those_that_came_are_dropped() -> None:
    new = world(spaces.Dict({"camera": spaces.Box(0, 255, (4, 4, 3), np.uint8), **OLD_SEEN.spaces}))
    old = policy_for()
    adapted = old.adapted(new)
    seen = {"place": np.array([0.25, -0.5], np.float32), "speed": np.float32(1.5)}
    for came in (new.observation_space.sample(), new.observation_space.sample()):
        done = adapted.act({**came, **seen})
        expected = old.act(seen)
        assert done["fire"] == expected["fire"]
        np.testing.assert_array_equal(done["turn"], expected["turn"])


def shown(observations: Any, new: Any, given: Any, fields: Any) -> Any:
    """What the module sees of an observation of the new space."""
    policy = Policy(Repeats, observation_space=observations, action_space=observations)
    return policy.adapted(world(new, observations), fields=fields).act(given)


@given(st.permutations(range(4)), st.lists(st.integers(0, 4), max_size=3))
def test_numbers_that_moved_come_from_where_the_mapping_says(order: list[int], came: list[int]) -> None:
    places = list(order)
    for at in came:
        places.insert(at, -1)
    old, new = box(*[(-8.0, 8.0)] * 4), box(*[(-9.0, 9.0)] * len(places))
    fields = {f"observation[{number}]": f"observation[{places.index(number)}]" for number in range(4)}
    given_numbers = np.array(places, np.float32)
    assert shown(old, new, given_numbers, fields).tolist() == [0.0, 1.0, 2.0, 3.0]


def test_numbers_are_scaled_kept_and_filled_as_the_mapping_says() -> None:
    old, new = box((-1.0, 1.0), (0.0, 10.0), (0.0, 1.0)), box((0.0, 4.0), (0.0, 20.0), (-5.0, 5.0))
    given = np.array([1.0, 6.0, 0.5], np.float32)
    fields: Any = {"observation[0]": ["observation[0]", 0.5, -1.0], "observation[2]": 0.25}
    fields["observation[1]"] = "observation[1]"
    np.testing.assert_allclose(shown(old, new, given, fields), [-0.5, 6.0, 0.25])
    np.testing.assert_allclose(shown(old, new, given, {"observation": "observation"}), given)
    np.testing.assert_allclose(shown(old, new, given, {"observation": 0.5}), [0.5, 0.5, 0.5])
    image = np.arange(4, dtype=np.uint8).reshape(2, 2)
    pixels = spaces.Box(0, 255, (2, 2), np.uint8), spaces.Box(0.0, 1.0, (2, 2), np.float32)
    scaled = shown(pixels[1], pixels[0], image, {"observation": ("observation", 1 / 255, 0.0)})
    np.testing.assert_allclose(scaled, image / 255, rtol=1e-6)


def test_a_part_takes_the_place_of_another_one_by_name() -> None:
    old = policy_for()
    new = spaces.Dict({"place": OLD_SEEN["place"], "velocity": SPEED})
    seen = {"place": np.zeros(2, np.float32), "velocity": np.float32(2.0)}
    adapted = old.adapted(world(new), fields={"observation['speed']": "observation['velocity']"})
    adapted.act(seen)
    old.act({"place": seen["place"], "speed": seen["velocity"]})
    np.testing.assert_array_equal(adapted.outputs["action_dist_inputs"], old.outputs["action_dist_inputs"])


def test_actions_get_the_fields_that_came_and_lose_those_that_went() -> None:
    new = spaces.Dict({"turn": spaces.Box(-2.0, 2.0, (3,), np.float64), "wait": spaces.Discrete(4)})
    old = policy_for()
    fields = {f"action['turn'][{place}]": [f"action['turn'][{place}]", 2.0, 0.0] for place in range(2)}
    adapted = old.adapted(world(OLD_SEEN, new), fields={**fields, "action['turn'][2]": 0.5, "action['wait']": 3})
    seen = OLD_SEEN.sample()
    done, before = adapted.act(seen), old.act(seen)
    assert done["wait"] == 3
    assert done.keys() == {"turn", "wait"}
    np.testing.assert_allclose(done["turn"], [*(2.0 * before["turn"]), 0.5], rtol=1e-6)
    assert new.contains({**done, "wait": np.int64(done["wait"])})


def test_actions_that_are_kept_stay_within_the_environments_bounds() -> None:
    wide, narrow = box((-2.0, 2.0), (-2.0, 2.0)), box((-1.0, 1.0), (-0.5, 3.0))
    policy = Policy(Repeats, observation_space=wide, action_space=wide)
    adapted = policy.adapted(world(wide, narrow), fields={"action": "action"})
    assert adapted.act(np.array([1.5, -1.5], np.float32)).tolist() == [1.0, -0.5]
    assert adapted.act(np.array([-0.5, 2.0], np.float32)).tolist() == [-0.5, 2.0]


def new_cart_pole() -> gym.Env[Any, Any]:
    """CartPole with two numbers more to see, and one more action to give."""

    def old_action(action: Any) -> int:
        assert action[1] == 1
        return int(action[0])

    more = np.array([8.0, 6.0], np.float32)
    seen, chosen = spaces.Box(-10, 10, (6,), np.float32), spaces.MultiDiscrete([2, 2])
    old = gym.make("CartPole-v1")
    return TransformAction(TransformObservation(old, lambda obs: np.hstack((obs, more)), seen), old_action, chosen)


POLE: dict[str, Any] = {f"observation[{place}]": f"observation[{place}]" for place in range(4)}
POLE |= {"action[0]": "action", "action[1]": 1}


@pytest.mark.slow
@pytest.mark.parametrize("lstm", [False, True])
def test_an_adapted_policy_plays_as_it_did_and_is_saved_as_any_other(lstm: bool, tmp_path: Path) -> None:
    env = gym.make("CartPole-v1")
    pieces = [MeanStdFilter(update_stats=False), PrevActionsPrevRewards(n_prev_actions=2), FlattenObservations()]
    old = policy_for(env.observation_space, env.action_space, [*pieces, FrameStacking(num_frames=2)], use_lstm=lstm)
    old.trained_on = {"env": "CartPole-v1"}
    adapted = old.adapted(new_cart_pole(), fields=POLE)
    adapted.save(tmp_path / "a")
    loaded = Policy.load(tmp_path / "a")
    loaded.save(tmp_path / "b")
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()
    assert loaded.trained_on == old.trained_on
    before = old.evaluate("CartPole-v1", 3)
    np.testing.assert_array_equal(loaded.evaluate(new_cart_pole, 3).returns, before.returns)


@pytest.mark.slow
def test_an_adapted_policy_has_an_onnx_program(tmp_path: Path) -> None:
    needs("onnx", "onnxruntime", "onnxscript")
    old = policy_for(pieces=[FlattenObservations(), MeanStdFilter(update_stats=False)])
    new = world(
        spaces.Dict({"place": spaces.Box(0.0, 4.0, (2,), np.float32), "speed": SPEED, "more": spaces.Discrete(3)}),
        spaces.Dict({"fire": spaces.Discrete(2), "turn": spaces.Box(-1.0, 1.0, (3,), np.float32)}),
    )
    turn = {
        "action['turn'][0]": "action['turn'][1]",
        "action['turn'][1]": 0.5,
        "action['turn'][2]": "action['turn'][0]",
    }
    adapted = old.adapted(new, fields={"observation['place']": ["observation['place']", 0.5, -1.0], **turn})
    adapted.save(tmp_path / "p", onnx=True)
    small = OnnxPolicy.load(tmp_path / "p")
    for _ in range(8):
        seen = new.observation_space.sample()
        np.testing.assert_allclose(small.act(seen)["turn"], adapted.act(seen)["turn"], atol=1e-5)


# What does not fit


def test_all_that_does_not_match_is_listed_for_both_sides() -> None:
    new = world(
        spaces.Dict({"place": spaces.Box(-1.0, 1.0, (3,), np.float32), "velocity": SPEED}),
        spaces.Dict({"fire": spaces.Discrete(1), "turn": TURN, "wait": spaces.Discrete(4)}),
    )
    with pytest.raises(ConnectorError) as caught:
        policy_for().adapted(new, fields={"observation['height']": 1.0, "wait": 2})
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("the policy does not fit the environment; expected fields=")
    for line, start in zip(
        lines[1:],
        [
            "  field observation['place'] has no origin, expected one for all of observation['place'] in Box(-1.0, 1",
            "  field observation['speed'] has no origin",
            "  field observation['height'] is not in Dict(",
            "  nothing takes observation['place'] in Box(-1.0, 1.0, (3,), float32)",
            "  nothing takes observation['velocity']",
            "  field action['fire'] has no origin, expected one for all of action['fire'] in Discrete(1)",
            "  field action['wait'] has no origin",
            "  nothing takes action['fire'] in Discrete(2)",
            "  field wait is not there, or made by a connector",
        ],
        strict=True,
    ):
        assert line.startswith(start)


@pytest.mark.parametrize(
    ("observations", "actions", "fields", "text"),
    [
        (OLD_SEEN, spaces.Discrete(5), {}, r"field action has no origin"),
        (OLD_SEEN, spaces.Discrete(1), {"action": "action['fire']"}, r"action in Discrete\(1\) can't hold what comes"),
        (OLD_SEEN, spaces.Discrete(5), {"action": "action['turn'][0]"}, r"can't hold what comes from action\['turn'\]"),
        (OLD_SEEN, spaces.Discrete(5), {"action": 5}, r"action in Discrete\(5\) can't hold 5"),
        (OLD_SEEN, spaces.Discrete(5), {"action": "action"}, "action comes from action, which is not there; expected"),
        (SPEED, OLD_DONE, {"observation['place']": "observation"}, r"observation has shape \[\], expected \[2\]"),
        (
            spaces.Dict({"place": spaces.Box(-1.0, 1.0, (2, 2), np.float32), "speed": SPEED}),
            OLD_DONE,
            {"observation['place']": "observation['place']"},
            r"observation\['place'\] has shape \[2, 2\], expected \[2\]",
        ),
        (
            spaces.Dict({"place": OLD_SEEN["place"], "speed": spaces.Box(-9.0, 9.0, (), np.float32)}),
            OLD_DONE,
            {},
            r"field observation\['speed'\] has no origin",
        ),
    ],
)
def test_what_does_not_match_is_named(observations: Any, actions: Any, fields: Any, text: str) -> None:
    with pytest.raises(ConnectorError, match=text):
        policy_for().adapted(world(observations, actions), fields=fields)


def test_what_is_no_environment_is_refused() -> None:
    with pytest.raises(ConnectorError, match="observation_space of the environment is None"):
        policy_for().adapted(SimpleNamespace())


def test_pieces_keep_fields_as_they_were_given() -> None:
    given: Any = {"action": "action"}
    piece = AdaptActions(space=spaces.Discrete(2), fields=given)
    given.clear()
    piece.set_input_spaces(spaces.Discrete(2), spaces.Discrete(2))
    assert piece(batch={"actions": np.array([1])})["actions_for_env"].tolist() == [1]


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


def test_connectors_of_ones_own_stand_around_the_policys() -> None:
    env = gym.make("CartPole-v1")
    old = policy_for(env.observation_space, env.action_space, [MeanStdFilter(update_stats=False)])
    with_one = AdaptActions(space=new_cart_pole().action_space, fields={"action[0]": "action", "action[1]": 1})
    adapted = old.adapted(new_cart_pole(), [Halved()], [with_one])
    before = old.evaluate("CartPole-v1", 2).returns
    np.testing.assert_array_equal(adapted.evaluate(new_cart_pole, 2).returns, before)
    told = r"come out of .*, but the policy takes .*\n.*shape \[6\], expected shape \[4\]"
    with pytest.raises(ConnectorError, match=told):
        old.adapted(new_cart_pole(), [FlattenObservations()], [with_one])
    with pytest.raises(ConnectorError, match=r"the environment takes .*\n.*, expected shape \[2\]"):
        old.adapted(new_cart_pole(), [Halved()], [AdaptActions(space=spaces.Discrete(3), fields={"action": "action"})])


PARTS = spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Discrete(2)})


@pytest.mark.parametrize(
    ("left", "expected", "problem"),
    [
        (box(*[(-1.0, 1.0)] * 6), spaces.Box(-1.0, 1.0, (2, 3)), r"observation has shape [6], expected shape [2, 3]"),
        (spaces.Dict({"a": PARTS["a"]}), PARTS, "observation['b'] in Discrete(2) is missing"),
        (PARTS, spaces.Dict({"a": PARTS["a"]}), "observation['b'] in Discrete(2) is not taken"),
        (box((0.0, 1.0)), box((0, 1), dtype=np.int32), "observation has dtype float32, expected dtype int32"),
        (spaces.Discrete(3), spaces.Discrete(2), "observation is in Discrete(3), expected Discrete(2)"),
    ],
    ids=["shape", "missing", "not taken", "dtype", "number"],
)
def test_what_connectors_of_ones_own_leave_is_held_against_the_policy(left: Any, expected: Any, problem: str) -> None:
    with pytest.raises(ConnectorError) as raised:
        policy_for(expected).adapted(world(left), [LambdaConnector(lambda episodes: None)])
    assert str(raised.value).splitlines()[1:] == [f"  {problem}"]


@pytest.mark.parametrize("expected", [spaces.Discrete(10), spaces.MultiDiscrete([3, 3])], ids=["one", "two"])
def test_a_box_of_whole_numbers_fits_where_numbers_are_counted(expected: Any) -> None:
    check_fits(spaces.Box(0, 255, expected.shape, np.uint8), expected, "action", "a connector")
