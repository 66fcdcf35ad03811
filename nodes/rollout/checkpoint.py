"""Checkpoints of a whole run: what a rollout needs to go on as if it had never stopped. No pickle.

    checkpoint-STEPS/checkpoint.json           manifest: kinds of environments, and digests of the other files
    checkpoint-STEPS/checkpoint.safetensors    the state, with the keywords
    checkpoint-STEPS/NAME/manifest.json        of what is attached and keeps files of its own, such as a replay
    checkpoint-STEPS/NAME/…                    its files: those that have not changed are links to the last ones

A checkpoint is there once its folder has its name, which it gets when both files are written.
"""

import logging
import os
import random
import re
import shutil
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from time import monotonic, sleep, thread_time
from typing import Any, Protocol, runtime_checkable
from weakref import WeakMethod

import numpy as np
import torch

from rollflow.nodes.argument_checks import check_numbers
from rollflow.nodes.policies.artifact_files import folder_of
from rollflow.nodes.policies.part_records import packed, to_plain, unpacked
from rollflow.nodes.policies.space_text import described
from rollflow.nodes.rollout.options import Checkpoints, Forward, Timeouts, Watch
from rollflow.stream.data.errors import (
    CheckpointError,
    PolicyError,
    RunError,
    StallError,
    noted,
    shown,
    warn_caller,
)
from rollflow.stream.data.infos import copied
from rollflow.stream.data.stored_files import LockedFolder, StoredKind, checksums, link, write_synced
from rollflow.stream.fragments.ready_lane import ReadyLane

logger = logging.getLogger(__name__)

RUN = StoredKind("rollflow checkpoint", 2, "checkpoint.json", "a checkpoint of a run", CheckpointError, oldest=2)
TOGETHER = replace(RUN, name="rollflow trainer checkpoint", noun="a checkpoint of a trainer and its rollouts")
_STATE, _MANIFEST = "checkpoint.safetensors", "manifest.json"
_NAME = "checkpoint-"
LOCK_WAIT_S = 8.0  # for children of a run that was killed, such as a `DataLoader`'s: they end some seconds after it
_IS_ONE = re.compile(rf"{_NAME}\d{{12,}}(\.\d{{3}})?").fullmatch  # several of as many steps have numbers
_ADDRESS = re.compile(" at 0x[0-9a-f]+")  # of an object, other in each slot
_RECORDS = {"forward": Forward, "timeouts": Timeouts, "watch": Watch, "checkpoints": Checkpoints}

State = dict[str, Any]


@runtime_checkable
class KeepsFiles(Protocol):
    """What is saved in files of its own, such as a `Replay`."""

    def captured(self, before: Path) -> Callable[[Path], None]:
        """What writes the state as it is now to a new folder, `manifest.json` last.

        before    folder of the state that was written last, if there is one: files of it may be linked
        """

    def load(self, path: Path) -> None:
        """Take the state in a folder."""


class _RunFolder(LockedFolder):
    """Folder that one run at a time saves itself to."""

    kind, writer = RUN, "another run"


class RunCheckpoints:
    """The checkpoints of one rollout: captured in the thread of its loop, written in a thread of its own.

    capture    gives the state of the rollout and the number of its transitions, in the thread of its loop; held weakly
    how        their folder, how often and how many; None: only what is asked for
    kind       of the checkpoints

    attached        name -> object that is saved with it
    saved           their states in the run that this one goes on with, of those that were not attached yet; a folder:
                    it has files of its own there
    resumed_from    the checkpoint that this run goes on from
    thread          of the loop
    """

    def __init__(
        self, capture: Callable[[], tuple[State, int]], how: Checkpoints | None, kind: StoredKind = RUN
    ) -> None:
        self.attached: dict[str, Any] = {}
        self.saved: dict[str, Any] = {}
        self.resumed_from: Path | None = None
        self._capture, self._how, self._kind = WeakMethod(capture), how, kind  # its rollout holds these
        self._folder = None if how is None else _RunFolder(how.folder)
        self._writer = ThreadPoolExecutor(1, "rollflow checkpoints")
        self._written: Future[Path] | None = None
        self._newest: Path | None = None  # that was written, or is gone on from
        self._last = 0.0
        self._cost_s = 0.0  # of the last one: of the loop, and of processor time of the thread that wrote it
        self._warned_of_cost = False
        self.thread = 0
        self._before: Any = None  # handler of SIGTERM, if it was replaced
        self._is_told = False  # to end, by SIGTERM
        self._has_ended = False
        self._warned: set[tuple[int, str]] = set()  # lanes and reasons
        self._kept: dict[str, Any] = {}  # what was saved of objects that nobody has attached

    def attach(self, objects: Mapping[str, Any]) -> None:
        """Save objects with the run, by their names; they load what was saved under these in the run before.

        Raises RunError for one of the run before that comes once the loop runs.
        """
        if late := ", ".join(name for name in objects if name in self._kept):
            raise RunError(
                f"attach({late}=…) is called in the loop of a run that goes on, expected it before the loop: there it "
                "loads what was saved"
            )
        for name, each in objects.items():
            keeps_files = isinstance(each, KeepsFiles)
            load = each.load if keeps_files else _ways_of(name, each)[1]
            if name in self.saved:
                if keeps_files != isinstance(self.saved[name], Path):
                    raise CheckpointError(f"attach({name}=…) is given {shown(each)}, expected what the checkpoint has")
                with noted(f"while attach({name}=…) had it load what was saved"):
                    load(self.saved[name])
                del self.saved[name]
            self.attached[name] = each

    def go_on_from(self, path: Path, saved: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, with the states of what was attached to it."""
        self.resumed_from = self._newest = path
        self.saved = dict(saved)
        self.attach(self.attached)

    def begin(self) -> None:
        """Begin with the run: the first one is due after the time that there is to be between two.

        Raises CheckpointError for a folder that can't be made, has another run's, or is written to by one.
        """
        self._last, self.thread = monotonic(), threading.get_ident()
        how = self._how
        if how is None or self._folder is None:
            return
        folder, until = _made(how.folder), monotonic() + LOCK_WAIT_S
        while True:
            try:
                self._folder.lock()
                break
            except CheckpointError:
                if monotonic() > until:
                    raise
                sleep(0.1)
        if _there(folder) and not (self.resumed_from and self.resumed_from.resolve().parent == folder.resolve()):
            raise CheckpointError(
                f"{folder} has checkpoints of another run; expected Rollout.resume({str(folder)!r}), or another folder"
            )
        in_main = threading.current_thread() is threading.main_thread()
        if how.on_sigterm and in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._before = signal.signal(signal.SIGTERM, self._end_soon) or signal.SIG_DFL

    def look(self) -> None:
        """Save if it is time. Between two rounds, in the loop's thread. Raises SystemExit after SIGTERM."""
        how, self.thread = self._how, threading.get_ident()
        if self.saved:
            names = ", ".join(self.saved)
            text = f"the checkpoint has {names}, which nothing was given: rollout.attach({names}=…)"
            logger.warning(text)
            warn_caller(text, RuntimeWarning)
            self._kept, self.saved = self.saved, {}
        if how is None:
            return
        has_written = self._written is None or self._written.done()
        pause_s = max(how.every_s, self._cost_s / how.most_share)
        if pause_s > 2 * how.every_s and has_written and not self._warned_of_cost:
            self._warned_of_cost = True
            logger.warning(
                "a checkpoint takes %.2f s: there is one every %.0f s, so that they take %.1f %% of the time; expected "
                "that, or another most_share of Checkpoints",
                self._cost_s,
                pause_s,
                100 * how.most_share,
            )
        is_due = has_written and monotonic() - self._last >= pause_s
        if is_due or self._is_told:
            try:
                self.save(how.folder, how.keep, waits=self._is_told)
            except StallError:
                raise
            except RunError as error:  # no reason to end the loop
                logger.warning("no checkpoint is saved: %s", error)
                self._last = monotonic()
        if self._is_told:
            self._is_told = False
            raise SystemExit(128 + signal.SIGTERM)

    def save(self, folder: str | os.PathLike[str], keep: int, *, waits: bool = True) -> Path:
        """Save the run; its folder.

        waits    return once it is written; else what writing raises is raised by the next call

        Raises RunError if it does not run, CheckpointError for what can't be saved or written, and ValueError for a
        `keep` below 1.
        """
        check_numbers(keep=(keep, 1))
        self._raise_written()
        capture, began = self._capture(), monotonic()
        assert capture is not None
        state, steps = capture()
        path, before, kept = _next(_made(folder), steps), self._newest or Path(folder), {**self._kept, **self.saved}
        files: dict[str, Callable[[Path], Any]] = {
            name: partial(shutil.copytree, before / folder_of(name), copy_function=link)
            for name, each in kept.items()
            if isinstance(each, Path)
        }
        for name, each in self.attached.items():
            if isinstance(each, KeepsFiles):
                files[name] = each.captured(before / folder_of(name))
            else:
                kept[name] = copied(_ways_of(name, each)[0]())
        state["attached"] = {name: each for name, each in kept.items() if name not in files}
        state["files"] = sorted(files)
        self._warn_of_restarts(state)
        try:
            write = partial(_write, self._kind, path, state, files, keep)
            self._written = self._writer.submit(self._timed, write, monotonic() - began)
        except RuntimeError:
            raise RunError("the rollout was closed, by another thread, while its state was read") from None
        if waits:
            self._raise_written()
        self._last = monotonic()
        return path

    def _timed(self, write: Callable[[], Path], captured_s: float) -> Path:
        began = thread_time()
        path = write()
        self._cost_s = captured_s + thread_time() - began
        return path

    def save_last(self) -> None:
        """Save a run that is left by its program, if it is saved by itself and can be: a thread may have ended it."""
        if self._how is not None and threading.get_ident() == self.thread:
            with suppress(RunError):
                self.save(self._how.folder, self._how.keep)

    def end(self) -> None:
        """End with the run. Raises what writing the last one has raised."""
        self._has_ended = True
        self._writer.shutdown()
        if self._folder is not None:
            self._folder.unlock()
        self._pass_on()
        self._raise_written()

    def _pass_on(self) -> None:
        """Give SIGTERM back to the handler before, with one that came behind the last round."""
        if self._before is None or threading.current_thread() is not threading.main_thread():
            return  # no other thread can do it: it is done when the next one comes
        before, self._before = self._before, None
        signal.signal(signal.SIGTERM, before)
        if self._is_told:
            os.kill(os.getpid(), signal.SIGTERM)

    def _raise_written(self) -> None:
        written, self._written = self._written, None
        if written is not None:
            self._newest = written.result()

    def _end_soon(self, *of_signal: Any) -> None:
        self._is_told = True
        if self._has_ended:
            self._pass_on()

    def _warn_of_restarts(self, state: State) -> None:
        for lane, environments in enumerate(state["environments"]):
            for reason in {_ADDRESS.sub("", each["restart"]) for each in environments if "restart" in each}:
                if (lane, reason) not in self._warned:
                    self._warned.add((lane, reason))
                    logger.warning(
                        "a run that goes on from this checkpoint begins lane %d's episodes anew: %s", lane, reason
                    )


# Parts of a state


def layout_of(environments: Any) -> State:
    """What the states of lanes go with."""
    return {
        "slots": [each.num_envs for each in environments.envs],
        "fragment_length": environments.fragment_length,
        "lookback": environments.lookback,
        "deterministic": environments.keeps_order,
        "does": environments.does,
        "step_apart": any(isinstance(lane, ReadyLane) for lane in environments.lanes),
        "on_device": any(getattr(lane, "device", None) is not None for lane in environments.lanes),
        "set_aside": [lane.index for lane in environments.lanes if lane.is_set_aside],
        "autoreset": str(getattr(environments.envs[0], "metadata", {}).get("autoreset_mode")),
        "agents": [[list(agents), described(seen), described(done)] for agents, seen, done, _ in environments.parts],
    }


def kept_of(keywords: Mapping[str, Any]) -> State:
    """Keywords of a rollout, its environments among them, without those that have no plain form."""
    kept: State = dict(keywords)
    for name, value in list(kept.items()):
        if name in _RECORDS and value is not None:
            of_one_run = "record", "replay", "until"  # of a `Watch`
            record = {each.name: getattr(value, each.name) for each in fields(value) if each.name not in of_one_run}
            value = kept[name] = {
                field: os.fspath(each) if isinstance(each, os.PathLike) else each for field, each in record.items()
            }
        try:
            is_plain = "$function" not in str(to_plain(value, name, {}))
        except PolicyError:
            is_plain = False
        if not is_plain:
            kept[name] = {"$missing": True}
    return kept


def generators() -> State:
    """The states of the shared generators of Python, numpy and torch, on GPUs as well if they are in use."""
    state = {"python": random.getstate(), "numpy": np.random.get_state(legacy=False), "torch": torch.get_rng_state()}
    cuda: Any = torch.cuda
    return {**state, "cuda": cuda.get_rng_state_all() if cuda.is_initialized() else []}


def set_generators(state: Mapping[str, Any]) -> None:
    """Set the shared generators of Python, numpy and torch: of as many GPUs as there are."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for device, each in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(each, device)


# Files


def _ways_of(name: str, each: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """How an object that is attached says its state, and how it takes one. Raises ValueError if it can't."""
    for get, put in ("state_dict", "load_state_dict"), ("get_state", "set_state"):
        if hasattr(each, get) and hasattr(each, put):
            return getattr(each, get), getattr(each, put)
    raise ValueError(
        f"attach({name}=…) is given {shown(each)}, expected an object with state_dict and load_state_dict, or a Replay "
        "of this process: ReplayHost(checkpoint=FOLDER) saves its own"
    )


def _write(
    kind: StoredKind, path: Path, state: Mapping[str, Any], files_of: Mapping[str, Callable[[Path], Any]], keep: int
) -> Path:
    """Write a state to a folder, whole or not at all, and remove all but the newest so many beside it; the folder.

    files_of    name of what keeps files of its own -> what writes them to a folder

    Raises CheckpointError for what can't be saved, and what the disk refuses.
    """
    try:
        files = {_STATE: packed(state)}
    except PolicyError as error:
        raise CheckpointError(f"the run can't be saved: {error}") from None
    kinds = [sorted({kind for each in lane for kind in each}) for lane in state["environments"]]
    made = _hidden(path)
    try:
        for left in path.parent.glob(f".{_NAME}*"):  # by a process that was killed as it wrote
            shutil.rmtree(left, ignore_errors=True)
        made.mkdir(parents=True)
        write_synced(made / _STATE, files[_STATE])
        for name, write in files_of.items():
            folder = made / folder_of(name)
            write(folder)
            files[f"{folder.name}/{_MANIFEST}"] = (folder / _MANIFEST).read_bytes()
        manifest = kind.manifest_bytes({"environments": kinds, "files": checksums(files)})
        write_synced(made / kind.manifest, manifest)
        for later in _there(path.parent):  # of a run before, which the next `resume` would go on from
            if later.name > path.name:
                aside = later.with_name(f"other-{later.name}")
                logger.warning("%s is of another run, which was longer: it is moved to %s", later, aside.name)
                shutil.rmtree(aside, ignore_errors=True)
                os.rename(later, aside)
        os.rename(made, path)
        for old in _there(path.parent)[:-keep]:
            os.rename(old, _hidden(old))  # never a part of one by its name
            shutil.rmtree(_hidden(old), ignore_errors=True)
    except OSError as error:
        raise CheckpointError(
            f"the run can't be saved to {path}: {error}; expected a disk that has room, and lets it be written"
        ) from error
    finally:
        shutil.rmtree(made, ignore_errors=True)  # what has no name of its own yet
    return path


def _hidden(path: Path) -> Path:
    """The folder of a checkpoint that is no whole one, beside its own."""
    return path.with_name(f".{path.name}.new")


def _made(folder: str | os.PathLike[str]) -> Path:
    """The path of a folder, which is made. Raises CheckpointError if it can't be."""
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"checkpoints can't be written to {path}: {error}; expected a folder") from None
    return path


def _there(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    return sorted(each for each in folder.glob(f"{_NAME}*") if _IS_ONE(each.name) and each.is_dir())


def _next(folder: Path, steps: int) -> Path:
    """The path of a new checkpoint: one of as many steps stays until the new one is there."""
    name = f"{_NAME}{steps:012d}"
    same = [each.name for each in _there(folder) if each.name.startswith(name)]
    return folder / (f"{name}.{int(same[-1].partition('.')[2] or 0) + 1:03d}" if same else name)


def read(path: str | os.PathLike[str], kind: StoredKind = RUN) -> tuple[Path, State]:
    """The folder of a checkpoint, or of the newest one in a folder, and its state.

    Raises CheckpointError for anything else, which names the newest one before that is whole, if there is one.
    """
    folder = Path(path)
    there = _there(folder)
    chosen = there[-1] if there else folder
    if not there and not (folder / kind.manifest).is_file():
        raise CheckpointError(f"there is no checkpoint at {folder}, expected a folder that save() was given")
    try:
        state = _state_at(chosen, kind)
    except CheckpointError as error:
        before = next((each for each in there[-2::-1] if _is_whole(each, kind)), None)
        how = "Rollout.resume" if kind is RUN else "stream.resume"
        others = "" if before is None else f"; {how}({str(before)!r}) is the one before"
        raise CheckpointError(f"{error}{others}") from None
    if isinstance(checkpoints := state["keywords"].get("checkpoints"), dict):
        checkpoints["folder"] = os.fspath(chosen.parent)  # which may be a copy of that of the run
    return chosen, state


def _is_whole(chosen: Path, kind: StoredKind) -> bool:
    try:
        _state_at(chosen, kind)
    except CheckpointError:
        return False
    return True


def _state_at(chosen: Path, kind: StoredKind) -> State:
    """The state in the folder of a checkpoint. Raises CheckpointError, with the folder."""
    try:
        manifest = kind.read_manifest(chosen)
        files = {name: kind.read_file(chosen, name, manifest["files"]) for name in manifest["files"]}
        state: State = unpacked(kind, files[_STATE], _STATE)
        state["attached"] |= {name: chosen / folder_of(name) for name in state["files"]}
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{chosen} can't be gone on from: {error}") from None
    return state


def keywords_of(state: Mapping[str, Any], env: Any, given: Mapping[str, Any]) -> tuple[Any, State]:
    """The environments and the keywords of a rollout that goes on from a state.

    env, given    what is given anew: env None stands for that of the state

    Raises CheckpointError for what has to be given anew, since it has no plain form.
    """
    kept = {name: value for name, value in state["keywords"].items() if name not in given}
    if env is not None:
        kept["env"] = env
    if missing := [name for name, value in kept.items() if value == {"$missing": True}]:
        raise CheckpointError(
            f"the checkpoint can't have {', '.join(missing)} of the run; expected the same to be given to resume()"
        )
    records = {name: kind(**kept[name]) for name, kind in _RECORDS.items() if isinstance(kept.get(name), dict)}
    return kept.pop("env"), {**kept, **records, **given}
