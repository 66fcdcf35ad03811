"""Our connector pieces beside Ray's: random episodes must give the same batch, and be left the same."""

import copy
from typing import Any

import numpy as np
import pytest
import ray.rllib.connectors.common as ray_common
import ray.rllib.connectors.env_to_module as ray_env_to_module
import ray.rllib.connectors.module_to_env as ray_module_to_env
import torch
from both import ask, assert_same, assert_same_answer
from episodes import KINDS, Kind, Pair, any_setting, arguments, numbers
from gymnasium import spaces
from hypothesis import assume, given, settings, strategies as st
from pieces import BATCHED, LEARNER, STATES, Module, Named, Setup, Values, forms, ids, ray_modules, rows, setups
from property_examples import examples
from ray.rllib.core.distribution.torch.torch_distribution import TorchCategorical, TorchDiagGaussian
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.single_agent_episode import SingleAgentEpisode as RayEpisode

from rollflow import nodes
from rollflow.nodes.modules.distribution import distribution_for
from rollflow.stream.data.tree import leaves_of


@st.composite
def acting(draw: st.DrawFn, kinds: list[Kind] = KINDS, actions: list[Kind] = KINDS, stateful: bool = False) -> Setup:
    """Episodes as they are while acting: some just begun, some just cut."""
    setup = draw(setups(kinds, actions, numpy=st.just(False), stateful=st.just(stateful)))
    for place, pair in enumerate(setup.pairs):
        how = draw(st.sampled_from(["under way", "begun", "cut"]))
        if how == "begun":
            begun = draw(arguments(setup.setting, max_steps=0)) | {"t_started": 0}
            setup.pairs[place] = Pair.of({**begun, "terminated": False, "truncated": False}, id_=f"e{place}")
        elif how == "cut" and not pair.ours.is_done:
            lookback = draw(st.integers(int(stateful), 4))  # without one, the state is gone
            setup.pairs[place] = Pair(pair.ours.cut(lookback), pair.theirs.cut(lookback))
    return setup


@st.composite
def in_chunks(draw: st.DrawFn, stateful: bool = False) -> Setup:
    """Episodes of which several may have one id: each goes on where the one before ends."""
    setup, pairs = draw(setups(numpy=st.just(False), stateful=st.just(stateful))), []
    is_numpy = stateful or draw(st.booleans())
    for pair in setup.pairs:
        at = draw(st.integers(1, len(pair.ours)))
        lookback = draw(st.integers(int(stateful), at))
        pairs.append(Pair(pair.ours.slice(slice(at)), pair.theirs.slice(slice(at))))
        if at < len(pair.ours):
            rest: Any = {"slice_": slice(at, None), "len_lookback_buffer": lookback}
            pairs.append(Pair(pair.ours.slice(**rest), pair.theirs.slice(**rest)))
    for pair in pairs if is_numpy else []:  # Ray slices lists without fault
        pair.ask(lambda episode: episode.to_numpy())
    return Setup(setup.setting, pairs, stateful, setup.spaces)


OBSERVED: Named = "AddObservationsFromEpisodesToBatch"
AS_ROWS: list[Named] = ["AddTimeDimToBatchAndZeroPad", "AddStatesFromEpisodesToBatch"]
ADDED: Named = "AddOneTsToEpisodesAndTruncate"
APART: list[Named] = ["TensorToNumpy", "UnBatchToIndividualItems", "RemoveSingleTsTimeRankFromBatch"]
in_any_order = st.permutations(LEARNER)
# Ray has to begin with observations: that piece makes the ids of an episode's chunks differ.
behind_observations = st.permutations(LEARNER[1:]).map(lambda names: [LEARNER[0], *names])
some = st.integers(1, 4).flatmap(lambda count: in_any_order.map(lambda names: names[:count]))
with_rows: dict[str, Any] = {"stateful": st.just(True), "numpy": st.just(True)}


def followed_by(names: st.SearchStrategy[list[Named]], *more: Named) -> st.SearchStrategy[list[Named]]:
    return names.map(lambda names: [*names, *more])


# What the pieces are called with, their names, and how the batches are compared.
CASES: dict[str, tuple[st.SearchStrategy[Setup], st.SearchStrategy[list[Named]], dict[str, Any]]] = {
    "columns": (setups(), some, {}),
    "batches": (setups(), followed_by(some, *BATCHED), {}),
    "chunks": (in_chunks(), followed_by(behind_observations, *BATCHED), {}),
    "rows of chunks": (in_chunks(stateful=True), followed_by(behind_observations, *STATES, *BATCHED), {}),
    "rows and states": (setups(**with_rows), followed_by(in_any_order, *STATES), {}),
    "observations while acting": (acting(), st.just([OBSERVED, *BATCHED]), {}),
    "states while acting": (acting(stateful=True), st.just([OBSERVED, *AS_ROWS, BATCHED[0]]), {}),
    "flat observations": (acting(), st.just(["FlattenObservations"]), {}),
    "one step more": (setups(done=True), st.just([ADDED]), {}),
    "rows of one step more": (
        setups(done=True, numpy=st.just(True), stateful=st.booleans()),
        in_any_order.map(lambda names: [ADDED, *names, *STATES, *BATCHED]),
        {},
    ),
    "returns to go": (  # Ray's are f64
        setups(),
        st.sampled_from([0.0, 0.5, 0.99, 1.0]).map(lambda gamma: [("ComputeReturnsToGo", {"gamma": gamma})]),
        {"dtypes": False, "rtol": 1e-5},
    ),
    "taken apart again": (  # for want of a module, the observations that went in come out
        st.booleans().flatmap(lambda stateful: acting(stateful=stateful)),
        st.just([OBSERVED, AS_ROWS[0], *BATCHED, *APART]),
        {"dtypes": False},  # Ray's TensorToNumpy makes 64 bits 32
    ),
}


@pytest.mark.parametrize("case", CASES)
@given(data=st.data())
@settings(max_examples=examples(100))
def test_batches_are_the_same(case: str, data: st.DataObject) -> None:
    drawn, names, how = CASES[case]
    data.draw(drawn).check(*rows(*data.draw(names)), **how)


COLUMNS = ["obs", "new_obs", "infos", "actions", "rewards", "terminateds", "truncateds", "action_logp"]


@given(setup=setups(), there=st.sets(st.sampled_from(COLUMNS), min_size=1))
@settings(max_examples=examples(100))
def test_columns_that_are_there_stay(setup: Setup, there: set[str]) -> None:
    assume("obs" not in there or "new_obs" in there)  # beside other observations we make no next ones
    setup.check(*rows(*LEARNER), {name: {(pair.ours.id_,): [7] for pair in setup.pairs} for name in there})


@given(setting=any_setting, data=st.data(), numpy=st.booleans(), names=st.permutations(LEARNER))
@settings(max_examples=examples(100))
def test_episodes_without_a_step_add_nothing(
    setting: Any, data: st.DataObject, numpy: bool, names: list[Named]
) -> None:
    given_ = [data.draw(arguments(setting)) | {"t_started": 0} for _ in range(data.draw(st.integers(0, 3)))]
    pairs = [Pair.of(each, numpy, id_=f"e{place}") for place, each in enumerate(given_)]
    setup = Setup(setting, pairs, False, (setting.observation.space, setting.action.space))
    answers = setup.run(*rows(*names[: data.draw(st.integers(1, 4))]))
    for answer in answers:
        for name in [name for name, items in (answer.value or {}).items() if not items]:
            del answer.value[name]  # we leave a column without items
    assert_same_answer(*answers)


@given(setup=acting(), data=st.data(), form=st.sampled_from(["by episode", "list", "one too few", "none"]))
@settings(max_examples=examples(150))
def test_observations_are_written_back(setup: Setup, data: st.DataObject, form: str) -> None:
    items: Any = {(pair.ours.id_,): [setup.setting.observation.item(data.draw(numbers))] for pair in setup.pairs}
    if form == "list":
        items = [each for [each] in items.values()]
    elif form == "one too few":
        items.pop((setup.pairs[-1].ours.id_,))
    setup.check(*rows("WriteObservationsToEpisodes"), batch={} if form == "none" else {"obs": items})


@given(setup=acting([kind for kind in KINDS if isinstance(kind.space, spaces.Dict)]), key=st.sampled_from("ab"))
@settings(max_examples=examples(50))
def test_keys_are_left_out_of_flat_observations(setup: Setup, key: str) -> None:
    given_: Any = {"keys_to_remove": [key]}
    ours = nodes.FlattenObservations(*setup.spaces, **given_)
    setup.check([ours], [ray_env_to_module.FlattenObservations(*setup.spaces, **given_)])


@given(
    setup=setups(KINDS[1:2], KINDS[:1], numpy=st.just(True)),
    gamma=st.sampled_from([0.0, 0.5, 0.99]),
    lambda_=st.sampled_from([0.0, 0.5, 1.0]),
)
@settings(max_examples=examples(50))
def test_value_targets_are_the_same_numbers(setup: Setup, gamma: float, lambda_: float) -> None:
    """Ray's need a step more at each episode's end, which the mask takes out again."""
    module, batch, shared = ray_modules(["default_policy"], *setup.spaces), {}, {}
    options = {"gamma": gamma, "lambda_": lambda_}
    _, pieces = rows("AddOneTsToEpisodesAndTruncate", *LEARNER[:2], *BATCHED, ("GeneralAdvantageEstimation", options))
    for piece in pieces:
        piece.input_observation_space, piece.input_action_space = setup.spaces
        batch = piece(rl_module=module, batch=batch, episodes=[pair.theirs for pair in setup.pairs], shared_data=shared)
    theirs = batch["default_policy"]
    episodes = [pair.ours for pair in setup.pairs]
    ours = nodes.GeneralAdvantageEstimation(**options)(rl_module=Values(), batch={}, episodes=episodes, shared_data={})
    targets = nodes.BatchIndividualItems()(rl_module=None, batch=ours, episodes=episodes)["value_targets"]
    assert_same(targets, np.asarray(theirs["value_targets"])[np.asarray(theirs["loss_mask"])], rtol=1e-4)


IMAGES = [
    Kind(spaces.Box(0, 255, (2, 3, 1), np.uint8), lambda i: np.full((2, 3, 1), i, np.uint8)),
    Kind(spaces.Box(-9.0, 99.0, (1, 2, 1), np.float32), lambda i: np.array([[[i], [i + 0.5]]], np.float32)),
]


@pytest.mark.parametrize("learner", [False, True], ids=["acting", "training"])
@given(data=st.data(), num_frames=st.integers(1, 5))
@settings(max_examples=examples(100))
def test_frames_are_stacked(learner: bool, data: st.DataObject, num_frames: int) -> None:
    setup = data.draw(setups(IMAGES, numpy=st.just(True)) if learner else acting(IMAGES))
    setup.check(*rows("FrameStacking", num_frames=num_frames, as_learner_connector=learner))


@given(setup=acting(actions=KINDS[:1]), n_prev_actions=st.integers(0, 4), n_prev_rewards=st.integers(0, 4))
@settings(max_examples=examples(100))
def test_earlier_actions_and_rewards_are_shown(setup: Setup, n_prev_actions: int, n_prev_rewards: int) -> None:
    options: Any = {"n_prev_actions": n_prev_actions, "n_prev_rewards": n_prev_rewards}
    assert_same_answer(*setup.run(*rows("PrevActionsPrevRewards", **options)))
    for pair in setup.pairs:
        mine, other = (dict(episode.get_observations(-1)) for episode in (pair.ours, pair.theirs))
        # f32[n, A] there, which does not lie in their own space.
        other |= {key: np.reshape(part, -1) for key, part in other.items() if key == "prev_n_actions"}
        assert_same(mine, other, dtypes=False)


@given(setup=acting(KINDS[1:3]), clip=st.sampled_from([0.5, 10.0, 100.0]), times=st.integers(1, 3))
@settings(max_examples=examples(100))
def test_observations_are_filtered(setup: Setup, clip: float, times: int) -> None:
    pieces = rows("MeanStdFilter", clip_by_value=clip)
    for _ in range(times):
        assert_same_answer(*setup.run(*pieces))
    for pair in setup.pairs:
        pair.check(lambda episode: episode.get_observations(-1), rtol=1e-4)  # they add 1e-6 to the deviation


@given(setup=acting(KINDS[1:3]), mean=st.booleans(), std=st.booleans(), update_stats=st.booleans())
@settings(max_examples=examples(50))
def test_a_filter_goes_on_with_the_state_of_another(setup: Setup, mean: bool, std: bool, update_stats: bool) -> None:
    options: Any = {"de_mean_to_zero": mean, "de_std_to_one": std, "clip_by_value": 100.0}
    item, space = setup.setting.observation.item, setup.spaces[0]
    seen = [Pair.of({"observations": [item(i)], "observation_space": space}, id_=f"seen{i}") for i in (3, 9)]
    first = rows("MeanStdFilter", **options)
    Setup(setup.setting, seen, False, setup.spaces).run(*first)
    then = rows("MeanStdFilter", **options, update_stats=update_stats)
    for [before], [after] in zip(first, then, strict=True):
        after.input_action_space, after.input_observation_space = setup.spaces[::-1]
        after.set_state(before.get_state())
    for _ in range(2):
        assert_same_answer(*setup.run(*then))
        for pair in setup.pairs:
            pair.check(lambda episode: episode.get_observations(-1), rtol=1e-4)


counts = st.integers(1, 4)
SPACED: dict[str, tuple[Any, Any, Any]] = {
    "FlattenObservations": (KINDS, KINDS, {}),
    "FrameStacking": (IMAGES, KINDS, {"num_frames": counts}),
    "MeanStdFilter": (KINDS[1:3], KINDS, {"clip_by_value": st.sampled_from([0.5, 10.0])}),
    "PrevActionsPrevRewards": (KINDS, KINDS[:1], {"n_prev_actions": counts, "n_prev_rewards": counts}),
}


@pytest.mark.parametrize("name", SPACED)
@given(data=st.data())
def test_spaces_come_out_the_same(name: str, data: st.DataObject) -> None:
    observations, actions, options = SPACED[name]
    given_ = data.draw(st.fixed_dictionaries(options))
    observed, acted = data.draw(st.sampled_from(observations)).space, data.draw(st.sampled_from(actions)).space
    made = []
    for [piece] in rows(name, **given_):
        piece.input_action_space, piece.input_observation_space = acted, observed
        made.append((piece.observation_space, piece.action_space))
    assert made[0] == made[1]


# By agents and modules


MEMORIZED = "memorized_map_structure"
ANY_MODULE: Any = {"rl_module_specs": dict.fromkeys("abc"), "agent_to_module_mapping_fn": None}
MODULES = ray_modules("abc", KINDS[0].space, KINDS[0].space)


@st.composite
def by_agent(draw: st.DrawFn) -> dict[str, Any]:
    """Column -> (episode, agent, module) -> items."""
    modules = draw(st.dictionaries(st.tuples(ids, ids), ids, min_size=1, max_size=5))
    keys = [(*key, module) for key, module in modules.items()]
    counts = {key: draw(st.integers(1, 3)) for key in keys}
    return {
        column: {key: [draw(numbers) for _ in range(counts[key])] for key in keys}
        for column in draw(st.sampled_from([["obs"], ["obs", "rewards"]]))
    }


@given(batch=by_agent(), batched=st.booleans())
def test_agents_are_mapped_to_modules(batch: dict[str, Any], batched: bool) -> None:
    made = []
    for common in (nodes, ray_common):
        call: Any = {"rl_module": MODULES, "episodes": [], "explore": True, "shared_data": {}}
        mapping = common.AgentToModuleMapping(**ANY_MODULE, as_learner_connector=True)
        by_module = mapping(batch=copy.deepcopy(batch), **call)
        if batched:
            by_module = common.BatchIndividualItems(multi_agent=True)(batch=by_module, **call)
        whose = {name: [tuple(key) for key in keys] for name, keys in call["shared_data"][MEMORIZED].items()}
        made.append({"batch": by_module, "whose": whose})
    assert_same(*made)


@given(batch=by_agent())
def test_outputs_of_modules_come_back_to_the_agents(batch: dict[str, Any]) -> None:
    batch = {"obs": {key: items[:1] for key, items in batch["obs"].items()}}
    answers = []
    for mapping, behind, episodes in (
        (nodes.AgentToModuleMapping, nodes, []),
        (ray_common.AgentToModuleMapping, ray_module_to_env, [MultiAgentEpisode(id_) for id_ in "abc"]),
    ):
        call: Any = {"rl_module": Module(), "episodes": episodes, "explore": True, "shared_data": {}}
        by_module = mapping(**ANY_MODULE, as_learner_connector=True)(batch=copy.deepcopy(batch), **call)
        made = {module: {"actions": np.array(columns["obs"])} for module, columns in by_module.items()}
        for piece in (behind.UnBatchToIndividualItems(), behind.ModuleToAgentUnmapping()):
            made = piece(batch=made, **call)
        answers.append({name: {str(key): items for key, items in data.items()} for name, data in made.items()})
    assert_same(*answers)


# Behind the module


DTYPES = [np.bool_, np.uint8, np.int8, np.int16, np.int32, np.int64, np.float16, np.float32]
FORMS = {
    "as it is": lambda array: array,
    "transposed": lambda array: array.T,
    "a part": lambda array: array[..., ::2],
    "read-only": lambda array: np.broadcast_to(array, array.shape),
}
arrays = st.builds(
    lambda dtype, shape, form: form((np.arange(np.prod(shape)) % 2).reshape(shape).astype(dtype)),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple),
    st.sampled_from(list(FORMS.values())),
)
trees = st.recursive(
    arrays,
    lambda parts: st.dictionaries(ids, parts, min_size=1, max_size=2) | st.tuples(parts, parts) | st.lists(parts),
    max_leaves=4,
)
columns_of_trees = st.fixed_dictionaries(
    {}, optional={"obs": trees, "actions": trees, "infos": st.lists(st.dictionaries(ids, arrays))}
)


@given(batch=columns_of_trees, module=st.sampled_from([Module(), None]))
@settings(max_examples=examples(100))
def test_arrays_become_tensors_and_arrays_again(batch: dict[str, Any], module: Any) -> None:
    tensors, again = [], []
    for common in (nodes, ray_common):
        call: Any = {"rl_module": module, "episodes": [], "explore": True, "shared_data": {}}
        made = common.NumpyToTensor()(batch=dict(batch), **call)
        tensors.append(made)
        again.append(common.TensorToNumpy()(batch=dict(made), **call))
    assert_same(*tensors)
    assert [leaf.dtype for leaf in leaves_of(tensors[0])] == [leaf.dtype for leaf in leaves_of(tensors[1])]
    assert_same(*again, dtypes=False)


@given(
    shape=st.lists(st.integers(1, 2), min_size=1, max_size=3),
    keyed=st.booleans(),
    column=st.sampled_from(["actions", "state_out"]),
    added=st.booleans(),
)
def test_the_time_axis_goes_again(shape: list[int], keyed: bool, column: str, added: bool) -> None:
    item = {"x": np.arange(np.prod(shape)).reshape(shape)}
    answers = []
    for behind in (nodes, ray_module_to_env):
        call: Any = {
            "episodes": [],
            "explore": True,
            "shared_data": {"_added_single_ts_time_rank": True} if added else {},
        }
        batch = {column: {("e",): [dict(item)]} if keyed else [dict(item)]}
        remove = behind.RemoveSingleTsTimeRankFromBatch()
        answers.append(ask(lambda: remove(rl_module=Module(True), batch=batch, **call)))  # noqa: B023
    assert_same_answer(*answers, told=item)


@pytest.mark.parametrize(
    "name", [*LEARNER, "AddOneTsToEpisodesAndTruncate"], ids=lambda name: name if isinstance(name, str) else name[0]
)
@given(setup=setups(stateful=st.just(True)), stateful=st.booleans())
@settings(max_examples=examples(20))
def test_items_of_a_train_batch_come_one_by_one_where_rays_do(name: Named, setup: Setup, stateful: bool) -> None:
    assert_same_answer(*setup.run(*rows(name, *(STATES if stateful else [])), shown=forms))


BOUNDED = [
    Kind(spaces.Box(-2.0, 4.0, (2,), np.float32), lambda i: np.array([i / 10 - 1, 1 - i / 10], np.float32)),
    Kind(
        spaces.Box(np.array([-1.0, 0.0], np.float32), np.array([1.0, 9.0], np.float32)),
        lambda i: np.array([i, -i], np.float32),
    ),
    Kind(
        spaces.Dict({"a": spaces.Box(-2.0, 4.0, (1,), np.float32), "b": spaces.Discrete(3)}),
        lambda i: {"a": np.array([i / 5 - 2], np.float32), "b": i % 3},
    ),
    Kind(spaces.Box(-1.0, 1.0, (), np.float32), lambda i: np.float32(i / 9 - 1)),
    Kind(spaces.Box(-1.0, 1.0, (2,), np.float64), lambda i: np.array([i / 9, -i])),
    *KINDS[:1],
]


@given(setup=setups(actions=BOUNDED), data=st.data(), normalize_actions=st.booleans(), clip_actions=st.booleans())
@settings(max_examples=examples(150))
def test_actions_are_brought_into_bounds_and_listed(
    setup: Setup, data: st.DataObject, normalize_actions: bool, clip_actions: bool
) -> None:
    batch = {"actions": {(pair.ours.id_,): [setup.setting.action.item(data.draw(numbers))] for pair in setup.pairs}}
    options: Any = {"normalize_actions": normalize_actions, "clip_actions": clip_actions}
    for more in ([], ["ListifyDataForVectorEnv"]):
        pieces = rows(("NormalizeAndClipActions", options), *more)
        assert_same_answer(*setup.run(*pieces, batch), rtol=1e-6)


@given(
    logits=st.lists(st.lists(st.integers(-5, 5), min_size=4, max_size=4, unique=True), min_size=1, max_size=4),
    space=st.sampled_from([spaces.Discrete(4), spaces.Box(-9.0, 9.0, (2,), np.float32)]),
    explore=st.booleans(),
    there=st.sampled_from([(), ("actions",), ("action_logp",), ("actions", "action_logp")]),
)
def test_actions_are_chosen(logits: list[list[int]], space: Any, explore: bool, there: tuple[str, ...]) -> None:
    ray_distribution = TorchCategorical if isinstance(space, spaces.Discrete) else TorchDiagGaussian
    inputs, made = torch.tensor(logits, dtype=torch.float32), []
    given_ = {
        "actions": torch.zeros(len(logits), *space.shape, dtype=torch.int64),
        "action_logp": torch.ones(len(logits)),
    }
    for piece, distribution in (
        (nodes.GetActions(), distribution_for(space)),
        (ray_module_to_env.GetActions(), ray_distribution),
    ):

        class Chooses(Module):
            get_inference_action_dist_cls = staticmethod(lambda: distribution)  # noqa: B023
            get_exploration_action_dist_cls = get_inference_action_dist_cls

        batch = {"action_dist_inputs": inputs, **{name: given_[name] for name in there}}
        batch = piece(rl_module=Chooses(), batch=batch, episodes=[RayEpisode()], explore=explore, shared_data={})
        if explore and not there:  # whatever was drawn, this is how likely it was
            drawn, logp = batch.pop("actions"), batch.pop("action_logp")
            assert_same(logp, ray_distribution.from_logits(inputs).logp(drawn), rtol=1e-4)
        elif explore and "actions" not in there:
            assert len(batch.pop("actions")) == len(logits)
        elif "action_logp" not in there and "actions" not in there:  # Ray's has one 0 for each number of an action
            batch["action_logp"] = batch["action_logp"].reshape(len(logits), -1).sum(-1)
        made.append(batch)
    assert_same(*made)
