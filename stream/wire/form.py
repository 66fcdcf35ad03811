"""What is said of a lane's environments, held against the Hello of their host."""

from typing import Any, Protocol

from rollflow.stream.wire.agent_form import AgentForm
from rollflow.stream.wire.handshake import Hello
from rollflow.stream.wire.rows import RowForm
from rollflow.stream.wire.running import Reset, Step


class Form(Protocol):
    """What requests and their answers look like, of one agent or of several."""

    def check_request(self, request: Reset | Step, slots: int) -> Reset | Step:
        """The request of a lane of so many environments, as the spaces have it. Raises WireError."""
        ...

    def check_rows(self, rows: Any, request: Reset | Step, slots: int) -> Any:
        """The answer to it, as the spaces have it. Raises WireError."""
        ...


def form_of(hello: Hello) -> Form:
    """As a Hello says. Raises WireError for spaces that are none."""
    return AgentForm.of(hello) if hello.role == "agents" else RowForm.of(hello)
