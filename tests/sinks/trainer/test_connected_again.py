"""A rollout that loses its trainer and gets it back: what both ends say meanwhile, and by what name it is known."""

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any

import pytest
from feeding_rollouts import SHORT, feeding, trainer
from numbered_module import NumberedEnv, NumberedModule
from remote_hosts import BrokenWire
from remote_rollouts import await_that

from rollflow import Rollout, feed
from rollflow.stream.data.errors import WireError

pytestmark = pytest.mark.wait_times(first_word_s=0.02)

OPTIONS: dict[str, Any] = {"lanes": 1, "num_fragments": 9, "sink": {"name": "b1", "limits": SHORT}}


@pytest.mark.slow
def test_both_ends_say_that_they_wait_and_that_the_connection_is_back(caplog: pytest.LogCaptureFixture) -> None:
    names = set()
    with trainer(yields="fragments", limits=SHORT) as stream:
        with closing(BrokenWire(stream.address, lambda: None)) as wire, feeding(wire.address, **OPTIONS):
            there = f"trainer {wire.address}"
            for count, _ in enumerate(stream):
                names |= {stream.handed[0].source, *stream.sources}
                if count in (2, 5):
                    caplog.clear()
                    wire.go_down()
                    await_that(lambda: len(re.findall(rf"waiting for \d+ s: {there}: ", caplog.text)) >= 2)
                    await_that(lambda: len(re.findall(r"waiting: rollout b1 \(.*\) is lost since", caplog.text)) >= 2)
                    wire.is_down = False
                    await_that(lambda: re.search(rf"{there}: connected again after \d+\.\d s", caplog.text))
                    await_that(lambda: re.search(r"rollout b1 \(.*\) is connected again after \d+\.\d s", caplog.text))
    assert count == 8
    assert names == {"b1"}


@pytest.mark.slow
def test_a_rollout_whose_trainer_is_away_for_longer_than_it_may_be_ends() -> None:
    rollout = Rollout([partial(NumberedEnv, 0)], module=NumberedModule(), fragment_length=8)
    with ThreadPoolExecutor() as threads, trainer(yields="fragments", limits=SHORT) as stream:
        with closing(BrokenWire(stream.address, lambda: None)) as wire:
            there, fragments = wire.address, iter(stream)
            fed = threads.submit(feed, rollout, there, limits=SHORT, retry_s=0.5)
            next(fragments)
            wire.go_down()
            with pytest.raises(WireError, match=rf"trainer {there} not reached for 0\.5 s: connection lost"):
                fed.result(60)
        stream.expect_no_more()
