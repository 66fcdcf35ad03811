"""`EnvHost`: environments on this host, for a rollout on another, and the lanes that they are."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.nodes.argument_checks import checking_keywords, is_whole
from rollflow.nodes.env.env_source import Autoreset, EnvSource, with_kwargs
from rollflow.nodes.env.environments import AgentEnvSource, check_numbers, kind_of
from rollflow.nodes.env.lane_envs import LaneEnvs
from rollflow.nodes.env.observation_check import Deviations
from rollflow.nodes.env.remote.host import PLACES, Host
from rollflow.nodes.env.stepping import Stepped, close_failed
from rollflow.nodes.env.workers.agent_codec import InfoCodec
from rollflow.nodes.env.workers.stand_ins import description_of
from rollflow.stream.data.closing import close_all, closing_on_error
from rollflow.stream.data.errors import EnvError
from rollflow.stream.data.space import row_of, space_of
from rollflow.stream.data.tree import Tree, map_tree
from rollflow.stream.multi_agent.agent_part import Observed
from rollflow.stream.wire import AgentRows, Answer, Reset, Rows, Step


def check_alike(lanes: Sequence[Any]) -> None:
    """Raise EnvError if lanes differ in what one description is for."""
    first = lanes[0].describe()
    for place, lane in enumerate(lanes):
        for name, mine in lane.describe().items():
            if mine != first[name]:
                text, other = (space_of(each) if name.endswith("space") else each for each in (mine, first[name]))
                raise EnvError(f"lane {place}: its {name} is {text}, expected that of lane 0, {other}")


class HostLane:
    """Environments of one lane of a host, of one agent each or of several, which a thread steps.

    maker         a `LaneMaker` or `AgentLaneMaker`; unless a user has made the environments, they are made again if
                  they are reset after they have raised
    index         number of the lane
    deviations    of what they give
    env           the environments as they are now

    Raises EnvError if they can't be made.
    """

    def __init__(self, maker: Any, index: int, deviations: Deviations) -> None:
        self._make = partial(maker.lane_env, deviations, f"lane {index}, ")
        self._can_be_remade, self._has_failed = maker.can_travel, False
        self._left_out = deviations.left_out
        self.env: Any = self._make()
        self._has_several = isinstance(self.env, LaneEnvs)
        if self._has_several:
            self._infos = InfoCodec(self.env.possible_agents, maker.first_slot)
        else:
            self._row = row_of(self.env.env.single_observation_space, 1)

    def describe(self) -> dict[str, Any]:
        """Fields of a Hello. Raises EnvError if agents' ids can't be sent."""
        return sent_description_of(self.env)

    def answer(self, request: Reset | Step) -> Rows | AgentRows:
        """Step or reset; the rows. Raises what the environments raise."""
        try:
            if isinstance(request, Step):
                return self._agents_stepped(request) if self._has_several else self._stepped(request)
            if self._has_failed and self._can_be_remade:
                close_failed(self.env)
                self.env = self._make()
            answer = self._agents_reset(request) if self._has_several else self._reset(request)
            self._has_failed = False
            return answer
        except BaseException:
            self._has_failed = True
            raise

    # Inside

    def _in_space(self, observations: Tree) -> Tree:
        """Observations in the space's dtypes, which the wire has, as a column would cast them elsewhere."""
        try:
            return map_tree(_cast, self._row, observations)
        except ValueError:  # of another structure, which is refused where it is sent
            return observations

    def _reset(self, request: Reset) -> Rows:
        options = None if request.options is None else dict(request.options)
        observations, infos = self.env.reset(request.seeds, options)
        return Rows(request.lane, request.number, self._in_space(observations), None, None, None, (), None, infos, {})

    def _stepped(self, request: Step) -> Rows:
        observations, rewards, terminateds, truncateds, infos, final = Stepped(*self.env.step(request.actions))
        slots: tuple[int, ...] = ()
        last: Tree = None
        last_infos: Mapping[str, Any] = {}
        if final is not None:
            slots = tuple(np.flatnonzero(np.logical_or(terminateds, truncateds)).tolist())
            last, last_infos = self._in_space(final[0]), final[1]
        return Rows(
            request.lane,
            request.number,
            self._in_space(observations),
            np.asarray(rewards, np.float64),
            np.asarray(terminateds, np.bool_),
            np.asarray(truncateds, np.bool_),
            slots,
            last,
            infos,
            last_infos,
        )

    def _agents_reset(self, request: Reset) -> AgentRows:
        observed, infos = self.env.reset(request.seeds)
        nothing = dict.fromkeys(
            ("rewards", "terminateds", "truncateds", "ended", "ended_truncated", "first_agent_slots", "first_obs")
        )
        slots, obs = _columns(observed)
        sent = self._infos.sent(infos, range(self.env.num_envs), self._left_out)
        return AgentRows(request.lane, request.number, slots, obs, **nothing, infos=sent, first_infos=())

    def _agents_stepped(self, request: Step) -> AgentRows:
        assert request.agent_slots is not None
        step = self.env.step(list(zip(request.agent_slots, request.actions, strict=True)))
        slots, obs = _columns([part.observed for part in step.parts])
        first_slots, first_obs = _columns(step.first) if len(step.ended) else (None, None)
        return AgentRows(
            request.lane,
            request.number,
            slots,
            obs,
            tuple(part.rewards for part in step.parts),
            tuple(part.terminateds for part in step.parts),
            tuple(part.truncateds for part in step.parts),
            step.ended,
            step.truncated,
            first_slots,
            first_obs,
            self._infos.sent(step.infos, range(self.env.num_envs), self._left_out),
            self._infos.sent(step.first_infos, step.ended.tolist(), self._left_out),
        )


def _cast(like: NDArray[Any], values: Any) -> Any:
    """Values in the dtype of `like`, if they are of the same kind."""
    array = np.asarray(values)
    return array.astype(like.dtype, copy=False) if np.can_cast(array.dtype, like.dtype, "same_kind") else values


def sent_description_of(env: Any) -> dict[str, Any]:
    """Fields of a Hello about the environments of a lane. Raises EnvError if agents' ids can't be sent."""
    fields = description_of(env)
    return fields | {"agents": tuple(map(_sent, fields["agents"]))} if "agents" in fields else fields


def made_lanes(
    env: Any,
    num_envs: int | None,
    lanes: int | None,
    autoreset_mode: Autoreset,
    make: Callable[[Any, int], Any],
    of_agents: Mapping[str, Any] | None = None,
) -> tuple[list[Any], bool]:
    """The lanes of a host, and whether environments have several agents each, as the first one that is made has.

    make         makes a lane of its maker, a `LaneMaker` or `AgentLaneMaker`, and its number
    of_agents    options that are for several agents alone

    Raises EnvError if they can't be made, and for options of the other kind.
    """
    with kind_of(env) as (kind, given):
        has_several = kind.has_several
        if has_several and autoreset_mode is not None:
            raise EnvError(
                f"autoreset_mode is {autoreset_mode!r}, but these environments have several agents; expected it to be "
                "left out"
            )
        for name, value in {} if has_several or of_agents is None else of_agents.items():
            if value is not None:
                raise EnvError(f"{name} is for environments with several agents; expected it to be left out")
        made: list[Any] = []
        with closing_on_error(lambda: close_all(("a lane", lane.env.close) for lane in made)):
            for index, maker in enumerate(kind.makers(given, num_envs, lanes, autoreset_mode)):
                placed = replace(maker, first_slot=sum(lane.env.num_envs for lane in made))
                made.append(make(placed, index))
            if has_several:
                check_numbers(num_envs, lanes, [lane.env for lane in made])
            check_alike(made)
        return made, has_several


def _sent(agent: Any) -> str | int:
    """An agent's id as it goes over the wire. Raises EnvError if it can't."""
    if isinstance(agent, str):
        return str(agent)
    if is_whole(agent):
        return int(agent)
    raise EnvError(f"agent {agent!r}: its id can't be sent to another host; expected a string or a whole number")


def _columns(observed: Sequence[Observed]) -> Any:
    return tuple(each.slots for each in observed), tuple(each.observations for each in observed)


class EnvHost(Host):
    """Environments for a rollout on another host.

        env, num_envs, lanes    as for `Rollout`, or for `MultiAgentRollout`; lanes overlap: while one's actions are on
                                their way, others step
        env_kwargs              as for `Rollout`
        autoreset_mode          as for `Rollout`; not for environments with several agents
        name                    what it is called in the gateway's messages; None: the machine's name and this process'
                                number

    role    "agents" if an environment has several agents, else "env"

    Every lane has a thread of its own. Leave it by `with`, or `close` it: this ends the threads and closes the
    environments.

    Raises EnvError if environments can't be made, or lanes differ.
    """

    @checking_keywords("EnvHost", PLACES)
    def __init__(
        self,
        env: EnvSource | AgentEnvSource,
        *,
        env_kwargs: Mapping[str, Any] | None = None,
        num_envs: int | None = None,
        lanes: int | None = None,
        autoreset_mode: Autoreset = None,
        name: str | None = None,
    ) -> None:
        deviations = Deviations()
        made, has_several = made_lanes(
            with_kwargs(env, env_kwargs),
            num_envs,
            lanes,
            autoreset_mode,
            lambda maker, index: HostLane(maker, index, deviations),
        )
        self.role = "agents" if has_several else "env"
        metadata = {"env": env} if isinstance(env, str) else {}
        super().__init__(made, name=name, metadata=metadata)

    def _work_on(self, lane: HostLane, request: Any) -> Callable[[], Answer]:
        return partial(lane.answer, request)
