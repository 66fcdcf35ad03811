"""Environments of one lane that step in worker processes, each on its own."""

import os
import selectors
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from time import monotonic
from typing import Any

import numpy as np
from gymnasium.vector.utils import batch_space

from rollflow.nodes.env.env_source import check_same_space, count_of, side_by_side, sizes_of
from rollflow.nodes.env.workers.frames import FINAL_OBS, Frame, FrameKind, frame, lane_block
from rollflow.nodes.env.workers.lane_status import MAX_FAILURES, LanePhase
from rollflow.nodes.env.workers.ready_server import ANSWERED
from rollflow.nodes.env.workers.ready_slots import ReadySlots
from rollflow.nodes.env.workers.watch import Activity
from rollflow.nodes.env.workers.worker_node import LaneLink, WorkerNode
from rollflow.nodes.env.workers.worker_process import core_count
from rollflow.stream.data.blocks import SharedBlock
from rollflow.stream.data.column import Column
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import EnvError
from rollflow.stream.data.infos import SlotInfos
from rollflow.stream.data.packing import pack
from rollflow.stream.data.system import POLLIN, make_poll
from rollflow.stream.data.tree import Tree
from rollflow.stream.fragments.ready_lane import SlotAnswers
from rollflow.stream.graph.meter import clock
from rollflow.stream.net.descriptor_transport import Descriptor
from rollflow.stream.observe.waits import Wait

_RESET = LanePhase.RESETTING, LanePhase.READY  # phases of workers that are asked for resets, or have been


# Phases of slots: the lane has its answer; waits for it; waits for it, but its worker is lost; its worker is lost while
# the lane has its answer; it has begun anew, which the lane is told next; it has begun anew while the lane has its
# answer of before.
_HELD, _ASKED, _LOST, _LOST_HELD, _BEGUN, _EARLY = range(6)
# The phases that follow on each of these once a slot has answered, and once its worker is lost.
_ANSWERED = _HELD, _HELD, _BEGUN, _EARLY
_GIVEN_UP = _LOST_HELD, _LOST, _LOST, _LOST_HELD, _LOST, _LOST_HELD


class SlotsLink(LaneLink):
    """The link to a worker that steps some slots of a lane.

    slots      their numbers
    answers    so far
    """

    answers = 0

    def __init__(self, slots: range, *of_every_link: Any) -> None:
        self.slots = slots
        super().__init__(*of_every_link)

    @property
    def name(self) -> str:
        first, last = self.slots[0], self.slots[-1]
        return f"slot {first}" if first == last else f"the worker of slots {first} to {last}"

    @property
    def has_made_steps(self) -> bool:
        return self.answers > len(self.slots)

    @property
    def progress(self) -> tuple[int, Activity]:
        turns, doing = super().progress
        is_idle = doing is Activity.STEP and not any(self.node.asked_at[slot] for slot in self.slots)
        # Then it is at another thing at each look.
        return (-int(monotonic() * 1e9) if is_idle else 2 * self.answers + turns), doing

    def lose(self, reason: str) -> int:
        return 0  # the lane is told once a slot begins anew

    def _reset(self) -> None:
        node, slots, lane = self.node, self.slots, self.lane
        first = node.first_slots()[0] + slots[0]
        seeds = node.seeds_of_slots(first, len(slots), self.starts + lane.vector_steps * lane.is_restored)
        layout = {"seeds": seeds, "first_slot": slots[0], "slots": node.num_envs, "records": node.records_actions}
        if lane.is_restored and self.starts:  # it was lost before it went on
            node.not_gone_on = self.reason
        elif lane.is_restored:
            part = slice(slots[0], slots[-1] + 1)
            layout["goes_on"] = list(zip(node.states_before[0][part], lane.dead[part].tolist(), strict=True))
        self.send_block(FrameKind.LAYOUT, pack(layout))
        self.send(frame(FrameKind.BLOCK, number=node.block.size), node.block.fd)
        self.send(frame(FrameKind.RESET), node.answers_to)
        for slot in slots:
            node.beside.pop(slot, None)  # of an answer that was cut short
            node.asked_at[slot] = clock()

    def step(self) -> None:
        raise NotImplementedError  # slots are asked one by one

    def take(self, answer: Frame) -> bool:
        """Keep what belongs to a slot's answer; without that, all slots have been reset."""
        if answer.payload:
            fields = self._fields_of(answer, f"lane {self.lane.index}, ")
            self.node.beside[fields["slot"]] = fields
        else:
            self.phase = LanePhase.READY
        return False


class ReadyProcesses(ReadySlots, WorkerNode):
    """A node with one lane, whose slots step in worker processes, each on its own: see `ReadySlots` and `WorkerNode`.

    workers    processes; slots in one take turns in its main thread. None: one for each core

    A worker that is lost loses its slots' open episodes alone, and begins anew with them.

    block         has what each slot has been asked for, and has answered last
    answers_to    descriptor that workers tell by which slots have answered
    beside        slot -> what it answered beside its columns, until that is taken
    asked_at      time in ns at which each slot was asked for what it has not answered yet; 0: it has answered
    """

    program = "rollflow.nodes.env.workers.ready_server"
    remotes: list[Any]

    def __init__(self, env: Any, **options: Any) -> None:
        self._pipe = [Descriptor(fd) for fd in os.pipe()]  # closed when nothing refers to them any more
        self._answers_from, self.answers_to = (each.fd for each in self._pipe)
        os.set_blocking(self._answers_from, False)
        self._poll, self._all = make_poll(), selectors.DefaultSelector()
        self._poll.register(self._answers_from, POLLIN)
        self._all.register(self._answers_from, selectors.EVENT_READ)
        self.beside: dict[int, dict[str, Any]] = {}
        self._kept: list[int] = []  # slots whose answers are to be handed over next
        self._to_leave: list[int] = []  # lost slots that never begin anew, once what they answered has been taken
        self.block: SharedBlock | None = None
        self._columns: dict[str, Column] = {}
        super().__init__(side_by_side(env), **options)

    def _made(self, env: Any, num_envs: int | None, lanes: int | None) -> Sequence[Any]:
        count = count_of(env, num_envs)
        sizes = sizes_of(count, min(count, self._asked_workers or core_count()))
        firsts = accumulate(sizes, initial=0)
        self.asked_at, self._phases = [0] * count, [_ASKED] * count
        self._parts = [range(first, first + size) for first, size in zip(firsts, sizes, strict=False)]
        made = super()._made(env, num_envs, len(sizes))
        one = made[0]
        for link, each in zip(self.remotes, made, strict=True):
            for kind in ("observation", "action"):
                space, expected = (getattr(envs, f"single_{kind}_space") for envs in (each, one))
                check_same_space(kind, space, expected, "slot", link.slots[0])
        one.num_envs = count
        for kind in ("observation", "action"):
            setattr(one, f"{kind}_space", batch_space(getattr(one, f"single_{kind}_space"), count))
        layout = lane_block(one.single_observation_space, one.single_action_space, count, 1, 0)
        self.block = SharedBlock(layout.size)
        self._columns = layout.columns(self.block.array())
        self._poll.register(self._selector.fileno(), POLLIN)
        self._all.register(self._selector.fileno(), selectors.EVENT_READ)
        self._link_of = [link for link in self.remotes for _ in link.slots]
        self._step_of = [frame(FrameKind.STEP, number=slot) for slot in range(count)]
        return [one]

    def link_of(self, lane: int, maker: Any, node: Any) -> LaneLink:
        return SlotsLink(self._parts[lane], lane, maker, node)

    def fileno(self) -> int:
        """A descriptor that can be read once a slot has answered, or a worker has something else to say."""
        return self._all.fileno()

    def close(self) -> None:
        """End the worker processes; steps that were under way in lost ones are lost."""
        if not self.is_closed:
            self._let_go(range(self.num_envs))
        super().close()

    def completed(self) -> Iterator[Any]:
        yield from super().completed()
        if self.is_draining and not any(self.asked_at):
            self.in_flight = 0  # there is nothing to be waited for

    def finish(self) -> Iterator[Any]:
        self._let_go(range(self.num_envs))
        yield from super().finish()

    # For `ReadySlots`

    def _go_on(self, remote: Any) -> None:
        if remote.phase in _RESET:  # a slot could not go on
            remote.phase = LanePhase.MADE
        super()._go_on(remote)

    def _taken(self, lane: Any, came: list[Any]) -> Any:
        if self._resets is not None:  # what a worker answered before it was lost does not count
            if any(self.asked_at) or any(link.phase not in _RESET for link in self.remotes):
                return None
            self.not_gone_on = next((each["anew"] for each in self.beside.values() if "anew" in each), self.not_gone_on)
            self._resets, came = list(range(self.num_envs)), []
            self._phases = [_HELD] * self.num_envs
        return super()._taken(lane, came)

    def _send(self, slots: Any, actions: Tree) -> None:
        self._columns[Columns.ACTIONS].write_items(0, slots, actions)
        now, phases = clock(), self._phases
        for slot in slots.tolist():
            phase = phases[slot]
            if phase == _HELD:
                phases[slot], self.asked_at[slot] = _ASKED, now
                self._link_of[slot].send(self._step_of[slot])
            elif phase == _EARLY:
                phases[slot] = _BEGUN
                self._kept.append(slot)
            else:  # it answers once it has begun anew
                phases[slot] = _LOST

    def _heard_within(self, wait_s: float) -> list[Any]:
        if self._to_leave:
            self._let_go(self._to_leave)
            self._to_leave = []
        for fd, _ in self._poll.poll(0 if self._kept else wait_s * 1e3):
            if fd == self._answers_from:
                self._kept += self._read()
            else:
                deque(self._heard(), 0)
        if self._lost:
            due: Any = self.due()
            for remote in due:
                self._set_out(remote)
        came, self._kept = self._kept, []
        if self._to_end:
            self._tell_begun(came)
            came = [slot for slot in came if self._phases[slot] != _LOST]  # again, since it has begun anew
        return came

    def _read(self) -> list[int]:
        """The slots that have answered, and that the lane waits for."""
        try:
            told = memoryview(os.read(self._answers_from, 8 * self.num_envs)).cast("q").tolist()
        except BlockingIOError:
            return []
        now, phases, asked_at, add = clock(), self._phases, self.asked_at, self.call_times.add
        slots = told if min(told) >= 0 else [max(slot, ~slot) for slot in told]
        for slot in slots:
            self._link_of[slot].answers += 1
            if began := asked_at[slot]:
                add(now - began)
                asked_at[slot] = 0
            phases[slot] = _ANSWERED[phases[slot]]
        if self._to_end:
            slots = [slot for slot in slots if phases[slot] != _EARLY]
        for slot in [~each for each in told if each < 0] if slots is not told else ():
            if not self._has_all_of(slot):
                phases[slot] = _LOST if slot in slots else _LOST_HELD
                slots = [each for each in slots if each != slot]
        return slots

    def _has_all_of(self, slot: int) -> bool:
        """Hear what belongs to a slot's answer, and was sent before; False: its worker has ended before it was read."""
        link = self._link_of[slot]
        while slot not in self.beside and (frames := link.receive()):
            deque(self._all_answered(link, frames), 0)
        return slot in self.beside

    def _joined(self, came: list[Any]) -> SlotAnswers:
        came.sort()
        columns, slots = self._columns, np.array(came)
        observations, rewards, terminateds, truncateds = [columns[name].items(0, slots) for name in ANSWERED]
        infos: Any = {}
        final = None
        if self.beside:
            beside = [self.beside.pop(slot, {}) for slot in came]
            infos, final_infos = (SlotInfos([each.get(name, {}) for each in beside]) for name in ("info", "final_info"))
            if any("final_info" in each for each in beside):
                final = columns[FINAL_OBS].items(0, slots[terminateds | truncateds]), final_infos
        return SlotAnswers(observations, rewards, terminateds, truncateds, infos, slots, final)

    def _waits_for(self, remote: Any, name: str, began: float | None, age_s: float) -> Iterator[Wait]:
        if remote.phase is not LanePhase.READY:
            yield from super()._waits_for(remote, name, began, age_s)
        elif asked := [(at, slot) for slot in remote.slots if (at := self.asked_at[slot])]:
            at, slot = min(asked)  # a worker steps its slots in the order in which they were asked
            for wait in super()._waits_for(remote, name, began, (clock() - at) / 1e9):
                yield replace(wait, where=wait.where.replace(remote.name, f"slot {slot}", 1))

    # Losses

    def give_up(self, remote: SlotsLink, reason: str) -> None:
        """Have the open episodes of a worker's slots end, once these begin anew."""
        self._kept += self._read()  # what it has answered before
        super().give_up(remote, reason)
        for slot in remote.slots:
            self.asked_at[slot] = 0
            if self._resets is None:  # else all of its slots are reset again
                self._phases[slot] = _GIVEN_UP[self._phases[slot]]
                self._to_end[slot] = reason
        if self.is_draining and self._resets is None:
            self._to_leave += remote.slots

    def _leave(self, remote: Any) -> Iterator[Any]:
        self.set_aside(remote)
        remote.is_waited = False
        self._to_leave += remote.slots
        self.check_any_left()
        if self._resets is not None:
            raise EnvError(
                f"{remote.name} was lost {MAX_FAILURES + 1} times in a row before its first observations had come, the "
                f"last time by: {remote.reason}"
            ).see("worker")
        return iter(())

    def _tell_begun(self, slots: Sequence[int], *phases: int) -> list[int]:
        """Tell the lane of those among slots that are in one of some phases, BEGUN if none is given: these."""
        lane, phases = self.lanes[0], phases or (_BEGUN,)
        held = {slot for each in lane.held for slot in each.slots.tolist()}  # which the lane gets first
        begun = [slot for slot in slots if self._phases[slot] in phases and slot in self._to_end and slot not in held]
        reasons = {slot: self._to_end.pop(slot) for slot in begun}
        for reason in set(reasons.values()):
            self.lost_steps += lane.lose(reason, np.array([slot for slot in begun if reasons[slot] == reason]))
        for slot in begun:
            self._phases[slot] = _HELD
        return begun

    def _let_go(self, slots: Sequence[int]) -> None:
        """Have those among slots that are lost answer no more."""
        if self._resets is None and (lost := self._tell_begun(slots, _LOST, _LOST_HELD)):
            self.lanes[0].give_up(np.array(lost))
            self._has_given_up = True

    def _end(self) -> None:
        super()._end()
        self._all.close()
        self._pipe.clear()
        self._columns = {}
        if self.block is not None:
            self.block.close()
            self.block = None
