"""`PolicyClient`: has a server of policies choose actions, over connections that may break."""

import socket
import ssl
from collections.abc import Mapping, Sequence
from math import inf
from time import monotonic
from typing import Any, Self

import gymnasium as gym
import numpy as np

from rollflow.nodes.argument_checks import checked_number
from rollflow.nodes.env.remote.remote_envs import Secret, check_tls, secret_bytes
from rollflow.nodes.env.remote.software import software
from rollflow.policy.served_policy import ServedPolicy, actions_of, count_of, policy_of
from rollflow.policy.serving.items import item_from
from rollflow.policy.serving.request import (
    ClosedError,
    RequestError,
    SessionLostError,
    UnansweredError,
    UnknownPolicyError,
)
from rollflow.stream import wire
from rollflow.stream.data.tree import Tree, map_tree, tree_at
from rollflow.stream.net.request_link import LinkTarget, RequestLink

DEFAULT_SESSION = "default"
CLIENT_LIMITS = wire.Limits(max_frame=1 << 26, undelivered=1 << 27)
SessionName = str | int
_Key = tuple[str, SessionName]  # a policy's name, and a session's


class PolicyClient:
    """Has policies act that a `PolicyServer`, or `rollflow serve --listen`, serves elsewhere.

        address    of the server, `tcp://host:port` or `unix:/path`
        policy     the name of the policy that acts; None: the only one
        secret     the server's; None: it has none
        tls        a client's context; None: nothing is encrypted
        timeout    seconds that an answer is waited for, over as many connections as it takes
        name       what the server calls this client; None: the machine's name
        limits     of frames, times and bytes under way

    It is called as a `Policy` is, from any number of threads. A session's first observation begins an episode, and so
    does the first one after `reset`. A connection that breaks is dialled again; a request that was under way is acted
    on once, and answered once. A session whose memory the server has lost, since it was started anew or away for too
    long, raises SessionLostError until it is `reset`.

    Raises WireError for an address that is none, where the server refuses this client, and where it does not know the
    secret; ServingError for what the server says of a request; UnansweredError where no answer comes in time.
    """

    def __init__(
        self,
        address: str,
        *,
        policy: str | None = None,
        secret: Secret = None,
        tls: ssl.SSLContext | None = None,
        timeout: float = 60.0,
        name: str | None = None,
        limits: wire.Limits | None = None,
    ) -> None:
        target, known = wire.parse_address(address), secret_bytes(secret)
        wire.check_secret(target, known)
        check_tls(target, tls)
        self.address, self.policy = str(target), policy
        self.timeout = checked_number("timeout", timeout, above=0, most=inf, noun="seconds")
        self._policies: dict[str, ServedPolicy] = {}
        self._begun: set[_Key] = set()  # sessions whose next observation goes on with an episode
        self._unknown: set[_Key] = set()  # sessions with a request whose answer never came
        name = socket.gethostname() if name is None else name
        limits = limits or CLIENT_LIMITS
        self._link = RequestLink(
            LinkTarget(
                target,
                known,
                tls,
                limits,
                timeout,
                software(),
                name,
                wire.ClientConnection,
                UnansweredError,
                ClosedError,
            ),
            self,
        )

    # Acting

    def act(
        self,
        observation: Tree,
        reward: float | None = None,
        session: SessionName | None = DEFAULT_SESSION,
        *,
        policy: str | None = None,
    ) -> Any:
        """The action for one observation, `any[...]`, of one environment.

            observation    in the environment's space
            reward         for the session's action before; None: none is there
            session        whose memory acts; None: the observation stands by itself
            policy         that is to act; None: the client's

        Returns an item of the action space. Raises as `act_batch` does.
        """
        until = monotonic() + self.timeout
        name, served = self._served(policy, until)
        item = item_from(served.observation_space, observation, "observation")
        rows = map_tree(lambda leaf: np.array(leaf)[None], item)
        rewards = None if reward is None else np.array([reward], np.float32)
        acted = self._asked(name, [session], rows, rewards, until)
        return tree_at(actions_of(acted, served.action_space, 1), 0)

    def act_batch(
        self,
        observations: Tree,
        rewards: Any = None,
        sessions: Sequence[SessionName | None] | None = None,
        *,
        policy: str | None = None,
    ) -> Tree:
        """The actions, any[N, ...], for one observation each of N environments, in one request.

            observations    any[N, ...]   a tree, as the environment's space has it
            rewards         f32[N]        for each session's action before, NaN for none; None: there are none
            sessions        N of them; None: 0 … N - 1
            policy          that is to act; None: the client's

        Raises ServingError: RequestError for what does not fit, SessionLostError for a session whose memory is gone,
        OverloadedError where too much waits at the server, PartlyActedError where only some observations have an
        action. Raises UnansweredError where no answer comes in time: the sessions are then lost.
        """
        until = monotonic() + self.timeout
        name, served = self._served(policy, until)
        count = count_of(observations)
        names = list(range(count)) if sessions is None else list(sessions)
        if len(names) != count or not count:
            raise RequestError(f"{count} observations for {len(names)} sessions, expected one for each, at least one")
        rows = item_from(served.observation_space, observations, "observations", (count,))  # a copy
        acted = self._asked(name, names, rows, None if rewards is None else np.asarray(rewards, np.float32), until)
        return actions_of(acted, served.action_space, count)

    def reset(self, session: SessionName = DEFAULT_SESSION, *, policy: str | None = None) -> None:
        """Begin a new episode with the session's next observation."""
        key = self._name_of(policy, monotonic() + self.timeout), session
        with self._link.changed:
            self._begun.discard(key)
            self._unknown.discard(key)

    def forget(self, session: SessionName = DEFAULT_SESSION, *, policy: str | None = None) -> None:
        """Release the memory of a session whose environment is gone."""
        name = self._name_of(policy, monotonic() + self.timeout)
        self.reset(session, policy=name)
        self._link.tell(wire.Release(name, (session,)))

    # What there is

    @property
    def policies(self) -> Mapping[str, ServedPolicy]:
        """The policies that are served, by name; waits until the server has said so. Raises as `act` does."""
        until = monotonic() + self.timeout
        with self._link.changed:
            self._link.wait(until, lambda: bool(self._policies))
            return dict(self._policies)

    @property
    def observation_space(self) -> gym.Space[Any]:
        """Space of the observations that the client's policy takes."""
        return self._served(None, monotonic() + self.timeout)[1].observation_space

    @property
    def action_space(self) -> gym.Space[Any]:
        """Space of the actions that the client's policy gives."""
        return self._served(None, monotonic() + self.timeout)[1].action_space

    def close(self) -> None:
        """Say goodbye, which ends this client's sessions; requests under way raise ClosedError."""
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Asking

    def _name_of(self, policy: str | None, until: float) -> str:
        name = self.policy if policy is None else policy
        return self._served(None, until)[0] if name is None else name

    def _served(self, policy: str | None, until: float) -> tuple[str, ServedPolicy]:
        name = self.policy if policy is None else policy
        with self._link.changed:
            self._link.wait(until, lambda: bool(self._policies))
            found = dict(self._policies)
        if name is None and len(found) == 1:
            name = next(iter(found))
        if name is None or name not in found:
            wanted = "policy is None" if name is None else f"there is no policy '{name}'"
            raise UnknownPolicyError(f"{wanted}, expected one of those that are served: {', '.join(found)}")
        return name, found[name]

    def _asked(
        self, policy: str, names: Sequence[SessionName | None], rows: Tree, rewards: Any, until: float
    ) -> wire.Acted:
        """The answer to a request."""
        remembers = self._policies[policy].has_memory  # what has none loses nothing with an answer
        keys = [(policy, name) for name in names if name is not None and remembers]

        def make(number: int, done: int) -> wire.Act:
            for key in keys:
                if key in self._unknown:
                    raise SessionLostError(
                        f"session {key[1]!r} is lost: an answer of it never came; expected reset({key[1]!r}) before "
                        "its next observation"
                    )
            begins = np.array([name is None or (policy, name) not in self._begun for name in names], np.bool_)
            return wire.Act(number, done, policy, None, tuple(names), begins, rewards, rows)

        acted = self._link.ask(make, until, lambda: self._unknown.update(keys))
        assert isinstance(acted, wire.Acted)
        with self._link.changed:
            self._begun.update((policy, name) for name in (names[place] for place in acted.places) if name is not None)
        return acted

    def take_settings(self, settings: wire.Settings) -> None:
        """Take the policies that are served."""
        self._policies = {name: policy_of(name, plain) for name, plain in settings.settings.get("policies", {}).items()}
