"""AgentFragment: the steps of one part's agents in a fragment of a multi-agent lane."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.stream.data.cached_property import cached_property
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ColumnError
from rollflow.stream.data.tree import map_tree
from rollflow.stream.episodes.agent_timeline import PendingAction
from rollflow.stream.episodes.single_agent import SingleAgentEpisode
from rollflow.stream.fragments.fragment import ChunkIndex, Fragment
from rollflow.stream.multi_agent.agent_part import AgentPart


class EnvClock:
    """Begins and ends of the episodes of N environments in one fragment, in vector steps since the first reset.

    first         vector step at which the fragment began
    started       i64[N]  vector step at which the episode began that was going on then
    numbers       i64[N]  number of episodes that the environment had before that one
    episode_id    (environment, number of its episode) -> id of the multi-agent episode
    ends          (vector step, environment, whether the episode was truncated, whether the environment was lost), in
                  the order of time
    losses        (vector step after which the environments were lost, reason)
    """

    def __init__(
        self,
        first: int,
        started: NDArray[np.int64],
        numbers: NDArray[np.int64],
        episode_id: Callable[[int, int], str],
        ends: Sequence[tuple[int, int, bool, bool]] = (),
        losses: Sequence[tuple[int, str]] = (),
    ) -> None:
        self.first, self.started, self.numbers, self.episode_id = first, started, numbers, episode_id
        self.losses, self.ends = list(losses), list(ends)
        self._ends_of: dict[int, list[tuple[int, bool]]] = {}  # of each environment: vector step, and if truncated
        for end, env, is_truncated, _ in ends:
            self._ends_of.setdefault(env, []).append((end, is_truncated))

    def end(
        self, envs: NDArray[np.int64], vector_step: int, truncated: NDArray[np.bool_], *, is_lost: bool = False
    ) -> None:
        """Record that episodes of `envs`, i64[E], ended with a vector step (`truncated`, bool[E]), and others began."""
        for env, is_truncated in zip(envs.tolist(), truncated.tolist(), strict=True):
            self.ends.append((vector_step, env, is_truncated, is_lost))
            self._ends_of.setdefault(env, []).append((vector_step, is_truncated))

    def lose(self, vector_step: int, reason: str) -> None:
        """Record that all episodes ended with a vector step, since the environments were lost."""
        envs = np.arange(len(self.numbers))
        self.losses.append((vector_step, reason))
        self.end(envs, vector_step, np.ones(len(envs), np.bool_), is_lost=True)

    def nth(self, env: int, vector_step: int) -> int:
        """Number of episodes of the environment that had ended in the fragment when a vector step began."""
        return bisect_right(self._ends_of.get(env, ()), (vector_step, True))

    def nth_of(self, envs: NDArray[np.int64], vector_steps: NDArray[np.int64]) -> NDArray[np.int64]:
        """`nth` of several environments, i64[K], at vector steps, i64[K]: i64[K]."""
        ends = np.array(sorted((env, end) for end, env, *_ in self.ends), np.int64).reshape(-1, 2)
        most = 1 + max(int(vector_steps.max(initial=0)), int(ends[:, 1].max(initial=0)))
        ordered = ends[:, 0] * most + ends[:, 1]
        before: NDArray[np.int64] = np.searchsorted(ordered, envs * most + vector_steps, side="right")
        return before - np.searchsorted(ordered, envs * most)

    def number(self, env: int, vector_step: int) -> int:
        """The number of the episode that the environment was in at a vector step."""
        return int(self.numbers[env]) + self.nth(env, vector_step)

    def id_at(self, env: int, vector_step: int) -> str:
        """The id of the episode that the environment was in at a vector step."""
        return self.episode_id(env, self.number(env, vector_step))

    def start(self, env: int, nth: int) -> int:
        """The vector step at which an episode began."""
        return self._ends_of[env][nth - 1][0] if nth else int(self.started[env])

    def count(self, env: int) -> int:
        """Number of episodes of the environment in the fragment, with the one that goes on at its end."""
        return 1 + len(self._ends_of.get(env, ()))

    def end_of(self, env: int, nth: int) -> tuple[int, bool] | None:
        """The vector step that ended an episode, and whether it was truncated; None: it goes on."""
        ends = self._ends_of.get(env, ())
        return ends[nth] if nth < len(ends) else None

    def begin_after_loss(self, reason: str) -> None:
        """Put before the first vector step the episodes that were lost then."""
        self.started, self.numbers = np.full_like(self.started, self.first), self.numbers - 1
        self.losses.insert(0, (self.first, reason))
        for env in reversed(range(len(self.numbers))):
            self.ends.insert(0, (self.first, env, True, True))
            self._ends_of.setdefault(env, []).insert(0, (self.first, True))

    def next(self, vector_step: int) -> "EnvClock":
        """The clock of the fragment that begins now."""
        started, numbers = self.started.copy(), self.numbers.copy()
        for end, env, *_ in self.ends:
            started[env], numbers[env] = end, numbers[env] + 1
        return EnvClock(vector_step, started, numbers, self.episode_id)


class AgentFragment(Fragment):
    """The steps of a part's agents: a `Fragment` with S agent slots, each of which is one agent of one environment.

    A row is a step of the agent, not of its environment. A slot has as many rows as it has made steps, up to `stops`;
    values in later rows have no meaning. Next to the columns:

        clock        i64[H+T+1, S]   vector step at which the observation came
        module_of    i16[H+T, S]     index in `module_ids` of the module that acted
        stops        i64[S]          row after the slot's last transition
        acts         bool[S]         whether the newest observation, in row `stops`, waits for an action
        waits        bool[S]         whether row `stops` has an action whose observation is yet to come
        received     f32[S]          reward received since that action
        serves       i16[S]          index in `module_ids` of the module that serves the slot at the end
        ends         (row, slot) of an episode's last step -> vector step of its end
        early        (vector step, slot, reward) of rewards that agents got before they had an observation in the
                     environment's episode, in the order of time. Those of agents that still had none at the beginning
                     of the fragment are there from the episode's beginning on
        env_clock    begins and ends of the episodes of the environments
        envs         i64[N]: of whole episodes, numbers in the lane of their environments
        outputs      module id -> names of its extra outputs. Columns of other modules have zeros in its rows
    """

    def __init__(
        self,
        *args: Any,
        part: AgentPart,
        env_clock: EnvClock,
        clock: NDArray[np.int64] | None = None,
        module_of: NDArray[np.int16] | None = None,
    ) -> None:
        super().__init__(*args)
        self.part, self.env_clock = part, env_clock
        rows, slots = self.last_row, self.layout.num_slots
        self.clock = np.zeros((rows + 1, slots), np.int64) if clock is None else clock
        self.module_of = np.zeros((rows, slots), np.int16) if module_of is None else module_of
        self.ends: dict[tuple[int, int], int] = {}
        self.early: list[tuple[int, int, float]] = []
        self.module_ids: Sequence[Any] = ()
        self.outputs: Mapping[Any, Sequence[str]] = {}
        self.acts = self.waits = np.zeros(slots, np.bool_)
        self.received = np.zeros(slots, np.float32)
        self.serves = np.zeros(slots, np.int16)
        self._stops: NDArray[np.int64] = np.full(slots, rows)
        self._of_modules: dict[Any, ModuleFragment] = {}

    @cached_property
    def chunk_modules(self) -> NDArray[np.int16]:
        """i16[C]: index in `module_ids` of the module that acted in each chunk."""
        return self.module_of[self.chunks.start, self.chunks.slot]

    def of_module(self, module_id: Any) -> "ModuleFragment":
        """The chunks in which a module acted. Raises ColumnError for a module without outputs here."""
        if module_id not in self.outputs:
            raise ColumnError(f"{self!r}: module '{module_id}' has not acted; {sorted(map(str, self.outputs))} have")
        made = self._of_modules.get(module_id)
        if made is None:
            made = self._of_modules[module_id] = ModuleFragment(self, module_id)
        return made

    def env_slots(self, slot: Any, number: Any) -> Any:
        """The numbers in the lane of the environments that chunks are from: an int or i64[C], as `slot` is."""
        env = slot // len(self.part.agents)
        return env if self.envs is None else self.envs[env]

    def chunk(self, index: int) -> SingleAgentEpisode:
        """Chunk number `index` of `chunks`, as an episode with the ids of its agent, module and multi-agent episode."""
        row, slot = int(self.chunks.start[index]), int(self.chunks.slot[index])
        return self._named_after(super().chunk(index), row, slot, self.module_ids[int(self.chunk_modules[index])])

    def rest_of(self, slot: int) -> SingleAgentEpisode:
        """The episode of a slot without a step here: its lookback, and its newest observation."""
        stop, ended = int(self._stops[slot]), int(np.count_nonzero(self.chunks.slot == slot))
        ended += sum(slot in loss.slots and slot not in loss.cut for loss in self.losses)
        t_started = 0 if ended else max(0, self.first_row - int(self.episode_start[slot]))
        number, lookback = int(self.episode_number[slot]) + ended, min(t_started, self.layout.lookback)
        flags = {"terminated": False, "truncated": False, "t_started": t_started}
        module_id = self.module_ids[int(self.serves[slot])]
        view = self.of_module(module_id) if module_id in self.outputs else self
        return self._named_after(view._episode(slot, number, stop, stop, lookback, **flags), stop, slot, module_id)

    def times_of(self, index: int) -> NDArray[np.int64]:
        chunks = self.chunks
        begin, stop, slot = (int(each[index]) for each in (chunks.start, chunks.stop, chunks.slot))
        return self.times(begin, stop, slot, has_ended=bool(chunks.terminated[index] | chunks.truncated[index]))

    def times(self, begin: int, stop: int, slot: int, *, has_ended: bool) -> NDArray[np.int64]:
        """i64[n + 1]: vector steps of a slot's observations in rows begin … stop, with that of the episode's end."""
        times = self.clock[begin : stop + 1, slot].copy()
        if has_ended:
            times[-1] = self.ends[stop - 1, slot]
        return times

    def early_in(self, env: int, started: int, stop: int) -> Iterator[tuple[int, int, float]]:
        """Place of the agent, vector step and reward of an environment's `early` between two vector steps."""
        for vector_step, slot, reward in self.early:
            of_env, place = divmod(slot, len(self.part.agents))
            if of_env == env and started < vector_step <= stop:
                yield place, vector_step, reward

    def parent_of(self, row: int, slot: int) -> str:
        """The id of the multi-agent episode that the observation of a slot in a row is of."""
        return self.env_clock.id_at(slot // len(self.part.agents), int(self.clock[row, slot]))

    def _named_after(self, episode: SingleAgentEpisode, row: int, slot: int, module_id: Any) -> SingleAgentEpisode:
        """The episode of a slot that has an observation in a row, with the ids of what it is a part of."""
        episode.agent_id, episode.module_id = self.part.agents[slot % len(self.part.agents)], module_id
        episode.multi_agent_episode_id = self.parent_of(row, slot)
        return episode

    def action_in(self, row: int, slot: int) -> PendingAction:
        """The action and extra outputs of a slot in a row, trees of arrays `any[...]`, while no observation answers."""
        values = {name: map_tree(lambda leaf: leaf[row, slot], self.columns[name].tree) for name in self.extra_columns}
        return PendingAction(map_tree(lambda leaf: leaf[row, slot], self.columns[Columns.ACTIONS].tree), values)

    def seal_at(self, stops: NDArray[np.int64]) -> None:
        """End every slot at the row in `stops`, i64[S], and make all arrays read-only. No flag is set in later rows."""
        super().seal_at(stops)
        self.clock.flags.writeable = self.module_of.flags.writeable = False

    def __repr__(self) -> str:
        agents = ", ".join(map(str, self.part.agents[:3])) + (", …" if len(self.part.agents) > 3 else "")
        return f"<AgentFragment {self.sequence} of lane {self.lane}: agents {agents}>"


class ModuleFragment(AgentFragment):
    """View of an `AgentFragment` with the chunks in which one module acted, over the same columns."""

    def __init__(self, whole: AgentFragment, module_id: Any) -> None:
        # Only the chunks differ, so the other attributes are taken over and the constructor is not called.
        self.__dict__.update(whole.__dict__)
        self._module_id = module_id
        self._of_modules = {}  # a reference to itself would keep the columns until a collection
        chosen = whole.chunk_modules == whole.module_ids.index(module_id)
        chunks = whole.chunks
        fields = {name: getattr(chunks, name)[chosen] for name in ChunkIndex.__slots__}
        self.__dict__ |= {"chunks": ChunkIndex(**fields), "chunk_modules": whole.chunk_modules[chosen]}
        for name in ("row_order", "_final_items"):
            self.__dict__.pop(name, None)

    @property
    def extra_columns(self) -> tuple[str, ...]:
        """Names of this module's extra outputs, `policy_version` among them."""
        return (*self.outputs[self._module_id], Columns.POLICY_VERSION)
