"""One lane of environments with several agents that step in a worker process, seen from here."""

from rollflow.nodes.multi_agent.workers.agent_codec import AgentsElsewhere, InfoCodec
from rollflow.nodes.multi_agent.workers.step_block import StepBlock
from rollflow.nodes.workers.frames import Frame, Kind, frame, frame_with
from rollflow.nodes.workers.lane_link import LaneLink, State
from rollflow.stream.blocks import SharedBlock
from rollflow.stream.multi_agent.multi_agent_lane import MultiAgentLane
from rollflow.stream.packing import pack, unpack


class AgentLink(LaneLink):
    """The socket to a lane's worker, and the block of memory that both ends have."""

    def __init__(self, index: int, maker: bytes) -> None:
        super().__init__(index, maker)
        self._infos = InfoCodec(())
        self._memory: SharedBlock | None = None
        self._block: StepBlock | None = None

    def lay_out(self, envs: AgentsElsewhere) -> None:
        """Have memory for environments such as these."""
        self._infos = InfoCodec(envs.possible_agents)
        self._memory = SharedBlock(StepBlock.size(envs.parts, envs.num_envs))
        self._block = StepBlock(envs.parts, envs.num_envs, self._memory.array())

    def close(self) -> None:
        """Give the memory back."""
        if self._memory is not None:
            self._memory.close()
        self._block = None

    def reset(self, seed: int, first_slot: int) -> None:
        """Have the environments reset for the first time."""
        assert self._memory is not None
        self.send(frame_with(Kind.LAYOUT, pack({"seed": seed, "first_env": first_slot})))
        self.send(frame(Kind.BLOCK, number=self._memory.size), self._memory.fd)
        self.send(frame(Kind.RESET))
        self.state, self.starts = State.RESETTING, self.starts + 1

    def step(self) -> None:
        """Have the environments stepped with the lane's actions."""
        assert self._block is not None
        self._block.write_actions(self.lane.actions)
        self.send(frame(Kind.STEP))
        self.state = State.STEPPING

    def take(self, answer: Frame) -> MultiAgentLane:
        """The lane, once its worker is done with what it was asked for."""
        assert self._block is not None
        lane: MultiAgentLane = self.lane
        told = unpack(answer.payload) if answer.payload else {}
        infos, first_infos = (self._infos.infos(told.get(kind, ())) for kind in ("infos", "first_infos"))
        if self.state is State.RESETTING:
            lane.reset(self._block.first(), infos)
        else:
            try:
                lane.record_step(self._block.step(infos, first_infos))
            except Exception as error:
                error.add_note(f"lane {lane.index}, vector step {lane.vector_steps}")
                raise
            self._succeeded(lane.num_rows)
        self.state = State.READY
        return lane
