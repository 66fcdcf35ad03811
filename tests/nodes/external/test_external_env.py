"""Environments that step themselves: what a program plays stands in the rollout, once and as it was."""

import random
import ssl
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from numbered_module import NUM_ACTIONS, NumberedModule
from remote_hosts import SHORT, BrokenWire, end_waits_once, listening

from rollflow import Fragment, RemoteEnvs, RemoteRollouts, Rollout, Timeouts
from rollflow.nodes import ExternalEnv
from rollflow.stream.data.errors import EnvError, WireError

SECRET = "correct horse battery staple"
SEEN = spaces.Box(0, 1e6, (3,), np.float32)  # (episode, step, 0)
DONE = spaces.Discrete(NUM_ACTIONS)
Transition = tuple[int, int, int, float, bool, bool]  # episode, step, action, reward, terminated, truncated


def seen(episode: int, step: int) -> Any:
    return np.array([episode, step, 0], np.float32)


class Player:
    """Plays numbered episodes of drawn lengths; `log` has every transition that it made."""

    def __init__(self, env: ExternalEnv, seed: int, log_actions: bool = False) -> None:
        self.log: list[Transition] = []
        self._env, self._rng, self._log_actions = env, random.Random(seed), log_actions
        self._first = 1000 * seed

    def play(self, episodes: int) -> None:
        """Play so many episodes, to their ends."""
        for number in range(self._first, self._first + episodes):
            name = self._env.start_episode(f"game {number}")
            length, terminates = self._rng.randrange(1, 12), self._rng.random() < 0.5
            for step in range(length):
                if self._log_actions and step % 2:
                    action = step % 5
                    self._env.log_action(name, seen(number, step), action)
                else:
                    action = int(self._env.get_action(name, seen(number, step)))
                self._env.log_returns(name, 0.25)  # several make one
                self._env.log_returns(name, step - 0.25)
                done = step == length - 1
                self.log.append((number, step, action, float(step), done and terminates, done and not terminates))
            self._env.end_episode(name, seen(number, length), truncated=not terminates)

    def play_until_the_end(self) -> None:
        with pytest.raises(EnvError, match="the rollout has ended"):
            self.play(1000)


def env_of(address: Any, **options: Any) -> ExternalEnv:
    settings = {"observation_space": SEEN, "action_space": DONE, "secret": SECRET, "limits": SHORT, **options}
    return ExternalEnv(str(address), **settings)


@contextmanager
def running(*players: Callable[[], None]) -> Iterator[None]:
    """Programs in threads; what they raised is raised at the end."""
    with ThreadPoolExecutor(len(players)) as pool:
        played = [pool.submit(player) for player in players]
        yield
    for each in played:
        each.result()


def rollout_of(envs: Any, **options: Any) -> Rollout:
    never: dict[str, Any] = {"timeouts": Timeouts(step=None, reset=None)}
    return Rollout(envs, **{"fragment_length": 16, "seed": 0, **never, **options})


def transitions_of(fragments: list[Fragment]) -> list[Transition]:
    """All transitions, whose observations join without a gap."""
    found: list[Transition] = []
    for chunk in (chunk for fragment in fragments for chunk in fragment.episodes()):
        observations = chunk.get_observations(slice(0, None))
        actions, rewards = chunk.get_actions(), chunk.get_rewards()
        for step in range(len(chunk)):
            episode, number = int(observations[step][0]), int(observations[step][1])
            assert observations[step + 1].tolist() == [episode, number + 1, 0]
            assert number == chunk.t_started + step
            last = step == len(chunk) - 1
            ended = last and chunk.is_terminated, last and chunk.is_truncated
            found.append((episode, number, int(actions[step]), float(rewards[step]), *ended))
    return found


@pytest.mark.slow
def test_all_that_programs_play_stands_in_the_rollout_once() -> None:
    envs = listening(secret=SECRET)
    with env_of(envs.addresses[0], episodes=3) as env, rollout_of(envs, prefetch=8) as rollout:
        players = [Player(env, seed) for seed in range(1, 4)]

        def play() -> None:
            with running(*(lambda player=player: player.play(40) for player in players)):  # type: ignore[misc]
                pass
            env.close()  # the lanes give what they have begun

        with running(play):
            fragments: list[Fragment] = []
            stream = rollout.fragments()
            while len(transitions_of(fragments)) < sum(len(player.log) for player in players) or env._thread.is_alive():
                fragments.append(next(stream))
        assert rollout.lost == {}
    played = sorted(entry for player in players for entry in player.log)
    assert sorted(transitions_of(fragments)) == played
    assert len(played) > 300


@pytest.mark.slow
@pytest.mark.parametrize("inference", ["server", "client"])
def test_connections_that_are_cut_at_drawn_moments_change_nothing(inference: Any) -> None:
    envs = listening(RemoteEnvs if inference == "server" else RemoteRollouts, secret=SECRET)  # type: ignore[type-abstract]
    rng = random.Random(0)
    wire = BrokenWire(envs.addresses[0], lambda: rng.randrange(2_000, 20_000))
    try:
        module = {"module": NumberedModule()} if inference == "client" else {}
        with env_of(wire.address, episodes=2, inference=inference, **module) as env:
            players = [Player(env, seed) for seed in range(1, 3)]
            with running(*(player.play_until_the_end for player in players)):
                with rollout_of(envs, num_fragments=20, module=NumberedModule()) as rollout:
                    fragments = list(rollout.fragments())
                    assert rollout.lost == {}
    finally:
        wire.close()
    found = transitions_of(fragments)
    assert wire.cuts >= 3
    assert len(found) == len(set(found))
    played = {entry for player in players for entry in player.log}
    # The last action of an episode that was being played is known here, and its transition is not.
    assert len(set(found) - played) <= 2
    for lane in (0, 1):
        mine = transitions_of([fragment for fragment in fragments if fragment.lane == lane])
        assert len(mine) >= 250


def test_actions_that_a_program_has_chosen_are_recorded_and_no_policy_answers_for_them() -> None:
    envs = listening(secret=SECRET)
    with env_of(envs.addresses[0]) as env:
        player = Player(env, 1, log_actions=True)
        with running(player.play_until_the_end), rollout_of(envs, num_fragments=6) as rollout:
            fragments = list(rollout.fragments())
    found = transitions_of(fragments)
    assert found == player.log[: len(found)]
    for chunk in (chunk for fragment in fragments for chunk in fragment.episodes()):
        chosen = [(chunk.t_started + step) % 2 == 0 for step in range(len(chunk))]
        assert np.isfinite(chunk.get_extra_model_outputs("action_logp")).tolist() == chosen


def test_an_action_that_a_piece_changes_on_its_way_can_not_be_logged() -> None:
    envs = listening(secret=SECRET)
    box = spaces.Box(-2, 2, (1,), np.float32)
    with env_of(envs.addresses[0], action_space=box) as env:

        def play() -> None:
            name = env.start_episode()
            with pytest.raises(EnvError, match="the rollout"):
                for step in range(9):
                    env.log_action(name, seen(1, step), [1.5])

        with running(play), pytest.raises(EnvError, match="took another action than the module's"):
            with rollout_of(envs) as rollout:
                next(rollout.fragments())


def test_what_a_program_gets_wrong_is_said_and_disturbs_nothing() -> None:
    envs = listening(secret=SECRET)
    with env_of(envs.addresses[0], timeout=30.0) as env, rollout_of(envs, prefetch=16) as rollout:
        stream = rollout.fragments()
        with running(lambda: next(stream)):
            name = env.start_episode("one")
            with pytest.raises(EnvError, match="episode 'one' has been started already"):
                env.start_episode("one")
            told = r"1 episodes are being played, expected fewer, or ExternalEnv\(episodes=2"
            with pytest.raises(EnvError, match=told):
                env.start_episode("two")
            with pytest.raises(EnvError, match="there is no episode 'two'"):
                env.get_action("two", seen(0, 0))
            with pytest.raises(EnvError, match="a reward, but no action came before"):
                env.log_returns(name, 1.0)
            with pytest.raises(EnvError, match="episode 'one': an observation that is not in its space"):
                env.get_action(name, np.zeros(4))
            with pytest.raises(EnvError, match=r"action 9 is not in Discrete\(7\)"):
                env.log_action(name, seen(0, 0), 9)
            env.end_episode(name, seen(0, 0))  # nothing was played
            Player(env, 1).play(6)
            with pytest.raises(EnvError, match="reward is nan"):
                env.start_episode("three")
                env.get_action("three", seen(3, 0))
                env.log_returns("three", float("nan"))
            for step in range(1, 20):
                env.get_action("three", seen(3, step))
    with pytest.raises(EnvError):
        env.start_episode("four")
        env.get_action("three", seen(3, 20))


def test_a_rollout_that_is_nowhere_or_has_another_secret_is_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with env_of("tcp://127.0.0.1:1", retry_s=0.0) as env, pytest.raises(EnvError, match="Connection refused"):
        env.get_action(env.start_episode(), seen(0, 0))
    end_waits_once(monkeypatch, lambda: "is refused" in caplog.text)
    envs = listening(secret="another")

    def wait() -> None:
        with pytest.raises(EnvError, match="another secret"):
            rollout_of(envs)

    with running(wait), env_of(envs.addresses[0]) as env, pytest.raises(EnvError, match="another secret"):
        env.get_action(env.start_episode(), seen(0, 0))
    for error, said, address, options in (
        (ValueError, "inference is 'here'", "tcp://127.0.0.1:1", {"inference": "here"}),
        (WireError, "secret is of type int", "tcp://127.0.0.1:1", {"secret": 123}),
        (WireError, "without a secret", "tcp://192.0.2.1:1", {"secret": None}),
        (WireError, "'nowhere'", "nowhere", {}),
        (WireError, "expected tls.check_hostname=False", "unix:/tmp/rollout", {"tls": ssl.create_default_context()}),
    ):
        with pytest.raises(error, match=said):
            env_of(address, **options)


def test_an_action_that_comes_late_is_for_the_observation_that_asked_for_it() -> None:
    envs = listening(secret=SECRET)
    with env_of(envs.addresses[0], timeout=0.05) as env:
        name = env.start_episode()
        with pytest.raises(TimeoutError, match=r"no action has come within 0\.05 s"):  # nobody is there yet
            env.get_action(name, seen(1, 0))
        with pytest.raises(EnvError, match="waits for an action, expected it to come before the end"):
            env.end_episode(name, seen(1, 1))
        with pytest.raises(EnvError, match="waits for the action of another observation"):
            env.get_action(name, seen(1, 1))
        env.timeout = None

        def play() -> None:
            env.get_action(name, seen(1, 0))
            env.log_returns(name, 7.0)
            env.end_episode(name, seen(1, 1))
            Player(env, 2).play_until_the_end()

        with running(play), rollout_of(envs, prefetch=16) as rollout:
            assert transitions_of([next(rollout.fragments())])[0][3:] == (7.0, True, False)
