from functools import partial
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from numbered_agents import NumberedAgents
from piece_forms import Breaks

from rollflow import (
    ConnectorV2,
    FrameStacking,
    GeneralAdvantageEstimation,
    MeanStdFilter,
    MultiAgentRollout,
    Rollout,
    SingleAgentEpisode,
)
from rollflow.nodes import (
    ConnectorPipelineV2,
    DefaultModule,
    EnvToModulePipeline,
    FlattenObservations,
    LambdaConnector,
    LearnerConnectorPipeline,
    ModuleToEnvPipeline,
)
from rollflow.nodes.connectors.module_to_env.action_pieces import GetActions
from rollflow.stream import ColumnError, ConnectorError
from rollflow.stream.fragments.live_episode import LaneEpisodes


class Append(ConnectorV2):
    """Adds its own name to `calls`, one number to the observation space, and keeps count as its state."""

    def __init__(self, in_obs: Any = None, in_act: Any = None, *, label: str = "", **kwargs: Any) -> None:
        super().__init__(in_obs, in_act, **kwargs)
        self.label = label
        self.count = 0

    def recompute_output_observation_space(self, in_obs: Any, in_act: Any) -> gym.Space[Any]:
        return Box(-1, 1, (in_obs.shape[0] + 1,))

    def __call__(self, *, batch: dict[str, Any], shared_data: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        self.count += 1
        batch.setdefault("calls", []).append(self.label)
        shared_data.setdefault("calls", []).append(self.label)
        return batch

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {"count": self.count} if self.count else {}

    def set_state(self, state: dict[str, Any]) -> None:
        self.count = state["count"]

    def reset_state(self) -> None:
        self.count = 0

    def merge_states(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        return {"count": sum(state["count"] for state in states)}


class Other(Append):
    pass


def calls(pipeline: ConnectorPipelineV2, **kwargs: Any) -> Any:
    return pipeline(rl_module=None, batch={}, episodes=[], **kwargs).get("calls", [])


def test_pieces_are_called_in_order_and_share_data() -> None:
    shared: dict[str, Any] = {}
    pipeline = ConnectorPipelineV2(connectors=[Append(label="a"), Append(label="b")])
    assert calls(pipeline, shared_data=shared) == ["a", "b"]
    assert shared["calls"] == ["a", "b"]
    assert ConnectorPipelineV2()(rl_module=None, batch={"x": 1}, episodes=[]) == {"x": 1}


def test_pipelines_nest() -> None:
    inner = ConnectorPipelineV2(connectors=[Append(label="b"), Append(label="c")])
    outer = ConnectorPipelineV2(Box(-1, 1, (1,)), Discrete(2), connectors=[Append(label="a"), inner, Append(label="d")])
    assert calls(outer) == ["a", "b", "c", "d"]
    assert outer.observation_space == Box(-1, 1, (5,))
    assert [space.shape for space in outer.observation_spaces] == [(2,), (3,), (4,), (5,)]


def test_every_edit_recomputes_the_spaces() -> None:
    pipeline = ConnectorPipelineV2(Box(-1, 1, (1,)), Discrete(2), connectors=[Append(label="a")])
    assert pipeline.insert_before("Append", Other(label="b")) is pipeline["Append"]
    assert pipeline.insert_after(Other, Append(label="c")) is pipeline["Other"]
    pipeline.prepend(Other(label="d"))
    pipeline.append(Other(label="e"))
    assert calls(pipeline) == ["d", "b", "c", "a", "e"]
    assert [piece.observation_space.shape for piece in pipeline] == [(2,), (3,), (4,), (5,), (6,)]
    pipeline.remove("Other")
    pipeline.remove("Append")
    assert calls(pipeline) == ["b", "a", "e"]
    assert pipeline.observation_space.shape == (4,)
    pipeline.input_observation_space = Box(-1, 1, (7,))
    assert pipeline.observation_space.shape == (10,)


def test_an_edit_of_a_nested_pipeline_reaches_the_ones_around_it() -> None:
    inner = ConnectorPipelineV2()
    middle = ConnectorPipelineV2(connectors=[inner])
    outer = ConnectorPipelineV2(Box(-1, 1, (1,)), Discrete(2), connectors=[middle, Append()])
    assert (middle.columnar, outer.observation_space.shape) == (True, (2,))
    inner.append(Append())
    assert (middle.columnar, outer.observation_space.shape) == (False, (3,))
    assert outer[1].input_observation_space.shape == (2,)
    inner.remove(Append)
    assert (middle.columnar, outer.observation_space.shape) == (True, (2,))


def test_a_pipeline_without_spaces_leaves_its_pieces_theirs() -> None:
    own = Append(Box(-1, 1, (4,)), Discrete(2))
    pipeline = ConnectorPipelineV2(connectors=[own, Append()])
    assert own.input_observation_space.shape == (4,)
    assert pipeline.observation_space.shape == (6,)
    assert pipeline.action_space == Discrete(2)
    pipeline.input_observation_space = Box(-1, 1, (1,))
    assert pipeline.observation_space.shape == (3,)


class Slots(LaneEpisodes):
    """Three slots whose observations are 0, 1 and 2."""

    def __init__(self) -> None:
        self.row = np.arange(3.0)
        self.listed = 0

    def __len__(self) -> int:
        return 3

    def settle(self, space: Any) -> None:
        """Do nothing: no lane records what pieces write."""

    def __getitem__(self, index: Any) -> Any:
        self.listed += index == 0
        made = [SingleAgentEpisode(str(i), observations=[np.float64(i)], len_lookback_buffer=0) for i in range(3)]
        return made[index]

    def newest(self) -> Any:
        return self.row


@pytest.mark.parametrize("nested", [False, True])
def test_a_piece_gets_columns_where_all_pieces_after_it_take_them(nested: bool) -> None:
    forms: list[Any] = []

    def note_form(episodes: Any) -> None:
        forms.append(type(episodes))

    pieces = [LambdaConnector(note_form, columnar=columnar) for columnar in (True, False, True, False, True, True)]
    connectors = [*pieces[:2], ConnectorPipelineV2(connectors=pieces[2:5]), pieces[5]] if nested else pieces
    episodes = Slots()
    ConnectorPipelineV2(connectors=connectors)(rl_module=None, batch={}, episodes=episodes)
    assert forms == [list] * 4 + ([list] if nested else [Slots]) + [Slots]
    assert episodes.listed == 1


def test_items_of_a_custom_piece_are_batched_beside_columns() -> None:
    def double(batch: dict[str, Any], episodes: Any) -> None:
        for episode in ConnectorV2.single_agent_episode_iterator(episodes):
            ConnectorV2.add_batch_item(batch, "doubled", 2 * episode.get_observations(-1), episode)

    pipeline = EnvToModulePipeline.default(custom_pieces=[LambdaConnector(double)])
    batch = pipeline(rl_module=object(), episodes=Slots(), explore=True)
    assert batch["obs"].tolist() == [0.0, 1.0, 2.0]
    assert batch["doubled"].tolist() == [0.0, 2.0, 4.0]


def test_pieces_are_found_by_place_name_and_class() -> None:
    first, second, other = Append(), Append(), Other()
    pipeline = ConnectorPipelineV2(connectors=[first, other, second])
    assert pipeline.names == ["Append", "Other", "Append_2"]
    assert pipeline[0] is first
    assert pipeline["Append_2"] is second
    assert pipeline[Other] == [other]
    assert pipeline[Append] == [first, other, second]
    assert (len(pipeline), list(pipeline)) == (3, [first, other, second])


MISSING = "ConnectorPipelineV2 has no piece 'Nope'; pieces: Append, Other, Append_2"
SEVERAL = "ConnectorPipelineV2 has 2 pieces of class 'Append', expected a name that says which: Append, Append_2"
TWICE = "ConnectorPipelineV2: the same Append object twice, expected two objects"
ITSELF = "ConnectorPipelineV2 was to be put into itself"


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        *(
            (lambda pipeline, way=way, of=of: getattr(pipeline, way)(of, Append()), told)
            for way in ("insert_before", "insert_after")
            for of, told in (("Nope", MISSING), (Append, SEVERAL))
        ),
        (lambda pipeline: pipeline.remove(Append), SEVERAL),
        (
            lambda pipeline: pipeline.append(type("Append_2", (Append,), {})()),
            "two pieces called 'Append_2', expected different names; pieces: Append,",
        ),
        (lambda pipeline: pipeline.append(pipeline[0]), TWICE),
        (lambda pipeline: pipeline.prepend(pipeline[0]), TWICE),
        (lambda pipeline: pipeline.insert_before("Other", pipeline[0]), TWICE),
        (lambda pipeline: ConnectorPipelineV2(connectors=[pipeline[0]] * 2), TWICE),
        (lambda pipeline: pipeline.append(3), "3 is int, expected a ConnectorV2 piece"),
        (lambda made: made.append(Append), r"is the class Append, not Append\(\), expected a ConnectorV2 piece"),
        (lambda pipeline: pipeline.append(pipeline), ITSELF),
        (lambda pipeline: pipeline.append(ConnectorPipelineV2(connectors=[pipeline])), ITSELF),
        (lambda pipeline: pipeline.set_state({"Nope": {}}), r"a state for \['Nope'\], expected .*; pieces: Append"),
        (lambda pipeline: pipeline.get_state("Nope"), MISSING),
        (lambda pipeline: pipeline.get_state(not_components=["Nope/Append"]), MISSING),
    ],
)
def test_what_is_refused_leaves_the_pipeline_as_it_was(edit: Any, told: str) -> None:
    pieces = [Append(), Other(), Append()]
    pipeline = ConnectorPipelineV2(connectors=pieces)
    with pytest.raises(ConnectorError, match=told):
        edit(pipeline)
    assert list(pipeline) == pieces


def test_a_piece_is_removed_by_name_and_the_one_of_that_very_class_is_found() -> None:
    pipeline = ConnectorPipelineV2(connectors=[first := Append(), other := Other(), Append()])
    with pytest.warns(UserWarning, match=f"nothing removed: {MISSING}"):
        pipeline.remove("Nope")
    pipeline.remove("Append_2")
    assert pipeline.insert_after(Append, third := Append()) is first, "the one of that very class, no subclass"
    assert list(pipeline) == [first, third, other]


def test_a_piece_that_returns_no_batch_is_named_with_its_place() -> None:
    class Forgets(ConnectorV2):
        def __call__(self, **kwargs: Any) -> Any:
            kwargs["batch"]["x"] = 1

    pipeline = ConnectorPipelineV2(connectors=[Append(), Forgets()])
    told = r"connector piece 'Forgets' \(2 of 2 in ConnectorPipelineV2\) returned NoneType, expected the batch, a dict"
    with pytest.raises(ConnectorError, match=told):
        calls(pipeline)


def test_an_error_in_a_piece_says_in_which() -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        calls(ConnectorPipelineV2(connectors=[Breaks(at=1)]))
    assert raised.value.__notes__ == ["in connector piece 'Breaks' (1 of 1 in ConnectorPipelineV2)"]


def test_states_go_by_name_also_for_two_pieces_of_one_class() -> None:
    pipeline = ConnectorPipelineV2(connectors=[Append(), Other(), Append()])
    assert pipeline.get_state() == {}
    pipeline.set_state({"Append": {"count": 3}, "Append_2": {"count": 5}})
    assert pipeline.get_state() == {"Append": {"count": 3}, "Append_2": {"count": 5}}
    assert pipeline.get_state("Append_2") == {"Append_2": {"count": 5}}
    assert pipeline.get_state(not_components=["Append_2"]) == {"Append": {"count": 3}}
    merged = pipeline.merge_states([{"Append_2": {"count": 1}}, {"Append_2": {"count": 2}, "Append": {"count": 4}}])
    assert merged == {"Append": {"count": 4}, "Append_2": {"count": 3}}
    assert [name for name, _ in pipeline.get_checkpointable_components()] == ["Append", "Other", "Append_2"]
    pipeline.reset_state()
    assert pipeline.get_state() == {}


def test_every_piece_is_timed() -> None:
    pipeline = ConnectorPipelineV2(connectors=[Append(), Other()])
    for _ in range(3):
        calls(pipeline)
    timers = pipeline.timers()
    assert [(name, timer.calls) for name, timer in timers.items()] == [("Append", 3), ("Other", 3)]
    assert all(timer.mean_us > 0 for timer in timers.values())
    pipeline.append(Append())
    assert [timer.calls for timer in pipeline.timers().values()] == [3, 3, 0]


def test_a_refused_edit_leaves_the_pipeline_as_it_was() -> None:
    inner = ConnectorPipelineV2(connectors=[LambdaConnector(lambda: None, name="first")])
    outer = ConnectorPipelineV2(Discrete(3), Discrete(2), connectors=[inner])
    with pytest.raises(ConnectorError, match="FrameStacking can't stack observations in Discrete") as raised:
        inner.append(FrameStacking(num_frames=2))
    assert "in the spaces of connector piece 'FrameStacking' (2 of 2 in ConnectorPipelineV2)" in raised.value.__notes__
    assert (inner.names, inner.lookback, outer.observation_space) == (["first"], 0, Discrete(3))


def test_a_part_of_the_state_is_asked_for_by_name() -> None:
    inner = ConnectorPipelineV2(connectors=[Append(), Append()])
    outer = ConnectorPipelineV2(connectors=[inner, Append()])
    state = {"ConnectorPipelineV2": {"Append": {"count": 1}, "Append_2": {"count": 2}}, "Append": {"count": 3}}
    outer.set_state(state)
    assert outer.get_state() == state
    assert outer.get_state("ConnectorPipelineV2/Append_2") == {"ConnectorPipelineV2": {"Append_2": {"count": 2}}}
    assert outer.get_state(not_components=["ConnectorPipelineV2/Append_2", "Append"]) == {
        "ConnectorPipelineV2": {"Append": {"count": 1}}
    }


def test_what_is_no_function_is_no_piece() -> None:
    for given in (3, dict):
        with pytest.raises(ConnectorError, match="is no function with arguments of its own, expected such a one"):
            LambdaConnector(given)  # type: ignore[arg-type]


def test_an_error_in_a_state_says_whose() -> None:
    with pytest.raises(KeyError) as raised:
        ConnectorPipelineV2(connectors=[Other()]).set_state({"Other": {"n": 3}})
    assert raised.value.__notes__ == ["in the state of connector piece 'Other' of ConnectorPipelineV2"]


# Pieces in a pipeline of another kind


@pytest.mark.parametrize(
    ("pipeline", "piece", "message"),
    [
        (
            EnvToModulePipeline,
            GetActions,
            "GetActions is put into the env-to-module pipeline, expected in the module-t",
        ),
        (EnvToModulePipeline, GeneralAdvantageEstimation, "env-to-module pipeline, expected in the learner pipeline"),
        (ModuleToEnvPipeline, FlattenObservations, "expected in the env-to-module or learner pipeline"),
        (
            LearnerConnectorPipeline,
            FrameStacking,
            "FrameStacking is put into the learner pipeline, expected in the env",
        ),
        (
            LearnerConnectorPipeline,
            MeanStdFilter,
            "MeanStdFilter is put into the learner pipeline, expected in the env",
        ),
    ],
)
@pytest.mark.parametrize("within", [False, True])
def test_a_piece_in_another_kind_of_pipeline_is_refused(pipeline: Any, piece: Any, message: str, within: bool) -> None:
    made = ConnectorPipelineV2(connectors=[piece()]) if within else piece()
    with pytest.raises(ConnectorError, match=message):
        pipeline(connectors=[made])
    with pytest.raises(ConnectorError, match=message):
        pipeline().append(made)


def short_rollout(piece: ConnectorV2, agents: bool) -> Any:
    """A rollout of one fragment, of one agent or several."""
    options: Any = {"env_to_module_connector": lambda env: piece, "fragment_length": 4, "num_fragments": 1}
    if agents:
        return MultiAgentRollout(partial(NumberedAgents, 0, nested=0), **options)
    return Rollout("CartPole-v1", **options)


@pytest.mark.parametrize("kind", ["observations", "rewards"])
@pytest.mark.parametrize("agents", [False, True])
def test_columns_that_are_written_to_in_place_are_refused(kind: str, *, agents: bool) -> None:
    def halve(episodes: Any) -> None:
        values = episodes.observations() if kind == "observations" else episodes.previous("rewards")
        if values is not None:
            values /= 2

    piece = LambdaConnector(halve, columnar=True)
    with pytest.raises(ValueError, match="read-only") as raised, short_rollout(piece, agents) as rollout:
        list(rollout.fragments())
    assert any("'halve'" in note for note in raised.value.__notes__)


class Watches(DefaultModule):
    """Keeps the observations that it got last, those of copies of it as well."""

    given: ClassVar[list[Any]] = []

    def _forward(self, batch: Any, **kwargs: Any) -> Any:
        self.given[:] = [batch["obs"].numpy()]
        return super()._forward(batch, **kwargs)


def with_piece(function: Any, **options: Any) -> Rollout:
    """A rollout of CartPole with a piece right behind that which adds the observations."""
    piece = LambdaConnector(function, columnar=True)
    rollout = Rollout("CartPole-v1", num_envs=4, fragment_length=4, num_fragments=1, seed=0, **options)
    rollout.env_to_module.insert_after("AddObservationsFromEpisodesToBatch", piece)
    return rollout


def test_observations_of_a_batch_that_are_written_to_in_place_are_refused() -> None:
    def double(batch: dict[str, Any]) -> None:
        batch["obs"] *= 2

    with pytest.raises(ValueError, match="read-only") as raised, with_piece(double) as rollout:
        list(rollout.fragments())
    assert any("batch['obs'] = batch['obs'] * 2 rather than" in note for note in raised.value.__notes__)


def test_other_observations_of_the_batch_leave_the_recorded_ones() -> None:
    seen = []

    def double(batch: dict[str, Any]) -> dict[str, Any]:
        seen.append(batch["obs"])
        return {**batch, "obs": batch["obs"] * 2}

    with with_piece(double, module=Watches) as rollout:
        [fragment] = rollout.fragments()
    rows = fragment.columns["obs"].tree
    np.testing.assert_array_equal(seen[-1], rows[-1])  # of which no pass is made any more
    np.testing.assert_array_equal(Watches.given[0], 2 * rows[-2])


@pytest.mark.filterwarnings("error")
def test_recorded_rows_go_to_the_module_without_a_copy_though_pieces_see_them_read_only() -> None:
    seen: list[Any] = []
    with with_piece(lambda batch: seen.append(batch["obs"]), module=Watches) as rollout:
        [fragment] = rollout.fragments()
    assert not seen[-1].flags.writeable
    assert np.shares_memory(Watches.given[0], fragment.columns["obs"].tree)


def test_a_piece_that_reads_columns_without_saying_so_is_told_how_to_say_it() -> None:
    class Forgets(ConnectorV2):
        def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
            return batch | {"mine": episodes.observations()}

    rollout = Rollout("CartPole-v1", env_to_module_connector=lambda env: Forgets())
    with pytest.raises(AttributeError) as raised, rollout:
        list(rollout.fragments())
    assert any("sets columnar = True in its own class" in note for note in raised.value.__notes__)


@pytest.mark.parametrize("agents", [False, True])
def test_a_name_of_no_column_is_refused_with_those_that_there_are(*, agents: bool) -> None:
    def asks(episodes: Any) -> None:
        episodes.previous("rewards"), episodes.previous("action_logp"), episodes.previous("reward")

    told = r"there is no column 'reward', expected one of obs, .*rewards"
    with pytest.raises(ColumnError, match=told), short_rollout(LambdaConnector(asks, columnar=True), agents) as rollout:
        list(rollout.fragments())
