"""A module with its connector pipelines, which acts without environments and without the code that trained it."""

import copy
import os
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rollflow.nodes.argument_checks import check_flags, checking_keywords, seeds_of
from rollflow.nodes.connectors.common.batches import NumpyToTensor
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2
from rollflow.nodes.connectors.learner.train_columns import device_of
from rollflow.nodes.connectors.pipelines.connector_pipeline_v2 import ConnectorPipelineV2, pieces_within
from rollflow.nodes.connectors.pipelines.default_pipelines import EnvToModulePipeline, ModuleToEnvPipeline
from rollflow.nodes.modules.given_module import RandomModule
from rollflow.nodes.modules.policy_weights import PolicyWeights, Weights
from rollflow.nodes.modules.rl_module import is_stateful
from rollflow.nodes.policies import artifact, artifact_files
from rollflow.nodes.policies.artifact_files import folder_of
from rollflow.nodes.policies.onnx_policy import DEFAULT_SESSION, rewards_of
from rollflow.nodes.policies.part_records import classes_of
from rollflow.nodes.stages.acting import acting_copy, chosen_space, lookback_for, module_for, sampling_data
from rollflow.nodes.stages.env_to_module import EnvToModule
from rollflow.nodes.stages.module_forward import ModuleForward, note_batch
from rollflow.nodes.stages.module_to_env import ModuleToEnv, convert_actions
from rollflow.stream.data.column import Column
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ColumnError, PolicyError, refused
from rollflow.stream.data.infos import SlotInfos
from rollflow.stream.data.space import check_columnar, row_of
from rollflow.stream.data.stored_files import write_file
from rollflow.stream.data.tree import Tree, leaves_of, map_tree, stack_trees, tree_at
from rollflow.stream.fragments.fragment import FragmentLayout
from rollflow.stream.fragments.lane import Lane

if TYPE_CHECKING:
    from rollflow.nodes.connectors.pipelines.adapting import Origin
    from rollflow.nodes.env.lane_source import LaneSource
    from rollflow.nodes.policies.evaluation import EnvMaker, Evaluation
    from rollflow.nodes.stages.module_set import ActingModule, AgentsActing
    from rollflow.stream.multi_agent.agent_part import AgentPart

MOST_BYTES_REMEMBERED = 1 << 30  # of observations, in one session's lookback
VECTOR_STEPS = "vector_steps"  # in `trained_on`


Pieces = ConnectorPipelineV2 | Sequence[ConnectorV2] | None
P = TypeVar("P", bound=ConnectorPipelineV2)


def has_memory(module: Any, *pipelines: ConnectorPipelineV2) -> bool:
    """True if an action may depend on more than the observation: on the module's state, or on what a piece keeps."""
    return is_stateful(module) or any(piece.lookback or piece.is_of_user for piece in pieces_within(*pipelines))


def pipeline_of(kind: type[P], pieces: Pieces, spaces: tuple[gym.Space[Any], gym.Space[Any]], *, stateful: bool) -> P:
    """A copy of the pipeline, or the default one with copies of the pieces."""
    copied = copy.deepcopy(pieces)
    if not isinstance(copied, ConnectorPipelineV2):
        made: P = cast("Any", kind).default(*spaces, list(copied or ()), stateful=stateful)
        return made
    if not isinstance(copied, kind):
        raise PolicyError(f"a {type(copied).__name__} was given, expected a {kind.__name__}, or a list of pieces")
    if copied.input_observation_space is None or copied.input_action_space is None:
        copied.set_input_spaces(*spaces)
    return copied


def spaces_of(pieces: Pieces, *spaces: gym.Space[Any] | None) -> tuple[gym.Space[Any], gym.Space[Any]]:
    """The environments' spaces, as they were given or as the pipeline has them."""
    found: list[gym.Space[Any]] = []
    for name, space in zip(("observation_space", "action_space"), spaces, strict=True):
        own = getattr(pieces, f"input_{name}", None) if space is None else space
        if not isinstance(own, gym.Space):
            raise PolicyError(f"{name} is {space!r}, expected a gymnasium space, or env_to_module of a rollout")
        check_columnar(own, name)
        found.append(own)
    return found[0], found[1]


def settled(pipelines: Sequence[ConnectorPipelineV2], device: Any, *, learns: bool) -> str:
    """Have the pieces use a torch device, and learn or not; the name of a piece that looks back to rewards, or ""."""
    needs_rewards = ""
    for piece in pieces_within(*pipelines):
        if isinstance(piece, NumpyToTensor):
            piece.device, piece.pin_memory = (None if device.type == "cpu" else device), False
        if not learns and getattr(piece, "update_stats", False):
            cast("Any", piece).update_stats = False
        if getattr(piece, "n_prev_rewards", 0):
            needs_rewards = piece.name
    return needs_rewards


def check_memory(space: gym.Space[Any], lookback: int) -> None:
    """Raise PolicyError if a session would remember too many bytes of observations."""
    size = sum(leaf.nbytes for leaf in leaves_of(row_of(space, 1))) * lookback
    if size > MOST_BYTES_REMEMBERED:
        raise PolicyError(
            f"a session would remember {lookback} observations of {space}, {size} bytes; expected at most "
            f"{MOST_BYTES_REMEMBERED}"
        )


def rows_of(observations: Tree, space: gym.Space[Any]) -> Tree:
    """Observations of a call as a tree of arrays any[N, ...]: such a tree, or a list of N observations."""
    if isinstance(observations, list) and observations:
        if isinstance(space, gym.spaces.Box) and space.dtype.kind == "f":
            return np.array(observations, space.dtype)
        return stack_trees(observations)
    return map_tree(np.asarray, observations)


def ids_of(observations: Tree, sessions: Sequence[Hashable] | None) -> tuple[Hashable, ...]:
    """The sessions of a call with observations, a tree of arrays any[N, ...]: those given, or 0 … N - 1.

    Raises PolicyError if they are not N, and if there is no observation.
    """
    leaves = leaves_of(observations)
    count = len(leaves[0]) if leaves and leaves[0].ndim else 0
    ids = tuple(range(count)) if sessions is None else tuple(sessions)
    if len(ids) != count or not count:
        raise PolicyError(f"{count} observations for {len(ids)} sessions, expected one for each, and at least one")
    return ids


_ROWS = 32  # vector steps until the columns are begun anew with their lookback
_MOST_SIZES = 256  # lanes of different sizes that are kept


class SessionLane(Lane):
    """The N sessions that act together, each with an episode of its own.

    sessions             one for each slot
    lookback             rows that the connector pieces look back
    observation_space    of what callers give
    action_space         of what the module chooses
    prepare              the stage before the forward pass, which follows this lane

    It stands either before its first observations, or at a row whose actions are recorded.
    """

    def __init__(
        self,
        sessions: Sequence[Hashable],
        lookback: int,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        prepare: EnvToModule,
    ) -> None:
        self.sessions, self.prepare = tuple(sessions), prepare
        layout = FragmentLayout(len(sessions), _ROWS, lookback, action_space, False, self._episode_id)
        super().__init__(0, layout, observation_space)
        self.is_fresh = True  # no observation has come yet, and no session was taken over
        self.begins: set[int] = set(range(len(sessions)))  # slots whose episodes begin with the next observation
        self._incoming = Column.empty(Columns.OBS, row_of(observation_space, len(sessions)), 1)
        self._leaves: tuple[Column, int, list[NDArray[Any]]] | None = None  # and the columns that they are of
        self._none_done = np.zeros(len(sessions), np.bool_)
        self._no_rewards = np.full(len(sessions), np.nan, np.float32)  # which is refused where a piece reads it

    @property
    def step(self) -> int:
        """The step of the run that the policy is from: its sessions are no part of that run, and make none."""
        return self.first_step

    def checked(self, observations: Tree) -> Tree:
        """The observations `any[N, ...]` in the dtypes of their space. Raises ColumnError if they don't fit."""
        self._incoming.write(0, observations)
        return map_tree(np.array, self._incoming.row(0))

    def take_observations(
        self, observations: Tree, rewards: NDArray[np.float32] | None, infos: Sequence[Mapping[str, Any]] | None
    ) -> None:
        """Take the next observation of every session.

        observations    any[N, ...], as `checked` gives them
        rewards         f32[N]  for the actions before; None: none came
        infos           N of them; None: they are empty
        """
        of_slots: Mapping[str, Any] = {} if infos is None else SlotInfos(infos)
        if self.is_fresh:
            self.is_fresh = False
            self.reset(observations, of_slots)
        else:
            rewards = self._no_rewards if rewards is None else rewards
            self.record_step(observations, rewards, self._none_done, self._none_done, of_slots)
            if self.begins:
                self._begin_episodes(np.array(sorted(self.begins)), self.row)
        self.begins.clear()

    def adopt(self, source: "SessionLane", theirs: list[int], ours: list[int]) -> None:
        """Go on with sessions of another lane: copy what their slots `theirs` remember into the slots `ours`."""
        self._begin_like(source)
        first, count = source.row - source.layout.lookback, self.row + 1
        to_slots, from_slots = np.array(ours), np.array(theirs)
        for leaf, from_leaf in zip(self._all_leaves(), source._all_leaves(), strict=True):
            for row in range(count):  # quicker than both axes at once
                leaf[row][to_slots] = from_leaf[first + row][from_slots]
        for row in range(count):
            self._adopt_infos(row, source.fragment.infos[first + row], theirs, ours)
        self.episode_start[ours] = source.episode_start[theirs] - first
        self.episode_number[ours] = source.episode_number[theirs]
        for slot, their_slot in zip(ours, theirs, strict=True):
            number = int(self.episode_number[slot])
            data = source.custom_data.get((their_slot, number))
            if data is not None:
                self.custom_data[slot, number] = data
            if their_slot not in source.begins:
                self.begins.discard(slot)

    def _all_leaves(self) -> list[NDArray[Any]]:
        """The leaves of all columns, in the order of the columns' names."""
        columns = self.fragment.columns
        known = self._leaves
        if known is None or known[0] is not columns[Columns.OBS] or known[1] != len(columns):
            leaves = [leaf for name in sorted(columns) for leaf in leaves_of(columns[name].tree)]
            self._leaves = known = columns[Columns.OBS], len(columns), leaves
        return known[2]

    def _adopt_infos(self, row: int, infos: Mapping[str, Any], theirs: list[int], ours: list[int]) -> None:
        if not isinstance(infos, SlotInfos):
            return
        own = self.fragment.infos[row]
        dicts = own.dicts if isinstance(own, SlotInfos) else [{} for _ in self.sessions]
        for slot, their_slot in zip(ours, theirs, strict=True):
            dicts[slot] = infos.of(their_slot)
        self.fragment.infos[row] = SlotInfos(dicts)

    def _begin_like(self, source: "SessionLane") -> None:
        """Give the columns the types that the other lane's have."""
        if not self.is_fresh:
            return
        self.is_fresh = False
        slots = self.layout.num_slots
        self.episode_number[:] = -1  # of sessions that begin here
        self._retype(source.observation_space)
        self._typing = False
        self._version_written = -1  # of rows that are still to come
        self.observation_spaces = source.observation_spaces
        extra = (source._outputs or set()) - {Columns.ACTIONS}
        like = {
            name: map_tree(lambda leaf: np.zeros((slots, *leaf.shape[1:]), leaf.dtype), column.row(0))
            for name, column in source.fragment.columns.items()
            if name in extra
        }
        self._add_extra_columns(like)
        self.episodes.show_row(self._column, self.row)

    def _episode_id(self, slot: int, number: int) -> str:
        return f"{self.sessions[slot]}/{number}"


Ids = tuple[Hashable, ...]


class Sessions:
    """Finds or makes the lane in which the sessions of a call stand side by side.

    make          makes a lane of the sessions named
    remembers     False: nothing of a session matters to its next step, so any lane of as many slots will do

    A call with the same sessions as an earlier one goes on in their lane. Other calls take the sessions' memory over
    into a lane of their own.
    """

    def __init__(self, make: Callable[[Ids], SessionLane], *, remembers: bool = True) -> None:
        self._make, self._remembers = make, remembers
        self._homes: dict[Hashable, tuple[SessionLane, int]] = {}  # lane and slot
        self._lanes: dict[Ids, SessionLane] = {}  # those that have all their sessions still; else of 0 … N - 1
        self._lost: set[Hashable] = set()

    @property
    def ids(self) -> tuple[Hashable, ...]:
        """All sessions that have a memory."""
        return tuple(self._homes)

    def lane(self, ids: Ids) -> SessionLane:
        """The lane of these sessions, in their order.

        Raises PolicyError for a session that comes twice, and for one whose memory was lost.
        """
        if not self._remembers:
            self._check(ids)
            ids = tuple(range(len(ids)))
        lane = self._lanes.get(ids)
        return self._made(ids) if lane is None else lane

    def reset(self, session: Hashable) -> None:
        """Begin a new episode with the session's next observation."""
        self._lost.discard(session)
        home = self._homes.get(session)
        if home is not None:
            home[0].begins.add(home[1])

    def forget(self, session: Hashable) -> None:
        """Release the memory of a session."""
        self._lost.discard(session)
        home = self._homes.pop(session, None)
        if home is not None:
            self._lanes.pop(home[0].sessions, None)

    def lose(self, lane: SessionLane) -> None:
        """Give up the memory of a lane's sessions, which a failure left half written."""
        self._lanes.pop(lane.sessions, None)
        for session in lane.sessions if self._remembers else ():
            self._homes.pop(session, None)
            self._lost.add(session)

    def _made(self, ids: Ids) -> SessionLane:
        self._check(ids)
        made = self._make(ids)
        if self._remembers:
            self._move(ids, made)
        elif len(self._lanes) >= _MOST_SIZES:
            self._lanes.clear()
        self._lanes[ids] = made
        return made

    def _move(self, ids: Ids, made: SessionLane) -> None:
        """Have a new lane go on with the sessions where they stand in others."""
        moves: dict[int, tuple[SessionLane, list[int], list[int]]] = {}
        for slot, session in enumerate(ids):
            home = self._homes.get(session)
            if home is not None and not home[0].is_fresh:
                _, theirs, ours = moves.setdefault(id(home[0]), (home[0], [], []))
                theirs.append(home[1])
                ours.append(slot)
        for lane, theirs, ours in moves.values():
            made.adopt(lane, theirs, ours)
        left: set[int] = set()  # lanes that have lost a session: a lane's name is as long as it has sessions
        for slot, session in enumerate(ids):
            before = self._homes.get(session)
            if before is not None and id(before[0]) not in left:
                left.add(id(before[0]))
                self._lanes.pop(before[0].sessions, None)
            self._homes[session] = made, slot

    def _check(self, ids: Ids) -> None:
        if len(set(ids)) < len(ids):
            twice = next(session for session in ids if ids.count(session) > 1)
            raise PolicyError(f"session {twice!r} comes more than once in one call, expected each session once")
        for session in ids:
            if session in self._lost:
                raise PolicyError(
                    f"session {session!r} lost its memory when an earlier step of it failed; expected "
                    f"reset({session!r}) before its next observation"
                )


class Policy:
    """A module and the connector pieces around it, with a memory for each environment that it acts in.

        module                module that acts; a copy of it does
        env_to_module         pipeline of a rollout, or pieces to be put before the default ones; copies of them act
        module_to_env         likewise, among the default ones
        observation_space,    of the environments; None: those of the pipelines
        action_space
        explore               True: sample actions; False: take the likeliest
        learns                True: filters count the observations that come by; False: they stay as they are
        device                of the forward passes; None: where the module is
        seed                  of sampling; None: a fresh one

    Public attributes:

        module                           the copy that acts
        env_to_module, module_to_env     the copies of the pipelines
        observation_space, action_space
        trained_on                       facts that are saved with it; schedules stand at its `vector_steps`, or at 0
        needs_rewards                    name of the piece that looks back to rewards; "" if none does
        outputs                          all columns of the last pass, any[N, ...]: `actions`, `action_logp`, …

    A *session* is one environment, as long as it lasts. What a policy looks back to belongs to the session: earlier
    observations, actions and rewards, and the module's state. The first observation after `reset` begins an episode.
    One thread at a time may call it.

    Raises ConnectorError, ModuleError or PolicyError for parts that do not fit together.
    """

    def __init__(
        self,
        module: Any,
        env_to_module: Pieces = None,
        module_to_env: Pieces = None,
        *,
        observation_space: gym.Space[Any] | None = None,
        action_space: gym.Space[Any] | None = None,
        explore: bool = False,
        learns: bool = False,
        device: Any = None,
        seed: int | None = None,
    ) -> None:
        check_flags(explore=explore, learns=learns)
        spaces = self.observation_space, self.action_space = spaces_of(env_to_module, observation_space, action_space)
        self.explore = explore
        self.trained_on: dict[str, Any] = {}
        self.outputs: Batch = {}
        self._examples = artifact.Examples()
        before = pipeline_of(EnvToModulePipeline, env_to_module, spaces, stateful=False)
        seen = before.observation_space or spaces[0], before.action_space or spaces[1]
        self.module = acting_copy(module_for(module, None, *seen), device)
        stateful = is_stateful(self.module)
        self.env_to_module = pipeline_of(EnvToModulePipeline, env_to_module, spaces, stateful=stateful)
        self.module_to_env = pipeline_of(ModuleToEnvPipeline, module_to_env, spaces, stateful=stateful)
        pipelines = self.env_to_module, self.module_to_env
        self.needs_rewards = settled(pipelines, device_of(self.module), learns=learns)
        self.lookback = lookback_for(None, pipelines, stateful=stateful)
        check_memory(self.observation_space, self.lookback)
        self._chosen_space = chosen_space(self.module, self.action_space)
        self._weights = PolicyWeights(self.module)
        self._sampling = sampling_data(0, seeds_of(seed)[0], "module")
        self._forward = ModuleForward(
            self.module, self._weights, explore=explore, threads=1, before=[self.env_to_module]
        )
        context = {"module": self.module, "explore": explore}
        self._act = ModuleToEnv(self.module_to_env, env_space=self.action_space, threads=1, **context)
        self._needs_lane = has_memory(self.module, *pipelines)
        self._sessions = Sessions(self._lane, remembers=self._needs_lane)

    # Acting

    def act(
        self, observation: Tree, reward: float | None = None, session: Hashable = DEFAULT_SESSION, info: Any = None
    ) -> Any:
        """The action for one observation, `any[...]`, of one environment.

            observation    in the environment's space; for a Box of floats a list will do
            reward         for the session's action before; None: none is there
            info           dict that came with the observation; None: an empty one

        Returns an item of the action space. Raises as `act_batch` does.
        """
        space = self.observation_space
        if isinstance(observation, tuple) and isinstance(observation[-1], dict) and isinstance(space, gym.spaces.Box):
            raise PolicyError(
                "act() got a tuple with a dict, as reset() and step() of an environment give it; expected its first "
                "part, the observation"
            )
        observations = observation[None] if isinstance(observation, np.ndarray) else rows_of([observation], space)
        rewards = None if reward is None else np.array([reward], np.float32)
        return tree_at(self._acted(observations, rewards, (session,), None if info is None else [info]), 0)

    def act_batch(
        self,
        observations: Tree,
        rewards: Any = None,
        sessions: Sequence[Hashable] | None = None,
        infos: Sequence[Mapping[str, Any]] | None = None,
    ) -> Tree:
        """The actions, any[N, ...], for one observation each of N environments, in one forward pass.

            observations    any[N, ...]   a tree, as the environment's space has it; or a list of N of them
            rewards         f32[N]        for each session's action before; None: there are none
            sessions        N of them; None: 0 … N - 1
            infos           N dicts that came with the observations; None: empty ones

        Raises ColumnError for observations that are not in the space; every session then is as it was. Raises
        PolicyError for a session that comes twice, and if a piece looks back to rewards that did not come.
        """
        observations = rows_of(observations, self.observation_space)
        ids = ids_of(observations, sessions)
        if infos is not None and len(infos) != len(ids):
            raise PolicyError(f"{len(infos)} infos for {len(ids)} sessions, expected one for each")
        return self._acted(observations, rewards_of(rewards, len(ids)), ids, infos)

    def reset(self, session: Hashable = DEFAULT_SESSION) -> None:
        """Begin a new episode with the session's next observation."""
        self._sessions.reset(session)

    def forget(self, session: Hashable = DEFAULT_SESSION) -> None:
        """Release the memory of a session whose environment is gone."""
        self._sessions.forget(session)

    @property
    def sessions(self) -> tuple[Hashable, ...]:
        """The sessions that have a memory; none if an action depends on the observation alone."""
        return self._sessions.ids

    def publish(self, weights: Weights) -> int:
        """Have the next pass use these weights, a `state_dict()`, which is copied; the version that they get.

        Raises ModuleError when they are not the module's.
        """
        return self._weights.publish(weights)

    @checking_keywords("evaluate", {"num_episodes": "episodes=…", "deterministic": "explore=False"})
    def evaluate(
        self, env: "EnvMaker", episodes: int = 100, *, num_envs: int = 8, seed: int = 0, explore: bool | None = None
    ) -> "Evaluation":
        """Returns and lengths of whole episodes, played by a copy of this policy that learns nothing.

            env         an environment's id, or a function that makes a new one at each call
            num_envs    environments side by side, for one forward pass over them
            seed        of the environments and of sampling
            explore     None: as the policy does

        Raises PolicyError for an environment with other spaces, and EnvError, with slot and step, for whatever a
        rollout refuses.
        """
        from rollflow.nodes.policies.evaluation import evaluated

        actor = self._copy(self.env_to_module, self.module_to_env, self.explore if explore is None else explore, seed)
        return evaluated(actor, env, episodes=episodes, num_envs=num_envs, seed=seed)

    def adapted(
        self,
        environment: Any,
        agent_connectors: Sequence[Any] = (),
        action_connectors: Sequence[Any] = (),
        *,
        fields: "Mapping[str, Origin] | None" = None,
    ) -> "Policy":
        """A policy that acts as this one in another environment; this one, and its sessions, stay as they are.

            environment          has the `observation_space` and the `action_space` that it is to act in
            agent_connectors     pieces before this policy's own
            action_connectors    likewise behind this policy's own
            fields               without connectors: path of a field that this policy observes, or of an action that the
                                 environment takes -> where it comes from. That is the path of a field of the other
                                 side's, `[path, factor, offset]`, or a number to fill it with. Fields that are the same
                                 on both sides need none

        Raises ConnectorError with all fields that do not match.
        """
        from rollflow.nodes.connectors.pipelines.adapting import adapted_pipelines

        made = Policy(
            self.module,
            *adapted_pipelines(self, environment, agent_connectors, action_connectors, fields or {}),
            observation_space=environment.observation_space,
            action_space=environment.action_space,
            explore=self.explore,
        )
        made.trained_on = dict(self.trained_on)
        return made

    # Saving

    def save(self, path: str | os.PathLike[str], *, onnx: bool = False) -> None:
        """Write the policy to a folder, with the sessions left out.

            onnx    True: with an ONNX program of the whole policy, for `OnnxPolicy`, which needs no class of a module

        A policy that is there already is replaced, in one step. What was written is what `load` has read back, and has
        acted with as this policy does.

        Raises PolicyError for a part that can't be saved: a function without a name, a class that can't be imported.
        """
        save_all({Path(path): self}, onnx=onnx)

    def _files(self, path: Path, *, onnx: bool) -> dict[str, bytes]:
        """Name -> contents of the files that `save` writes to a path, read back."""
        artifact_files.check_target(path)
        examples = self._tried()
        others = {artifact_files.ONNX: self._onnx_bytes(examples)} if onnx else {}
        files = artifact.files_of(self, examples, others)
        manifest, arrays = artifact_files.read_manifest(files)
        type(self)._made_of(manifest, arrays, classes_of(manifest), device_of(self.module))
        return files

    def export_onnx(self, path: str | os.PathLike[str]) -> None:
        """Write the policy, its pieces included, as an ONNX program that takes the likeliest actions: see `OnnxPolicy`.

        It is written once it does on recorded observations what the policy does, to 1e-5.

        Raises PolicyError for a piece that has no tensor form, and for a policy that samples its actions.
        """
        if Path(path).is_dir():
            raise PolicyError(f"there is a folder at {path}, expected a file to be replaced, or nothing")
        write_file(Path(path), self._onnx_bytes(self._tried()))

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        allow: Collection[str] = (),
        device: Any = None,
        explore: bool | None = None,
        learns: bool = False,
        seed: int | None = None,
    ) -> Self:
        """The policy that `save` has written, once it does on the saved examples what it did then.

            allow            packages and modules whose classes and functions may be imported, beside rollflow's own and
                             those that are registered
            device           of the forward passes; None: main memory
            explore          None: as the policy was saved
            learns, seed     as for the constructor

        Raises PolicyError if anything is missing, altered, unknown, or not allowed, and if a part differs.
        """
        if isinstance(allow, str):
            raise PolicyError(f"allow is {allow!r}, expected a list of packages: allow=[{allow!r}]")
        manifest, files = artifact_files.read_files(Path(path))
        with refused(f"no policy can be made of {path}"):
            policy = cls._made_of(manifest, files, allow, device, explore=explore, learns=learns, seed=seed)
        return policy

    @classmethod
    def _made_of(cls, manifest: Any, files: Any, allow: Collection[str], device: Any, **options: Any) -> Self:
        """The policy of a manifest and its files; options are keywords that are not as they were saved."""
        arguments, trained_on, examples = artifact.parts_of(manifest, files, allow)
        explored = arguments["explore"]
        given = {name: value for name, value in options.items() if value is not None}
        policy = cls(**{**arguments, **given}, device=device)
        policy.trained_on, policy._examples = trained_on, examples
        computed = policy._traced(examples.inputs, explored)
        artifact.check_same(examples.computed, computed, skipped=artifact.CHOSEN if explored else ())
        return policy

    def _tried(self) -> artifact.Examples:
        """The examples that this policy is saved with, as it acts now."""
        self._weights.load_into(self.module)
        inputs = self._examples.inputs or artifact.drawn_inputs(self.observation_space)
        return artifact.Examples(inputs, self._traced(inputs, self.explore))

    def _onnx_bytes(self, examples: artifact.Examples) -> bytes:
        from rollflow.nodes.policies.onnx_export import onnx_bytes  # with packages that acting does not need

        return onnx_bytes(self, {**examples.inputs, **examples.computed})

    def _traced(self, inputs: artifact.Arrays, explore: bool) -> artifact.Arrays:
        """All that each part makes of the examples."""
        make = partial(self._copy, explore=explore, seed=0)
        return artifact.traced(make, (self.env_to_module, self.module_to_env), self.observation_space, inputs)

    # Inside

    def _copy(self, before: ConnectorPipelineV2, after: ConnectorPipelineV2, explore: bool, seed: int) -> "Policy":
        """A policy of the same module, without this one's sessions, that learns nothing."""
        self._weights.load_into(self.module)
        spaces: dict[str, Any] = {"observation_space": self.observation_space, "action_space": self.action_space}
        made = Policy(self.module, before, after, explore=explore, seed=seed, **spaces)
        made.trained_on = self.trained_on
        if isinstance(made.module, RandomModule):
            made.module.seed(seed)
        return made

    def _acted(self, observations: Tree, rewards: Any, ids: Ids, infos: Sequence[Mapping[str, Any]] | None) -> Tree:
        lane = self._sessions.lane(ids)
        try:
            observations = lane.checked(observations)
        except ColumnError as error:
            error.add_note(f"expected observations in {self.observation_space}, with a leading axis of {len(ids)}")
            raise
        if rewards is None and self.needs_rewards and len(lane.begins) < len(ids):
            raise PolicyError(
                f"'{self.needs_rewards}' looks back to rewards, but none came for sessions that go on; expected the "
                "reward of each session's action before"
            )
        try:
            self.outputs = outputs = self._passed(lane, observations, rewards, infos)
        except BaseException:
            self._sessions.lose(lane)
            raise
        return outputs.get(Columns.ACTIONS_FOR_ENV, outputs[Columns.ACTIONS])

    def _passed(
        self,
        lane: SessionLane,
        observations: Tree,
        rewards: NDArray[np.float32] | None,
        infos: Sequence[Mapping[str, Any]] | None,
    ) -> Batch:
        """All columns, any[N, ...], of a pass over the next observation of each of the lane's sessions.

        If nothing is remembered and the default pieces alone are around the module, observations don't go through
        a lane, which takes two thirds of the time for one environment.

        observations, rewards, infos    as `SessionLane.take_observations` takes them; observations in new memory
        """
        is_tried = not (self._needs_lane or lane.is_fresh)  # a lane's first pass is its own, which checks types
        output = self._output(observations) if is_tried else None
        if output is not None:
            sizes = [len(lane.sessions)]
            made = self.module_to_env.run_jointly(self.module, output, sizes, self.explore, [self._sampling])
            if made is not None:
                convert_actions(made, lane.layout.action_space, self.action_space)
                return made
        lane.take_observations(observations, rewards, infos)
        lane.prepare(lane)
        if output is None:
            self._forward(lane)
        else:
            lane.batch = output
        columns: Batch = self._act(lane).batch
        if is_tried:
            self._needs_lane = True
        return columns

    def _output(self, observations: Tree) -> Batch | None:
        """The module's output for observations that no lane has; None if the pieces before it need a lane."""
        batch = self.env_to_module.run_on(self.module, observations)
        if batch is None:
            return None
        try:
            return self._forward.forward(batch)
        except Exception as error:
            note_batch(error, "sessions without a memory", batch)
            raise

    def _lane(self, ids: Ids) -> SessionLane:
        prepare = EnvToModule(self.env_to_module, self.module, explore=self.explore, finite=False)
        lane = SessionLane(ids, self.lookback, self.observation_space, self._chosen_space, prepare)
        lane.first_step, lane.shared_data = self.trained_on.get(VECTOR_STEPS, 0), dict(self._sampling)
        return lane

    def __reduce__(self) -> Any:  # as a copy without sessions that learns nothing, as `_copy` makes one
        self._weights.load_into(self.module)
        options = {name: getattr(self, name) for name in ("observation_space", "action_space", "explore")}
        parts = self.module, self.env_to_module, self.module_to_env
        return _unpickled, (type(self), parts, options, self.trained_on)

    def __repr__(self) -> str:
        return f"<Policy {type(self.module).__name__}: {self.observation_space} → {self.action_space}>"


def _unpickled(kind: type[Policy], parts: Sequence[Any], options: Mapping[str, Any], facts: dict[str, Any]) -> Policy:
    made = kind(*parts, **options)
    made.trained_on = facts
    return made


def save_all(policies: Mapping[Path, Policy], *, onnx: bool = False) -> None:
    """Write policies to their paths, as `Policy.save` does; nothing is written if one of them can't be saved."""
    made = {path: policy._files(path, onnx=onnx) for path, policy in policies.items()}
    for path, files in made.items():
        artifact_files.write_files(path, files)


def policy_now(
    module: Any, weights: PolicyWeights, pipelines: Sequence[Any], facts: dict[str, Any], **options: Any
) -> Policy:
    """A policy of a module that acts in a rollout, with the weights published last.

    weights      of the module
    pipelines    before and behind it
    facts        `trained_on`, but for the policy version
    options      keywords of `Policy`
    """
    version, newest = weights.newest(module)
    made = Policy(module, *pipelines, **options)
    made.publish(newest)
    made.trained_on = facts | {"policy_version": version}
    return made


class AgentPolicies:
    """The policies of a rollout's agents, each with the weights published last.

    parts     the agents by their spaces
    acting    the modules that act for them, with the pipelines of each part
    source    steps their environments
    """

    def __init__(self, parts: "Sequence[AgentPart]", acting: "AgentsActing", source: "LaneSource") -> None:
        self._parts, self._acting, self._source = parts, acting, source

    def of(self, agent: Any, module_id: Any = None, **options: Any) -> Policy:
        """The policy that acts for an agent.

            module_id    None: of the module that the agent is mapped to
            options      of `Policy`

        Raises PolicyError for an unknown agent, and if its module is up to the episode, or it can't act alone.
        """
        if self._acting.joint is not None:
            raise PolicyError(f"joint_connector pieces see all agents together, and agent {agent!r} can't act alone")
        place, acting = self._place_of(agent), self._module_of(agent, module_id)
        part, pipelines = self._parts[place], (self._acting.env_to_module[place], self._acting.module_to_env[place])
        spaces = {"observation_space": part.observation_space, "action_space": part.action_space}
        facts = {"agent": str(agent), "module": str(acting.module_id), VECTOR_STEPS: self._source.vector_steps}
        return policy_now(acting.module, acting.weights, pipelines, facts, **spaces, **options)

    def of_all(self) -> dict[Any, Policy]:
        """Agent -> its policy, which agents of the same spaces and the same module share. Raises as `of` does."""
        made: dict[tuple[int, Any], Policy] = {}
        found: dict[Any, Policy] = {}
        for agent in (agent for part in self._parts for agent in part.agents):
            key = self._place_of(agent), self._module_of(agent, None).module_id
            if key not in made:
                made[key] = self.of(agent)
            found[agent] = made[key]
        return found

    def to_save(self, path: Path, agent: Any, module_id: Any, **options: Any) -> dict[Path, Policy]:
        """Path -> the policy of an agent or of a module; None for both: those of all modules, in folders of their own.

        Raises as `of` does, and PolicyError if several can't be saved at the path.
        """
        if agent is not None or module_id is not None:
            return {path: self.of(self._acting.agent_of(module_id) if agent is None else agent, module_id, **options)}
        ids = list(self._acting.versions())
        made = {path / folder_of(str(each)): self.of(self._acting.agent_of(each), each, **options) for each in ids}
        if len(made) < len(ids):
            raise PolicyError(f"some of the modules {ids} have one text as their ids, expected another for each")
        return made

    def _place_of(self, agent: Any) -> int:
        for place, part in enumerate(self._parts):
            if agent in part.agents:
                return place
        agents = [each for part in self._parts for each in part.agents]
        raise PolicyError(f"there is no policy for agent {agent!r}: the agents are {agents}")

    def _module_of(self, agent: Any, module_id: Any) -> "ActingModule":
        if module_id is not None:
            return self._acting.of_id(module_id)
        if self._acting.is_by_agent:
            return self._acting.module_of(agent, "policy")
        raise PolicyError(
            f"agent {agent!r} may have another module in each episode, as agent_to_module_mapping_fn is a function; "
            f"expected a dict there, or policy({agent!r}, module_id), and evaluate_agents to evaluate such policies"
        )
