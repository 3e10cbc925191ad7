"""What the router says when it refuses or ends a request: errors in full, each with its reason and numbers."""

from collections.abc import Sequence

from octavo.errors import Code, OctavoError

RETRY_AFTER_S = 1.0


def nothing_served() -> OctavoError:
    """No engine was reached yet."""
    return _unavailable("NO_EXECUTOR", "no model is served yet; the executor is still loading or not reached")


def not_reached(model_name: str) -> OctavoError:
    """The model's engines are lost, at least for now."""
    message = f"no engine of {model_name!r} takes requests now: executor or cache service are not reached; try again"
    return _unavailable("NO_EXECUTOR", message)


def may_be_served(served: Sequence[str], unknown_engines: Sequence[str]) -> OctavoError:
    """An engine that was never reached may have the model."""
    message = (
        f"no engine that was reached serves this model, only {_names(served)}, and {_names(unknown_engines)} "
        "was not reached yet; try again"
    )
    return _unavailable("NO_EXECUTOR", message)


def no_such_model(served: Sequence[str]) -> OctavoError:
    """The name is of no model; or there is none, where it is needed."""
    return OctavoError(
        Code.NOT_FOUND,
        "MODEL_NOT_FOUND",
        f"model: name one that is served: {_names(served)}",
        metadata={"served": ",".join(served)},
    )


def draining() -> OctavoError:
    """This router ends."""
    return _unavailable("DRAINING", "this router is going away; send to another one")


def engine_lost() -> OctavoError:
    """Executor or cache service were gone for too long."""
    return _unavailable("ENGINE_LOST", "the engine was lost while this request ran; send it again")


def model_changed(model_name: str) -> OctavoError:
    """The executor that came back is not the one that went: its lease and its requests are over."""
    message = f"the executor now serves {model_name!r}, another model or another pool"
    return OctavoError(Code.FAILED_PRECONDITION, "MODEL_CHANGED", message)


def router_fault() -> OctavoError:
    """An exception that nobody expected: a defect of ours, and no reason to send the request again."""
    message = "the router failed while it served this request, which is a defect of Octavo; its log says where"
    return OctavoError(Code.INTERNAL, "ROUTER_FAULT", message)


def step_failed(reason: str, message: str) -> OctavoError:
    """The executor could not compute a request."""
    return OctavoError(
        Code.INTERNAL,
        "STEP_FAILED",
        f"the executor could not compute this request: {message}",
        metadata={"reason": reason},
    )


def no_token_left() -> OctavoError:
    """A search whose rules left nothing to go on with."""
    message = "the rules of this request left no token to generate; allow more of them"
    return OctavoError(Code.INTERNAL, "STEP_FAILED", message, metadata={"reason": "NO_TOKEN_LEFT"})


def poisoned(num_deaths: int) -> OctavoError:
    """A request that kills executors."""
    return OctavoError(
        Code.INTERNAL,
        "POISONED",
        f"{num_deaths} executors died while this request ran alone in them; do not send it again as it is",
        metadata={"num_deaths": str(num_deaths)},
    )


def too_many_choices(num_choices: int, rows: int) -> OctavoError:
    """More answers than can ever run at once."""
    return OctavoError(
        Code.FAILED_PRECONDITION,
        "NEVER_FITS",
        f"{num_choices} answers are asked for, and this engine generates {rows} at once; lower n, best_of or "
        "beam.width",
        metadata={"num_choices": str(num_choices), "max_running_requests": str(rows)},
    )


def queue_full(queued: int, allowed: int) -> OctavoError:
    """Come back later."""
    return OctavoError(
        Code.RESOURCE_EXHAUSTED,
        "QUEUE_FULL",
        f"{queued} requests wait, and {allowed} may; try again later or send to another router",
        metadata={"queued": str(queued), "max_queued_requests": str(allowed)},
        retry_after_s=1.0,
    )


def id_is_live(request_id: str) -> OctavoError:
    """Another request has this id."""
    return OctavoError(
        Code.ALREADY_EXISTS,
        "REQUEST_ID_LIVE",
        "request_id: a live request with another body has this id; choose another id, cancel that one, or wait for it",
        metadata={"request_id": request_id},
    )


def superseded(request_id: str) -> OctavoError:
    """The same request was sent again, and its newer call gets the answer."""
    return OctavoError(
        Code.ABORTED,
        "SUPERSEDED",
        "request_id: the same request was sent again while this call was live, and that call goes on with it",
        metadata={"request_id": request_id},
    )


def _unavailable(reason: str, message: str) -> OctavoError:
    return OctavoError(Code.UNAVAILABLE, reason, message, retry_after_s=RETRY_AFTER_S)


def _names(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
