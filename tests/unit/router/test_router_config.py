"""What the router's options say together: which engines there are, and what cannot be."""

from typing import Any

import pytest
from pydantic import ValidationError

from router.config import RouterConfig

ONE = {"cache_service": "a:1", "executor": "a:2"}
SPARES = {"spare_executors": ("a:3", "a:4")}


@pytest.mark.parametrize(
    ("options", "num_wanted"),
    [({}, 0), (SPARES, 2), ({**SPARES, "wanted_spares": 0}, 0), ({**SPARES, "wanted_spares": 1}, 1)],
)
def test_spares_are_wanted_as_far_as_nothing_else_is_said(options: dict[str, Any], num_wanted: int) -> None:
    for config in (RouterConfig(**options), RouterConfig.model_validate({"engines": [{**ONE, **options}]})):
        assert [engine.num_wanted_spares for engine in config.fleet] == [num_wanted]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"wanted_spares": 1}, "wanted_spares is 1; spare_executors names 0"),
        ({"engines": [{**ONE, **SPARES, "wanted_spares": 3}]}, "wanted_spares is 3; spare_executors names 2"),
        ({"wanted_spares": -2}, "greater than or equal to -1"),
        ({"engines": [ONE], "wanted_spares": 0}, "give the one or the others"),
        ({"engines": [{**ONE, "name": "x"}, {**ONE, "name": "x", "executor": "a:3"}]}, "two have the name x"),
        ({"engines": [ONE, {**ONE, **SPARES}]}, "two have the executor a:2"),
    ],
)
def test_engines_that_cannot_be_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        RouterConfig.model_validate(options)
