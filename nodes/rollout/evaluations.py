"""Evaluations beside a rollout: each plays in a process of its own with the newest weights, and the run goes on."""

import logging
import pickle
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from rollflow.nodes.env.workers.worker_process import pickled
from rollflow.nodes.launch.process_launcher import ProgramProcess
from rollflow.nodes.policies.artifact_files import MANIFEST, read_files
from rollflow.nodes.policies.evaluation import Evaluation
from rollflow.nodes.policies.policy import Policy, save_all
from rollflow.stream.data.errors import EnvError, RollflowError

logger = logging.getLogger(__name__)

_PRELOAD = "rollflow.nodes.policies.evaluation"
_LOOK_S = 0.25  # between two looks at whether it is to be broken off
_MEAN = "mean_return"  # in `trained_on` of the best policy

Found = Evaluation | dict[Any, Evaluation]


@dataclass(frozen=True, slots=True)
class EvaluationBeside:
    """One evaluation of a rollout's policy.

    steps      environment steps that the rollout had made when it began
    version    policy version that was evaluated; of several modules, id -> version
    found      its returns and lengths; of several agents, agent -> those
    """

    steps: int
    version: Any
    found: Found

    @property
    def mean(self) -> float:
        """Mean return; of several agents, the mean of theirs."""
        return fmean(each.mean for each in _by_agent(self.found).values())


class Evaluations:
    """Evaluates a rollout's newest weights every so many environment steps, and keeps the best policy on disk.

        steps    environment steps from one evaluation to the next
        best     folder of the policy with the highest mean return so far; None: none is kept

        done     the evaluations that have ended, the oldest first

    An evaluation that is due while another is under way begins when that has ended. One that fails is logged, and the
    rollout goes on. One that is under way at the end of the rollout is broken off.
    """

    def __init__(self, steps: int, best: str | Path | None, log: Callable[[str, float], None]) -> None:
        self.done: list[EvaluationBeside] = []
        self._steps, self._best, self._log = steps, None if best is None else Path(best), log
        self._due = 0
        self._highest = _mean_of(self._best)
        self._thread = ThreadPoolExecutor(1, "rollflow evaluation")
        self._last: Future[None] | None = None
        self._is_closed = False

    def is_due(self, steps: int) -> bool:
        """True, once, if so many environment steps ask for an evaluation, and none is under way."""
        if steps < self._due or not (self._last is None or self._last.done()):
            return False
        begins, self._due = self._due > 0, (steps // self._steps + 1) * self._steps
        return begins

    def begin(
        self, steps: int, version: Any, play: Callable[[], Found], policies: Callable[[Path], Mapping[Path, Policy]]
    ) -> None:
        """Begin one.

        play        plays in the other process; holds copies
        policies    path -> policy that is saved there, of those that play
        """
        self._last = self._thread.submit(self._evaluate, steps, version, play, policies)

    def wait(self) -> None:
        """Wait until the evaluation that is under way has ended."""
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        """Break off the evaluation that is under way."""
        self._is_closed = True
        self._thread.shutdown(cancel_futures=True)

    def _evaluate(self, steps: int, version: Any, play: Callable[[], Found], policies: Any) -> None:
        try:
            found = self._found(play, steps)
            if found is None:
                return
            ended = EvaluationBeside(steps, version, found)
            if self._best is not None and ended.mean > self._highest:
                made = policies(self._best)
                for policy in made.values():
                    policy.trained_on[_MEAN] = ended.mean
                save_all(made)
                self._highest = ended.mean
        except (RollflowError, OSError) as error:
            logger.warning("the evaluation at %s steps failed: %s", f"{steps:,}", error)
            return
        self.done.append(ended)
        for name, each in _by_agent(found).items():
            self._log(f"eval/return{name}", each.mean)
            self._log(f"eval/length{name}", float(each.lengths.mean()))
        versions = {f"/{each}": of for each, of in version.items()} if isinstance(version, Mapping) else {"": version}
        for name, number in versions.items():
            self._log(f"eval/version{name}", number)

    def _found(self, play: Callable[[], Found], steps: int) -> Found | None:
        """What another process finds; None: it was broken off. Raises EnvError if that fails."""
        with tempfile.TemporaryDirectory(prefix="rollflow-") as folder:
            path = Path(folder, "found")
            call = pickled(partial(_play, play, path), [("the policy or env", play)], "an evaluation")
            process = ProgramProcess(call, f"evaluation-{steps}", _PRELOAD)
            try:
                while (end := process.wait(_LOOK_S)) is None:
                    if self._is_closed:
                        return None
            finally:
                process.kill()
            if end:
                raise EnvError(f"its process {end}: {process.log.strip()}")
            found: Found | str = pickle.loads(path.read_bytes())
        if isinstance(found, str):
            raise EnvError(found)
        return found


def _play(play: Callable[[], Found], path: Path, name: str) -> None:
    """What the other process does: plays, and writes what it has found, or the text of an error, to a path."""
    found: Found | str
    try:
        found = play()
    except Exception as error:
        found = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    path.write_bytes(pickle.dumps(found))


def _by_agent(found: Found) -> dict[str, Evaluation]:
    return {"": found} if isinstance(found, Evaluation) else {f"/{agent}": each for agent, each in found.items()}


def _mean_of(folder: Path | None) -> float:
    """Mean return of the best policy in a folder: an earlier run may have left one."""
    if folder is not None:
        for path in (folder, *sorted(folder.glob("*"))):
            if (path / MANIFEST).is_file():
                return float(read_files(path)[0]["trained_on"].get(_MEAN, float("-inf")))
    return float("-inf")
