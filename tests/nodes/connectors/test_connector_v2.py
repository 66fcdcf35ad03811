"""The interface of a connector piece: what RLlib's page shows for single-agent data, and what is refused."""

import copy
import pickle
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from rollflow import ConnectorV2, SingleAgentEpisode
from rollflow.nodes import ConnectorPipelineV2, LambdaConnector
from rollflow.stream import ConnectorError
from rollflow.stream.data.space import one_hot
from rollflow.stream.testing import check


class OneHot(ConnectorV2):
    def recompute_output_observation_space(self, in_obs: Any, in_act: Any) -> gym.Space[Any]:
        return Box(0.0, 1.0, (in_obs.n,), np.float32)

    def __call__(
        self, *, rl_module: Any, batch: Any, episodes: Any, explore: Any = None, shared_data: Any = None, **kwargs: Any
    ) -> Any:
        assert "obs" in batch
        batch["obs"] = one_hot(batch["obs"])
        return batch


@pytest.fixture
def episode() -> SingleAgentEpisode:
    return SingleAgentEpisode("SA-EPS0", observations=[0, 1, 2, 3], actions=[1, 2, 3], rewards=[1.0, 2.0, 3.0])


def test_a_piece_transforms_a_batch_and_knows_its_output_space() -> None:
    connector = OneHot(input_observation_space=Discrete(2))
    output = connector(rl_module=None, batch={"obs": np.array([1, 0, 0], np.int32)}, episodes=None)
    check(output, {"obs": np.array([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]], np.float32)})
    assert connector.observation_space == Box(0.0, 1.0, (2,), np.float32)
    connector.input_observation_space = Discrete(3)
    assert connector.observation_space == Box(0.0, 1.0, (3,), np.float32)
    assert connector.action_space is None
    connector.input_action_space = Discrete(7)
    assert connector.action_space == Discrete(7)


AGENT = SingleAgentEpisode(agent_id="ag0", module_id="mod0", multi_agent_episode_id="MA-EPS1")


@pytest.mark.parametrize(
    ("of", "key"), [(None, None), (SingleAgentEpisode("e"), ("e",)), (AGENT, ("MA-EPS1", "ag0", "mod0"))]
)
def test_items_are_added_under_their_column_and_the_episodes_key(of: Any, key: Any) -> None:
    batch: dict[str, Any] = {}
    for column, item in (("test_col", 5), ("test_col", 6), ("test_col_2", -10)):
        ConnectorV2.add_batch_item(batch, column, item_to_add=item, single_agent_episode=of)
    expected = {"test_col": [5, 6], "test_col_2": [-10]}
    assert batch == (expected if of is None else {column: {key: items} for column, items in expected.items()})


def test_several_items_are_added_at_once(episode: SingleAgentEpisode) -> None:
    batch: dict[str, Any] = {}
    structs = [{"a": np.array(3), "b": 4}, {"a": np.array(5), "b": 6}]
    ConnectorV2.add_n_batch_items(batch, "test_col", structs, num_items=2)
    check(batch["test_col"], structs)
    ConnectorV2.add_n_batch_items(batch, "test_col_2", {"a": np.array([3, 5]), "b": np.array([4, 6])}, num_items=2)
    more = {"a": np.array([7, 7, 7]), "b": np.array([8, 8, 8])}
    ConnectorV2.add_n_batch_items(batch, "test_col_2", more, num_items=3)
    check(batch["test_col_2"], [{"a": np.array([3, 5]), "b": np.array([4, 6])}, more])
    batch = {}
    ConnectorV2.add_n_batch_items(batch, "test_col", [5, 6, 7], num_items=3, single_agent_episode=episode)
    assert batch == {"test_col": {("SA-EPS0",): [5, 6, 7]}}


@pytest.mark.parametrize("items", [[1, 2], np.array([1, 2]), {"a": np.array([1, 2])}])
def test_a_wrong_number_of_items_is_refused(items: Any) -> None:
    with pytest.raises(ConnectorError, match="column 'x': num_items is 3, but there are 2 items to add"):
        ConnectorV2.add_n_batch_items({}, "x", items, num_items=3)


def test_a_column_of_another_form_is_not_added_to(episode: SingleAgentEpisode) -> None:
    with pytest.raises(ConnectorError, match="column 'x' is list, expected a dict from episodes to lists of items"):
        ConnectorV2.add_batch_item({"x": [1]}, "x", 2, episode)
    with pytest.raises(ConnectorError, match="column 'x' is ndarray, expected a list of items"):
        ConnectorV2.add_batch_item({"x": np.zeros(2)}, "x", 2)


BY_AGENT = {("e1", "a1", "m1"): [1, 2, 3], ("e2", "a1", "m2"): [400, 500], ("e2", "a2", "m3"): [-1, -2]}


def of_agent(item: Any, episode: Any, agent: Any, module: Any) -> Any:
    return item - 1 if episode == "e1" else item / 100 if module == "m2" else -item


@pytest.mark.parametrize(
    ("batch", "column", "func", "changed"),
    [
        ({"x": [0, 1]}, "x", lambda item, *ids: item + 1, {"x": [1, 2]}),
        ({"x": [0], "y": [2]}, ["x", "y"], lambda items, *ids: (items[0] + 1, -items[1]), {"x": [1], "y": [-2]}),
        ({"x": {("e",): [0, 1], ("f",): [2]}}, "x", lambda item, e, *ids: e, {"x": {("e",): [*"ee"], ("f",): ["f"]}}),
        ({"x": BY_AGENT}, "x", of_agent, {"x": dict(zip(BY_AGENT, ([0, 1, 2], [4, 5], [1, 2]), strict=True))}),
    ],
    ids=["one", "two", "episodes", "agents"],
)
def test_a_function_changes_every_item_and_knows_whose_it_is(batch: Any, column: Any, func: Any, changed: Any) -> None:
    batch = copy.deepcopy(batch)
    ConnectorV2.foreach_batch_item_change_in_place(batch, column, func)
    assert batch == changed


def test_an_unknown_column_is_named() -> None:
    with pytest.raises(ConnectorError, match="the batch has no column 'x'; columns: obs"):
        ConnectorV2.foreach_batch_item_change_in_place({"obs": []}, "x", lambda item: item)


def test_columns_and_module_ids_change_places() -> None:
    batch = {"obs": {"module_0": [1, 2, 3]}, "actions": {"module_0": [4, 5, 6], "module_1": [7]}}
    assert ConnectorV2.switch_batch_from_column_to_module_ids(batch) == {
        "module_0": {"obs": [1, 2, 3], "actions": [4, 5, 6]},
        "module_1": {"actions": [7]},
    }


def test_episodes_are_iterated_alone_or_with_their_items(episode: SingleAgentEpisode) -> None:
    other = SingleAgentEpisode("b")
    iterate = ConnectorV2.single_agent_episode_iterator
    assert list(iterate([episode, other])) == [episode, other]
    assert list(iterate([episode, other], zip_with_batch_column=[1, 2])) == [(episode, 1), (other, 2)]
    by_id = {("b",): [3], ("SA-EPS0",): [1, 2]}
    pairs = list(iterate([episode, other, episode], zip_with_batch_column=by_id))
    assert pairs == [(episode, 1), (other, 3), (episode, 2)]
    with pytest.raises(ValueError, match="zip_with_batch_column has 1 items, expected one for each of 2 episodes"):
        list(iterate([episode, other], zip_with_batch_column=[1]))
    with pytest.raises(ValueError, match=r"zip_with_batch_column has 0 items for episode \('b',\)"):
        list(iterate([other], zip_with_batch_column={}))


def test_a_piece_can_be_made_again_from_its_arguments() -> None:
    class Piece(OneHot):
        def __init__(self, in_obs: Any = None, in_act: Any = None, *, depth: int, **kwargs: Any) -> None:
            super().__init__(in_obs, in_act, **kwargs)
            self.depth = depth

    args, kwargs = Piece(Discrete(2), depth=3).get_ctor_args_and_kwargs()
    assert (args, kwargs) == ((Discrete(2),), {"depth": 3})
    assert Piece(*args, **kwargs).depth == 3


class Filters(ConnectorV2):
    """Keeps what `recompute_output_observation_space` has found out."""

    recomputed = 0

    def __init__(self, in_obs: Any = None, in_act: Any = None, *, times: int = 1) -> None:
        super().__init__(in_obs, in_act)
        self.times = times
        self.filters: Any = None

    def recompute_output_observation_space(self, in_obs: Any, in_act: Any) -> gym.Space[Any]:
        self.recomputed += 1
        self.filters = [0] * in_obs.n * self.times
        return Box(0.0, 1.0, (len(self.filters),), np.float32)

    def recompute_output_action_space(self, in_obs: Any, in_act: Any) -> gym.Space[Any]:
        self.actions = in_act.n
        return Discrete(in_act.n + 1)

    def __call__(self, *, batch: Any, **kwargs: Any) -> Any:
        return batch | {"filters": len(self.filters), "actions": self.actions}

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {"filters": self.filters}


class Widest(Filters):
    """Sets something behind two constructors."""

    def __init__(self, *spaces: Any) -> None:
        super().__init__(*spaces)
        self.times = 5


def test_a_piece_built_by_itself_has_recomputed_its_spaces() -> None:
    assert Filters(Discrete(2), Discrete(3))(batch={}) == {"filters": 2, "actions": 3}
    assert Filters(Discrete(2), Discrete(3)).get_state() == {"filters": [0, 0]}
    assert vars(Filters(Discrete(2), Discrete(3), times=2))["filters"] == [0] * 4
    assert Widest(Discrete(2), Discrete(3)).filters == [0] * 10
    assert Widest(Discrete(2)).observation_space.shape == (10,)
    assert (Filters().filters, Filters(None, Discrete(3)).actions) == (None, 3)


def test_a_constructor_may_go_on_from_what_was_recomputed() -> None:
    class Buffers(OneHot):
        def __init__(self, *spaces: Any) -> None:
            super().__init__(*spaces)
            self.buffer = np.zeros(self.size)
            self.observation_space = Discrete(9)

        def recompute_output_observation_space(self, in_obs: Any, in_act: Any) -> gym.Space[Any]:
            self.size = in_obs.n
            return in_obs

    piece = Buffers(Discrete(4), Discrete(2))
    assert (piece.buffer.shape, piece.observation_space, piece.action_space) == ((4,), Discrete(9), Discrete(2))
    assert pickle.loads(pickle.dumps(Filters(Discrete(2), Discrete(3)))).filters == [0, 0]


def test_what_recomputing_raises_the_constructor_raises() -> None:
    with pytest.raises(AttributeError, match="'Box' object has no attribute 'n'"):
        Filters(Box(0, 1, (2,)), Discrete(3))


def test_an_argument_that_no_class_knows_is_refused() -> None:
    with pytest.raises(TypeError, match="OneHot takes no argument named 'depht'"):
        OneHot(Discrete(2), depht=3)


def test_what_is_no_space_is_refused() -> None:
    nothing: Any = lambda *spaces: None  # noqa: E731
    forgets = LambdaConnector(lambda batch: None, name="Forgets", observation_space=nothing)
    told = "Forgets: recompute_output_observation_space returned None, NoneType, expected a gymnasium space"
    with pytest.raises(ConnectorError, match=told):
        forgets.set_input_spaces(Discrete(2), None)
    with pytest.raises(ConnectorError, match="OneHot: input_action_space is 2, int, expected a gymnasium space"):
        OneHot(Discrete(2)).input_action_space = 2  # type: ignore[assignment]


def test_a_piece_has_no_state_unless_it_says_so() -> None:
    piece = OneHot()
    assert piece.get_state() == {}
    piece.set_state({})
    piece.reset_state()
    assert piece.merge_states([{"a": 1}]) == {"a": 1}
    assert piece.get_checkpointable_components() == []


def test_a_subclass_with_its_own_call_says_anew_whether_it_takes_columns() -> None:
    class Columnar(OneHot):
        columnar = True

    class Renamed(Columnar):
        pass

    class Overridden(Columnar):
        def __call__(self, **kwargs: Any) -> Any:
            return kwargs["batch"]

    assert (Columnar.columnar, Renamed.columnar, Overridden.columnar) == (True, True, False)


def test_a_piece_may_name_itself_and_say_how_far_it_looks_back() -> None:
    class Ported(OneHot):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.name, self.lookback = "mine", 5

    pipeline = ConnectorPipelineV2(connectors=[OneHot(), ConnectorPipelineV2(connectors=[Ported()])])
    assert (pipeline.lookback, pipeline[1].names) == (5, ["mine"])


def test_a_batch_by_module_is_not_added_to(episode: SingleAgentEpisode) -> None:
    batch = {"default_policy": {"obs": [1]}}
    for given in (None, episode):
        with pytest.raises(ConnectorError, match=r"column 'x' can't be added: the batch is by module.*default_policy"):
            ConnectorV2.add_batch_item(batch, "x", 5, given)
        with pytest.raises(ValueError, match="stand before AgentToModuleMapping"):
            ConnectorV2.add_n_batch_items(batch, "x", np.zeros(2), 2, given)
    nested = {"obs": {"a": np.zeros(2), "b": {"c": np.zeros(2)}}}  # arrays of a Dict space: no module
    ConnectorV2.add_batch_item(nested, "x", 5)
    assert nested["x"] == [5]


@pytest.mark.parametrize(
    ("y", "func", "told"),
    [
        ([1], lambda items, *ids: items, "column 'y' has 1 items, column 'x' 2; expected as many"),
        (3, lambda items, *ids: items, "column 'y' is int, expected a list of items"),
        (
            [1, 2],
            lambda items, *ids: (items[0] + 1,),
            r"the function returned \(2,\), expected a tuple of one item for",
        ),
        ([1, 2], lambda items, *ids: items[0] + 1, "the function returned 2, expected a tuple of one item for each of"),
    ],
)
def test_a_change_that_is_refused_changes_nothing(y: Any, func: Any, told: str) -> None:
    batch = {"x": [1, 2], "y": y}
    with pytest.raises(ConnectorError, match=told):
        ConnectorV2.foreach_batch_item_change_in_place(batch, ["x", "y"], func)
    assert batch == {"x": [1, 2], "y": y}
