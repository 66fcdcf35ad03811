"""A trainer in the trace of the rollout that feeds it, and the trace of a trainer's own loop."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from numbered_module import NumberedEnv, NumberedModule
from remote_hosts import listening
from shifted_processes import shifted_host, shifted_trainer
from traces import Event, arrows, assert_valid, events_of, processes, tracks

from rollflow.nodes import RemoteRollouts, Rollout, RolloutHost
from rollflow.sinks import TrainerStream, feed

ENVS = [partial(NumberedEnv, number) for number in range(4)]
OPTIONS: dict[str, Any] = {"fragment_length": 8, "num_fragments": 3, "seed": 0}


@pytest.mark.slow
@pytest.mark.parametrize("sends", ["fragments", "batches"])
def test_arrows_lead_from_a_host_over_the_rollout_to_the_update_of_a_trainer(tmp_path: Path, sends: Any) -> None:
    remote: Any = listening(RemoteRollouts)
    path = tmp_path / "run.trace"
    with shifted_trainer(-420) as (address, trainer), shifted_host(remote.addresses[0], RolloutHost, 300):
        feed(Rollout(remote, module=NumberedModule(), **OPTIONS), address, sends=sends, trace=str(path))
        assert trainer.stdout is not None
        assert trainer.stdout.read().strip() == "3"
    events = events_of(path)
    assert_valid(events)
    program, *others = processes(events)
    (host,) = [name for name in others if name.startswith("host sim")]
    (loop,) = [name for name in others if name.startswith("trainer tcp://")]
    found = [stops for stops in arrows(events) if stops[-1][0] == loop]
    assert sorted((stops[0][:2], stops[1][:2]) for stops in found) == sorted(
        ((host, f"lane {lane}"), (program, f"lane {lane}")) for lane in range(2) for _ in range(3)
    )
    updates = [span for span in tracks(events, processes(events)[loop])["loop"] if span[2]["name"] == "update"]
    assert len(updates) == 3
    fragments = [span for spans in tracks(events).values() for span in spans if span[2]["name"].startswith("fragment")]
    uncertainty_ns = events[-1]["args"]["clocks"][loop]["uncertainty_us"] * 1e3
    for sequence, (begin, _, _) in enumerate(updates):  # each begins when the fragments were there that it used
        ends = [end for _, end, each in fragments if each["name"] == f"fragment {sequence}"]
        assert len(ends) == 2
        assert max(ends) <= begin + uncertainty_ns
