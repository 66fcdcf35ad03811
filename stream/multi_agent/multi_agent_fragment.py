"""MultiAgentFragment: T vector steps of a lane of environments with several agents each."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.stream.data.cached_property import cached_property
from rollflow.stream.data.loss_ledger import Origin
from rollflow.stream.episodes.multi_agent import MultiAgentEpisode
from rollflow.stream.fragments.fragment import Fragment, FragmentEpisodes
from rollflow.stream.multi_agent.agent_fragment import AgentFragment, EnvClock, ModuleFragment
from rollflow.stream.multi_agent.env_episodes import sealed_episode

AgentChunk = tuple[Any, Fragment, int]
"""Part of an agent's episode: the agent's key, the same in all fragments, a fragment, and the index in its `chunks`."""


class MultiAgentFragment:
    """T vector steps of N environments with several agents each; read-only.

    lane, sequence    number of the lane, and of the fragment in it
    parts             the agents' steps, one fragment for each part
    num_envs          N
    num_rows          T
    clock             begins and ends of episodes
    custom_data       (environment, number of its episode) -> data that pieces keep with the episode
    envs              i64[N]: of whole episodes, numbers in the lane of their environments; None: these are the lane's
    is_last           whether this is the lane's last fragment
    """

    origin: Origin | None = None  # which counts lost transitions; set at the cut

    def __init__(
        self,
        lane: int,
        sequence: int,
        parts: Sequence[AgentFragment],
        *,
        num_rows: int,
        clock: EnvClock,
        custom_data: Mapping[tuple[int, int], Mapping[Any, Any]],
        envs: NDArray[np.int64] | None = None,
    ) -> None:
        self.lane, self.sequence, self.parts = lane, sequence, tuple(parts)
        self.num_envs, self.num_rows, self.clock = len(clock.numbers), num_rows, clock
        self.episode_id, self.custom_data = clock.episode_id, custom_data
        self.envs, self.is_last = envs, False

    @property
    def host(self) -> "MultiAgentFragment":
        """The fragment with columns of arrays: this one."""
        return self

    @property
    def num_steps(self) -> int:
        """Number of agent steps, without lookback."""
        return sum(part.num_steps for part in self.parts)

    @property
    def is_empty(self) -> bool:
        """True if there are no environment steps; a fragment with some may still have no agent step."""
        return not self.num_rows

    @property
    def nbytes(self) -> int:
        """Bytes in the columns."""
        return sum(part.nbytes for part in self.parts)

    @property
    def module_ids(self) -> list[Any]:
        """The modules that have acted so far, part by part."""
        return [module_id for part in self.parts for module_id in part.outputs]

    @property
    def losses(self) -> list[tuple[int, str]]:
        """Losses of the environments: (vector step since the first reset, reason).

        Ongoing episodes ended as truncated. An agent without a step in this fragment has no chunk to mark so.
        """
        return self.clock.losses

    @cached_property
    def agent_chunks(self) -> dict[tuple[int, int], list[AgentChunk]]:
        """(environment, number of its episode in the fragment) -> chunks of its agents.

        An agent's key is the number of its part, its place in that, and the id of its module.
        """
        found: dict[tuple[int, int], list[AgentChunk]] = {}
        for number, part in enumerate(self.parts):
            for module_id in part.outputs:
                view = part.of_module(module_id)
                envs, places = np.divmod(view.chunks.slot, len(part.part.agents))
                nths = self.clock.nth_of(envs, part.clock[view.chunks.start, view.chunks.slot])
                rows = zip(envs.tolist(), nths.tolist(), places.tolist(), strict=True)
                for index, (env, nth, place) in enumerate(rows):
                    found.setdefault((env, nth), []).append(((number, place, module_id), view, index))
        return found

    def of_module(self, module_id: Any) -> ModuleFragment:
        """The agents' chunks in which a module acted. Raises KeyError for one that has not acted so far."""
        for part in self.parts:
            if module_id in part.outputs:
                return part.of_module(module_id)
        raise KeyError(f"module '{module_id}' has not acted in {self!r}, expected one of {self.module_ids}")

    def by_module(self) -> dict[Any, ModuleFragment]:
        """Module id -> its agents' chunks, of modules that have made steps here."""
        return {module_id: parts[0] for module_id, parts in parts_by_module([self]).items()}

    def policy_versions(self) -> dict[Any, int]:
        """Module id -> the oldest version that an action was computed with, of modules that acted."""
        return {module_id: part.policy_version for module_id, part in self.by_module().items()}

    def agent_episodes(self, module_id: Any) -> FragmentEpisodes:
        """The chunks of one module's agents as a sequence of `SingleAgentEpisode`, made on demand."""
        return FragmentEpisodes([self.of_module(module_id)])

    def episodes(self) -> Iterator[MultiAgentEpisode]:
        """The chunks of the environments' episodes, environment by environment, in the order of time.

        The rewards of an agent that waits for its next observation count as received in the last env step.
        """
        for env in range(self.num_envs):
            for nth in range(self.clock.count(env)):
                episode = sealed_episode(self, env, nth)
                if len(episode) and episode.agent_ids:  # after a loss, no agent may be left
                    yield episode

    def env_slot(self, env: int) -> int:
        """The number in the lane of an environment."""
        return env if self.envs is None else int(self.envs[env])

    def begin_after_loss(self, reason: str) -> None:
        """Record that the environments were lost before this fragment's first step: all open episodes ended."""
        self.clock.begin_after_loss(reason)
        for part in self.parts:
            part.begin_after_loss(reason)

    def __repr__(self) -> str:
        if self.envs is not None:
            held = f"{self.num_envs} episodes, {self.num_steps} agent steps"
            return f"<WholeMultiAgentEpisodes {self.sequence} of lane {self.lane}: {held}>"
        return (
            f"<MultiAgentFragment {self.sequence} of lane {self.lane}: {self.num_rows} vector steps × {self.num_envs} "
            "environments>"
        )


AnyFragment = Fragment | MultiAgentFragment


def parts_by_module(
    fragments: Iterable[MultiAgentFragment], is_wanted: Callable[[Any], bool] | None = None
) -> dict[Any, list[ModuleFragment]]:
    """Module id -> its agents' chunks, fragment by fragment, of modules that have made steps there.

    is_wanted    False for ids of modules that are left out; None: none is
    """
    found: dict[Any, list[ModuleFragment]] = {}
    for part in (part for fragment in fragments for part in fragment.parts):
        for module_id in part.outputs if is_wanted is None else filter(is_wanted, part.outputs):
            mine = part.of_module(module_id)
            if len(mine.chunks.slot):
                found.setdefault(module_id, []).append(mine)
    return found
