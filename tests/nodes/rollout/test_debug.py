"""Debugging: everything in one thread, and errors that say in which piece, lane and step."""

import re
from threading import get_ident
from typing import Any

import pytest
import torch
from drawn_agents import Drawn, made as agents_rollout, makers_of
from numbered_agents import NumberedAgents
from numbered_module import NumberedModule, numbered_envs
from serial_module import SerialModule

from rollflow import ConnectorV2, Forward, Rollout

THREADED: dict[str, Any] = {"prefetch": 2, "forward": Forward(max_batch=64), "lanes": 2, "seed": 0}


THREADS: set[int] = set()
"""Threads in which something that is watched was called."""


class Watches(ConnectorV2):
    """Notes which threads it is called in, and raises at its `raises_at`-th call."""

    changes_episodes = False

    def __init__(self, raises_at: int | None = None) -> None:
        super().__init__()
        self.raises_at, self.calls = raises_at, 0

    def __call__(self, *, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        THREADS.add(get_ident())
        self.calls += 1
        if self.calls == self.raises_at:
            raise ZeroDivisionError
        return batch


def watched(kind: type, name: str) -> Any:
    """A class of which one method notes the threads that it is called in."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        THREADS.add(get_ident())
        return getattr(kind, name)(self, *args, **kwargs)

    return type("Watched", (kind,), {name: method})


AGENTS = Drawn(4, 2, 3, 0, 9, False, 8, 1, False, 0)


SEVERAL = pytest.mark.parametrize("several", [False, True], ids=["one agent", "several agents"])


@SEVERAL
@pytest.mark.parametrize("where", ["threads", "processes"])
def test_everything_runs_in_the_loops_thread_whatever_else_is_asked_for(where: Any, several: bool) -> None:
    THREADS.clear()
    pieces = [Watches() for _ in range(4)]
    options: dict[str, Any] = {"where": where, "num_fragments": 3, "debug": True, **THREADED}
    options |= {"env_to_module_connector": lambda env: pieces[0], "module_to_env_connector": lambda env: pieces[1]}
    options["learner_connector"] = lambda obs_space, act_space: pieces[2]
    if several:
        modules = {name: watched(SerialModule, "_forward")() for name in ("plain 0", "plain 1")}
        options |= {"env": makers_of(AGENTS, watched(NumberedAgents, "step")), "module": modules}
        del options["seed"]
        _, rollout = agents_rollout(AGENTS, joint_connector=lambda env: pieces[3], **options)
    else:
        module = watched(NumberedModule, "_forward")()
        rollout = Rollout(numbered_envs(4)[1], module=module, fragment_length=8, **options)
    with rollout:
        assert sum(1 for _ in rollout.batches()) == 3
    assert THREADS == {get_ident()}
    assert [piece.calls > 0 for piece in pieces] == [True] * 3 + [several]


@pytest.mark.parametrize("pipeline", ["joint_connector", "env_to_module_connector", "module_to_env_connector"])
def test_an_error_with_several_agents_says_in_which_piece_lane_and_step(pipeline: str) -> None:
    options: dict[str, Any] = {pipeline: lambda part: Watches(5), "debug": True, "forward": Forward(max_batch=64)}
    _, rollout = agents_rollout(AGENTS._replace(at_once=True), **options)
    with pytest.raises(ZeroDivisionError) as raised, rollout:
        list(rollout.batches())
    assert raised.value.__notes__[0].startswith("in connector piece 'Watches'")
    assert any(re.search(r"lane [01], vector step [12]", note) for note in raised.value.__notes__)


STEP, BATCH = "lane 0, vector step 2", "lane 0, vector steps 16 to 24, lane 1, vector steps 16 to 24"


@pytest.mark.parametrize(
    ("pipeline", "calls", "place", "where"),
    [
        ("env_to_module", 5, "1 of 4 in EnvToModulePipeline", STEP),
        ("module_to_env", 5, "4 of 6 in ModuleToEnvPipeline", STEP),
        ("learner", 3, "1 of 5 in LearnerConnectorPipeline", f"in the train batch of {BATCH}"),
    ],
)
def test_an_error_says_in_which_piece_lane_and_step(pipeline: str, calls: int, place: str, where: str) -> None:
    """In the third batch, or in lane 0's third step."""
    options: dict[str, Any] = {f"{pipeline}_connector": lambda *given: Watches(calls), "fragment_length": 8, **THREADED}
    made = Rollout(numbered_envs(4)[1], module=NumberedModule(), debug=True, **options)
    with pytest.raises(ZeroDivisionError) as raised, made as rollout:
        list(rollout.batches())
    assert raised.value.__notes__[:2] == [f"in connector piece 'Watches' ({place})", where]


def test_an_error_in_the_module_says_what_it_was_given() -> None:
    class Wrong(NumberedModule):
        def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            return {"action_dist_inputs": batch["obs"].float() @ torch.zeros(5, 7)}

    with pytest.raises(RuntimeError) as raised, Rollout(numbered_envs(4)[1], module=Wrong(), debug=True) as rollout:
        next(iter(rollout.batches()))
    page = "see docs/how_to/modules.md#outputs"
    assert raised.value.__notes__[0] == f"lane 0, vector step 0, batch: 'obs' [4, 3]; {page}"
