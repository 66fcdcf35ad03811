"""A killed worker's part of a fragment is given as it would have been."""

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ending_envs import Doomed, lives_of, rewards_by_slot
from hypothesis import Phase, given, settings, strategies as st
from numbered_module import NumberedEnv, NumberedModule
from property_examples import examples

from rollflow import ConnectorV2, Fragment, Rollout
from rollflow.stream.data.tree import map_tree
from rollflow.stream.testing import check

pytestmark = [pytest.mark.slow, pytest.mark.wait_times(first_pause_s=0.01)]


class Kills(ConnectorV2):
    """Kills its process when so many vector steps have been made, once."""

    def __init__(self, step: int, flag: Path) -> None:
        super().__init__()
        self.step, self.flag = step, flag

    def __call__(self, *, batch: Any, shared_data: Any, **kwargs: Any) -> Any:
        if shared_data.get("step") == self.step and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return batch


def fragments_of(env: Any, step: int, flag: Path, **options: Any) -> tuple[list[Fragment], dict[str, int]]:
    with Rollout(
        env,
        lanes=1,
        seed=3,
        fragment_length=8,
        num_fragments=5,
        env_to_module_connector=lambda _: Kills(step, flag),
        **options,
    ) as rollout:
        return list(rollout.fragments()), rollout.lost


def check_rescued(rescued: Fragment, whole: Fragment, reason: str) -> None:
    """The first rows are those of the whole fragment, episode by episode; what was open then is truncated."""
    rows = rescued.num_rows
    assert 0 < rows < whole.num_rows
    assert (rescued.lane, rescued.sequence, rescued.columns.keys()) == (0, whole.sequence, whole.columns.keys())
    for name in set(whole.columns) - {"truncateds"}:
        of_whole = map_tree(lambda leaf: leaf[:rows], whole.column(name))
        map_tree(np.testing.assert_array_equal, rescued.column(name), of_whole)
    expected = {chunk.id_: chunk for chunk in whole.episodes() if _start(chunk, whole) < rescued.last_row}
    assert {chunk.id_ for chunk in rescued.episodes()} == set(expected)
    for chunk in rescued.episodes():
        like = expected[chunk.id_]
        was_open = "lost" in chunk.custom_data
        if was_open:
            assert (chunk.is_terminated, chunk.is_truncated) == (False, True)
            assert reason in chunk.custom_data["lost"]
            like = like.slice(slice(0, len(chunk)), len_lookback_buffer=chunk.observations.lookback)
        for name in ("observations", "actions", "rewards"):
            check(getattr(chunk, f"get_{name}")(slice(0, None)), getattr(like, f"get_{name}")(slice(0, None)))
        if not was_open:
            assert (chunk.is_terminated, chunk.is_truncated) == (like.is_terminated, like.is_truncated)
        assert chunk.t_started == like.t_started


def _start(chunk: Any, fragment: Fragment) -> int:
    [start] = [
        int(fragment.chunks.start[index])
        for index, each in enumerate(fragment.episodes())
        if (each.id_, each.t_started) == (chunk.id_, chunk.t_started)
    ]
    return start


@pytest.mark.parametrize(
    ("kind", "step"),
    [("numbered", 2), ("numbered", 20), ("nested", 7), ("cartpole", 2), ("cartpole", 20), ("lstm", 20)],
)
def test_a_killed_worker_gives_the_rows_that_it_had_made(kind: str, step: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {}
    if kind in ("cartpole", "lstm"):  # gymnasium's own vector form, under NEXT_STEP
        env: Any = "CartPole-v1"
        options = {"num_envs": 3, "model_config": {"use_lstm": kind == "lstm", "fcnet_hiddens": (8,)}}
    else:
        env = [partial(NumberedEnv, slot, lengths=(1, 5), nested=kind == "nested") for slot in range(3)]
        options = {"module": NumberedModule()}
    (tmp_path / "never").touch()
    whole, _ = fragments_of(env, step, tmp_path / "never", **options)
    ours, lost = fragments_of(env, step, tmp_path / "once", where="rollouts", **options)
    assert [fragment.sequence for fragment in ours] == list(range(5))
    place = (step - 1) // 8
    check_rescued(ours[place], whole[place], "was killed by SIGKILL")
    assert ours[place].num_rows == step - 1 - 8 * place  # all but the step that was under way
    assert 0 < lost["workers"] <= 3
    for before, other in zip(ours[:place], whole[:place], strict=True):
        for name in before.columns:
            map_tree(np.testing.assert_array_equal, before.column(name), other.column(name))
    assert not {c.id_ for f in ours[: place + 1] for c in f.episodes()} & {
        c.id_ for f in ours[place + 1 :] for c in f.episodes()
    }


@given(step=st.integers(0, 40), length=st.integers(1, 9))
@settings(max_examples=examples(4), phases=[Phase.explicit, Phase.generate])
def test_every_step_but_those_under_way_is_given(
    step: int, length: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("lives")
    makers = [partial(Doomed, slot, folder, "kill", step, int(slot == 1), lengths=(1, 6)) for slot in range(4)]
    options: Any = {"module": NumberedModule(), "fragment_length": length, "num_fragments": 12, "seed": 0}
    with Rollout(makers, lanes=2, where="rollouts", workers=2, **options) as rollout:
        fragments = list(rollout.fragments())
        assert rollout.num_steps == sum(fragment.num_steps for fragment in fragments)
    missing = 0
    for slot, rewards in rewards_by_slot(fragments).items():
        first, *others = Doomed.lives(folder, slot)
        if others:  # what the last life made after its last fragment is not missing
            seen = lives_of(rewards)
            missing += first - (seen[0] if len(seen) > len(others) else 0)
    assert 0 <= missing <= rollout.lost.get("workers", 0) <= 2


def test_what_was_changed_when_the_environment_raised_is_not_rescued(tmp_path: Path) -> None:
    """A worker that is killed between the two gives nothing of that fragment, rather than something wrong."""
    maker = partial(Doomed, 0, tmp_path, "raise", 5, 1, lengths=(100, 100))
    with Rollout(
        maker, where="rollouts", module=KilledWhenTold(tmp_path), fragment_length=8, num_fragments=2, seed=0
    ) as rollout:
        first, second = rollout.fragments()
        assert rollout.lost == {"workers": 5 + 1}
    for fragment in (first, second):
        assert fragment.num_rows == 8
    assert [loss.row for loss in first.losses] == [first.first_row]


class KilledWhenTold(NumberedModule):
    """Kills its process when an environment of this process has raised, before that is told."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.flag, self.made_in = folder / "killed", os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if os.getpid() == self.made_in:
            return  # a copy, where the test is
        from rollflow.stream.fragments.lane import Lane

        lose = Lane.lose

        def loses(lane: Lane, reason: str) -> int:
            lost = lose(lane, reason)
            if not self.flag.exists():
                self.flag.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return lost

        Lane.lose = loses  # type: ignore[method-assign]
