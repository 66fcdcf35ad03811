"""A rollout on a device: what it records is what the same rollout of arrays does, and no vector step reads anything."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from feeding_rollouts import fed, trainer
from fragment_equality import assert_alike
from gymnasium.vector import SyncVectorEnv
from hypothesis import settings
from property_examples import examples
from tensor_envs import ACTIONS, FORMS, OBSERVATIONS, NumberedTensors, drawn_rollouts, of_arrays

from benchmarks.host_reads import counting_reads
from rollflow import (
    Columns,
    DatasetSink,
    DatasetSource,
    EpsilonGreedy,
    Forward,
    FrameStacking,
    GeneralAdvantageEstimation,
    MeanStdFilter,
    MultiAgentRollout,
    Replay,
    Rollout,
)
from rollflow.nodes import ConnectorV2, FlattenObservations, PrevActionsPrevRewards
from rollflow.nodes.connectors.common.batches import DEVICE
from rollflow.nodes.connectors.learner.train_columns import AddInfosFromEpisodesToTrainBatch, NStepReturns
from rollflow.nodes.connectors.pipelines.connector_pipeline_v2 import pieces_of
from rollflow.nodes.device.environments import DeviceEnvironments
from rollflow.nodes.device.torch_envs import TorchEnvs
from rollflow.nodes.modules.default_module import DefaultModule
from rollflow.nodes.stages.acting import acting_for
from rollflow.sinks import SampledNStepReturns
from rollflow.stream import ColumnError, ConnectorError, EnvError, ModuleError
from rollflow.stream.data.tree import map_tree

plain = FORMS["plain"]


def gae(observation_space: Any, action_space: Any) -> Any:
    return GeneralAdvantageEstimation(gamma=0.9, lambda_=0.8)


def bootstrapped(fragment: Any) -> Any:
    """The column `bootstrap_from` of a fragment on a device, which its host's then lacks."""
    return fragment.host.columns.pop(Columns.BOOTSTRAP_FROM).tree[fragment.first_row : fragment.last_row]


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=examples(40))
@drawn_rollouts
def test_fragments_are_those_of_arrays(
    form: str, num_envs: int, lengths: tuple[int, ...], gives_final: bool, **options: Any
) -> None:
    def played(**more: Any) -> tuple[Any, list[Any]]:
        numbered = NumberedTensors(num_envs, lengths=lengths, gives_final=gives_final)
        env = FORMS[form](numbered, allow_host_copies=True)
        with Rollout(env, num_fragments=3, **options, **more) as rollout:
            return rollout, list(rollout.fragments())

    (rollout, ours), (expected, others) = played(), played(env_to_module_connector=of_arrays)
    assert [each.device for each in ours + others] == [torch.device("cpu")] * 3 + [None] * 3
    knows_last = form == "VectorEnv" or (form == "plain" and gives_final)
    for fragment in ours:
        stood_in = fragment.host.column(Columns.TRUNCATEDS) & (not knows_last)
        np.testing.assert_array_equal(bootstrapped(fragment), stood_in)
        assert (fragment.num_steps, fragment.policy_version) == (num_envs * fragment.num_rows, 0)
    assert_alike([fragment.host for fragment in ours], others)
    for mine, other in zip(ours, others, strict=True):
        for name in ("gather", "last", "preceding"):
            for column in other.columns:
                same(getattr(mine, name)(column), getattr(other, name)(column))
        same(mine.last_observations(), other.last_observations())
        same(mine.recent_observations(2), other.recent_observations(2))
    assert list(rollout.returns.returns) == list(expected.returns.returns)


def same(ours: Any, others: Any) -> None:
    map_tree(lambda one, other: np.testing.assert_array_equal(np.asarray(one), other), ours, others)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=examples(40))
@drawn_rollouts
def test_train_batches_are_those_of_arrays(
    form: str, num_envs: int, lengths: tuple[int, ...], gives_final: bool, **options: Any
) -> None:
    def made(**more: Any) -> list[Any]:
        numbered = NumberedTensors(num_envs, lengths=lengths, gives_final=gives_final)
        env = FORMS[form](numbered, allow_host_copies=True)
        with Rollout(env, num_fragments=3, learner_connector=gae, **options, **more) as rollout:
            return list(rollout.batches())

    for ours, others in zip(made(), made(env_to_module_connector=of_arrays), strict=True):
        assert ours.keys() == {*others, Columns.BOOTSTRAP_FROM}
        for name, column in others.items():
            map_tree(
                lambda one, other: torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5), ours[name], column
            )


@pytest.mark.parametrize("explore", [True, False])
@pytest.mark.parametrize("space", [gym.spaces.Discrete(2, start=1), ACTIONS, gym.spaces.Box(0, 1, (2,), np.float32)])
def test_lanes_act_alone_jointly_and_piece_by_piece(space: Any, explore: bool) -> None:
    """Environments may write into their actions, also where the module's inference made them."""

    class Writing(NumberedTensors):
        def step(self, actions: torch.Tensor) -> Any:
            return super().step(actions.clamp_(0, 1).view(3, -1).expand(3, 2))

    def played(max_batch: int, fuses: bool) -> list[Any]:
        envs = [TorchEnvs(Writing(3), observation_space=OBSERVATIONS, action_space=space) for _ in range(2)]
        options: Any = {"fragment_length": 4, "num_fragments": 1, "seed": 0, "forward": Forward(max_batch=max_batch)}
        with Rollout(envs, explore=explore, **options) as rollout:
            rollout.env_to_module.fuses = rollout.module_to_env.fuses = fuses
            fragments = list(rollout.fragments())
        assert [(each.lane, each.device) for each in fragments] == [(0, envs[0].device), (1, envs[0].device)]
        return [fragment.host for fragment in fragments]

    fused = played(3, True)
    assert_alike(fused, played(3, False))
    played(6, True)


def test_n_steps_bootstrap_as_the_latest_of_them_does() -> None:
    env = FORMS["rsl_rl"](NumberedTensors(3))
    options: Any = {"learner_connector": lambda *_: NStepReturns(n_step=3), "fragment_length": 12}
    with Rollout(env, **options) as rollout:
        batch = next(rollout.batches())
    assert batch[Columns.TRUNCATEDS].any()
    assert torch.equal(batch[Columns.BOOTSTRAP_FROM].bool(), batch[Columns.TRUNCATEDS])


@pytest.mark.parametrize(("num_envs", "fragment_length"), [(1, 4), (3, 1), (2, 3)])
def test_a_batch_may_be_written_to(num_envs: int, fragment_length: int) -> None:
    with Rollout(plain(NumberedTensors(num_envs)), fragment_length=fragment_length) as rollout:
        fragment = next(rollout.fragments())
        before = fragment.gather(Columns.OBS)
        rollout.learner_pipeline.of_fragments([fragment], rollout.module)[Columns.OBS].sub_(1)
    assert torch.equal(fragment.gather(Columns.OBS), before)


def test_infos_are_not_recorded_and_their_piece_is_refused() -> None:
    env = plain(NumberedTensors(3))
    options: Any = {"learner_connector": lambda *_: AddInfosFromEpisodesToTrainBatch(), "fragment_length": 5}
    text = "no infos are recorded of .* on cpu; .* without AddInfosFromEpisodesToTrainBatch: last_extras of"
    with pytest.raises(ConnectorError, match=text), Rollout(env, **options) as rollout:
        next(rollout.batches())


@contextmanager
def reads_of(form: str, *, fragment_length: int, lengths: tuple[int, ...], batches: bool) -> Iterator[list[str]]:
    """What 2 fragments, or batches of them, of 4 slots have read."""
    env = FORMS[form](NumberedTensors(4, lengths=lengths, gives_final=True))
    with Rollout(env, fragment_length=fragment_length, num_fragments=2, learner_connector=gae, seed=0) as rollout:
        with counting_reads() as reads:
            given = list(rollout.batches() if batches else rollout.fragments())
        assert len(given) == 2
        yield reads


@pytest.mark.parametrize("fragment_length", [4, 64])
@pytest.mark.parametrize("form", FORMS)
def test_a_fragment_is_one_read_and_a_vector_step_none(form: str, fragment_length: int) -> None:
    with reads_of(form, fragment_length=fragment_length, lengths=(3, 1, 5, 2), batches=False) as reads:
        assert reads == ["numpy"] * 2


@pytest.mark.parametrize("form", FORMS)
def test_a_batch_takes_as_many_reads_for_few_ends_as_for_many(form: str) -> None:
    counts = []
    for lengths in ((30,), (1,)):
        with reads_of(form, fragment_length=64, lengths=lengths, batches=True) as reads:
            counts.append(len(reads))
    assert counts[0] == counts[1] <= 2 * 24


@pytest.mark.parametrize("form", FORMS)
def test_vector_steps_need_no_value_of_the_device(form: str) -> None:
    """On the device without values each read raises."""
    env = FORMS[form](NumberedTensors(4, "meta", gives_final=True))
    environments = DeviceEnvironments(env, fragment_length=99)
    spaces = environments.observation_space, environments.action_space
    connectors = dict.fromkeys(("env_to_module_connector", "module_to_env_connector", "model_config", "device"))
    acting = acting_for(env, spaces, module=DefaultModule(*spaces).to("meta"), seed=0, **connectors)
    environments.choose_memory(acting.pipelines, env.device)
    prepare, forward, act = acting.stages(environments, {"explore": False, "threads": None}, None)
    (lane,) = environments.start()
    lane.shared_data[DEVICE] = lane.device
    for _ in range(8):
        lane = environments(act(forward(prepare(lane).batches)))
    with pytest.raises(ColumnError, match=r"'rewards': got float32\[4\] on cpu, expected float32\[4\] on meta"):
        lane.record_step(None, *torch.zeros(3, 4), {})


class Doubled(ConnectorV2):
    """A user's piece over whole columns."""

    columnar = on_device = True

    def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
        episodes.set_observations(map_tree(lambda leaf: leaf * 2, episodes.observations()))
        return batch


PIECES: dict[str, Callable[[], Any]] = {
    "own": Doubled,
    "filter": MeanStdFilter,
    "previous": lambda: PrevActionsPrevRewards(n_prev_actions=2, n_prev_rewards=2),
    "flat": lambda: [PrevActionsPrevRewards(), FlattenObservations()],
    "stacks": lambda: FrameStacking(num_frames=3),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pieces", PIECES)
def test_pieces_give_what_they_give_of_arrays_and_read_nothing(pieces: str, form: str) -> None:
    def made(*more: Any) -> tuple[list[Any], list[str]]:
        learner = [FrameStacking(num_frames=3, as_learner_connector=True)] if pieces == "stacks" else []
        options: dict[str, Any] = {
            "env_to_module_connector": lambda env: [*more, *pieces_of(PIECES[pieces](), "pieces")],
            "learner_connector": lambda obs, act: learner,
        }
        env = FORMS[form](NumberedTensors(3), allow_host_copies=True)
        with Rollout(env, fragment_length=24, num_fragments=2, seed=3, **options) as rollout:
            iterator = rollout.fragments()
            fragments = [next(iterator)]
            with counting_reads() as reads:
                fragments += iterator
            return [rollout.learner_pipeline.of_fragments([each], rollout.module) for each in fragments], reads

    (ours, reads), (others, _) = made(), made(of_arrays(None))
    assert reads == ["numpy"]
    for mine, other in zip(ours, others, strict=True):
        for name, column in other.items():
            map_tree(
                lambda one, another: torch.testing.assert_close(one, another, rtol=1e-5, atol=1e-5), mine[name], column
            )


class Learnt(DefaultModule):
    """Its initial state is a parameter."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.first = torch.nn.Parameter(torch.linspace(-1, 1, 8))

    def get_initial_state(self) -> Any:
        return {"h": self.first, "c": torch.ones(8)}


@pytest.mark.parametrize("module", [DefaultModule, Learnt])
@pytest.mark.parametrize("form", FORMS)
def test_a_module_with_memory_gives_what_it_gives_of_arrays_and_reads_nothing(form: str, module: Any) -> None:
    def made(**more: Any) -> tuple[Any, list[Any], list[Any], list[str]]:
        config = {"use_lstm": True, "lstm_cell_size": 8, "max_seq_len": 3, "fcnet_hiddens": [8]}
        env = FORMS[form](NumberedTensors(3), allow_host_copies=True)
        torch.manual_seed(0)
        own = {"module": module(env.single_observation_space, env.single_action_space, model_config=config)}
        options: dict[str, Any] = {"learner_connector": gae, **own, **more}
        with Rollout(env, fragment_length=7, num_fragments=3, seed=3, **options) as rollout:
            iterator = rollout.fragments()
            fragments = [next(iterator)]
            with counting_reads() as reads:
                fragments += iterator
            batches = [rollout.learner_pipeline.of_fragments([each], rollout.module) for each in fragments]
        for fragment in fragments:
            fragment.host.columns.pop(Columns.BOOTSTRAP_FROM, None)
        return fragments[0].device, [each.host for each in fragments], batches, reads

    (device, ours, batches, reads), (no_device, others, expected, _) = made(), made(env_to_module_connector=of_arrays)
    assert (device, no_device, reads) == (torch.device("cpu"), None, ["numpy"] * 2)
    assert_alike(ours, others)
    for mine, other in zip(batches, expected, strict=True):
        assert mine.keys() == {*other, Columns.BOOTSTRAP_FROM}
        for name, column in other.items():
            map_tree(
                lambda one, another: torch.testing.assert_close(one, another, rtol=1e-5, atol=1e-5), mine[name], column
            )


@pytest.mark.parametrize("prefetch", [0, 2])
def test_whole_episodes_are_those_of_arrays(prefetch: int) -> None:
    def played(**more: Any) -> list[Any]:
        env = FORMS["rsl_rl"](NumberedTensors(3), allow_host_copies=True)
        with Rollout(env, fragment_length=4, num_fragments=5, seed=3, prefetch=prefetch, **more) as rollout:
            whole = list(rollout.fragments(complete_episodes=True))
            return [episode for fragment in whole for episode in fragment.episodes()]

    ours, others = played(), played(env_to_module_connector=of_arrays)
    assert [each.id_ for each in ours] == [each.id_ for each in others]
    for mine, other in zip(ours, others, strict=True):
        same(mine.get_observations(), other.get_observations())
        same(mine.get_actions(), other.get_actions())


def test_a_replay_and_a_dataset_take_a_fragment_of_tensors(tmp_path: Path) -> None:
    with Rollout(plain(NumberedTensors(3)), fragment_length=16, num_fragments=1, seed=3) as rollout:
        (fragment,) = list(rollout.fragments())
    replays = [Replay(100, seed=1, batch_size=32) for _ in range(2)]
    for replay, item in zip(replays, (fragment, fragment.host), strict=True):
        replay.insert(item)
    same(*[replay.sample() for replay in replays])
    with DatasetSink(tmp_path) as sink:
        sink(fragment)
    assert sum(len(episode) for episode in DatasetSource(tmp_path).episodes()) == fragment.num_steps
    sampled = Replay(100, seed=1, batch_size=32, pieces=[SampledNStepReturns(n_step=3)])
    sampled.insert(fragment)
    batch = sampled.sample()
    assert torch.equal(batch[Columns.BOOTSTRAP_FROM].bool(), batch[Columns.TRUNCATEDS])


def test_a_trainer_takes_fragments_of_tensors() -> None:
    options: Any = {"fragment_length": 4, "num_fragments": 3, "seed": 3}
    with fed(trainer(yields="fragments"), Rollout(plain(NumberedTensors(3)), **options)) as (stream, _):
        theirs = list(stream)
    with Rollout(plain(NumberedTensors(3)), **options) as rollout:
        assert_alike(theirs, [fragment.host for fragment in rollout.fragments()])


@pytest.mark.parametrize("inside", ["made", "entered", "begun"])
def test_a_rollout_goes_on_outside_of_the_inference_mode_that_it_was_made_in(inside: str) -> None:
    mode = {name: torch.inference_mode(name == inside) for name in ("made", "entered", "begun")}
    with mode["made"]:
        rollout = Rollout(FORMS["plain"](NumberedTensors(3)), fragment_length=4, num_fragments=3)
    with mode["entered"]:
        rollout.__enter__()
    iterator = rollout.batches()
    with mode["begun"]:
        next(iterator)
    assert not any(batch["obs"].is_inference() for batch in list(iterator))


def test_first_observations_that_are_none_in_their_space_are_told(caplog: Any) -> None:
    env = TorchEnvs(NumberedTensors(3), observation_space=gym.spaces.Box(-1, 1, (3,), np.float16), action_space=ACTIONS)
    with Rollout(env, fragment_length=4, num_fragments=1, seed=0) as rollout:
        list(rollout.fragments())
    texts = [record.getMessage() for record in caplog.records]
    for text in ("observation is float32", "is 6.0, expected -1.0 to 1.0"):
        assert any(told.startswith("lane 0, slot 0, the first reset") and text in told for told in texts), texts


PIECE = {"env_to_module_connector": of_arrays}


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda env: Rollout(env, **PIECE), ConnectorError, "<lambda> would have each step copied from cpu"),
        (
            lambda env: Rollout(env, module=DefaultModule(OBSERVATIONS, ACTIONS).to("meta")),
            ModuleError,
            r"the module is on meta, but the environments are on cpu; expected module.to\('cpu'\)",
        ),
        (lambda env: Rollout(env, where="threads"), EnvError, "where is 'threads', but a TorchEnvs steps in the"),
        (lambda env: Rollout(env, where="auto"), EnvError, "where is 'auto', but a TorchEnvs"),
        (lambda env: Rollout(lambda: env), EnvError, "each step copied to the host: a callable made it, or a wrapper"),
        (lambda env: Rollout(gym.vector.VectorWrapper(env)), EnvError, "expected the TorchEnvs itself"),
        (lambda env: MultiAgentRollout(env), EnvError, "a TorchEnvs has one agent in each environment"),
        (
            lambda env: Rollout([env, plain(NumberedTensors(2, "meta"))]),
            EnvError,
            "environments of lane 1 are on meta, expected cpu of lane 0",
        ),
        (lambda env: Rollout([env, plain(env.env)]), EnvError, "lanes 0 and 1 .* same environment, expected"),
        (
            lambda env: Rollout([SyncVectorEnv([lambda: gym.make("CartPole-v1")]), env]),
            EnvError,
            "lane 0 is .*SyncVectorEnv.*, but another one a TorchEnvs; expected one in each lane",
        ),
    ],
)
def test_what_can_not_be_on_the_device_is_refused(make: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        make(plain(NumberedTensors(2)))


def test_a_reward_that_is_not_finite_is_refused_at_the_cut_with_its_place() -> None:
    class Broken(NumberedTensors):
        def step(self, actions: torch.Tensor) -> Any:
            observations, rewards, *rest = super().step(actions)
            if len(self.actions) == 4:
                rewards[1] = torch.nan
            return observations, rewards, *rest

    with (
        pytest.raises(EnvError, match="lane 0, slot 1, vector step 3"),
        Rollout(plain(Broken(3)), fragment_length=8) as rollout,
    ):
        next(iter(rollout.fragments()))


class Blind(NumberedTensors):
    """Slot 1 observes NaN in the second step and infinity in the third; actions are of any space."""

    def step(self, actions: torch.Tensor) -> Any:
        observations, *rest = super().step(actions.float().view(self.num_envs, -1).expand(-1, 2))
        if len(self.actions) in (2, 3):
            observations[1] = torch.nan if len(self.actions) == 2 else torch.inf
        return observations, *rest


THREE, SQUARE = gym.spaces.Discrete(3), gym.spaces.MultiDiscrete([3, 2])


def giving(numbers: Any, space: Any = THREE, what: str = "action_dist_inputs") -> Callable[..., Any]:
    """A module that gives numbers for the row of slot 1 in the first steps of episodes, else zeros."""

    row = torch.tensor(numbers)

    class Giving(DefaultModule):
        def given(self, batch: Any, **kwargs: Any) -> Any:
            made = torch.zeros(len(batch["obs"]), *row.shape, dtype=row.dtype)
            made[1] = row
            return {what: made + 0 * batch["obs"].sum(-1).view(-1, *[1] * row.ndim).to(row.dtype)}

        forward_exploration = forward_inference = given

    return Giving(OBSERVATIONS, space)


NAN, INF, OUT = float("nan"), float("inf"), -1e9
FIRST = "in lane 0, slot 1, vector step 0, expected"


@pytest.mark.parametrize(
    ("module", "options", "error", "text"),
    [
        (giving([0.0, NAN, 0.0]), {"explore": False}, ModuleError, rf"inputs' is \[0.0, nan, 0.0\] {FIRST} numbers"),
        (giving([0.0, INF, 0.0]), {"explore": False}, ModuleError, f"{FIRST} numbers below inf"),
        (giving([OUT] * 3), {"explore": False}, ModuleError, f"{FIRST} .* with one above -1e9"),
        (giving([0.0] * 3 + [OUT] * 2, SQUARE), {"explore": False}, ModuleError, FIRST),
        (
            giving([0.0, NAN, 0.0]),
            {"module_to_env_connector": lambda env: EpsilonGreedy(schedule=0.5)},
            ModuleError,
            FIRST,
        ),
        (giving([0.0, NAN, 0.0, 0.0], ACTIONS), {}, ModuleError, FIRST),
        (giving(7, what="actions"), {}, ColumnError, rf"'actions' is 7 {FIRST} one in Discrete\(3\)"),
        (giving([0, -1], SQUARE, "actions"), {}, ColumnError, rf"'actions' is \[0, -1\] {FIRST} one in MultiDiscrete"),
        (giving([0.0, NAN], ACTIONS, "actions"), {}, ModuleError, rf"'actions' is \[0.0, nan\] {FIRST} one in Box"),
        (giving([0.0] * 3), {}, ModuleError, "slot 1, vector step 2, .*: the observation itself is not finite"),
        (
            giving(0, what="actions"),
            {"env_to_module_connector": lambda env: MeanStdFilter()},
            ConnectorError,
            "MeanStdFilter: an observation of lane 0, slot 1, vector step 2 is not finite",
        ),
        (giving(0, what="actions"), {}, None, ""),
    ],
)
def test_choices_that_can_not_be_meant_are_refused_at_the_cut(module: Any, options: Any, error: Any, text: str) -> None:
    env = TorchEnvs(Blind(3), observation_space=OBSERVATIONS, action_space=module.action_space)
    with (
        pytest.raises(error, match=text) if error else nullcontext(),
        Rollout(env, module=module, fragment_length=8, num_fragments=1, **options) as rollout,
        counting_reads() as reads,
    ):
        try:
            list(rollout.fragments())
        finally:
            assert reads[:1] == ["numpy"]  # at the cut
