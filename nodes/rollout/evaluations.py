"""Evaluations beside a rollout: each plays in a process of its own with the newest weights, and the run goes on."""

import logging
import pickle
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from statistics import fmean
from typing import Any

from rollflow.nodes.env.workers.worker_process import pickled
from rollflow.nodes.launch.process_launcher import ProgramProcess
from rollflow.nodes.policies.artifact_files import MANIFEST, check_target, read_files
from rollflow.nodes.policies.evaluation import Evaluation
from rollflow.nodes.policies.policy import Policy, save_all
from rollflow.nodes.policies.space_text import described
from rollflow.stream.data.errors import EnvError, PolicyError, RollflowError

logger = logging.getLogger(__name__)

_PRELOAD = "rollflow.nodes.policies.evaluation"
_LOOK_S = 0.25  # between two looks at whether it is to be broken off
_MEAN = "mean_return"  # in `trained_on` of the best policy

Found = Evaluation | dict[Any, Evaluation]
Played = tuple[partial[Found], Mapping[Path, Policy], Any]


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
        played   gives a call that plays with copies of the policies; path -> policy, of those that are kept if their
                 mean return is the highest so far, {}: none is; and the policies' versions

        done     the evaluations that have ended, the oldest first

    An evaluation that is due while another is under way begins when that has ended. One that fails is logged, and the
    rollout goes on. One that is under way at the end of the rollout is broken off.

    Raises TypeError for a keyword that the call has not, and PolicyError if something else than such a policy is at one
    of the paths.
    """

    def __init__(self, steps: int, played: Callable[[], Played], log: Callable[[str, float], None]) -> None:
        play, best, _ = played()  # raises what is wrong
        try:
            signature(play)
        except ValueError:
            raise TypeError(f"evaluate_every got {sorted(play.keywords)}, expected keywords of evaluate") from None
        self.done: list[EvaluationBeside] = []
        self._steps, self._played, self._log = steps, played, log
        self._due = 0
        self._highest = max(map(_mean_before, best, best.values()), default=float("-inf"))
        self._thread = ThreadPoolExecutor(1, "rollflow evaluation")
        self._last: Future[None] | None = None
        self._is_closed = False

    def look(self, steps: int) -> None:
        """Begin one if so many environment steps ask for it, and none is under way."""
        if steps < self._due or not (self._last is None or self._last.done()):
            return
        is_first, self._due = not self._due, (steps // self._steps + 1) * self._steps
        if not is_first:  # a run begins with none
            self._last = self._thread.submit(self._evaluate, steps, *self._played())

    def __repr__(self) -> str:
        return f"<{type(self).__name__} every {self._steps:,} steps: {len(self.done)} done>"

    def wait(self) -> None:
        """Wait until the evaluation that is under way has ended."""
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        """Break off the evaluation that is under way."""
        self._is_closed = True
        self._thread.shutdown(cancel_futures=True)

    def _evaluate(self, steps: int, play: Callable[[], Found], best: Mapping[Path, Policy], version: Any) -> None:
        try:
            found = self._found(play, steps)
        except (RollflowError, OSError) as error:
            logger.warning("the evaluation at %s steps failed: %s", f"{steps:,}", error)
            return
        if found is None:
            logger.warning(
                "the evaluation at %s steps was broken off by the end of the rollout; expected evaluations.wait() "
                "before, in its block",
                f"{steps:,}",
            )
            return
        ended = EvaluationBeside(steps, version, found)
        if best and ended.mean > self._highest:
            self._highest = ended.mean
            for policy in best.values():
                policy.trained_on[_MEAN] = ended.mean
            try:
                save_all(best)
            except (RollflowError, OSError) as error:
                logger.warning("the best policy, of %s steps, can't be saved: %s", f"{steps:,}", error)
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


def _mean_before(path: Path, policy: Policy) -> float:
    """Mean return of the policy at a path, which an earlier run may have left. Raises PolicyError for another kind."""
    check_target(path)
    if not (path / MANIFEST).is_file():
        return float("-inf")
    manifest, _ = read_files(path)
    before = manifest["trained_on"]
    spaces = {name: described(getattr(policy, name)) for name in ("observation_space", "action_space")}
    facts = before.get("environment"), policy.trained_on.get("environment")
    if facts[0] != facts[1] or any(manifest[name] != space for name, space in spaces.items()):
        raise PolicyError(
            f"{path} has a policy that was trained in {facts[0] or spaces}, and this one is in {facts[1] or 'others'}; "
            "expected another folder for the best policy"
        )
    return float(before.get(_MEAN, float("-inf")))
