"""What a user puts into a pipeline, held against what a connector piece is."""

from typing import Any

from rollflow.nodes.connectors.connector_v2 import ConnectorV2
from rollflow.stream.errors import ConnectorError


def pieces_of(made: Any, what: str) -> list[ConnectorV2]:
    """What a connector builder function returned, as a list. Raises ConnectorError unless it is a piece or several."""
    pieces = list(made) if isinstance(made, list | tuple) else [made]
    for piece in pieces:
        if not isinstance(piece, ConnectorV2):
            raise ConnectorError(
                f"{what} returned {_told_class(piece)}, expected a ConnectorV2 piece or a list of pieces"
            )
    return pieces


def check_piece(piece: Any) -> None:
    """Raise ConnectorError unless it is a piece."""
    if not isinstance(piece, ConnectorV2):
        raise ConnectorError(f"{piece!r} is {_told_class(piece)}, expected a ConnectorV2 piece")


def _told_class(piece: Any) -> str:
    return f"the class {piece.__name__}, not {piece.__name__}()" if isinstance(piece, type) else type(piece).__name__
