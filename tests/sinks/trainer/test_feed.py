"""A rollout that feeds a trainer from a script without an event loop of its own."""

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from feeding_rollouts import SHORT, trainer
from numbered_module import NumberedEnv, NumberedModule

from rollflow import Rollout, Watch, feed
from rollflow.stream.data.errors import RunError, WireError


class Broken(NumberedEnv):
    def step(self, action: Any) -> Any:
        raise RuntimeError("it broke")


def numbered_rollout(env: type[NumberedEnv] = NumberedEnv, **options: Any) -> Rollout:
    return Rollout([partial(env, 0)], module=NumberedModule(), fragment_length=8, seed=0, **options)


def test_it_ends_with_the_rollout() -> None:
    rollout = numbered_rollout(num_fragments=3)
    with ThreadPoolExecutor() as threads:
        with trainer(yields="fragments") as stream:
            fed = threads.submit(feed, rollout, str(stream.address), limits=SHORT)
            assert [fragment.sequence for fragment in stream] == [0, 1, 2]
            assert fed.result() is None


def test_it_ends_with_the_trainer_and_tells_its_reason() -> None:
    rollout = numbered_rollout()
    with ThreadPoolExecutor() as threads:
        with trainer(yields="fragments") as stream:
            fed = threads.submit(feed, rollout, str(stream.address), limits=SHORT)
            next(iter(stream))
        assert fed.result() == "the trainer has ended"
    assert rollout.environments.is_closed


def test_what_an_environment_raises_is_raised_as_it_is() -> None:
    with ThreadPoolExecutor() as threads, trainer(join_timeout=0) as stream:
        with pytest.raises(RunError, match="0 of 1 rollouts came"):
            next(iter(stream))  # from now on it takes them in
        fed = threads.submit(feed, numbered_rollout(Broken), str(stream.address), limits=SHORT)
        with pytest.raises(RuntimeError, match="it broke"):
            fed.result()


def test_a_rollout_that_the_trainer_refuses_ends_with_its_words() -> None:
    with ThreadPoolExecutor() as threads, trainer(secret="open sesame", join_timeout=0) as stream:
        with pytest.raises(RunError, match="0 of 1 rollouts came"):
            next(iter(stream))  # from now on it takes them in
        rollout = numbered_rollout()
        fed = threads.submit(feed, rollout, str(stream.address), secret="open barley", limits=SHORT)
        with pytest.raises(WireError, match=f"^trainer {stream.address}: refuses: .*another secret"):
            fed.result()
    assert rollout.environments.is_closed


def test_what_the_rollout_logs_is_logged_while_it_feeds(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    rollout = numbered_rollout(num_fragments=3, log=f"jsonl:{path}", watch=Watch(log_every=3600.0))
    with ThreadPoolExecutor() as threads, trainer(yields="fragments") as stream:
        fed = threads.submit(feed, rollout, str(stream.address), limits=SHORT)
        assert len(list(stream)) == 3
        assert fed.result() is None
    [row] = [json.loads(line) for line in path.read_text().splitlines()]
    assert (row["steps"], row["updates"]) == (rollout.num_steps, 3)
    assert {"busy/rollout/env", "busy/trainer"} <= row.keys()
