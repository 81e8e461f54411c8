"""The drafter as the engine sees it: a peer that answers one message a step, and that may be lost and replaced."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from workers.comm.channel import Channel, ChannelOffer, PeerLost
from workers.comm.ipc import DrafterLost
from workers.comm.wire import Message
from workers.types import DraftReply, DraftRequest, HeadState, NewHead

logger = logging.getLogger(__name__)


class DrafterPeer:
    """The link to drafter rank 0, as long as there is one.

    channel: None = an engine without a drafter. offer_link: opens the link on which a lost drafter's successor will
    connect; None = the loss of the drafter ends the engine: all methods but `stop` raise PeerLost. on_lost: called with
    the reason and the address of that link.
    """

    def __init__(
        self,
        channel: Channel | None,
        offer_link: Callable[[], ChannelOffer] | None,
        on_lost: Callable[[DrafterLost], None],
    ) -> None:
        self.channel = channel
        self._offer_link, self._on_lost = offer_link, on_lost
        self._offer: ChannelOffer | None = None  # while the drafter is lost
        self._last_contact = 0.0

    @property
    def is_connected(self) -> bool:
        """True unless there is no drafter, or it is lost."""
        return self.channel is not None

    def accept_successor(self) -> None:
        """Take the link of a new drafter, if one has connected."""
        if self._offer is not None and (channel := self._offer.accepted()) is not None:
            self.channel, self._offer = channel, None
            logger.warning("a new drafter has connected; requests from now on are drafted for")

    def keep_alive(self, step: int, period_s: float) -> None:
        """Send a heartbeat after `period_s` seconds without contact, which shows a loss although nothing is drafted."""
        if self.channel is not None and time.monotonic() - self._last_contact >= period_s:
            self._last_contact = time.monotonic()
            try:
                self.channel.heartbeat(step)
            except PeerLost as error:
                self._lose(error)

    def swap(self, message: NewHead, step: int) -> HeadState | None:
        """Ask for another head and return how far it is; None if the drafter is lost. Call it between two steps."""
        if self.channel is None or not self.send(message, step):
            return None
        reply = self._receive()
        assert reply is None or isinstance(reply, HeadState)
        return reply

    def send(self, message: DraftRequest | NewHead, step: int) -> bool:
        """Send a message; return whether it was sent."""
        assert self.channel is not None
        try:
            self.channel.send(message, step)
        except PeerLost as error:
            self._lose(error)
            return False
        return True

    def receive(self) -> DraftReply | None:
        """Wait for the reply to a step's message; None if the drafter is lost."""
        reply = self._receive()
        assert reply is None or isinstance(reply, DraftReply)
        return reply

    def _receive(self) -> Message | None:
        assert self.channel is not None
        try:
            received = self.channel.receive()
        except PeerLost as error:
            self._lose(error)
            return None
        self._last_contact = time.monotonic()
        return received.message

    def stop(self, step: int) -> None:
        """Tell the drafter to leave, or withdraw the offer to its successor."""
        if self.channel is not None:
            try:
                self.channel.stop(step)
            except PeerLost as error:
                logger.warning("%s, while the engine stops", error)
        if self._offer is not None:
            self._offer.close()

    def _lose(self, error: PeerLost) -> None:
        if self._offer_link is None:
            raise error
        logger.error("%s; the engine goes on without drafts", error)
        self.channel, self._offer = None, self._offer_link()
        self._on_lost(DrafterLost(reason=str(error), link=self._offer.address))
