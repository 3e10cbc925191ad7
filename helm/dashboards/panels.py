"""What panels and dashboards of Octavo have in common: the data source, the variables, the look.

Not here: any expression (overview, kv_cache).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.builders.dashboard import ThresholdsConfig
from grafana_foundation_sdk.models.common import (
    BigValueGraphMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    Threshold,
    ThresholdsMode,
    VariableRefresh,
    VariableSort,
)

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
GRID_COLUMNS = 24
AnyPanel = TypeVar("AnyPanel", timeseries.Panel, stat.Panel)

# What series are chosen by. Where there is no label `namespace`, All takes those too.
BY_MODEL = 'namespace=~"$namespace", model_name=~"$model"'
BY_NAMESPACE = 'namespace=~"$namespace"'


@dataclass(frozen=True)
class Query:
    """An expression, and what its series are called in the legend."""

    expression: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """One picture.

    Attributes:
        unit: of Grafana: s, short, percentunit, reqps ...
        text: what to make of it; shown behind the title.
        is_stacked: series add up to a whole.
        is_number: one number with a small line, instead of a time series.
        warn_at, alarm_at: where a number turns yellow and red; None: never.
        maximum: of the axis, where there is a natural one.
    """

    title: str
    unit: str
    queries: Sequence[Query]
    text: str = ""
    is_stacked: bool = False
    is_number: bool = False
    warn_at: float | None = None
    alarm_at: float | None = None
    maximum: float | None = None


def stacked(title: str, unit: str, expression: str, legend: str, text: str = "") -> Panel:
    """Series of one expression that add up to a whole."""
    return Panel(title, unit, [Query(expression, legend)], text, is_stacked=True)


def figure(
    title: str,
    unit: str,
    expression: str,
    text: str = "",
    *,
    warn_at: float | None = None,
    alarm_at: float | None = None,
) -> Panel:
    """What one expression is now."""
    return Panel(title, unit, [Query(expression)], text, is_number=True, warn_at=warn_at, alarm_at=alarm_at)


@dataclass(frozen=True)
class Row:
    """Panels side by side."""

    title: str
    panels: Sequence[Panel]
    height: int = 8


def quantiles(metric: str, by: str, selector: str, *, parts: Sequence[float] = (0.5, 0.95, 0.99)) -> list[Query]:
    """Quantiles of a histogram, a series for each value of the labels `by`."""
    legend = " ".join(f"{{{{{label.strip()}}}}}" for label in by.split(","))
    rate = f"sum by (le, {by}) (rate({metric}_bucket{{{selector}}}[$__rate_interval]))"
    return [Query(f"histogram_quantile({part:g}, {rate})", f"p{part * 100:g} {legend}") for part in parts]


def mean(metric: str, by: str, selector: str, legend: str) -> Query:
    """The mean of a histogram's values."""
    total, count = (
        f"sum by ({by}) (rate({metric}_{part}{{{selector}}}[$__rate_interval]))" for part in ("sum", "count")
    )
    return Query(f"{total} / {count}", legend)


# What all dashboards may be narrowed to, and those of models beside it.
CHOICE_OF_NAMESPACE = ("namespace", "label_values(octavo_engine_up, namespace)")
CHOICE_OF_MODEL = ("model", 'label_values(octavo_engine_up{namespace=~"$namespace"}, model_name)')
CHOICE_OF_TENANT = ("tenant", 'label_values(octavo_tenant_requests_total{namespace=~"$namespace"}, tenant)')


def make_dashboard(
    uid: str, title: str, description: str, choices: Sequence[tuple[str, str]], rows: Sequence[Row]
) -> dashboard.Dashboard:
    """A dashboard of these rows.

    Args:
        choices: variables that its expressions use: name, and query for the values.
    """
    made = (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags(["octavo"])
        .editable()
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .timezone("browser")
        .refresh("30s")
        .time("now-1h", "now")
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for name, query in choices:
        made.with_variable(_chosen_from(name, name.capitalize(), query))
    number = 0
    for row in rows:
        made.with_row(dashboard.Row(row.title).id(number := number + 1))
        for panel, width in zip(row.panels, _widths(len(row.panels)), strict=True):
            build = _number if panel.is_number else _time_series
            made.with_panel(build(panel, width, row.height).id(number := number + 1))
    return made


def _widths(num_panels: int) -> list[int]:
    """Of panels that fill a row, as even as columns allow, wider ones first."""
    width, num_wider = divmod(GRID_COLUMNS, num_panels)
    return [width + (place < num_wider) for place in range(num_panels)]


def _chosen_from(name: str, label: str, query: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query(query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
    )


def _time_series(panel: Panel, width: int, height: int) -> timeseries.Panel:
    legend = common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
    tooltip = common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING)
    made = (
        timeseries.Panel()
        .legend(legend.show_legend(True))
        .tooltip(tooltip)
        .line_width(1)
        .fill_opacity(25 if panel.is_stacked else 5)
        .min(0)
    )
    if panel.is_stacked:
        made.stacking(common.StackingConfig().mode(StackingMode.NORMAL).group("A"))
    if panel.maximum is not None:
        made.max(panel.maximum)
    return _finished(made, panel, width, height)


def _number(panel: Panel, width: int, height: int) -> stat.Panel:
    made = (
        stat.Panel()
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .graph_mode(BigValueGraphMode.AREA)
        .no_value("-")
    )
    steps = [Threshold(value=None, color="green")]
    steps += [
        Threshold(value=value, color=color)
        for value, color in ((panel.warn_at, "yellow"), (panel.alarm_at, "red"))
        if value is not None
    ]
    made.thresholds(ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps))
    return _finished(made, panel, width, height)


def _finished(made: AnyPanel, panel: Panel, width: int, height: int) -> AnyPanel:
    made.title(panel.title).unit(panel.unit).datasource(SOURCE).span(width).height(height)
    if panel.text:
        made.description(panel.text)
    for index, query in enumerate(panel.queries):
        target = prometheus.Dataquery().expr(query.expression).legend_format(query.legend or "__auto")
        made.with_target(target.ref_id(chr(ord("A") + index)).range())
    return made
