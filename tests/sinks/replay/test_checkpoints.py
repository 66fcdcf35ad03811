"""Checkpoints of a replay: little is written for a little change, and a kill or an altered file costs nothing else."""

import errno
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from kill_runs import TWO
from newest_sampler import Newest
from numbered_agents import NumberedTeam
from property_examples import examples
from replayed import Played, insert_all, rows_of
from wire_values import same

from rollflow import MultiAgentRollout, Replay, Rollout
from rollflow.sinks import Episodes, Prioritized, ReplayClient, Storage
from rollflow.sinks.replay import row_index
from rollflow.sinks.replay.checkpoint import REPLAY, CheckpointFolder
from rollflow.stream import ReplayError
from rollflow.stream.data.errors import CheckpointError
from rollflow.stream.data.stored_files import StoredKind
from rollflow.stream.data.tree import map_tree

BLOCK = 2048  # bytes: some rows of numbered environments


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_index, "_BLOCK_BYTES", BLOCK)
        yield


@pytest.fixture(scope="module")
def played() -> Played:
    return Played(3, 40, lengths=(5, 12), nested=True)


def prioritized(capacity: int = 400) -> Replay:
    return Replay(capacity, sampler=Prioritized(), storage=Storage(frames=2), seed=0)


def saved(folder: Path, fragments: Any) -> Replay:
    """A replay with some fragments, and its checkpoint."""
    replay = prioritized()
    insert_all(replay, fragments)
    replay.save(folder)
    return replay


def loaded(folder: Path) -> Replay:
    replay = prioritized()
    replay.load(folder)
    return replay


def sizes(folder: Path) -> dict[str, int]:
    """File -> its bytes."""
    return {path.name: path.stat().st_size for path in folder.iterdir()}


def test_a_small_change_writes_the_blocks_it_is_in_and_no_others(tmp_path: Path, played: Played) -> None:
    replay = saved(tmp_path / "replay", played.fragments[:20])
    before = sizes(tmp_path / "replay")
    rows = sum(size for name, size in before.items() if name.startswith("rows"))
    replay.insert(played.fragments[20])  # 12 steps
    replay.update_priorities(replay.sample(8)["ids"], np.arange(8.0))
    replay.save(tmp_path / "replay")
    after = sizes(tmp_path / "replay")
    new = {name: size for name, size in after.items() if name not in before}
    changed = [name for name in new if name.startswith("rows")]
    fits = row_index._BLOCK_BYTES // (replay.nbytes // 400)  # rows of a block
    assert 1 <= len(changed) <= 2 + 16 // fits
    assert sum(new[name] for name in changed) < rows / 4
    assert sorted(new.keys() - set(changed)) == [next(name for name in after if name.startswith("index"))]
    assert len(after.keys() - before.keys()) >= len(before.keys() - after.keys())  # what was replaced is gone
    again = loaded(tmp_path / "replay")
    assert same(again.get_state(), replay.get_state())
    again.insert(played.fragments[21])
    again.save(tmp_path / "replay")  # a replay that was restored goes on with the files that are there
    assert len(after.keys() & sizes(tmp_path / "replay").keys()) > len(after) / 2


@settings(max_examples=examples(10), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    capacity=st.integers(40, 130),
    parts=st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 6)), min_size=1, max_size=6),
    make=st.sampled_from([Newest, Prioritized]),
)
def test_what_is_restored_is_what_was_saved_whoever_has_saved_before(
    tmp_path_factory: pytest.TempPathFactory, played: Played, capacity: int, parts: list[Any], make: Any
) -> None:
    folder = tmp_path_factory.mktemp("any") / "replay"
    replays = {name: Replay(capacity, sampler=make(), seed=0) for name in "ab"}
    given_to = dict.fromkeys("ab", 0)
    for name, count in parts:  # two replays in turn: neither may trust what the other has written
        replay = replays[name]
        insert_all(replay, played.fragments[given_to[name] : given_to[name] + count])
        given_to[name] += count
        if len(replay):
            replay.sample(8)
        replay.save(folder)
        again = Replay(capacity, sampler=make())
        again.load(folder)
        assert same(again.get_state(), replay.get_state())
        if count % 2:
            replays[name] = again


def _save_until(path: str, fragments: Any, moment: int) -> None:
    """Save a replay with some fragments more, and die at one of the moments at which files change."""
    replay = loaded(Path(path))
    insert_all(replay, fragments)
    calls = {"left": moment}

    def dying(call: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any, **options: Any) -> Any:
            if calls["left"] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            calls["left"] -= 1
            return call(*arguments, **options)

        return made

    for name in ("fsync", "replace", "unlink"):
        setattr(os, name, dying(getattr(os, name)))
    replay.save(path)


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_the_last_whole_checkpoint(tmp_path: Path, played: Played) -> None:
    older, newer = saved(tmp_path / "replay", played.fragments[:6]), loaded(tmp_path / "replay")
    insert_all(newer, played.fragments[6:9])
    states = [older.get_state(), newer.get_state()]
    moment, found = 0, [0]
    while True:
        arguments = str(tmp_path / "replay"), played.fragments[6:9], moment
        process = multiprocessing.get_context("fork").Process(target=_save_until, args=arguments)
        process.start()
        process.join(60)
        again = loaded(tmp_path / "replay")
        found.append(int(len(again) > len(older)))
        assert same(again.get_state(), states[found[-1]])
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        if found[-1]:
            older.save(tmp_path / "replay")  # the next one begins as this one has
        moment += 1
    assert found == sorted(found)
    assert moment > 10
    assert found.count(1) > 1  # also while older files were removed
    assert len(list((tmp_path / "replay").glob("index-*"))) == 1  # and nothing that is half done stays
    assert [path.name for path in (tmp_path / "replay").glob(".*")] == [".lock"]


def test_a_full_disk_is_told_with_the_file(tmp_path: Path, played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    replay = saved(tmp_path / "replay", played.fragments[:1])
    replay.insert(played.fragments[1])
    taken = len(replay)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(OSError, match="No space left on device") as raised:
            replay.save(tmp_path / "replay")
    [note] = raised.value.__notes__
    assert note.startswith(f"while {tmp_path}/replay/")
    assert note.endswith(" was written; what was there stays")
    again = loaded(tmp_path / "replay")
    assert 0 < len(again) < taken


def test_whole_episodes_are_those_of_the_state_that_was_taken_last() -> None:
    one, other = Replay(500, sampler=Episodes(), seed=0), Replay(500, sampler=Episodes(), seed=0)
    mode = gym.vector.AutoresetMode.SAME_STEP
    for seed, replay in enumerate((one, other)):
        replay.insert(Played(2, 1, seed=seed, lengths=(1, 6), fragment_length=12, autoreset_mode=mode).fragments[0])
    assert one.report() == other.report()
    one.sample(4)
    one.set_state(other.get_state())
    assert one.sample(4)["seen"].tolist() == other.sample(4)["seen"].tolist()


def test_one_replay_at_a_time_writes_to_a_folder(tmp_path: Path) -> None:
    replay = prioritized()
    with CheckpointFolder(tmp_path / "new" / "replay").held():  # as a host does, in this process or in another
        told = "another replay, or a replay host, writes to .*, expected one at a time"
        with pytest.raises(ReplayError, match=told):
            replay.save(tmp_path / "new" / "replay")
    replay.save(tmp_path / "new" / "replay")


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_anew(
    tmp_path: Path, played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    older, newer = saved(tmp_path / "replay", played.fragments[:1]), prioritized()
    insert_all(newer, played.fragments[:2])
    read = StoredKind.read_manifest

    def meanwhile(kind: StoredKind, folder: Path) -> Any:
        manifest = read(kind, folder)
        monkeypatch.undo()
        newer.save(tmp_path / "replay")
        return manifest

    again = prioritized()
    monkeypatch.setattr(StoredKind, "read_manifest", meanwhile)
    again.load(tmp_path / "replay")
    assert len(again) == len(newer) > len(older)


def test_an_altered_file_is_refused_by_its_name(tmp_path: Path, played: Played) -> None:
    saved(tmp_path / "replay", played.fragments[:6])
    assert len(sizes(tmp_path / "replay")) > 4
    for path in (tmp_path / "replay").glob("[!.]*"):
        data = path.read_bytes()
        middle = len(data) // 2
        for altered in (None, data[:middle], data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]):
            path.unlink() if altered is None else path.write_bytes(altered)
            again = prioritized()
            with pytest.raises(ReplayError, match=path.name):
                again.load(tmp_path / "replay")
            assert len(again) == 0
        path.write_bytes(data)
    with pytest.raises(ReplayError, match=r"manifest.json is missing in .*nothing, expected a replay's checkpoint"):
        loaded(tmp_path / "nothing")
    loaded(tmp_path / "replay")


def test_a_folder_that_was_damaged_meanwhile_is_written_anew(tmp_path: Path, played: Played) -> None:
    replay = saved(tmp_path / "replay", played.fragments[:1])
    (tmp_path / "replay" / REPLAY.manifest).write_text("{}")
    somebody_elses = [tmp_path / "replay" / name for name in ("notes", "index-page.html", "rows-2024.csv")]
    for path in somebody_elses:
        path.write_text("")
    replay.save(tmp_path / "replay")
    again = loaded(tmp_path / "replay")
    for row in rows_of(again.sample(8)):
        played.check_row(row, frames=2)
    assert all(path.exists() for path in somebody_elses)
    (tmp_path / "file").write_text("")
    with pytest.raises(ReplayError, match="file is a file, expected a replay's checkpoint, which is a folder"):
        replay.save(tmp_path / "file")


def fed(rollout: Rollout, replay: Replay, rounds: int, folder: Path) -> list[Path]:
    """Insert a run's fragments into a replay, and save both behind each; the checkpoints."""
    rollout.attach(replay=replay)
    with rollout:
        paths = []
        for fragment, _ in zip(rollout.fragments(), range(rounds), strict=False):
            replay.insert(fragment)
            replay.update_priorities(replay.sample(8)["ids"], np.arange(8.0))
            paths.append(rollout.save(folder, keep=3))
    return paths


def test_a_run_saves_its_replay_and_writes_what_is_new(tmp_path: Path) -> None:
    replay = Replay(2000, sampler=Prioritized(), seed=0)
    paths = fed(Rollout("CartPole-v1", num_envs=4, fragment_length=16, seed=0), replay, 9, tmp_path)
    assert [path.exists() for path in paths] == [False] * 6 + [True] * 3
    before, after = ({each.name: each for each in (path / "replay").glob("rows-*")} for path in paths[-2:])
    assert len(after) > 8
    assert len(after.keys() - before.keys()) <= 3
    assert all(each.samefile(before[name]) for name, each in after.items() if name in before)
    whole = replay.get_state()
    for path in paths[-1:], paths[-2:-1]:
        again, resumed = Replay(2000, sampler=Prioritized()), Rollout.resume(path[0])
        resumed.attach(replay=again)
        if path[0] == paths[-1]:
            assert same(again.get_state(), whole)
            paths += fed(resumed, again, 1, tmp_path)  # which goes on with the files that are there
            assert len(after.keys() - {each.name for each in (paths[-1] / "replay").iterdir()}) <= 2
        resumed.close()


def test_a_replay_that_is_not_attached_again_stays_and_another_kind_is_refused(tmp_path: Path) -> None:
    replay = prioritized()
    [path] = fed(Rollout("CartPole-v1", num_envs=2, fragment_length=16, seed=0), replay, 1, tmp_path)
    with (run := Rollout.resume(tmp_path)):
        with pytest.warns(RuntimeWarning, match="the checkpoint has replay, which nothing was given"):
            next(run.batches())
        newer = run.save(tmp_path)
    assert not path.exists()
    assert same(loaded(newer / "replay").get_state(), replay.get_state())
    run = Rollout.resume(tmp_path)
    with pytest.raises(ReplayError, match="the state is of a replay with capacity=400, expected 7"):
        run.attach(replay=Replay(7))
    with pytest.raises(CheckpointError, match=r"attach\(replay=…\) is given .*, expected what the checkpoint has"):
        run.attach(replay=torch.nn.Linear(1, 1))
    run.close()
    for name in ("manifest.json", "index-*"):
        file = next((newer / "replay").glob(name))
        data = file.read_bytes()
        file.write_bytes(data[:-1])
        with pytest.raises((CheckpointError, ReplayError), match=f"{file.name} has .* bytes, .*: it was truncated"):
            Rollout.resume(tmp_path).attach(replay=prioritized())
        file.write_bytes(data)


def test_a_replay_elsewhere_is_refused_with_what_saves_it(tmp_path: Path) -> None:
    with Rollout("CartPole-v1") as run, ReplayClient(f"unix:{tmp_path}/none") as client:
        with pytest.raises(ValueError, match=r"expected .* a Replay of this process: ReplayHost\(checkpoint=FOLDER\)"):
            run.attach(replay=client)


RUNS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "one agent": (Rollout, "CartPole-v1", {}),
    "lanes in threads": (Rollout, "CartPole-v1", {"lanes": 2, "where": "threads", "deterministic": True}),
    "ahead": (Rollout, "CartPole-v1", {"lanes": 2, "prefetch": 1, "deterministic": True}),
    "several agents": (MultiAgentRollout, partial(NumberedTeam, 0, nested=0), TWO),
}


def sampled(rollout: Any, rounds: int, folder: Path | None = None) -> Iterator[Any]:
    """What a replay of a run gives, by module, which it is saved with behind the last round."""
    replay = Replay(150, sampler=Prioritized(), seed=0)
    rollout.attach(replay=replay)
    with rollout:
        fragments = rollout.fragments()
        for _ in range(rounds):
            replay.insert(next(fragments))
            batch = replay.sample(8)
            for module_id, each in batch.items() if replay.module_ids else [(None, batch)]:
                replay.update_priorities(each["ids"], np.arange(8.0), module_id)
            yield {each: map_tree(np.asarray, values) for each, values in batch.items()}
        if folder is not None:
            rollout.save(folder)


@pytest.mark.parametrize("name", RUNS)
def test_samples_behind_a_stop_are_those_of_the_run_that_never_stopped(name: str, tmp_path: Path) -> None:
    kind, env, options = RUNS[name]
    torch.manual_seed(0)
    whole = list(sampled(kind(env, num_envs=4, fragment_length=16, seed=0, **options), 16))
    torch.manual_seed(0)
    first = list(sampled(kind(env, num_envs=4, fragment_length=16, seed=0, **options), 9, tmp_path))
    functions = {each: value for each, value in options.items() if callable(value)}
    resumed = kind.resume(tmp_path, env if callable(env) else None, **functions)
    assert same([*first, *sampled(resumed, 7)], whole)
