"""`ExternalEnv`: environments that step themselves, whose episodes a rollout elsewhere trains with."""

import itertools
import logging
import math
import ssl
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from rollflow.nodes.env.environments import TAKEN_ACTION
from rollflow.nodes.env.observation_check import misfit_of
from rollflow.nodes.env.remote.env_host import EnvHost
from rollflow.nodes.offloaded.rollout_host import RolloutHost
from rollflow.stream.data.closing import ClosedOnExit, closing_on_error
from rollflow.stream.data.errors import EnvError, shown
from rollflow.stream.data.infos import SlotInfos
from rollflow.stream.data.space import check_columnar, row_of
from rollflow.stream.data.tree import Tree, equal_trees, map_tree, tree_at
from rollflow.stream.net.endpoint import Secret, endpoint_at
from rollflow.stream.wire import Limits

logger = logging.getLogger(__name__)

EpisodeId = str | int
_LINGER_S = 10.0


@dataclass(slots=True, eq=False)
class Logged:
    """An observation that a program has logged.

    observation    any[...] in the space
    reward         for the action before
    infos          that came with it
    ended          whether the episode is over, and whether it was cut off; None: it wants an action
    action         that was chosen for it; None: none yet
    """

    observation: Tree
    reward: float = 0.0
    infos: Mapping[str, Any] = field(default_factory=dict)
    ended: tuple[bool, bool] | None = None
    action: Tree = None


class EpisodeLane(VectorEnv[Any, Any, Any]):
    """A vector environment with one slot, whose episodes a program plays in its own time, one after the other.

    reward, infos    of the episode since its last action
    has_action       whether there was an action
    asked            what has no action yet; None: all have
    is_waiting       whether a call waits for that action

    The lane's thread calls `reset` and `step`, which wait for the program; that calls `log` and `action_of`. If
    nobody wants the rest of an episode any more, since the rollout was started anew, what is left of it is another
    episode.
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012  # gymnasium reads it from the class

    def __init__(self, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> None:
        self.num_envs = 1
        self.single_observation_space, self.single_action_space = observation_space, action_space
        self.observation_space, self.action_space = batch_space(observation_space, 1), batch_space(action_space, 1)
        self._row = row_of(observation_space, 1)
        self._logged: deque[Logged] = deque()
        self._has_logged = False
        self._asking: Logged | None = None  # that `reset` or `step` gave last, and that has no action yet
        self._is_waiting = False  # the lane's thread, for what is logged next
        self._is_over = False  # the episode that `step` gave last
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self.begin_episode()

    # For the program

    def begin_episode(self) -> None:
        """Begin with an episode of which nothing is known."""
        self.reward, self.has_action, self.is_waiting = 0.0, False, False
        self.infos: dict[str, Any] = {}
        self.asked: Logged | None = None

    def log(self, logged: Logged) -> None:
        """Take an observation; waits for nothing. Raises EnvError in the end."""
        with self._changed:
            if self._error is not None:
                raise self._raised()
            self._logged.append(logged)
            self._has_logged = True
            self._changed.notify_all()

    def action_of(self, logged: Logged, timeout: float | None) -> Tree:
        """The action for an observation. Raises EnvError in the end, and TimeoutError after so many seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: logged.action is not None or self._error is not None, timeout):
                raise TimeoutError(f"no action has come within {timeout:g} s")
            if logged.action is None:
                raise self._raised()
            return logged.action

    def wait_until_sent(self, until: float) -> bool:
        """Wait until the rollout wants more than was logged, so that it has all of it; False: it was too late."""
        with self._changed:
            while (self._logged or self._asking is not None or not self._is_waiting) and self._has_logged:
                if self._error is not None or not self._changed.wait(max(0.0, until - monotonic())):
                    return False
            return True

    def end(self, error: Exception) -> None:
        """Have all that waits, and all that comes, raise this; the lane's thread is let go."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    # For the lane's thread

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Tree, Any]:
        """The first observation of the next episode, once the program has logged it."""
        with self._changed:
            self._is_over = False
            while self._asking is None:
                logged = self._next()
                if logged.ended is None:  # the end of an episode that nobody wants any more says nothing
                    self._asking = logged
            return self._observed(self._asking), SlotInfos([self._asking.infos])

    def step(self, actions: Tree) -> Any:
        """Give the program its action; the next observation, once that is logged."""
        with self._changed:
            if self._is_over:
                observation, infos = self.reset()
                return observation, np.zeros(1), np.zeros(1, np.bool_), np.zeros(1, np.bool_), infos
            if self._asking is not None:
                self._asking.action = tree_at(map_tree(np.array, actions), 0)
                self._changed.notify_all()
            logged = self._next()
            self._asking, self._is_over = (logged, False) if logged.ended is None else (None, True)
            terminated, truncated = logged.ended or (False, False)
            flags = np.array([terminated], np.bool_), np.array([truncated], np.bool_)
            return self._observed(logged), np.array([logged.reward]), *flags, SlotInfos([logged.infos])

    def close(self, **kwargs: Any) -> None:
        """Let the thread go."""
        self.end(EnvError("this environment is closed"))

    # Inside

    def _raised(self) -> Exception:
        assert self._error is not None
        return type(self._error)(str(self._error))

    def _next(self) -> Logged:
        """The next observation; in the end one of zeros, which nobody takes."""
        self._is_waiting = True
        self._changed.notify_all()
        self._changed.wait_for(lambda: bool(self._logged) or self._error is not None)
        self._is_waiting = False
        return self._logged.popleft() if self._logged else Logged(tree_at(self._row, 0))

    def _observed(self, logged: Logged) -> Tree:
        return map_tree(lambda like, leaf: np.asarray(leaf, like.dtype)[None], self._row, logged.observation)


class ExternalEnv(ClosedOnExit):
    """Environments that step themselves, such as a game, a robot or a live service: they ask for actions, log rewards.

        address              of the rollout, `tcp://host:port` or `unix:/path`
        observation_space,   of each of the environments
        action_space
        episodes             that may be played at a time
        inference            "server": the rollout chooses actions, over `RemoteEnvs`; "client": a copy of its module
                             does so here, over `RemoteRollouts`, with the weights that the trainer publishes
        timeout              seconds that an action is waited for; None: any time
        retry_s              seconds that the rollout is dialled in vain; None: for ever
        secret, tls, limits  as for `EnvHost.connect`
        options              as for `EnvHost`: `name`; with inference="client" as for `RolloutHost`: `module` and
                             connectors as well

    It is called from any number of threads, an episode from one at a time. Each transition stands in the rollout once,
    whatever becomes of connections; the rollout counts those of episodes that were cut off as lost. A rollout waits for
    as long as its `Timeouts` say: give it None for both.

    Raises WireError for an address, a secret or a certificate that can't be; EnvError, once the rollout has said
    goodbye, for each call that wants an action.
    """

    def __init__(
        self,
        address: str,
        *,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        episodes: int = 1,
        inference: Literal["server", "client"] = "server",
        timeout: float | None = None,
        retry_s: float | None = 60.0,
        secret: Secret = None,
        tls: ssl.SSLContext | None = None,
        limits: Limits | None = None,
        **options: Any,
    ) -> None:
        if inference not in ("server", "client"):
            raise ValueError(f"inference is {inference!r}, expected 'server' or 'client'")
        if episodes < 1:
            raise ValueError(f"episodes is {episodes}, expected at least 1")
        for name, space in (("observation_space", observation_space), ("action_space", action_space)):
            check_columnar(space, name)
        endpoint_at(address, secret, tls, limits)
        self.observation_space, self.action_space, self.timeout = observation_space, action_space, timeout
        self._lanes = [EpisodeLane(observation_space, action_space) for _ in range(episodes)]
        kind: type[EnvHost | RolloutHost] = EnvHost if inference == "server" else RolloutHost
        self._host = kind(self._lanes, **options)
        self._free = list(self._lanes)
        self._episodes: dict[EpisodeId, EpisodeLane] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        connect = partial(self._host.connect, address, secret=secret, tls=tls, limits=limits, retry_s=retry_s)
        self._thread = threading.Thread(
            target=self._serve, args=(connect,), name="rollflow external environments", daemon=True
        )
        with closing_on_error(self._host.close):
            self._thread.start()

    def start_episode(self, episode_id: EpisodeId | None = None) -> EpisodeId:
        """Begin an episode; its id. Raises EnvError for an id that is there, and if too many are being played."""
        with self._lock:
            made = next(self._numbers) if episode_id is None else episode_id
            if made in self._episodes:
                raise EnvError(f"episode {made!r} has been started already, expected end_episode before")
            if not self._free:
                raise EnvError(
                    f"{len(self._lanes)} episodes are being played, expected fewer, or "
                    f"ExternalEnv(episodes={len(self._lanes) + 1} or more)"
                )
            self._episodes[made] = lane = self._free.pop(0)
            lane.begin_episode()
            return made

    def get_action(self, episode_id: EpisodeId, observation: Tree) -> Any:
        """The action for an observation, any[...]: an item of the action space.

        Raises EnvError for an unknown episode, for an observation outside of the space, and once the rollout has ended;
        TimeoutError if no action comes in time: another call with the same observation waits for it again.
        """
        return self._ask(episode_id, observation, {})

    def log_action(self, episode_id: EpisodeId, observation: Tree, action: Any) -> None:
        """Log an action that was chosen elsewhere for an observation, any[...], in the place of `get_action`.

        The rollout records it with NaN as its log-probability, since no policy of its own chose it. Raises EnvError as
        `get_action` does, and for an action outside of the space.
        """
        like = self.action_space.sample()
        item = map_tree(lambda leaf, given: np.asarray(given, np.asarray(leaf).dtype), like, action)
        flat = item[()] if isinstance(item, np.ndarray) and not item.ndim else item
        if not self.action_space.contains(flat):
            raise EnvError(f"episode {episode_id!r}: action {shown(action)} is not in {self.action_space}")
        self._ask(episode_id, observation, {TAKEN_ACTION: item})

    def log_returns(self, episode_id: EpisodeId, reward: float, info: dict[str, Any] | None = None) -> None:
        """Add to the reward of the action before; the info goes with the next observation."""
        episode = self._episode(episode_id)
        if not episode.has_action:
            raise EnvError(f"episode {episode_id!r}: a reward, but no action came before, expected get_action first")
        if not math.isfinite(reward):
            raise EnvError(f"episode {episode_id!r}: reward is {shown(reward)}, expected a finite number")
        episode.reward += float(reward)
        episode.infos |= info or {}

    def end_episode(self, episode_id: EpisodeId, observation: Tree, *, truncated: bool = False) -> None:
        """End an episode with its last observation, any[...].

        truncated    True: it was cut off, and might have gone on

        An episode without an action leaves nothing. Raises EnvError as `get_action` does.
        """
        episode = self._episode(episode_id)
        self._check(episode_id, observation)
        if episode.asked is not None:
            raise EnvError(f"episode {episode_id!r} waits for an action, expected it to come before the end")
        if episode.has_action:
            ended = not truncated, truncated
            episode.log(Logged(_copied(observation), episode.reward, episode.infos, ended))
        with self._lock:
            del self._episodes[episode_id]
            self._free.append(episode)

    def close(self) -> None:
        """Say goodbye, once the rollout has what was logged, or after 10 s; episodes that are open end as truncated."""
        until = monotonic() + _LINGER_S
        if not all([lane.wait_until_sent(until) for lane in self._lanes if self._thread.is_alive()]):
            logger.warning("the rollout has not taken all that was logged")
        self._host.stop()
        self._thread.join()
        self._end(EnvError("this external environment is closed"))
        self._host.close()

    # Inside

    def _ask(self, episode_id: EpisodeId, observation: Tree, taken: dict[str, Any]) -> Any:
        episode = self._episode(episode_id)
        self._check(episode_id, observation)
        if episode.is_waiting:
            raise EnvError(f"episode {episode_id!r} waits for an action already, expected one call at a time")
        asked = episode.asked
        if asked is None:
            asked = episode.asked = Logged(_copied(observation), episode.reward, episode.infos)
            episode.reward, episode.infos = 0.0, dict(taken)
            episode.log(asked)
        elif not equal_trees(asked.observation, _copied(observation)):
            raise EnvError(f"episode {episode_id!r} waits for the action of another observation, expected the same one")
        episode.is_waiting = True
        try:
            action = episode.action_of(asked, self.timeout)
        finally:
            episode.is_waiting = False
        episode.asked, episode.has_action = None, True
        return action

    def _episode(self, episode_id: EpisodeId) -> EpisodeLane:
        episode = self._episodes.get(episode_id)
        if episode is None:
            raise EnvError(f"there is no episode {episode_id!r}, expected one that start_episode gave, and not ended")
        return episode

    def _check(self, episode_id: EpisodeId, observation: Tree) -> None:
        if (text := misfit_of(self.observation_space, observation)) is not None:
            raise EnvError(f"episode {episode_id!r}: {text}")

    def _serve(self, connect: Callable[[], str]) -> None:
        try:
            error: Exception = EnvError(f"the rollout has ended: {connect()}")
        except Exception as raised:
            error = EnvError(f"the rollout is gone: {raised}")
        self._end(error)

    def _end(self, error: Exception) -> None:
        for lane in self._lanes:
            lane.end(error)


def _copied(observation: Tree) -> Tree:
    """A copy of an observation: programs reuse theirs."""
    return map_tree(np.array, observation)
