"""Keywords of a rollout: checked, with their defaults, in frozen records."""

import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import Any, Literal, TypedDict, TypeVar

import gymnasium as gym

from rollflow.nodes.argument_checks import (
    check_flags,
    check_keywords,
    check_numbers,
    checked_count,
    checked_number,
    checking_constructor,
    places_in,
    seeds_of,
)
from rollflow.nodes.connectors.connector_v2 import ConnectorV2
from rollflow.nodes.env.env_source import Autoreset
from rollflow.nodes.launch.on_hosts import OnHosts
from rollflow.nodes.logs.destinations import Log, LogOptions
from rollflow.nodes.logs.figures import Axis
from rollflow.nodes.metrics.metrics_logger import MetricsLogger
from rollflow.nodes.rollout.schedule import Recording, ReplayedRun
from rollflow.nodes.stages.acting import compile_options
from rollflow.nodes.stages.module_set import AgentToModule
from rollflow.nodes.stages.rounds import OnExcess, check_staleness
from rollflow.stream.data.errors import shown
from rollflow.stream.multi_agent.agent_part import AgentPart
from rollflow.stream.observe.watch import OnStall, StallRules

Init = TypeVar("Init", bound=Callable[..., None])
T = TypeVar("T")
Pieces = ConnectorV2 | Sequence[ConnectorV2]
JOINT_PASSES = "max_batch and max_wait of Forward are for a pass over several lanes"
Where = Literal["inline", "threads", "processes", "rollouts", "auto"]
Place = Where | OnHosts
Until = str | float | Callable[[Any], bool] | None


@checking_constructor(device="device=… of the rollout")
@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """How forward passes are done while acting: `Rollout(env, forward=Forward(max_batch=64))`.

    max_batch    slots, or agents, in one pass over several ready lanes, at most; None: each lane has its own pass. With
                 where="threads" or "processes" and `lanes` left out, environments of one agent each, no more than
                 that, are one lane, whose slots step each on its own: a pass has those that are ready. With `lanes`,
                 lanes stay
    max_wait     seconds for which such a pass waits for more lanes or slots, once one is ready
    flat         do passes as flat lists of torch operations, without the cost of `nn.Module`'s calls. True: for modules
                 that do the same at every call; results are equal up to rounding. None: for a `DefaultModule`, and on
                 the CPU for others whose code can do nothing else at another call, with the same bits: `explain()`
                 says why one is not. See `FlatForward`
    compile      do passes by `torch.compile`; a dict has its options
    threads      torch's threads for passes and for making actions of them. One is best for small networks: two wait
                 for each other. None: as torch is set

    Raises ValueError for numbers that are none, or too small, and for `flat` and `compile` together.
    """

    max_batch: int | None = None
    max_wait: float = 0.0
    flat: bool | None = None
    compile: bool | Mapping[str, Any] = False
    threads: int | None = 1

    def __post_init__(self) -> None:
        check_numbers(max_batch=(self.max_batch, 1), threads=(self.threads, 1))
        checked_number("max_wait", self.max_wait, least=0, noun="seconds")
        check_flags(flat=self.flat is not None and self.flat)
        if not isinstance(self.compile, bool | Mapping):
            raise ValueError(f"compile is {self.compile!r}, expected True, False or a dict of torch.compile's options")
        if self.max_wait and self.max_batch is None:
            raise ValueError(f"max_wait={self.max_wait} is for a pass over several lanes, expected max_batch as well")
        if self.flat and self.compile is not False:
            raise ValueError("flat and compile are two ways of doing a pass, expected one of them")

    @property
    def options(self) -> dict[str, Any]:
        """Keywords of `ModuleForward`, but for `explore`."""
        return {"flat": self.flat, "threads": self.threads, "compiled": compile_options(self.compile)}


@checking_constructor()
@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Seconds after which environments in threads, in worker processes or on hosts are taken for hung; None: never.

    step     of a vector step. On hosts it includes resets after ended episodes
    reset    of a reset; the first one includes the start of a process. Vectorized environments that reset within a
             step have both times together

    Raises ValueError for anything but numbers above 0.
    """

    step: float | None = 60.0
    reset: float | None = 120.0

    def __post_init__(self) -> None:
        for name, seconds in (("step", self.step), ("reset", self.reset)):
            if seconds is not None:
                checked_number(f"{name} of Timeouts", seconds, above=0, noun="seconds")

    def keywords(self) -> dict[str, Any]:
        """The times as keywords of nodes that step environments."""
        return {"step_timeout": self.step, "reset_timeout": self.reset}


@checking_constructor()
@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What is said and kept of a run beside its log: `Rollout(env, watch=Watch(stall_after=1.0))`.

    stall_after    seconds for which no fragment comes while its reader waits, after which the log says why, with file
                   and line; None: never. In a graph `graph.run` has it
    on_stall       "raise": a run that stands still also ends, with a StallError
    trace          file for a trace of stages, lanes and fragments, for ui.perfetto.dev; compressed if it ends in .gz.
                   In a graph `graph.run` has it, and `feed` writes this one
    log_every      seconds between two rows of the log, at least
    log_x          x axis of trackers: "steps" of environments, "updates" handed out, or "time" in s
    metrics        what pieces log into; None: a `MetricsLogger`
    record         new file for what the seed does not determine, such as the order of lanes: for `replay`
    replay         such a file: the program that wrote it gives the same batches once more, in the loop's thread alone
    until          what stops a replay, by a RunError that shows the episode, and has it as `episode`: "nan", at the
                   first number that is none; a number, at the first reward above it; an episode's id, at its end; or
                   a function of an episode, which is asked after each step with what the fragment has of it

    Raises ValueError for a number of seconds that is not above 0, another word, another `until`, and both of `record`
    and `replay`.
    """

    stall_after: float | None = 5.0
    on_stall: OnStall = "log"
    trace: str | os.PathLike[str] | None = None
    log_every: float = 1.0
    log_x: Axis = "steps"
    metrics: Any = None
    record: str | os.PathLike[str] | None = None
    replay: str | os.PathLike[str] | None = None
    until: Until = None

    def __post_init__(self) -> None:
        self.stall_rules()
        LogOptions(every=self.log_every, axis=self.log_x)
        if self.record is not None and self.replay is not None:
            raise ValueError("record and replay of Watch are both given, expected one of them")
        if self.until is not None and self.replay is None:
            raise ValueError(f"until={shown(self.until)} is where a replay stops, expected replay as well")
        until = self.until
        is_text = isinstance(until, str) and (until == "nan" or until.lower() not in ("", "nan"))
        is_number = isinstance(until, Real) and not isinstance(until, bool) and not math.isnan(until)
        if not (until is None or is_text or is_number or callable(until)):
            raise ValueError(f"until is {shown(until)}, expected 'nan', a number, an episode's id or a function")

    def stall_rules(self) -> StallRules:
        """The rules of the stall doctor."""
        return StallRules(self.stall_after, self.on_stall)


@checking_constructor()
@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Checkpoints of a run, from which `Rollout.resume` goes on: `Rollout(env, checkpoints=Checkpoints("runs/7"))`.

    folder        each is written to a folder of its own in there
    every_s       seconds between two; the first round that is asked for after that begins with one
    keep          newest ones that are kept
    on_sigterm    save, and leave the loop by SystemExit, when the process is told to end
    most_share    of the time that saving may take; if it takes more, it is done less often, as a warning says once

    A thread writes them. Environments that can't say their state are stepped again from their last reset, with the
    actions that are recorded for that. Raises ValueError for a folder that is none, and numbers out of bounds.
    """

    folder: str | os.PathLike[str]
    every_s: float = 60.0
    keep: int = 3
    on_sigterm: bool = True
    most_share: float = 0.01

    def __post_init__(self) -> None:
        if not isinstance(self.folder, str | os.PathLike) or not os.fspath(self.folder):
            raise ValueError(f"folder of Checkpoints is {shown(self.folder)}, expected the path of a folder")
        checked_number("every_s of Checkpoints", self.every_s, above=0, noun="seconds")
        checked_count("keep of Checkpoints", self.keep, 1)
        checked_number("most_share of Checkpoints", self.most_share, above=0, most=1)
        check_flags(on_sigterm=self.on_sigterm)


_RECORDS: dict[str, type[Forward | Timeouts | Watch]] = {"forward": Forward, "timeouts": Timeouts, "watch": Watch}

# Keyword that no rollout has -> what is to be written instead; some are other engines' words.
_ELSEWHERE = {
    "complete_episodes": "rollout.batches(complete_episodes=…) or fragments(complete_episodes=…)",
    "policy": "module=…",
    **dict.fromkeys(("num_steps", "n_steps", "horizon"), "'fragment_length', the steps of each environment"),
    **dict.fromkeys(
        ("batch_size", "train_batch_size", "frames_per_batch"),
        "'fragment_length': a batch has so many steps of each environment",
    ),
    **dict.fromkeys(("total_timesteps", "total_frames"), "'num_fragments', or a loop that ends"),
    **dict.fromkeys(("gamma", "gae_lambda"), "learner_connector=lambda *_: GeneralAdvantageEstimation(gamma=…)"),
    "num_env_runners": "'workers'",
}


class CommonKeywords(TypedDict, total=False):
    """Keywords that both kinds of rollouts take; see `Rollout`."""

    module: Any
    model_config: Any
    num_envs: int | None
    lanes: int | None
    where: Place
    workers: int | None
    fragment_length: int
    num_fragments: int | None
    lookback: int | None
    seed: int | Sequence[int] | None
    learner_connector: Callable[[gym.Space[Any], gym.Space[Any]], Pieces] | None
    prefetch: int
    max_lag: int | None
    on_excess: OnExcess
    device: Any
    log: Log
    forward: Forward
    timeouts: Timeouts
    watch: Watch
    checkpoints: Checkpoints | None
    deterministic: bool
    debug: bool


class RolloutKeywords(CommonKeywords, total=False):
    """Keywords of a `Rollout`."""

    env_kwargs: Mapping[str, Any] | None
    autoreset_mode: Autoreset
    explore: bool
    env_to_module_connector: Callable[[Any], Pieces] | None
    module_to_env_connector: Callable[[Any], Pieces] | None


class MultiAgentKeywords(CommonKeywords, total=False):
    """Keywords of a `MultiAgentRollout`."""

    agent_to_module_mapping_fn: AgentToModule
    modules_to_train: Sequence[Any] | None
    explore: bool | Mapping[Any, bool]
    joint_connector: Callable[[Any], Pieces] | None
    env_to_module_connector: Callable[[AgentPart], Pieces] | None
    module_to_env_connector: Callable[[AgentPart], Pieces] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOptions:
    """Options of a rollout: its keywords, with their defaults; see `Rollout` and `MultiAgentRollout`.

    seed          of every environment, and of sampling
    slot_seeds    one seed for each slot's environment; None: they follow from `seed`
    log_to        where its figures, and a trace, are written
    schedule      by `watch.record` or `watch.replay`

    Raises ValueError for numbers that are none, or too small, and for what makes no sense.
    """

    module: Any = None
    model_config: Any = None
    num_envs: int | None = None
    lanes: int | None = None
    where: Place = "inline"
    env_kwargs: Mapping[str, Any] | None = None
    autoreset_mode: Autoreset = None
    workers: int | None = None
    fragment_length: int = 128
    num_fragments: int | None = None
    lookback: int | None = None
    seed: Any = None
    slot_seeds: tuple[int, ...] | None = None
    explore: Any = True
    agent_to_module_mapping_fn: AgentToModule = None
    modules_to_train: Sequence[Any] | None = None
    joint_connector: Any = None
    env_to_module_connector: Any = None
    module_to_env_connector: Any = None
    learner_connector: Any = None
    prefetch: int = 0
    max_lag: int | None = None
    on_excess: OnExcess = "drop"
    device: Any = None
    log: Log = None
    forward: Forward = Forward()
    timeouts: Timeouts = Timeouts()
    watch: Watch = Watch()
    checkpoints: Checkpoints | None = None
    deterministic: bool = False
    debug: bool = False
    log_to: LogOptions = field(default_factory=LogOptions)
    schedule: Recording | ReplayedRun | None = None

    def __post_init__(self) -> None:
        checked_count("fragment_length", self.fragment_length, 1)
        check_numbers(
            workers=(self.workers, 1),
            lookback=(self.lookback, 0),
            num_fragments=(self.num_fragments, 1),
            max_lag=(self.max_lag, 0),
        )
        checked_count("prefetch", self.prefetch, 0)
        check_flags(debug=self.debug, deterministic=self.deterministic)
        for name, kind in _RECORDS.items():
            checked_record(name, getattr(self, name), kind)
        if self.checkpoints is not None:
            checked_record("checkpoints", self.checkpoints, Checkpoints)
        check_staleness(self.max_lag, self.on_excess)

    @property
    def acting_options(self) -> dict[str, Any]:
        """Keywords of what acts, with one agent in each environment or several."""
        connectors = "env_to_module_connector", "module_to_env_connector"
        return {name: getattr(self, name) for name in ("module", "model_config", "device", "seed", *connectors)}

    @property
    def is_in_loop(self) -> bool:
        """True if all is to run in the loop's thread."""
        return self.debug or isinstance(self.schedule, ReplayedRun)

    @property
    def pass_options(self) -> dict[str, Any]:
        """How forward passes are done, here or elsewhere: what `ModuleForward` takes beside module and weights."""
        return {"explore": self.explore, **self.forward.options}

    def check_offloaded(self, *, is_remote: bool) -> None:
        """Raise ValueError for what whole rollouts elsewhere can't do: on other hosts, or in worker processes."""
        if is_remote and self.debug:
            raise ValueError(
                "debug is for what runs in this process, and RemoteRollouts act on the hosts; expected RemoteEnvs, or "
                "environments here"
            )
        for name, is_given in (
            ("Forward(compile=…)", self.forward.compile is not False),
            ("device", self.device is not None),
        ):
            if is_remote and is_given:
                raise ValueError(
                    f"{name} is for forward passes here, and RemoteRollouts do theirs on the hosts; expected it to be "
                    "given to each RolloutHost"
                )
        if self.forward.max_batch is not None:
            place, expected = "where='rollouts' has", "where='threads' or where='processes'"
            if is_remote:
                place, expected = "RemoteRollouts have", "RemoteEnvs"
            raise ValueError(f"{JOINT_PASSES}, but {place} one for each; expected {expected}")
        metrics = self.watch.metrics
        if metrics is not None and not isinstance(metrics, MetricsLogger):
            raise ValueError(
                f"metrics is {type(metrics).__name__}, expected a MetricsLogger: every worker has one, to be merged"
            )


def checked_record(name: str, given: Any, kind: type[T]) -> T:
    """Return the record of a keyword. Raises TypeError for anything of another kind."""
    if not isinstance(given, kind):
        raise TypeError(f"{name} is {given!r}, expected {kind.__name__}(...), which help() explains")
    return given


def metrics_of(watch: Watch) -> Any:
    """What connector pieces log into."""
    return MetricsLogger() if watch.metrics is None else watch.metrics


def options_of(given: Mapping[str, Any], keywords: type, rollout: str) -> RolloutOptions:
    """The options of a rollout with these keywords; with `debug` everything is inline.

    keywords    `RolloutKeywords` or `MultiAgentKeywords`
    rollout     name of its class

    Raises TypeError for a keyword that there is not, and ValueError.
    """
    check_keywords(rollout, given, keywords.__annotations__, places_in(**_RECORDS) | _ELSEWHERE)
    seed, slot_seeds = seeds_of(given.get("seed"))
    options = RolloutOptions(**dict(given, seed=seed, slot_seeds=slot_seeds))
    watch = options.watch
    log_to = LogOptions(options.log, watch.log_every, watch.log_x, options.num_fragments, watch.trace)
    options = _with_schedule(replace(options, log_to=log_to), is_seeded=given.get("seed") is not None)
    if not options.debug:
        return options
    one_by_one = Forward(flat=False, threads=options.forward.threads)
    return replace(options, where="inline", workers=None, prefetch=0, forward=one_by_one)


def _with_schedule(options: RolloutOptions, *, is_seeded: bool) -> RolloutOptions:
    """The options with what `watch` records, or replays: with the same seed and lanes, in the loop's thread."""
    watch = options.watch
    if watch.record is not None:
        return replace(options, schedule=Recording(watch.record))
    if watch.replay is None:
        return options
    schedule = ReplayedRun(watch.replay, watch.until)
    seed = options.seed if is_seeded else schedule.first["seed"]
    lanes = schedule.first["lanes"] if options.lanes is None and options.where != "inline" else options.lanes
    here: dict[str, Any] = {"where": "inline", "workers": None, "prefetch": 0, "checkpoints": None}
    return replace(options, schedule=schedule, seed=seed, lanes=lanes, **here)


def with_keywords(keywords: type) -> Callable[[Init], Init]:
    """Give a rollout's `__init__` the signature with each of these keywords, for `help()` and editors."""
    defaults = {each.name: each.default for each in fields(RolloutOptions)}
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=annotation)
        for name, annotation in keywords.__annotations__.items()
    ]

    def described(init: Init) -> Init:
        signature = inspect.signature(init)
        others = list(signature.parameters.values())[:-1]
        init.__signature__ = signature.replace(parameters=[*others, *parameters])  # type: ignore[attr-defined]
        return init

    return described
