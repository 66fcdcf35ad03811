"""Plans: predictions of what other numbers of lanes, workers and slots, or another place, would give a rollout."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, product
from statistics import fmean
from typing import Any, NamedTuple, TypedDict, get_type_hints

from rollflow.nodes.argument_checks import check_numbers
from rollflow.nodes.env.env_source import count_of, is_ready
from rollflow.nodes.env.remote.remote_envs import RemoteHosts
from rollflow.nodes.env.workers.process_environments import ProcessEnvironments
from rollflow.nodes.env.workers.thread_environments import ThreadEnvironments
from rollflow.nodes.env.workers.worker_process import core_count
from rollflow.nodes.launch.on_hosts import OnHosts
from rollflow.nodes.offloaded.rollout_processes import RolloutProcesses
from rollflow.nodes.rollout.options import EnvOptions, FlowOptions, ForwardOptions
from rollflow.nodes.rollout.placement_cost_model import PLACES, PlacementRequest, best_setting, refusals
from rollflow.nodes.rollout.placement_probe import ProbeResult, Trial, generators_kept, probe
from rollflow.nodes.rollout.placement_trials import TriedCosts
from rollflow.nodes.rollout.rollout_doctor import RolloutDoctor
from rollflow.nodes.rollout.simulation import Setting, simulate
from rollflow.nodes.rollout.step_costs import StepCosts, scaled
from rollflow.stream.graph.report import CALLER, Report

_SIZES = (8, 64, 512)  # numbers of slots that are measured, beside others: between them lines are straight
_COMPARED_STEPS = 256  # of lanes, in a round that is simulated, where many settings are compared
_MOSTLY, _WORTH = 0.5, 1.1  # share of the environments' time; how many times as fast a change to be named must be
_WORKER_BYTES = {"processes": 60 << 20, "rollouts": 220 << 20}  # that a worker process takes for itself
_TIMES_SLOTS, _TIMES_CORES, _HOSTS = (1, 2, 4), (2, 4), (2, 4)  # of the table
_LINKS = (125e6, 12.5e6)  # bytes per second from all hosts: 1 Gbit/s, and a tenth


@dataclass(frozen=True, slots=True)
class Prediction:
    """A setting, and what a simulation of it gave.

    cores           of each machine
    steps_per_s     float: transitions
    bottleneck      the stage that the others would wait for, by its name in reports, or "link"
    lag             float: policy versions that a batch would be old, where each batch makes one
    memory_bytes    int: of the fragments that are alive, and of worker processes
    """

    setting: Setting
    cores: int
    steps_per_s: float
    bottleneck: str
    lag: float
    memory_bytes: int

    def __str__(self) -> str:
        named = ", ".join(_named(self.setting, self.cores).values())
        return (
            f"{named}: {self.steps_per_s:,.0f} steps/s predicted, held back by {self.bottleneck}, lag {self.lag:.1f}, "
            f"{self.memory_bytes / 1e6:,.1f} MB"
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """Predictions for settings, beside the one that a rollout has now. `str(plan)` is a table.

    now            the prediction for the setting as it is
    measured       float: steps per second that it has made in this setting; None: it has not run
    predictions    for other settings
    first          a sentence: what to change first
    cores          of this machine. Settings with others, or with hosts, can't be tried here
    """

    now: Prediction
    measured: float | None
    predictions: tuple[Prediction, ...]
    first: str
    cores: int

    @property
    def then(self) -> Prediction:
        """The first prediction, which is the only one where a setting was named."""
        return self.predictions[0]

    def as_dict(self) -> dict[str, Any]:
        """The same as plain numbers and text: `now`, `measured`, `predictions`, `first`, `cores`."""
        return asdict(self)

    def __str__(self) -> str:
        made = "" if self.measured is None else f"; measured: {self.measured:,.0f} steps/s"
        rows = [
            f"{'where':<10} {'lanes':>5} {'workers':>7} {'hosts':>5} {'Mbit/s':>6} {'cores':>5} {'slots':>6} "
            f"{'ahead':>5} {'steps/s':>11}  {'held back by':<13} {'lag':>4} {'memory':>10}",
            f"{self._row(self.now)}  now{made}",
            *map(self._row, self.predictions),
        ]
        if any(self._is_elsewhere(each) for each in self.predictions):
            rows.append("*: another machine, or several; nothing of it was measured")
        return "\n".join([*rows, "all steps/s are predictions", self.first])

    def _is_elsewhere(self, each: Prediction) -> bool:
        return each.setting.hosts > 0 or each.cores != self.cores

    def _row(self, each: Prediction) -> str:
        setting = each.setting
        workers, mark = setting.workers if setting.has_workers else "-", " *" if self._is_elsewhere(each) else ""
        link = f"{8e-6 * setting.link_bytes_s:.0f}" if setting.hosts else "-"
        return (
            f"{setting.where:<10} {setting.lanes:>5} {workers:>7} {setting.hosts or '-':>5} {link:>6} {each.cores:>5} "
            f"{setting.slots:>6} {setting.prefetch:>5} {each.steps_per_s:>11,.0f}  {each.bottleneck:<13} "
            f"{each.lag:>4.1f} {each.memory_bytes / 1e6:>7,.1f} MB{mark}"
        )


class Changes(TypedDict, total=False):
    """Changes to a rollout's setting: arguments of `Rollout`, but `slots`, which are its `num_envs`, and three more.

    cores           of each machine
    hosts           machines like this one that do whole rollouts, each with `workers` of them
    link_bytes_s    bytes per second that come from all hosts together; else those of 1 Gbit/s
    """

    where: str
    lanes: int
    workers: int
    slots: int
    prefetch: int
    max_batch: int
    cores: int
    hosts: int
    link_bytes_s: int


class Running(NamedTuple):
    """What a rollout has measured itself.

    report          counts of its stages; None: it does not run as a loop
    reader_times    seconds for which its reader had each of its last rounds, batches made of them included
    round_s         seconds from one of these rounds to the next; None: there were fewer than two
    """

    report: Report | None
    reader_times: Sequence[float]
    round_s: float | None

    @classmethod
    def of(cls, report: Report | None, doctor: RolloutDoctor) -> "Running":
        """By a report, where there is one, and the doctor that watches the rollout."""
        return cls(report, doctor.reader_times, doctor.round_s)


class Planner:
    """Makes plans for a rollout, by costs that it measures when it is first asked.

    env           what the rollout was given
    make_trial    gives what makes an inline Rollout of some environments, to be measured
    """

    def __init__(
        self, env: Any, envs: EnvOptions, forward: ForwardOptions, flow: FlowOptions, make_trial: Callable[[], Trial]
    ) -> None:
        self._env, self._envs, self._forward, self._flow = env, envs, forward, flow
        self._make_trial, self._tried_costs = make_trial, TriedCosts(env, make_trial)
        self._probed: ProbeResult | None = None

    def plan(self, environments: Any, running: Running, changes: Changes) -> Plan:
        """A plan for the setting that some changes lead to, or where there are none for many.

        environments    the rollout's node that steps them

        Raises ValueError for what can't be, and what making and stepping environments raises.
        """
        self._check_source()
        now, cores = self._setting_of(environments), core_count()
        named = [changed(now, changes, cores)] if changes else []
        most = max([now.slots, *(each.slots for each, _ in named)]) if named else now.slots * max(_TIMES_SLOTS)
        probed = self._probe(most, now)
        costs = calibrated(probed.measured, now, running)
        ruled_out = refusals(self._request) | probed.ruled_out
        best = (self._best(costs, now.slots, [where], ruled_out, cores) for where in _WORKER_BYTES)
        for each, _ in named or chain.from_iterable(best):
            costs = self._tried_costs.measured(costs, each)
        here = predicted(costs, now, cores)
        first = first_change(costs, here, self._neighbours(costs, now, ruled_out))
        rows = tuple(predicted(costs, *each) for each in named or self._table(costs, now, ruled_out))
        measured = now.slots * now.fragment_length / running.round_s if running.round_s else None
        return Plan(here, measured, rows, first, cores)

    def _probe(self, slots: int, now: Setting) -> ProbeResult:
        """Costs up to so many slots, and of a lane as it is; measured once, and again for more slots."""
        if isinstance(self._env, Sequence) and not isinstance(self._env, str):
            slots = now.slots  # a list of callables has no more
        if self._probed is None or self._probed.measured.slots < slots:
            sizes = [now.slots // now.lanes, *(size for size in _SIZES if size < slots)]
            length, device = now.fragment_length, self._forward.device
            with generators_kept():
                self._probed = probe(self._env, slots, self._make_trial(), sizes=sizes, length=length, device=device)
        return self._probed

    @property
    def _request(self) -> PlacementRequest:
        """What any setting keeps to: not the numbers, but how passes are done."""
        forward, flow = self._forward, self._flow
        return PlacementRequest(
            max_batch=forward.max_batch,
            forward_in_thread=forward.in_thread,
            max_wait=forward.max_wait,
            prefetch=flow.prefetch,
            fragment_length=self._envs.fragment_length,
        )

    def _check_source(self) -> None:
        """Raise ValueError for environments that can't be measured apart from their run."""
        if isinstance(self._env, RemoteHosts) or isinstance(self._envs.where, OnHosts):
            where = type(self._env if isinstance(self._env, RemoteHosts) else self._envs.where).__name__
            raise ValueError(
                f"what_if measures environments in this process, and those of {where} are on hosts; expected a rollout "
                "with an id or a callable, and hosts=… for hosts of them"
            )
        if is_ready(self._env):
            raise ValueError(
                "what_if makes environments of other numbers to measure them, and these vector environments are made "
                "already; expected a rollout with an id, a callable, or a list of callables"
            )

    def _setting_of(self, environments: Any) -> Setting:
        """The setting that a rollout has."""
        kinds = {"rollouts": RolloutProcesses, "threads": ThreadEnvironments, "processes": ProcessEnvironments}
        where = next((name for name, kind in kinds.items() if isinstance(environments, kind)), "inline")
        return Setting(
            where=where,
            slots=count_of(self._env, self._envs.num_envs),
            lanes=environments.num_lanes,
            workers=environments.carrier.num_workers if where in ("processes", "rollouts") else 1,
            prefetch=self._flow.prefetch,
            fragment_length=self._envs.fragment_length,
            max_batch=self._forward.max_batch,
        )

    def _table(self, costs: StepCosts, now: Setting, ruled_out: Mapping[str, str]) -> Iterator[tuple[Setting, int]]:
        """The best setting of every place, for so many slots and times as many, and on other machines."""
        cores = core_count()
        for times in _TIMES_SLOTS:
            for where in PLACES:
                yield from self._best(costs, now.slots * times, [where], ruled_out, cores)
        for times in _TIMES_CORES:
            yield from self._best(costs, now.slots, PLACES, ruled_out, cores * times)
        for hosts, link in product(_HOSTS, _LINKS) if "rollouts" not in ruled_out else ():
            there: dict[str, Any] = {"where": "rollouts", "hosts": hosts, "workers": cores, "link_bytes_s": link}
            yield replace(now, **there, slots=now.slots * hosts, lanes=min(now.slots, cores) * hosts), cores

    def _best(
        self, costs: StepCosts, slots: int, places: Sequence[str], ruled_out: Mapping[str, str], cores: int
    ) -> Iterator[tuple[Setting, int]]:
        """The fastest setting of some places, with its cores; none where all of them are ruled out."""
        allowed = [where for where in places if where not in ruled_out]
        found = [best for where in allowed if (best := best_setting(costs, slots, where, self._request, cores))]
        if found:
            yield max(found, key=lambda each: each[1])[0], cores

    def _neighbours(self, costs: StepCosts, now: Setting, ruled_out: Mapping[str, str]) -> list[Setting]:
        """Settings that one change leads to, on this machine, the simplest change first."""
        cores, slots = core_count(), now.slots
        found = [replace(now, max_batch=slots)] if now.lanes > 1 and now.where != "rollouts" else []
        if now.has_workers:
            most = min(cores, now.lanes)
            more = {min(most, now.workers << power) for power in range(1, most.bit_length() + 1)}
            found += [replace(now, workers=each) for each in sorted(more) if each > now.workers]
        found += [replace(now, lanes=each) for each in (now.lanes * 2, now.lanes // 2) if now.workers <= each <= slots]
        found += [replace(now, lanes=1)] if now.where == "inline" else []
        found.append(replace(now, prefetch=now.prefetch + 1))
        for where in PLACES:
            if where != now.where:
                found += [best for best, _ in self._best(costs, slots, [where], ruled_out, cores)]
        return [*found, replace(now, slots=2 * slots)]


def predicted(costs: StepCosts, setting: Setting, cores: int) -> Prediction:
    """What a setting gives on machines with so many cores each, by costs that were measured."""
    found = simulate(costs, setting, costs.on(cores, setting.where))
    fragments = costs.step_bytes * setting.slots * setting.fragment_length * (2 + setting.prefetch)
    workers = setting.workers * max(1, setting.hosts) * _WORKER_BYTES.get(setting.where, 0)
    return Prediction(setting, cores, found.steps_per_s, found.bottleneck, found.lag, int(fragments + workers))


def calibrated(costs: StepCosts, now: Setting, running: Running) -> StepCosts:
    """The costs, with what a run has measured itself: the reader's times, and inline the means of its stages.

    Behind environments that mostly wait, an inline run's stages find caches cold, as those of other settings do not.
    """
    report = running.report
    busy = {} if report is None else {node.name: node.busy_s / node.items for node in report.nodes if node.items}
    times = running.reader_times[1:] or running.reader_times  # the first one may have to set things up
    if times:
        seconds = fmean(times)
        # Batches are made by the interpreter, and updates by torch, which lets it go on elsewhere.
        releases = 1 - min(1.0, busy.get("learner_pipeline", 0.0) / max(seconds, 1e-12))
        rows = now.slots * now.fragment_length
        costs = replace(costs, update_s=seconds, update_rows=rows, update_releases=releases)
    if report is None or now.where != "inline":
        return costs
    slots = max(1, now.slots // now.lanes)
    if min(node.items for node in report.nodes if node.name in ("env", "module")) < now.fragment_length:
        return costs  # its first steps set things up
    env = scaled(costs.env, busy["env"] / max(costs.env(slots), 1e-9))
    if costs.waits > _MOSTLY:
        return replace(costs, env=env)
    stages = {
        stage: scaled(part, busy[stage] / max(part(slots), 1e-9))
        for stage, part in costs.parts.items()
        if stage in busy
    }
    # What the ring takes between two stages counts with the last one.
    of_lane = ((running.round_s or 0.0) - costs.update_s) / (now.fragment_length * now.lanes)
    between, last = max(0.0, of_lane - busy["env"] - sum(map(busy.__getitem__, stages))), next(reversed(stages))
    return replace(costs, env=env, stages=stages | {last: lambda count, of=stages[last]: of(count) + between})


def first_change(costs: StepCosts, now: Prediction, neighbours: Sequence[Setting]) -> str:
    """A sentence: the one change that gives most, the simplest of those that give about as much.

    neighbours    settings that one change leads to, the simplest first
    """
    rates = {each: _rate(costs, each, now.cores) for each in (now.setting, *neighbours)}
    before = rates[now.setting]
    same = [each for each in neighbours if each.slots == now.setting.slots]
    for found in same, neighbours:
        most = max((rates[each] for each in found), default=0.0)
        if most >= _WORTH * before:
            best = predicted(costs, next(each for each in found if rates[each] >= 0.97 * most), now.cores)
            texts = _named(now.setting, now.cores)
            what = ", ".join(text for name, text in _named(best.setting, now.cores).items() if texts.get(name) != text)
            return (
                f"change first: {what}; {best.steps_per_s / now.steps_per_s:.1f} times the steps per second of now "
                f"are predicted, {best.steps_per_s:,.0f}, held back by {best.bottleneck}"
            )
    faster = {stage: _rate(costs.halved(stage), now.setting, now.cores) for stage in ("env", *costs.parts, CALLER)}
    stage = max(faster, key=faster.__getitem__)
    name = "the reader of the batches" if stage == CALLER else f"the stage {stage} itself"
    return (
        f"change first: {name}, for no other numbers or place give much more here; if it took half the time, "
        f"{faster[stage] / before:.1f} times the steps per second of now are predicted"
    )


def _rate(costs: StepCosts, setting: Setting, cores: int) -> float:
    return simulate(costs, setting, costs.on(cores, setting.where), steps=_COMPARED_STEPS).steps_per_s


def changed(now: Setting, changes: Changes, cores: int) -> tuple[Setting, int]:
    """The setting that changes lead to, and its cores; elsewhere with the lanes and workers of a rollout's own choice.

    Raises ValueError for what a rollout does not take, either.
    """
    given: dict[str, Any] = dict(changes)
    if unknown := sorted(given.keys() - get_type_hints(Changes).keys()):
        raise ValueError(f"what_if has no {', '.join(unknown)}, expected {', '.join(get_type_hints(Changes))}")
    numbers = given.keys() - {"where"}
    check_numbers(**{name: (given[name], 0 if name == "prefetch" else 1) for name in sorted(numbers)})
    cores = given.pop("cores", cores)
    hosts, slots = given.get("hosts", 0), given.get("slots", now.slots)
    where = given.get("where", "rollouts" if hosts else now.where)
    if where not in PLACES:
        raise ValueError(f"where is {where!r}, expected {', '.join(map(repr, PLACES))}")
    if hosts and where != "rollouts":
        raise ValueError(f"hosts is {hosts} and where is '{where}', expected where='rollouts': hosts do whole rollouts")
    if "link_bytes_s" in given and not hosts:
        raise ValueError(f"link_bytes_s is {given['link_bytes_s']}, but nothing comes over a link; expected hosts=…")
    workers = given.get("workers", cores)
    if "workers" in given and where not in _WORKER_BYTES:
        raise ValueError(f"workers is {workers}, but where='{where}' has none; expected 'processes' or 'rollouts'")
    if where == now.where and not hosts:
        lanes = min(now.lanes, slots)
        if "workers" in given:  # each has a lane, at the least
            lanes = max(lanes, min(slots, workers))
        usual = {"lanes": lanes, "workers": now.workers}
    else:
        most = {"inline": 1, "threads": slots, "processes": max(2, workers)}.get(where, workers * max(1, hosts))
        usual = {"lanes": min(slots, most), "workers": workers}
    then = replace(now, **{"where": where, "slots": slots, **usual, **given})
    if then.lanes > slots:
        raise ValueError(f"lanes is {then.lanes}, expected at most the slots, which are {slots}")
    largest = -(-slots // then.lanes)
    if then.max_batch is not None and (where == "rollouts" or then.max_batch < largest):
        what = "another where than 'rollouts'" if where == "rollouts" else f"at least {largest}, the slots of a lane"
        raise ValueError(f"max_batch is {then.max_batch}, expected {what}")
    return then, cores


def _named(setting: Setting, cores: int) -> dict[str, str]:
    """Name -> text of a setting's numbers, those alone that say something."""
    texts = {"where": f"where='{setting.where}'", "lanes": f"lanes={setting.lanes}"}
    if setting.has_workers:
        texts["workers"] = f"workers={setting.workers}"
    texts |= {"slots": f"num_envs={setting.slots}"}
    for name in ("prefetch", "max_batch", "hosts"):
        if getattr(setting, name):
            texts[name] = f"{name}={getattr(setting, name)}"
    if setting.hosts:
        texts["link_bytes_s"] = f"link_bytes_s={setting.link_bytes_s:.0f}"
    return texts | {"cores": f"{cores} cores"}
