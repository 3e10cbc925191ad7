"""PromQL expressions, taken apart: which series one reads, and which labels it wants of each."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import promql_parser


@dataclass(frozen=True)
class Wanted:
    """A series that an expression reads, and the labels that it matches or groups by."""

    name: str
    labels: frozenset[str]


def wanted(expression: str) -> list[Wanted]:
    """All that an expression reads. Raises ValueError for what is no PromQL, or matches by what was aggregated away."""
    return list(_walk(promql_parser.parse(expression), frozenset()))


def _walk(node: Any, outer: frozenset[str]) -> Iterator[Wanted]:
    """`outer` are the labels that what is around groups or matches by."""
    if isinstance(node, promql_parser.VectorSelector):
        matched = {matcher.name for matcher in node.matchers.matchers}
        yield Wanted(node.name, outer | matched)
        return
    if isinstance(node, promql_parser.AggregateExpr):
        kept = _labels_of(node.modifier, promql_parser.AggModifierType.By)
        if not outer <= kept:
            raise ValueError(f"{set(outer - kept)} are wanted, and aggregated away by {node.prettify()}")
        outer = kept
    if isinstance(node, promql_parser.BinaryExpr) and node.modifier is not None:
        outer |= _labels_of(node.modifier.matching, promql_parser.LabelModifierType.Include)
    if isinstance(node, promql_parser.Call) and node.func.name == "label_replace":
        made, source = node.args[1].val, node.args[3].val
        outer = (outer - {made}) | {source}
    for child in _children(node):
        yield from _walk(child, outer)


def _labels_of(modifier: Any, listing: Any) -> frozenset[str]:
    """Of `by (...)` and `on (...)`; `without` and `ignoring` want none."""
    return frozenset(modifier.labels) if modifier is not None and modifier.type == listing else frozenset()


def _children(node: Any) -> Iterator[Any]:
    for name in ("lhs", "rhs", "expr", "vector_selector"):
        child = getattr(node, name, None)
        if child is not None:
            yield child
    yield from getattr(node, "args", None) or ()
