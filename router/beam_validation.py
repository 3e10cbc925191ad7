"""What a request may say of beam search, and what does not go with it. Part of `validation`."""

from collections.abc import Callable

from router.raw import RawRequest

MAX_LENGTH_PENALTY = 10.0

# What draws, and values of it that are off.
_DRAWING = {"temperature": (0.0,), "top_p": (1.0,), "top_k": (0, -1), "min_p": (0.0,), "seed": ()}


def check_beam(raw: RawRequest, max_width: int, check: Callable[[bool, str, str], None]) -> None:
    """Call `check` with whether a field is good, its path, and what is wrong where it is not."""
    if (beam := raw.beam) is None:
        return
    n, width, penalty = raw.n or 1, beam.width, beam.length_penalty
    field = "sampling.beam.width"
    check(1 <= width <= max_width, field, f"is {width}; allowed is 1 to {max_width}, max_choices")
    check(n <= max(width, 1), field, f"is {width}, below sampling.n, {n}; a search finds as many answers as beams")
    is_good = -MAX_LENGTH_PENALTY <= penalty <= MAX_LENGTH_PENALTY  # NaN is in no range
    allowed = f"[{-MAX_LENGTH_PENALTY:g}, {MAX_LENGTH_PENALTY:g}]"
    check(is_good, "sampling.beam.length_penalty", f"is {penalty}; allowed is {allowed}")
    for name, neutral in _DRAWING.items():
        value = getattr(raw, name)
        is_off = value is None or value in neutral
        check(is_off, f"sampling.{name}", "does not go with sampling.beam, which draws nothing; leave it unset")
    others = {
        "sampling.best_of": (raw.best_of is not None, "the best of a search are its answers: set sampling.n"),
        "constraint": (raw.constraint is not None, "a search follows no grammar"),
        "stopping.stop": (len(raw.stop) > 0, "a search looks at tokens alone: use stopping.stop_token_ids"),
        "resume": (len(raw.resume) > 0, "its answers are chosen at the end: send the request again without"),
    }
    for path, (is_set, why) in others.items():
        check(not is_set, path, f"does not go with sampling.beam; {why}")
