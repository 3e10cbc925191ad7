"""The dashboard that is looked at first: is it up, how busy is it, how long do answers take."""

from helm.dashboards.panels import (
    BY_MODEL,
    BY_NAMESPACE,
    CHOICE_OF_MODEL,
    CHOICE_OF_NAMESPACE,
    Panel,
    Query,
    Row,
    figure,
    mean,
    quantiles,
    stacked,
)

UID, TITLE = "octavo-overview", "Octavo overview"
DESCRIPTION = "Whether engines serve, how busy they are, and how long answers take."
CHOICES = (CHOICE_OF_NAMESPACE, CHOICE_OF_MODEL)

_RATE = "[$__rate_interval]"
_CALLS = f'octavo_grpc_requests_total{{{BY_NAMESPACE}, method=~"Generate.*"}}{_RATE}'
_FAILED_CALLS = (
    f'octavo_grpc_requests_total{{{BY_NAMESPACE}, method=~"Generate.*", '
    f'grpc_code=~"UNAVAILABLE|INTERNAL|UNKNOWN|DATA_LOSS"}}{_RATE}'
)


def _sum(metric: str, by: str, selector: str = BY_MODEL) -> str:
    return f"sum by ({by}) ({metric}{{{selector}}})"


def _rate(metric: str, by: str, selector: str = BY_MODEL) -> str:
    return f"sum by ({by}) (rate({metric}{{{selector}}}{_RATE}))"


_NOW = Row(
    "Now",
    [
        figure(
            "Engines that serve",
            "short",
            f"sum(max by (namespace, engine) (octavo_engine_up{{{BY_MODEL}}}))",
            "Engines that some router takes requests for.",
        ),
        figure(
            "Executors lost",
            "short",
            f"count(octavo_executor_up{{{BY_NAMESPACE}}} == 0) or vector(0)",
            "Executors that died and did not come back.",
            alarm_at=1,
        ),
        figure(
            "Calls that fail",
            "percentunit",
            f"sum(rate({_FAILED_CALLS})) / sum(rate({_CALLS}))",
            "Share of Generate calls that end by the server's fault, of all models; - while there are no calls.",
            warn_at=0.001,
            alarm_at=0.0144,
        ),
        figure("Running", "short", f"sum(octavo_num_requests_running{{{BY_MODEL}}})"),
        figure("Waiting", "short", f"sum(octavo_num_requests_waiting{{{BY_MODEL}}})"),
        figure(
            "Tokens generated",
            "short",
            f"sum(rate(octavo_generation_tokens_total{{{BY_MODEL}}}{_RATE}))",
            "A second, of all answers.",
        ),
    ],
    height=4,
)

_REQUESTS = Row(
    "Requests",
    [
        stacked(
            "Calls by status",
            "reqps",
            f"sum by (grpc_code) (rate({_CALLS}))",
            "{{grpc_code}}",
            "Of all models: a call is counted before its model is known.",
        ),
        stacked(
            "Ended requests by reason",
            "reqps",
            _rate("octavo_request_success_total", "finished_reason"),
            "{{finished_reason}}",
        ),
        stacked(
            "Refused before they queued", "reqps", _rate("octavo_admission_rejections_total", "reason"), "{{reason}}"
        ),
    ],
)

_LOAD = Row(
    "Load",
    [
        stacked("Running, by engine", "short", _sum("octavo_num_requests_running", "engine"), "{{engine}}"),
        stacked(
            "Waiting, by what for",
            "short",
            _sum("octavo_num_requests_waiting_by_reason", "reason"),
            "{{reason}}",
            "blocks: KV memory; capacity: a row of the executor; tokenizing: a thread of the router.",
        ),
        Panel(
            "Preemptions per request",
            "short",
            [
                Query(
                    f"{_rate('octavo_num_preemptions_total', 'model_name')} / "
                    f"{_rate('octavo_request_success_total', 'model_name')}",
                    "{{model_name}}",
                )
            ],
            "Requests that gave their blocks to older ones, and computed again.",
        ),
    ],
)

_LATENCY = Row(
    "Latency",
    [
        Panel(
            "Time to first token",
            "s",
            quantiles("octavo_time_to_first_token_seconds", "model_name", BY_MODEL),
            "From the arrival of a request.",
        ),
        Panel(
            "Between two tokens",
            "s",
            quantiles("octavo_inter_token_latency_seconds", "model_name", BY_MODEL),
        ),
        Panel(
            "Whole answers",
            "s",
            quantiles("octavo_e2e_request_latency_seconds", "model_name", BY_MODEL),
        ),
        Panel(
            "Where the time goes, mean",
            "s",
            [
                mean(f"octavo_request_{part}_time_seconds", "model_name", BY_MODEL, f"{part} {{{{model_name}}}}")
                for part in ("queue", "prefill", "decode")
            ],
            "queue: until the first step; prefill: until the first token; decode: until the last.",
            is_stacked=True,
        ),
    ],
)

_WORK = Row(
    "Work",
    [
        Panel(
            "Tokens a second",
            "short",
            [
                Query(_rate("octavo_prompt_tokens_total", "model_name"), "prompt {{model_name}}"),
                Query(_rate("octavo_generation_tokens_total", "model_name"), "generated {{model_name}}"),
            ],
            "Prompt tokens are counted when a request ends.",
        ),
        Panel(
            "Tokens of a step, mean",
            "short",
            [mean("octavo_iteration_tokens", "engine", f'{BY_MODEL}, engine!=""', "{{engine}}")],
            "Prefill and decode together: the fuller, the better the device is used.",
        ),
        Panel(
            "Parts of a step, mean",
            "s",
            [mean("octavo_step_time_seconds", "part", BY_MODEL, "{{part}}")],
            "With two steps in flight, plan and deliver lie under execute and cost no time.",
        ),
        Panel(
            "Faults",
            "short",
            [
                Query(_rate("octavo_steps_failed_total", "reason"), "step: {{reason}}"),
                Query(_rate("octavo_router_faults_total", "engine", BY_NAMESPACE), "router: {{engine}}"),
            ],
            "Steps that failed in the model, and the router's own: 0 in a sound system.",
            is_stacked=True,
        ),
    ],
)

_SIZES = Row(
    "Sizes",
    [
        Panel(
            "Prompt tokens of a request",
            "short",
            quantiles("octavo_request_prompt_tokens", "model_name", BY_MODEL, parts=(0.5, 0.95)),
        ),
        Panel(
            "Generated tokens of a request",
            "short",
            quantiles("octavo_request_generation_tokens", "model_name", BY_MODEL, parts=(0.5, 0.95)),
        ),
    ],
)

_RECOVERY = Row(
    "Recovery",
    [
        stacked(
            "Computed again",
            "short",
            _rate("octavo_recomputed_tokens_total", "cause"),
            "{{cause}}",
            "Tokens a second: steps that were in flight when an executor was lost, blocks that were given up.",
        ),
        Panel(
            "Until a lost executor was replaced, mean",
            "s",
            [mean("octavo_takeover_time_seconds", "engine", f'{BY_MODEL}, engine!=""', "{{engine}}")],
            "From the loss of the session to the next one; running requests wait for that, and for a first step there.",
        ),
        Panel(
            "Spare executors",
            "short",
            [
                Query(f"min by (namespace, engine) (octavo_spare_executors_ready{{{BY_MODEL}}})", "{{engine}}"),
                Query(f"max by (namespace, engine) (octavo_spare_executors{{{BY_MODEL}}})", "{{engine}}, wanted"),
            ],
            "Attached, loaded and idle: they take the place of one that dies at once.",
        ),
    ],
)

_CERTIFICATES = Row(
    "Certificates",
    [
        Panel(
            "Certificate files that can be used",
            "short",
            [Query(f"min by (job, use) (octavo_tls_files_good{{{BY_NAMESPACE}}})", "{{job}} {{use}}")],
            "0: they have changed, and the certificate of before is still in use.",
            maximum=1,
        ),
        stacked(
            "Changes of certificate files",
            "short",
            f"sum by (use, outcome) (increase(octavo_tls_reloads_total{{{BY_NAMESPACE}}}[1h]))",
            "{{use}} {{outcome}}",
            "Within an hour, over all processes.",
        ),
    ],
)

ROWS = (_NOW, _REQUESTS, _LOAD, _LATENCY, _WORK, _SIZES, _RECOVERY, _CERTIFICATES)
