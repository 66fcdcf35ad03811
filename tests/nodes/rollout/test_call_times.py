"""Every stage says how long its calls took, wherever they are made, and which piece is the slowest."""

from functools import partial
from typing import Any

import pytest
from numbered_module import NumberedEnv, NumberedModule
from places import PLACES

from rollflow import Rollout
from rollflow.nodes.connectors.connector_v2 import ConnectorV2
from rollflow.stream.graph.meter import CallTimes


class Slow(ConnectorV2):
    """A piece that takes longer than all others, and changes nothing."""

    def __call__(self, *, batch: dict[str, Any], **_: Any) -> dict[str, Any]:
        sum(range(100_000))
        return batch


@pytest.mark.parametrize("place", ["inline", "threads", "processes", "rollouts"])
def test_a_report_has_the_calls_of_each_stage_and_the_slowest_piece(place: str) -> None:
    options: dict[str, Any] = {
        "module": NumberedModule(),
        "fragment_length": 8,
        "num_fragments": 3,
        "seed": 0,
        "lanes": 2,
    }
    pieces: dict[str, Any] = {
        name: lambda *spaces: Slow() for name in ("env_to_module_connector", "module_to_env_connector")
    }
    envs = [partial(NumberedEnv, number) for number in range(4)]
    with Rollout(envs, learner_connector=lambda *spaces: Slow(), **options, **pieces, **PLACES[place]) as rollout:
        assert len(list(rollout.batches())) == 3
        report = rollout.report()
    nodes = {node.name: node for node in report.nodes}
    for name in ("env", "env_to_module", "module", "module_to_env", "learner_pipeline", "caller"):
        calls = nodes[name].calls
        assert calls is not None, name
        assert 0 < calls.p50_s <= calls.p99_s <= calls.longest_s, name
    for name in ("env_to_module", "module_to_env", "learner_pipeline"):
        assert nodes[name].slowest_piece == "Slow"
        assert f"{nodes[name].slowest_piece}\n" in str(report)


def test_percentiles_are_of_the_last_calls_and_the_longest_is_of_all() -> None:
    calls = CallTimes()
    assert calls.read() is None
    for took in [10**9, *range(1000, 3000)]:
        calls.add(took)
    assert calls.read() == ((3000 - 1024 + 511) / 1e9, (3000 - 1024 + 1012) / 1e9, 1.0)
