"""Where callers come in: whose token it is, whether the tenant has room, and what each call has used.

The glue between the tenants file, the accounts and their metrics, and the one place of these that knows the clock.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry

from octavo.errors import OctavoError
from octavo.tokens import is_local
from router.config import RouterConfig
from router.request import Usage
from router.tenants.accounts import Accounts
from router.tenants.directory import unauthenticated
from router.tenants.metrics import TenantMetrics
from router.tenants.tenant import Tenant
from router.tenants.watch import TenantsFile


class Gate:
    """Knows all tenants, or that nobody has to say who they are.

    Args:
        registry: of the router's metrics.
        clock: seconds, monotonic.
        wall_clock: Unix seconds, for the end of tokens.

    Raises:
        ValueError: the tenants file cannot be used, or tokens would travel unprotected; one line.
    """

    def __init__(
        self,
        config: RouterConfig,
        registry: CollectorRegistry,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.accounts = Accounts()
        self.metrics = TenantMetrics(
            registry,
            config.max_tenant_labels,
            self.accounts.in_flight,
            self._is_file_good,
        )
        self._everybody = Tenant(config.default_tenant)
        self._clock = clock
        self._wall_clock = wall_clock
        _check(config)
        self.file = TenantsFile(config.tenants_file, self.metrics) if config.tenants_file else None
        self._watching: asyncio.Task[None] | None = None

    def _is_file_good(self) -> bool | None:
        return None if self.file is None else self.file.is_good

    def start(self) -> None:
        """Follow changes of the file. In a running event loop."""
        if self.file is not None:
            self._watching = asyncio.create_task(self.file.run(), name="tenants")

    def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()

    def identify(self, token: str | None) -> Tenant:
        """Who calls. Raises OctavoError, UNAUTHENTICATED or PERMISSION_DENIED, and counts it."""
        if self.file is None:
            return self._everybody
        try:
            if token is None:
                raise unauthenticated("TOKEN_MISSING")
            return self.file.directory.authenticate(token, self._wall_clock())
        except OctavoError as error:
            self.metrics.on_not_let_in(error.reason)
            raise

    @contextlib.contextmanager
    def call(self, tenant: Tenant) -> Iterator["Call"]:
        """While a call of the tenant runs. Raises OctavoError, RESOURCE_EXHAUSTED, before it begins."""
        self.accounts.begin(tenant, self._clock())
        self.metrics.on_begun(tenant.name)
        try:
            yield Call(self, tenant)
        finally:
            self.accounts.end(tenant, self._clock())

    def take(self, tenant: Tenant, num_tokens: int) -> None:
        self.accounts.take(tenant, num_tokens, self._clock())


class Call:
    """A call that was let in."""

    def __init__(self, gate: Gate, tenant: Tenant) -> None:
        self._gate = gate
        self.tenant = tenant

    def on_prompt(self, usage: Usage) -> None:
        """Its prompt is tokenized."""
        self._gate.take(self.tenant, usage.prompt_tokens)

    def on_answered(self, usage: Usage) -> None:
        """Nothing more is generated for it, whatever ended it."""
        self._gate.take(self.tenant, usage.new_tokens)
        self._gate.metrics.on_used(self.tenant.name, usage)


def _check(config: RouterConfig) -> None:
    if not config.tenants_file:
        return
    if config.default_tenant:
        raise ValueError("--default-tenant is given beside --tenants-file: with the file, every caller has a tenant")
    if not (config.tls_certificate or is_local(config.listen) or config.allow_plaintext_tokens):
        raise ValueError(
            f"--tenants-file with --listen {config.listen} and no --tls-certificate: tokens would travel in plain "
            "text; give a certificate, or --allow-plaintext-tokens where a proxy or a mesh protects them"
        )
