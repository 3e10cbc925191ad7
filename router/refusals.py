"""What the engine says when it refuses or ends a request: errors in full, each with its reason and numbers."""

from octavo.errors import Code, OctavoError


def step_failed(reason: str, message: str) -> OctavoError:
    """The executor could not compute a request."""
    return OctavoError(
        Code.INTERNAL,
        "STEP_FAILED",
        f"the executor could not compute this request: {message}",
        metadata={"reason": reason},
    )


def too_many_choices(num_choices: int, rows: int) -> OctavoError:
    """More answers than can ever run at once."""
    return OctavoError(
        Code.FAILED_PRECONDITION,
        "NEVER_FITS",
        f"{num_choices} answers are asked for, and this engine generates {rows} at once; lower n or best_of",
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
