"""A gRPC channel with TLS whose certificates may change while it is used.

gRPC fixes the credentials of a channel when it is made. So this one makes another channel when the files have changed:
new calls, those after a broken connection above all, go there, and the old one closes with the last of its calls.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from octavo.tls import TlsMaterial, TlsSource

_LOOK_INTERVAL_S = 1.0

MakeChannel = Callable[[grpc.ChannelCredentials], grpc.aio.Channel]


def channel_credentials(material: TlsMaterial) -> grpc.ChannelCredentials:
    """What a client shows and trusts; without a CA it trusts those that gRPC ships."""
    return grpc.ssl_channel_credentials(material.ca, material.key, material.certificate)


class _Inner:
    """One channel with fixed credentials, and how many of its calls run."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self._num_calls = 0
        self._is_retired = False
        self._closing: asyncio.Task[None] | None = None

    def hold(self, call: Any) -> None:
        """Stay open until this call is over."""
        self._num_calls += 1
        call.add_done_callback(self._release)

    def retire(self) -> None:
        """No further call will come."""
        self._is_retired = True
        self._close_if_idle()

    def _release(self, call: Any) -> None:
        self._num_calls -= 1
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._is_retired and not self._num_calls and self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self.channel.close())


class SecureChannel(grpc.aio.Channel):
    """Looks like a channel of grpc.aio; made and used in one event loop.

    Args:
        source: looked at before a call, at most once a second.
        make: a channel with these credentials.
    """

    def __init__(self, source: TlsSource, make: MakeChannel) -> None:
        self._source = source
        self._make = make
        self._material = source.latest()
        self._inner = _Inner(make(channel_credentials(self._material)))
        self._looked_at = time.monotonic()

    def current(self) -> _Inner:
        """The channel for the next call."""
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_INTERVAL_S:
            self._looked_at = now
            material = self._source.latest()
            if material is not self._material:
                self._material = material
                self._inner.retire()
                self._inner = _Inner(self._make(channel_credentials(material)))
        return self._inner

    async def __aenter__(self) -> "SecureChannel":
        return self

    async def __aexit__(self, *problem: Any) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        await self._inner.channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self.current().channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._inner.channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self.current().channel.channel_ready()

    def unary_unary(self, *method: Any, **options: Any) -> Any:
        return _Method(self, "unary_unary", method, options)

    def unary_stream(self, *method: Any, **options: Any) -> Any:
        return _Method(self, "unary_stream", method, options)

    def stream_unary(self, *method: Any, **options: Any) -> Any:
        return _Method(self, "stream_unary", method, options)

    def stream_stream(self, *method: Any, **options: Any) -> Any:
        return _Method(self, "stream_stream", method, options)


class _Method:
    """What a stub calls: the method on whichever channel is the current one."""

    def __init__(self, channel: SecureChannel, kind: str, method: Sequence[Any], options: dict[str, Any]) -> None:
        self._channel = channel
        self._kind = kind
        self._method = method
        self._options = options
        self._made_for: _Inner | None = None
        self._callable: Any = None

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        inner = self._channel.current()
        if inner is not self._made_for:
            self._made_for = inner
            self._callable = getattr(inner.channel, self._kind)(*self._method, **self._options)
        call = self._callable(*arguments, **options)
        inner.hold(call)
        return call
