"""Served policies that follow a trainer: they act with its newest weights."""

import argparse
import logging
import ssl
from collections.abc import Mapping
from typing import Any

from rollflow.cli import arguments
from rollflow.policy.serving.shelf import Shelf
from rollflow.sinks import WeightsFollower
from rollflow.stream.data.errors import RollflowError
from rollflow.stream.wire import parse_trainer_address

logger = logging.getLogger(__name__)

PREFIX = "follow-"
_LOOKS_UNTIL_AGAIN = 10  # after an error, such as another secret


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `rollflow serve` that name trainers to follow."""
    parser.add_argument(
        "--follow",
        action="append",
        default=[],
        metavar="[NAME=]ADDRESS",
        help="a trainer, a TrainerStream at tcp://host:port, unix:/path or shm:/path, whose newest weights act; where "
        "it trains several modules, in the policies of their names",
    )
    arguments.add_protection(parser, PREFIX)


def following(shelf: Shelf, args: argparse.Namespace) -> list["Following"]:
    """What follows the trainers of the arguments. Raises ValueError and RollflowError where they make no sense."""
    secret, tls = arguments.secret_of(args, PREFIX), arguments.tls_of(args, PREFIX, listens=False)
    if not args.follow and (secret is not None or tls is not None):
        raise ValueError("--follow-secret-… and --follow-tls are for --follow ADDRESS, expected it as well")
    made: list[Following] = []
    for text in args.follow:
        name, equals, address = text.rpartition("=")
        if equals:
            shelf.versions(name)
        parse_trainer_address(address)
        made.append(Following(shelf, name or None, address, secret, tls))
    return made


class Following:
    """Policies of a shelf that follow a trainer, from `begin` on; what becomes of it is logged.

    name    of the policy; None: the only one, or those that are named as the trainer's modules
    """

    def __init__(
        self, shelf: Shelf, name: str | None, address: str, secret: str | None, tls: ssl.SSLContext | None
    ) -> None:
        self._shelf, self._name, self._address = shelf, name, address
        self._options: dict[str, Any] = {"secret": secret, "tls": tls}
        self._version, self._is_away, self._looks = 0, False, 0
        self._follower: WeightsFollower | None = None

    def begin(self) -> None:
        """Dial the trainer."""
        self._follower = WeightsFollower(self._address, self._take, **self._options)

    def look(self) -> None:
        """Say whether the trainer is away or back; after an error dial it again some time later."""
        follower = self._follower
        if follower is None:
            return
        if (is_away := bool(problem := follower.problem)) != self._is_away:
            self._is_away = is_away
            if is_away:
                weights = f"weights {self._version} of it" if self._version else "the weights that were saved"
                logger.warning("trainer %s is away, %s act on: %s", self._address, weights, problem)
            else:
                logger.warning("trainer %s is there, and is followed", self._address)
        if follower.error is not None:
            self._looks += 1
            if self._looks >= _LOOKS_UNTIL_AGAIN:
                self._looks = 0
                follower.close()
                self.begin()

    def close(self) -> None:
        """Leave the trainer."""
        if self._follower is not None:
            self._follower.close()

    def _take(self, version: int, weights: Mapping[str, Any]) -> None:
        try:
            names = self._shelf.publish(weights, version, self._name)
        except RollflowError as error:
            logger.warning("weights %d of trainer %s do not act: %s", version, self._address, error)
            return
        self._version = version
        logger.info("weights %d of trainer %s act in %s", version, self._address, ", ".join(names))
