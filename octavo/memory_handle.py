"""How memory of a device gets from the process that made it to those that use it: over a Unix socket, one message.

    holder                                 maker
    connect                    -->
                               <--         kind, memory id, device, size; with it a descriptor, or an IPC handle in it
    (the connection stays open for as long as the memory is held)
    close                      -->         one holder less

The socket is abstract: its name goes with its process, and nothing is left to be swept up after a kill. A connection
counts as a hold, so that a maker whose memory does not outlive it can wait for its holders, and a holder sees at once
that the maker is gone. Only processes of the same user are answered. Here belongs the hand-over, both sides of it. Not
here: calls of the driver (cuda_driver), and what lies in the memory.
"""

import contextlib
import json
import logging
import os
import selectors
import socket
import struct
import threading
import time
from dataclasses import asdict, dataclass
from typing import Literal

from octavo.errors import Code, OctavoError

log = logging.getLogger(__name__)

Sharing = Literal["descriptor", "ipc"]

_MESSAGE_BYTES = 4096
_FETCH_TIMEOUT_S = 10.0
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


@dataclass(frozen=True, slots=True)
class MemoryOffer:
    """What the maker says of its memory."""

    memory_id: str  # of this memory and no other, ever
    device_uuid: str
    size_bytes: int
    sharing: Sharing
    ipc_handle: str = ""  # hexadecimal; only where sharing is ipc


class HandleServer:
    """Gives one memory to every process of this user that asks, in a thread of its own."""

    def __init__(self, name: str, offer: MemoryOffer, descriptor: int | None) -> None:
        """name: of the abstract socket. descriptor: goes along with the offer; it belongs to the caller."""
        self._message = json.dumps(asdict(offer)).encode()
        self._descriptors = [] if descriptor is None else [descriptor]
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{name}")
        self._listener.listen()
        self._wake, self._woken = socket.socketpair()
        self._holders: set[socket.socket] = set()
        self._selector = selectors.DefaultSelector()
        for each in (self._listener, self._woken):
            self._selector.register(each, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="memory-handle", daemon=True)
        self._thread.start()

    @property
    def num_holders(self) -> int:
        """Connections that are open."""
        return len(self._holders)

    def wait_for_holders(self, timeout_s: float) -> bool:
        """Wait until nobody holds the memory. Returns whether that is so."""
        deadline_s = time.monotonic() + timeout_s
        while self._holders and time.monotonic() < deadline_s:
            time.sleep(0.01)
        return not self._holders

    def close(self) -> None:
        """Answer nobody any more. Idempotent."""
        if not self._thread.is_alive():
            return
        self._wake.close()
        self._thread.join()

    def _serve(self) -> None:
        try:
            while self._serve_ready():
                pass
        finally:
            for each in (*self._holders, self._listener, self._woken):
                each.close()
            self._selector.close()

    def _serve_ready(self) -> bool:
        for key, _ in self._selector.select():
            if key.fileobj is self._woken:
                return False
            if key.fileobj is self._listener:
                self._accept()
            else:
                self._drop(key.fileobj)  # it said something or left: a holder has nothing to say
        return True

    def _accept(self) -> None:
        try:
            holder, _ = self._listener.accept()
        except OSError as error:  # it left before it was taken, or there are no descriptors left
            log.warning("a holder of device memory could not be answered: %s", error)
            return
        if _uid_of(holder) != os.geteuid():
            log.warning("a process of user %d asked for device memory and was refused", _uid_of(holder))
            holder.close()
            return
        try:
            socket.send_fds(holder, [self._message], self._descriptors)
        except OSError:
            holder.close()
            return
        self._holders.add(holder)
        self._selector.register(holder, selectors.EVENT_READ)

    def _drop(self, holder: object) -> None:
        assert isinstance(holder, socket.socket), "only sockets are registered"
        self._selector.unregister(holder)
        self._holders.discard(holder)
        holder.close()


class Hold:
    """One memory that this process was given.

    Attributes:
        offer: what the maker said.
        descriptor: holds the memory by itself; None where it is shared by an IPC handle.
    """

    def __init__(self, connection: socket.socket, offer: MemoryOffer, descriptor: int | None) -> None:
        self.offer = offer
        self.descriptor = descriptor
        self._connection = connection

    @property
    def maker_is_there(self) -> bool:
        """Whether the process that made the memory still runs."""
        try:
            return bool(self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        """Tell the maker that this process holds nothing of it any more. Idempotent."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
        self._connection.close()


def fetch_memory(name: str, memory_id: str) -> Hold:
    """Ask the maker for the memory of this id.

    Raises:
        OctavoError: FAILED_PRECONDITION MEMORY_GONE: nobody is there, it is refused, or it is another memory by now.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(_FETCH_TIMEOUT_S)
        connection.connect(f"\0{name}")
        message, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 1)
        connection.settimeout(None)
    except OSError as error:
        connection.close()
        raise _gone(
            f"nobody answers at the socket @{name} ({error}); the process that made it has ended, or lives in "
            "another network namespace"
        ) from error
    try:
        return _hold_of(connection, message, descriptors, memory_id)
    except OctavoError:
        connection.close()
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def _hold_of(connection: socket.socket, message: bytes, descriptors: list[int], memory_id: str) -> Hold:
    if not message:
        raise _gone("its maker gives it to processes of its own user alone")
    offer = MemoryOffer(**json.loads(message))
    if offer.memory_id != memory_id:
        raise _gone(f"its maker has {offer.memory_id} by now")
    if (offer.sharing == "descriptor") != bool(descriptors):
        raise _gone("its descriptor did not arrive: this process may open no more files")
    return Hold(connection, offer, descriptors[0] if descriptors else None)


def _uid_of(peer: socket.socket) -> int:
    credentials = b""
    with contextlib.suppress(OSError):
        credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(credentials)[1] if credentials else -1


def _gone(why: str) -> OctavoError:
    return OctavoError(
        Code.FAILED_PRECONDITION, "MEMORY_GONE", f"the device memory is not to be had: {why}; register again"
    )
