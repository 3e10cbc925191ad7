"""A tenant: callers who share request ids, limits and cached prefixes. Frozen; what one has used is in `accounts`."""

from dataclasses import dataclass

from octavo.errors import Code, OctavoError


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant as its file describes it; 0 and None are no limit.

    Attributes:
        name: in metrics and logs; empty where nobody has to say who they are.
        prefix_group: tenants of a group find each other's cached prefixes; empty: nobody else does.
        models: names of the models that it may use; None: all.
        is_disabled: known, and refused.
        max_requests_in_flight: calls at a time.
        tokens_per_minute: prompt and generated, on average; as many may be used at once.
        max_queue_share: of the places in the queue, (0, 1].
        max_kv_share: of the KV blocks of each engine, for what runs, (0, 1].
    """

    name: str = ""
    prefix_group: str = ""
    models: frozenset[str] | None = None
    is_disabled: bool = False
    max_requests_in_flight: int = 0
    tokens_per_minute: int = 0
    max_queue_share: float = 1.0
    max_kv_share: float = 1.0

    @property
    def cache_tenant(self) -> str | None:
        """What is part of the key of its blocks, and what the cache service's metrics and weights call it.

        No name of a group can pass for the name of a tenant, which has no colon.
        """
        return f"group:{self.prefix_group}" if self.prefix_group else self.name or None

    def may_use(self, model_name: str) -> bool:
        return self.models is None or model_name in self.models

    def check_model(self, model_name: str) -> None:
        """Raises OctavoError, PERMISSION_DENIED, for a model that it may not use."""
        if not self.may_use(model_name):
            raise OctavoError(
                Code.PERMISSION_DENIED,
                "MODEL_NOT_ALLOWED",
                f"model: this caller may not use {model_name!r}; ListModels names those that it may",
                metadata={"model": model_name},
            )


NOBODY = Tenant()  # where there are no tenants
