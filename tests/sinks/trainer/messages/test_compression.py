"""Observations that come compressed are the same; what was not compressed as it says is refused."""

import logging
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import wide_module
from drawn_rollouts import Setting, drawn_settings, fragments_of, makers_of, rollout_of
from feeding_rollouts import graph_over, in_lanes_order, running, trainer
from fragment_equality import assert_alike
from hypothesis import Phase, given, settings
from numbered_env import NumberedEnv
from property_examples import examples
from remote_hosts import BrokenWire

from rollflow.nodes import Rollout
from rollflow.sinks.trainer.messages.compression import compressed, decompressed
from rollflow.stream.data import zstd
from rollflow.stream.data.errors import RollflowError, WireError
from rollflow.stream.wire import Fragment, encode


@settings(max_examples=examples(8), phases=[Phase.explicit, Phase.generate])
@given(drawn=drawn_settings)
def test_fragments_are_the_same(drawn: Setting) -> None:
    here = fragments_of(makers_of(drawn), drawn, lanes=drawn.lanes)
    with trainer(yields="fragments", compression="zstd") as stream:
        with running(*graph_over(rollout_of(drawn, lanes=drawn.lanes), stream.address)):
            there = list(stream)
    assert_alike(in_lanes_order(there), [fragment for fragment in here if fragment.num_steps])


@pytest.mark.parametrize("is_paced", [False, True], ids=["free", "paced"])
def test_weights_take_less_room_and_are_those_that_were_published(is_paced: bool) -> None:
    paced: dict[str, Any] = {"max_lag": 0, "on_excess": "pace"} if is_paced else {}
    options: dict[str, Any] = {"module": wide_module.NumberedModule(), "fragment_length": 8, "num_fragments": 12}
    rollout = Rollout([partial(NumberedEnv, 0)], seed=0, **options)
    with (
        trainer(yields="fragments", compression="zstd", **paced) as stream,
        closing(BrokenWire(stream.address, lambda: None)) as wire,
    ):
        with running(*graph_over(rollout, wire.address)):
            for version, fragment in enumerate(stream, 1):
                versions = fragment.column("policy_version")
                for name in ("weight", "least", "most"):
                    np.testing.assert_array_equal(fragment.column(name)[: len(versions)], versions)
                stream.publish(wide_module.wide_weights(version))
            uses = stream.weights_in_use()
        assert wire.given < wide_module.WIDE_BYTES / 4
    assert [use.is_same for use in uses] == [True]


def test_a_rollout_whose_weights_are_damaged_on_the_way_gets_them_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wide_module.damage_third(monkeypatch)
    options: dict[str, Any] = {"module": wide_module.NumberedModule(), "fragment_length": 8, "num_fragments": 12}
    rollout, steps = Rollout([partial(NumberedEnv, 0)], seed=0, **options), 0
    with trainer(yields="fragments", compression="zstd", max_lag=0, on_excess="pace") as stream:
        with running(*graph_over(rollout, stream.address)):
            for version, fragment in enumerate(stream, 1):
                np.testing.assert_array_equal(fragment.column("weight"), fragment.column("policy_version"))
                steps += fragment.num_steps
                stream.publish(wide_module.wide_weights(version))
    assert steps == 12 * 8
    assert "packed weights, version 3: their checksum is" in caplog.text


def test_it_takes_less_room_on_the_way() -> None:
    observations = np.zeros((64, 8, 84, 84), np.uint8)
    message = compressed(Fragment(0, 1, {"obs": observations}, {}))
    assert sum(map(len, encode(message))) < observations.nbytes / 100


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"obs": [["<f4", [10**12]]]}, "a frame of Zstandard of .* bytes, expected 4294967296"),
        ({"obs": [["<f4", [3]]]}, "a frame of Zstandard of .* bytes, expected 12"),
        ({"obs": [["<f4", [-3]]]}, "expected a dtype and a shape"),
        ({"obs": [["|O", [2]]]}, "expected a dtype and a shape"),
        ({"obs": [["nonsense", [2]]]}, "nonsense"),
        ({"obs": []}, "expected a dtype and a shape for each part"),
        ({"rewards": [["<f4", [2]]]}, "expected columns that were asked for so"),
        (3, "expected columns that were asked for so"),
    ],
)
def test_what_is_not_as_it_says_is_refused(change: Any, told: str) -> None:
    message = compressed(Fragment(0, 1, {"obs": np.zeros(2, np.float32), "rewards": np.zeros(2)}, {}))
    with pytest.raises(WireError, match=told):
        decompressed(replace(message, rest={"compressed": change}))
    with pytest.raises(WireError, match="compressed"):
        decompressed(replace(message, columns={"obs": np.zeros(30, np.uint8)}))


def test_where_the_package_is_missing_the_trainer_says_so_and_a_rollout_sends_all_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with trainer(compression="zstd") as stream, monkeypatch.context() as without:
        without.setattr(zstd, "zstandard", None)
        with pytest.raises(RollflowError, match=r"takes the package zstandard: pip install rollflow\[compression\]"):
            trainer(compression="zstd")
        with caplog.at_level(logging.WARNING):
            rollout = Rollout("CartPole-v1", fragment_length=8, num_fragments=2)
            with running(*graph_over(rollout, stream.address)):
                assert len(list(stream)) == 2
    assert "can't compress by zstd: all goes as it is, both ways" in caplog.text
    with pytest.raises(ValueError, match="compression is 'gzip', expected 'zstd' or None"):
        trainer(compression="gzip")
