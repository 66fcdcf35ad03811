"""Predicted over measured steps per second: what `what_if` says of a setting, beside the setting itself.

Each prediction is made by a rollout that runs inline for a moment, and measures its own environments and module; the
setting is then run in pairs with it. A `ratio` of 1 is a prediction that was right.

    python -m benchmarks.plan [--quick]
"""

from typing import Any

from benchmarks.command import run
from benchmarks.envs import PLAIN_CARTPOLE, CountingEnv, PixelEnv, SleepEnv
from benchmarks.pairs import QUICK, Record, Sizes, in_steady_state, in_turns, record
from benchmarks.policies import Mlp, NatureCnn, Zeros
from rollflow.nodes import Rollout

PROCESSES = {"where": "processes", "lanes": 2, "workers": 1}
ROLLOUTS = {"where": "rollouts", "lanes": 2, "workers": 2}
MANY = {"where": "rollouts", "lanes": 16, "workers": 2}
CASES: tuple[Any, ...] = (
    ("CartPole, plain", PLAIN_CARTPOLE, Mlp, 8, 128, ({}, ROLLOUTS)),
    ("CartPole, plain", PLAIN_CARTPOLE, Mlp, 64, 128, ({"lanes": 4}, {"slots": 256}, PROCESSES, ROLLOUTS)),
    ("CartPole, vectorized", "CartPole-v1", Mlp, 64, 128, ({}, {"slots": 1024})),
    ("pixels", PixelEnv, NatureCnn, 8, 128, ({}, PROCESSES, ROLLOUTS)),
    (
        "steps of lognormal time",
        SleepEnv,
        Mlp,
        16,
        32,
        ({"where": "threads", "lanes": 16}, {"where": "threads", "lanes": 4}, MANY),
    ),
    ("steps that do nothing", CountingEnv, Zeros, 64, 128, ({}, {"lanes": 8}, PROCESSES)),
)


def measure(sizes: Sizes, cases: tuple[Any, ...] = CASES) -> list[Record]:
    """A line for each setting."""
    if sizes == QUICK:  # the last setting of each workload
        cases = tuple({case[0]: (*case[:5], case[5][-1:]) for case in cases}.values())
    return [_measured(sizes, *case, changes) for *case, settings in cases for changes in settings]


def _measured(
    sizes: Sizes, workload: str, env: Any, policy: Any, slots: int, length: int, changes: dict[str, Any]
) -> Record:
    options: dict[str, Any] = {"fragment_length": length, "flat_forward": True, "seed": 0}

    def predicted() -> float:
        with Rollout(env, module=policy(), num_envs=slots, **options) as rollout:
            in_steady_state(rollout, sizes.seconds / 2)
            return rollout.what_if(**{"prefetch": 1} | changes).then.steps_per_s

    def made() -> float:
        setting = {"num_envs": changes.get("slots", slots)} | {
            name: each for name, each in changes.items() if name != "slots"
        }
        with Rollout(env, module=policy(), **setting, prefetch=1, **options) as rollout:
            return in_steady_state(rollout, sizes.seconds)

    pairs = in_turns(predicted, made, max(1, sizes.rounds // 3))
    name = ", ".join(f"{name} {each}" for name, each in changes.items() if name != "where") or "as it is"
    told = {"where": changes.get("where", "inline"), "beside_name": "measured"}
    return record(f"{workload}: {name}", changes.get("slots", slots), pairs, aim=None, **told)


if __name__ == "__main__":
    run(measure)
