"""Saved policies that are served: what is saved anew takes over, and what can't be loaded does not."""

import shutil
from pathlib import Path

import pytest
from served_policies import Echo, Taking, policy_of

from rollflow.policy.serving.request import Acted
from rollflow.policy.serving.shelf import Shelf, WatchedPolicy, Watcher, version_of


def offset_of(shelf: Shelf) -> float:
    """The offset of the policy that acts."""
    front = Taking()
    shelf.submit("pole", front.request(1.0, "a"))
    answer = front.take()["a"]
    assert isinstance(answer, Acted), answer
    return float(answer.action[1])


def watched_at(path: Path, shelf: Shelf) -> WatchedPolicy:
    """A policy that is saved there, and watched."""
    policy_of(Echo, 1.0).save(path)
    return WatchedPolicy(shelf, "pole", path, allow=["served_policies"])


def test_what_is_saved_anew_takes_over(shelf: Shelf, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    watched = watched_at(path, shelf)
    assert (offset_of(shelf), watched.look()) == (1.0, False)
    policy_of(Echo, 2.0).save(path)
    assert watched.look()
    assert offset_of(shelf) == 2.0
    assert shelf.batcher("pole").version == version_of(path)
    assert not watched.look()


def test_what_can_not_be_loaded_is_not_served(shelf: Shelf, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "saved"
    watched = watched_at(path, shelf)
    manifest = path / "policy.json"
    manifest.write_bytes(manifest.read_bytes()[:-20])
    assert not watched.look()
    assert "can't be served, what was there before goes on" in caplog.text
    shutil.rmtree(path)
    assert not watched.look()
    assert offset_of(shelf) == 1.0


def test_a_watcher_looks_by_itself(shelf: Shelf, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    watcher = Watcher([watched_at(path, shelf).look], seconds=0.001)
    policy_of(Echo, 2.0).save(path)
    while offset_of(shelf) != 2.0:  # pytest's limit of time ends it
        pass
    watcher.close()
