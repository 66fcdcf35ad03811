"""`JaxEnvs` records of each form what a plain loop over the same environment does, and reads nothing in a step."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from extras import needs
from fragment_equality import assert_alike
from hypothesis import given, settings, strategies
from jax_forms import Box, Brax, Gymnax, Gymnax1, LoopSlot, Pgx, Wrapped
from property_examples import examples

from benchmarks.host_reads import counting_reads
from rollflow import Columns, JaxEnvs, Rollout
from rollflow.nodes.device.foreign_spaces import gymnasium_space
from rollflow.nodes.env.stepping import seeds_for
from rollflow.stream import EnvError

jax = needs("jax")
FORMS: dict[str, Callable[[], Any]] = {
    "gymnax": Gymnax1,
    "gymnax of old": Gymnax,
    "gymnax, wrapped": lambda: Wrapped(Gymnax1()),
    "Brax": Brax,
    "PGX": lambda: Pgx("minatar-numbers"),
}
jax_envs = cache(lambda form: JaxEnvs(FORMS[form](), num_envs=3))  # compiled once


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=examples(10))
@given(
    fragment_length=strategies.integers(1, 8),
    lookback=strategies.integers(0, 3),
    seed=strategies.integers(0, 99),
)
def test_a_rollout_records_what_a_loop_over_each_slot_does(form: str, seed: int, **options: Any) -> None:
    """Every transition, action and last observation, from the same keys again and again."""
    env = jax_envs(form)
    slot = partial(LoopSlot, has_keys=form != "Brax", has_limit=form != "gymnax of old")
    options |= {"num_fragments": 3, "seed": seed, "explore": form != "PGX"}
    with Rollout(env, **options) as rollout:
        ours = list(rollout.fragments())
    seed = seeds_for(seed, 0, 1)[0]
    with Rollout([partial(slot, each, env, seed) for each in range(3)], lanes=1, **options) as rollout:
        others = list(rollout.fragments())
    assert not any(fragment.host.columns.pop(Columns.BOOTSTRAP_FROM).tree.any() for fragment in ours)
    assert_alike([fragment.host for fragment in ours], others)


@pytest.mark.parametrize("form", FORMS)
def test_a_vector_step_reads_nothing_from_the_device(form: str) -> None:
    with Rollout(jax_envs(form), fragment_length=8, num_fragments=2, seed=0) as rollout:
        with counting_reads() as reads:
            assert len(list(rollout.fragments())) == 2
    assert reads == ["numpy"] * 2  # one a fragment


def test_tensors_and_arrays_share_memory() -> None:
    slots, tensor, array = jax_envs("gymnax").env, torch.zeros(3, 2), jax.numpy.zeros((3, 2))
    assert slots._array(tensor).unsafe_buffer_pointer() == tensor.data_ptr()
    assert slots._tensors(array).data_ptr() == array.unsafe_buffer_pointer()
    assert slots._array(torch.zeros(2, 3).T).shape == (3, 2)


def test_params_are_those_that_are_given() -> None:
    env = JaxEnvs(Gymnax1(), 2, num_envs=4)
    assert (env.single_observation_space.high == 1 << 20).all()
    with Rollout(env, fragment_length=16, num_fragments=1, seed=0) as rollout:
        (fragment,) = list(rollout.fragments())
    assert max(len(episode) for episode in fragment.episodes()) == 2


@pytest.mark.parametrize(
    ("dtype", "least", "most"), [("int32", -(1 << 31), (1 << 31) - 1), ("uint8", 0, 255), ("bool", 0, 1)]
)
@pytest.mark.parametrize("bound", [np.inf, jax.numpy.full(2, jax.numpy.inf), 1e30])
def test_bounds_beyond_a_dtype_are_those_of_the_dtype(dtype: str, least: int, most: int, bound: Any) -> None:
    space: Any = gymnasium_space(Box(-bound, bound, (2,)), np.zeros(2, dtype))
    assert (space.dtype, space.low.tolist(), space.high.tolist()) == (dtype, [least] * 2, [most] * 2)
    with pytest.raises(EnvError, match="an observation is bfloat16, expected a dtype that numpy has"):
        gymnasium_space(Box(-bound, bound, (2,)), jax.numpy.zeros(2, "bfloat16"))


@pytest.mark.parametrize("is_cut", [True, False])
def test_without_time_limits_every_end_is_a_termination(is_cut: bool) -> None:
    env = JaxEnvs(Brax(is_cut=is_cut), num_envs=4)
    env.reset_tensors([0])
    steps = [env.step_tensors(torch.zeros(4, 2)) for _ in range(12)]
    odd = torch.stack([each.final[0][:, 0] % 2 == 1 for each in steps if each.final is not None])
    ends, cut = (torch.stack([getattr(each, name) for each in steps]) for name in ("terminateds", "truncateds"))
    assert (ends | cut).any()
    assert torch.equal(cut, (ends | cut) & odd & is_cut)


def test_moves_that_are_not_legal_are_masked() -> None:
    with Rollout(JaxEnvs(Pgx(), num_envs=4), fragment_length=32, num_fragments=1, seed=0) as rollout:
        (batch,) = list(rollout.batches())
    mask = batch["obs"]["action_mask"]
    assert mask.gather(1, batch["actions"][:, None]).all()
    assert not mask.all()


@pytest.mark.parametrize("form", FORMS)
def test_a_rollout_names_jax_envs_for_environments_in_jax(form: str) -> None:
    for env in (FORMS[form](), (FORMS[form](), 6), FORMS[form]):
        with pytest.raises(EnvError, match=r"in JAX: write JaxEnvs\(env, num_envs=…\)"):
            Rollout(env)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Pgx(num_players=2), "for 2 players, expected a game for one"),
        (lambda: Brax(first_obs=0), "resets itself, and keeps no .* without AutoResetWrapper: auto_reset=False"),
        (lambda: Gymnax, "env is the class Gymnax, expected an environment of gymnax, Brax, or PGX"),
        (lambda: (Gymnax(), 6), r"gymnax.make gives two values: JaxEnvs\(\*gymnax.make"),
        (lambda: "CartPole-v1", "env is 'CartPole-v1', expected an environment of"),
        (lambda: type("Own", (Gymnax,), {"step": None})(), r"lacks step\(key, .*params\): step may be step_env$"),
        (lambda: type("Own", (Gymnax,), {"action_space": None})(), r"in gymnax's form it lacks action_space\("),
        (lambda: Wrapped(Gymnax()), "Wrapped gives no info.*expected an environment of gymnax 1.0, or one without"),
    ],
)
def test_what_steps_no_slot_of_one_player_is_refused(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(EnvError, match=text), Rollout(JaxEnvs(make(), num_envs=2), fragment_length=4) as rollout:
        next(rollout.fragments())


def test_arguments_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvError, match="params is 6, expected None for a Brax, which is no gymnax environment"):
        JaxEnvs(Brax(), 6, num_envs=2)
    with pytest.raises(ValueError, match="num_envs is 0, expected a whole number from 1 on"):
        JaxEnvs(Brax(), num_envs=0)
    with pytest.raises(TypeError, match="JaxEnvs has no keyword 'num_env', expected 'num_envs'"):
        JaxEnvs(Brax(), num_env=2)  # type: ignore[call-arg]
    monkeypatch.setitem(__import__("sys").modules, "jax", None)
    with pytest.raises(EnvError, match=r"JaxEnvs takes the package jax: pip install 'rollflow\[jax\]'"):
        JaxEnvs(Brax(), num_envs=2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("package", "name"), [("gymnax", "Pendulum-v1"), ("pgx", "minatar-breakout")])
def test_environments_of_others_are_stepped_as_their_packages_do(package: str, name: str) -> None:
    """Each slot by itself, through several ends."""
    made = needs(package).make(name)
    one, *params = made if package == "gymnax" else [made]
    env, split = JaxEnvs(one, *params, num_envs=3), jax.random.split
    begin, step = jax.jit(one.reset if params else one.init), jax.jit(one.step)
    env.reset_tensors([5])
    keys = [split(key) for key in split(jax.random.PRNGKey(5), 3)]
    states = [begin(given)[1] if params else begin(given) for _, given in keys]
    for t in range(250):
        actions = torch.tensor([t % 3, t % 2, 1])
        stepped = env.step_tensors(actions[:, None] - 1.0 if params else actions)
        ours = stepped.observations, stepped.rewards, stepped.terminateds, stepped.truncateds, stepped.final[0]
        for slot, (kept, _) in enumerate(keys):
            keys[slot] = kept, given = split(kept)
            if params:
                now, states[slot], *values, infos = step(given, states[slot], actions[slot : slot + 1].numpy() - 1.0)
                theirs = now, *values, infos["final_observation"]
            else:
                of_step, of_reset = split(given)
                last = step(states[slot], int(actions[slot]), of_step)
                states[slot] = begin(of_reset) if last.terminated else last
                theirs = (states[slot].observation, last.rewards[0], last.terminated, last.truncated, last.observation)
            for mine, other in zip(ours, theirs, strict=True):
                np.testing.assert_allclose(mine[slot].numpy(), other, rtol=1e-4, atol=1e-4)
