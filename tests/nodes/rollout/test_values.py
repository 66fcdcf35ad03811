"""Truth of values: pieces, modules, environments and learners are given what direct stepping has, bit for bit."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings, strategies as st
from places import rollout_at
from property_examples import examples
from together import Together
from typed_env import (
    ACTION_SPACES,
    OBSERVATION_DTYPES,
    Episode,
    Form,
    MaskedEnv,
    TypedEnv,
    action_for,
    checksum,
    folded,
    mask_at,
    stepped_directly,
)

from rollflow import (
    ConnectorV2,
    DatasetSink,
    DatasetSource,
    EpsilonGreedy,
    GeneralAdvantageEstimation,
    MultiAgentRollout,
    Policy,
    Replay,
    RLModule,
    Rollout,
    SingleAgentEpisode,
)
from rollflow.nodes import AddNextObservationsFromEpisodesToTrainBatch, mask_logits
from rollflow.nodes.connectors.common.episode_columns import AddObservationsFromEpisodesToBatch
from rollflow.nodes.connectors.env_to_module.observation_pieces import WriteObservationsToEpisodes
from rollflow.sinks import Sequences
from rollflow.stream.data.tree import leaves_of, map_tree, stack_trees

HOSTED = pytest.param("hosted rollouts", marks=pytest.mark.slow)
PLACES = ["inline", "threads", "processes", "rollouts", "hosts", HOSTED]


def in_place(place: str, drawn: st.SearchStrategy[Any]) -> Callable[[Callable[[Any], None]], None]:
    """Have a function check drawn settings: fewer where a rollout takes long to begin."""
    count = examples(36 if place in ("inline", "threads") else 12)
    return lambda check: settings(max_examples=count)(given(drawn)(check))()


class Setting(NamedTuple):
    """Random settings of a rollout.

    pieces    target dtype of each connector piece that rewrites the observations, and how it does so: see `FOLDS`
    """

    form: Form
    slots: int
    lanes: int
    fragment_length: int
    lookback: int
    mode: AutoresetMode
    pieces: tuple[tuple[str, str], ...]
    prefetch: int
    seed: int


kinds = {"dtype": st.sampled_from(OBSERVATION_DTYPES), "action": st.sampled_from(sorted(ACTION_SPACES))}
forms = st.builds(Form, nested=st.booleans(), longest=st.integers(1, 9), **kinds)
targets = st.sampled_from(["u1", "i2", "f2", "f4"])
rewritten = st.lists(st.tuples(targets, st.sampled_from(["by episodes", "by columns", "as floats"])), max_size=2)
drawn_settings = st.builds(
    Setting,
    form=forms,
    slots=st.integers(1, 4),
    lanes=st.integers(1, 2),
    fragment_length=st.integers(1, 8),
    lookback=st.integers(0, 12),
    mode=st.sampled_from(list(AutoresetMode)),
    pieces=rewritten.map(tuple)
    | targets.map(lambda target: (("u2", "by columns"), (target, "in the batch")))
    | targets.map(lambda target: ((target, "as floats"), ("u2", "by columns"))),
    prefetch=st.integers(0, 1),
    seed=st.integers(0, 2**32 - 1),
).filter(lambda drawn: drawn.lanes <= drawn.slots)


class Fold(ConnectorV2):
    """Rewrites observations as `folded` does, and refuses those that are not in the types of its input space."""

    def __init__(self, target: str) -> None:
        self.target = target
        super().__init__()

    def recompute_output_observation_space(self, observation_space: Any, action_space: Any) -> Any:
        if isinstance(observation_space, gym.spaces.Dict):
            parts = observation_space.spaces.items()
            return gym.spaces.Dict({name: self.recompute_output_observation_space(part, None) for name, part in parts})
        return gym.spaces.Box(0, 255, observation_space.shape, np.dtype(self.target))

    def turned(self, observations: Any) -> Any:
        seen = [leaf.dtype for leaf in leaves_of(observations)]
        space: Any = self.input_observation_space
        parts = space.spaces.values() if isinstance(space, gym.spaces.Dict) else [space]
        assert seen == [part.dtype for part in parts]
        return folded(observations, self.target)

    def __call__(self, *, batch: dict[str, Any], episodes: Any, **kwargs: Any) -> dict[str, Any]:
        for episode in self.single_agent_episode_iterator(episodes):
            episode.set_observations(new_data=self.turned(episode.get_observations(-1)), at_indices=-1)
        return batch


class ColumnarFold(Fold):
    """The same for a whole lane at once."""

    columnar = True

    def __call__(self, *, batch: dict[str, Any], episodes: Any, **kwargs: Any) -> dict[str, Any]:
        if not hasattr(episodes, "set_observations"):
            return super().__call__(batch=batch, episodes=episodes, **kwargs)
        episodes.set_observations(self.turned(episodes.newest()))
        return batch


class FloatFold(ColumnarFold):
    """Leaves numbers in another type than its space says, which the next piece is given in that."""

    def turned(self, observations: Any) -> Any:
        return map_tree(lambda leaf: leaf.astype(np.float64), super().turned(observations))


class BatchFold(ColumnarFold):
    """The same for the batch's observations, which a piece behind it has recorded."""

    columnar = True
    changes_episodes = False

    def __call__(self, *, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {**batch, "obs": self.turned(batch["obs"])}


class JointFold(Fold):
    """The same for all agents of an environment together."""

    def __call__(self, *, batch: dict[str, Any], episodes: Any, **kwargs: Any) -> dict[str, Any]:
        for episode in episodes:
            seen = {agent: folded(each, self.target) for agent, each in episode.get_observations(-1).items()}
            episode.set_observations(new_data=seen, at_indices=-1)
        return batch


FOLDS: dict[str, Callable[[str], list[ConnectorV2]]] = {
    "by episodes": lambda target: [Fold(target)],
    "by columns": lambda target: [ColumnarFold(target)],
    "as floats": lambda target: [FloatFold(target)],
    "in the batch": lambda target: [
        AddObservationsFromEpisodesToBatch(),
        BatchFold(target),
        WriteObservationsToEpisodes(),
    ],
}


class Exact(RLModule):
    """Takes the action that follows from each bit of an observation; its parts have a training mode.

    Outputs: `seen`, the observation; `kept`, ones that dropout leaves alone unless it is training; `vf_preds`.
    """

    def setup(self) -> None:
        self.norm, self.drop = torch.nn.BatchNorm1d(1), torch.nn.Dropout(0.5)

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        seen = map_tree(lambda leaf: leaf.clone(), batch["obs"])
        arrays = map_tree(lambda leaf: leaf.numpy(), seen)
        rows = range(len(leaves_of(arrays)[0]))
        items = [map_tree(lambda leaf, row=row: leaf[row], arrays) for row in rows]
        actions = map_tree(torch.from_numpy, stack_trees([action_for(self.action_space, item) for item in items]))
        return {"actions": actions, "seen": seen, "kept": self.drop(torch.ones(len(items))), **self._values(items)}

    def _values(self, items: list[Any]) -> dict[str, Any]:
        numbers = torch.tensor([[float(checksum(item) % 1000)] for item in items])
        return {"vf_preds": self.norm(numbers)[:, 0]}

    def compute_values(self, batch: dict[str, Any], **kwargs: Any) -> torch.Tensor:
        outputs: torch.Tensor = self._forward(batch)["vf_preds"]
        return outputs


def pieces_of(drawn: Setting) -> Callable[[Any], list[ConnectorV2]]:
    return lambda env: [piece for target, how in drawn.pieces for piece in FOLDS[how](target)]


def turned_by(drawn: Setting, joint: Sequence[str] = ()) -> Callable[[Any], Any]:
    def turned(observation: Any) -> Any:
        for target in (*joint, *(target for target, _ in drawn.pieces)):
            observation = folded(observation, target)
        return observation

    return turned


def lengths_of(drawn: Setting) -> dict[str, Any]:
    """Options of a rollout that is two fragments long."""
    lengths = {"num_fragments": 2, "fragment_length": drawn.fragment_length, "lookback": drawn.lookback}
    return {**lengths, "prefetch": drawn.prefetch, "seed": drawn.seed}


def rollout_in(place: str, drawn: Setting, **options: Any) -> AbstractContextManager[Rollout]:
    """A rollout over a `TypedEnv` in each slot."""
    makers = [partial(TypedEnv, slot, drawn.form) for slot in range(drawn.slots)]
    acts = {"module": Exact(), "env_to_module_connector": pieces_of(drawn)}
    envs = {"lanes": drawn.lanes, "autoreset_mode": drawn.mode}
    return rollout_at(place, makers, envs=envs, acts=acts, **lengths_of(drawn), **options)


def same_bits(values: Any, expected: list[Any], like: Any) -> None:
    """Assert that values, any[T, ...], are the expected items, in the types that `like` has."""
    for leaf, wanted, kind in zip(leaves_of(values), leaves_of(stack_trees(expected)), leaves_of(like), strict=True):
        array = np.asarray(leaf)
        assert array.dtype == wanted.dtype == kind.dtype
        assert array.tobytes() == wanted.tobytes(), f"{array} is not {wanted}"


def check_chunk(chunk: SingleAgentEpisode, episode: Episode, drawn: Setting, made: dict[str, int]) -> None:
    """Check a chunk, which goes on with its episode where the one before ended; `made` has the steps till then."""
    start, stop, lookback = chunk.t_started, chunk.t, chunk.rewards.lookback
    assert (start, lookback) == (made.get(chunk.id_, 0), min(drawn.lookback, start))
    made[chunk.id_] = stop
    seen = [chunk.get_observations(i, neg_index_as_lookback=True) for i in range(-lookback, len(chunk) + 1)]
    same_bits(stack_trees(seen), episode.observations[start - lookback : stop + 1], episode.observations[0])
    assert chunk.get_infos() == episode.infos[start : stop + 1]
    if not len(chunk):
        return
    actions = [chunk.get_actions(i, neg_index_as_lookback=True) for i in range(-lookback, len(chunk))]
    kinds = map_tree(np.asarray, episode.actions[0])
    same_bits(stack_trees(actions), episode.actions[start - lookback : stop], kinds)
    assert all(info.get("contained", True) for info in chunk.get_infos())
    same_bits(chunk.get_rewards(), [np.float32(reward) for reward in episode.rewards[start:stop]], np.zeros(1, "f4"))
    same_bits(chunk.get_extra_model_outputs("seen"), episode.observations[start:stop], episode.observations[0])
    assert (chunk.get_extra_model_outputs("kept") == 1).all()
    is_last = stop == len(episode.actions)
    assert (chunk.is_terminated, chunk.is_truncated) == (episode.ends if is_last else (False, False))


def check_batch(batch: dict[str, Any], episodes: list[tuple[SingleAgentEpisode, Episode]]) -> None:
    """Assert that a train batch has the steps of the chunks, in their order, and values of the module that acted."""
    told = [(chunk, episode) for chunk, episode in episodes if len(chunk)]

    def joined(of: Callable[[Episode, int], Any]) -> list[Any]:
        return [of(episode, t) for chunk, episode in told for t in range(chunk.t_started, chunk.t)]

    observations = joined(lambda episode, t: episode.observations[t])
    arrays = {name: map_tree(lambda leaf: leaf.numpy(), batch[name]) for name in ("obs", "new_obs", "actions")}
    same_bits(arrays["obs"], observations, observations[0])
    same_bits(arrays["new_obs"], joined(lambda episode, t: episode.observations[t + 1]), observations[0])
    actions = joined(lambda episode, t: episode.actions[t])
    same_bits(arrays["actions"], actions, map_tree(np.asarray, actions[0]))
    same_bits(batch["rewards"].numpy(), joined(lambda episode, t: np.float32(episode.rewards[t])), np.zeros(1, "f4"))
    # With gamma and lambda 0 an advantage is the reward less the value that the module gave as it acted.
    expected = batch["rewards"] - batch["vf_preds"]
    torch.testing.assert_close(batch["advantages"], expected, rtol=1e-5, atol=1e-3, equal_nan=True)


def check_place(place: str, drawn: Setting) -> None:
    def learner_pieces(*spaces: Any) -> list[ConnectorV2]:
        estimation = GeneralAdvantageEstimation(gamma=0.0, lambda_=0.0, normalize_advantages=False)
        return [AddNextObservationsFromEpisodesToTrainBatch(), estimation]

    with rollout_in(place, drawn, learner_connector=learner_pieces) as rollout, rollout:
        fragments = list(rollout.fragments())
        module = rollout.module
        module.train()
        statistics = module.norm.running_mean.clone()
        batches = [rollout.learner_pipeline.of_fragments([fragment], module) for fragment in fragments]
        assert module.training
        assert torch.equal(module.norm.running_mean, statistics)
        assert rollout.lost == {}
    played = [
        stepped_directly(TypedEnv(slot, drawn.form), turned_by(drawn), 2 * drawn.fragment_length + 3)
        for slot in range(drawn.slots)
    ]
    made: dict[str, int] = {}
    for fragment, batch in zip(fragments, batches, strict=True):
        told = [(chunk, played[info["slot"]][info["episode"]]) for chunk, info in first_infos(fragment.episodes())]
        for chunk, episode in told:
            check_chunk(chunk, episode, drawn, made)
        if batch:
            check_batch(batch, told)
    assert sum(made.values()) == rollout.num_steps


def first_infos(chunks: Any) -> Iterator[tuple[SingleAgentEpisode, dict[str, Any]]]:
    return ((chunk, chunk.get_infos(0)) for chunk in chunks)


@pytest.mark.hypothesis  # which are drawn within
@pytest.mark.parametrize("place", PLACES)
def test_values_are_those_of_direct_stepping(place: str) -> None:
    in_place(place, drawn_settings)(lambda drawn: check_place(place, drawn))


def check_agents(place: str, drawn: Setting, others: list[Form], joint: list[str]) -> None:
    forms = [drawn.form, *others]
    modules = {f"agent {slot}": Exact() for slot in range(len(forms))}

    def make() -> Together:
        return Together({f"agent {slot}": TypedEnv(slot, form) for slot, form in enumerate(forms)})

    acts: Any = {"module": modules, "agent_to_module_mapping_fn": agent_as_module}
    acts["joint_connector"] = (lambda env: list(map(JointFold, joint))) if joint else None
    acts["env_to_module_connector"] = pieces_of(drawn)
    rollout = MultiAgentRollout([make], where=place, **acts, **lengths_of(drawn))
    with rollout:
        fragments = list(rollout.fragments())
    played = [
        stepped_directly(TypedEnv(slot, form), turned_by(drawn, joint), 2 * drawn.fragment_length + 3)
        for slot, form in enumerate(forms)
    ]
    served, made = set(), dict[str, int]()
    for fragment in fragments:
        for module_id in fragment.module_ids:
            for chunk, info in first_infos(fragment.agent_episodes(module_id)):
                check_chunk(chunk, played[info["slot"]][info["episode"]], drawn, made)
                served.add(module_id)
    assert served == modules.keys()
    assert sum(made.values()) == rollout.num_steps
    assert rollout.lost == {}


def agent_as_module(agent: str, episode: Any) -> str:
    return agent


@pytest.mark.hypothesis
@pytest.mark.parametrize("place", ["inline", "threads", "processes", "rollouts"])
def test_values_of_several_agents_are_those_of_direct_stepping(place: str) -> None:
    drawn = st.tuples(drawn_settings, st.lists(forms, max_size=2), st.lists(targets, max_size=2))
    in_place(place, drawn)(lambda drawn: check_agents(place, *drawn))


@settings(max_examples=examples(40))
@given(drawn_settings)
def test_a_policys_sessions_see_the_values_of_direct_stepping(drawn: Setting) -> None:
    env, turned = TypedEnv(0, drawn.form), turned_by(drawn)
    spaces: Any = {"observation_space": env.observation_space, "action_space": env.action_space}
    policy = Policy(Exact, pieces_of(drawn)(env), **spaces, seed=0)
    observation, _ = env.reset()
    for t in range(40):  # over the end of a lane's columns
        two = stack_trees([observation, observation])
        policy.act_batch(two, sessions=["a", "b"] if t % 2 else ["b", "a"])
        expected = turned(observation)
        same_bits(policy.outputs["seen"], [expected] * 2, map_tree(np.asarray, expected))
        observation, _, *ends, _ = env.step(action_for(env.action_space, expected))
        if any(ends):
            observation, _ = env.reset()


# Masks, schedules and initial states

INITIAL = 1000.0
MAX_SEQ_LEN = 3


class Counting(RLModule):
    """Prefers the first actions that the mask allows; its state begins at `INITIAL` and counts the episode's steps."""

    def get_initial_state(self) -> Any:
        return {"count": np.full(1, INITIAL, np.float32)}

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        mask = batch["obs"]["action_mask"]
        logits = torch.arange(4.0, 0.0, -1.0).expand(mask.shape)
        counts = batch["state_in"]["count"] + mask.shape[1]
        return {"action_dist_inputs": mask_logits(logits, mask), "state_out": {"count": counts}}


def epsilon(step: int) -> float:
    return float(step // 2 % 2)


def explore(env: Any) -> ConnectorV2:
    return EpsilonGreedy(schedule=epsilon)


def check_choices(place: str, drawn: Setting) -> None:
    makers = [partial(MaskedEnv, slot, drawn.form.longest) for slot in range(drawn.slots)]
    module = Counting(model_config={"max_seq_len": MAX_SEQ_LEN})
    acts: dict[str, Any] = {"module": module, "module_to_env_connector": explore}
    # In this mode each vector step is a step of every slot.
    envs = {"lanes": drawn.lanes, "autoreset_mode": AutoresetMode.SAME_STEP}
    options = {"fragment_length": drawn.fragment_length, "prefetch": drawn.prefetch, "seed": drawn.seed}
    with rollout_at(place, makers, envs=envs, acts=acts, num_fragments=2, **options) as rollout, rollout:
        fragments = list(rollout.fragments())
        batches = [rollout.learner_pipeline.of_fragments([fragment], rollout.module) for fragment in fragments]
        assert rollout.lost == {}
    steps: dict[int, int] = defaultdict(int)
    for fragment, batch in zip(fragments, batches, strict=True):
        for chunk in fragment.episodes():
            for t in range(len(chunk)):
                at = chunk.get_observations(t)["at"]
                action, logp = int(chunk.get_actions(t)), float(chunk.get_extra_model_outputs("action_logp", t))
                allowed = np.flatnonzero(mask_at(at))
                assert action in allowed
                if epsilon(steps[int(at[0])]):
                    assert logp == pytest.approx(-np.log(len(allowed)), abs=1e-6)
                else:
                    assert (action, logp) == (allowed[0], 0.0)
                steps[int(at[0])] += 1
        firsts = batch["obs"]["at"][:, 0, 2]  # the step in its episode with which each sequence begins
        assert batch["state_in"]["count"][:, 0].tolist() == [INITIAL + step for step in firsts.tolist()]
    assert sum(steps.values()) == rollout.num_steps
    check_stored(fragments, drawn)


def check_stored(fragments: list[Any], drawn: Setting) -> None:
    """Assert that a replay and a dataset give the states that acted."""
    replay = Replay(1024, sampler=Sequences(2), batch_size=64, seed=drawn.seed)
    with TemporaryDirectory() as folder:
        with DatasetSink(Path(folder) / "data") as sink:
            for fragment in fragments:
                replay.insert(fragment)
                sink(fragment)
        module = Counting(model_config={"max_seq_len": MAX_SEQ_LEN})
        source = DatasetSource(Path(folder) / "data", batch_size=5, module=module, shuffle_seed=drawn.seed)
        batches = [replay.sample(), *source.batches()]
    for batch in batches:
        firsts = batch["obs"]["at"][:, 0, 2]
        assert batch["state_in"]["count"][:, 0].tolist() == [INITIAL + step for step in firsts.tolist()]


@pytest.mark.hypothesis
@pytest.mark.parametrize("place", PLACES)
def test_masks_schedules_and_states_hold(place: str) -> None:
    in_place(place, drawn_settings)(lambda drawn: check_choices(place, drawn))
