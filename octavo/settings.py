"""Options of every command, from one mechanism: command line, `OCTAVO_*` variables, a TOML file, defaults.

A service declares a frozen pydantic model; this module fills it. The earlier source wins, unknown names are refused
in every source, and what is wrong is said in one line. Not here: any option of any service.
"""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from octavo.settings_sources import OptionParser, SettingsSources, UsageError, option_of

T = TypeVar("T", bound=BaseModel)

# Every table that a configuration file may hold: one file serves all commands.
SECTIONS = ("cache_service", "executor", "router", "serve", "engine", "generate", "chat", "stats", "token", "rollout")
DEFAULT = "default"


class FieldKey(NamedTuple):
    """Where a value lives: its section and its field, as in the table and the key of the file."""

    section: str
    name: str


@dataclass(frozen=True, slots=True)
class Sourced:
    """A value as its source gave it, not yet validated, and what that source is called."""

    value: Any
    source: str


def load_settings(model: type[T], *, section: str, program: str, argv: list[str] | None = None) -> T:
    """Read the options of one command.

    A field of `model` that is itself a model is a section of its own name: its options are `--name.field`, its
    variables `OCTAVO_NAME_FIELD`, its table `[name]`.

    Args:
        model: a frozen pydantic model; every field has a default or is required, and a description with its unit.
        section: table of the file and part of the variables' names that the plain fields belong to.
        program: how the command is called, for help and errors: `octavo router`.
        argv: arguments after the command; None: those of this process.

    Returns:
        The validated model.

    Raises:
        SystemExit: 2 with one line on standard error when something is wrong; 0 after `--help` or `--print-config`.
    """
    sources = SettingsSources(model, section, SECTIONS, _parser(model, program))
    try:
        command_line = sources.read_command_line(sys.argv[1:] if argv is None else argv)
        found = _merge(sources, command_line.config_file, command_line.values)
        settings = model.model_validate(_nested(model, section, found))
    except UsageError as error:
        _fail(program, str(error))
    except ValidationError as error:
        _fail(program, _describe(error, section, found))
    if command_line.print_config:
        sys.stdout.write(render(settings, section, found))
        raise SystemExit(0)
    return settings


def _parser(model: type[BaseModel], program: str) -> OptionParser:
    description = (model.__doc__ or "").strip().partition("\n")[0]
    epilog = "Each option is also a variable and a key of the file; --print-config shows their values and sources."
    parser = OptionParser(program, description, epilog)
    parser.add_argument("--config", metavar="FILE", help="TOML file with a table per section (variable: OCTAVO_CONFIG)")
    parser.add_argument("--print-config", action="store_true", help="print every value with its source, and exit")
    return parser


def _merge(
    sources: SettingsSources, config_file: str | None, command_line: Mapping[tuple[str, str], Any]
) -> dict[FieldKey, Sourced]:
    """All values that some source gives, the strongest source last."""
    path = config_file or os.environ.get("OCTAVO_CONFIG")
    found: dict[FieldKey, Sourced] = {}
    if path:
        found |= {FieldKey(*key): Sourced(value, path) for key, value in sources.read_file(path).items()}
    for (section, name), value in sources.read_variables(os.environ).items():
        found[FieldKey(section, name)] = Sourced(value, variable_of(section, name))
    for (section, name), value in command_line.items():
        found[FieldKey(section, name)] = Sourced(value, "command line")
    return found


def _nested(model: type[BaseModel], section: str, found: Mapping[FieldKey, Sourced]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, sourced in found.items():
        if key.section == section and key.name in model.model_fields:
            values[key.name] = sourced.value
        else:
            values.setdefault(key.section, {})[key.name] = sourced.value
    return values


# -------------------------------------------------------------------------------------------------------------- output


def variable_of(section: str, name: str) -> str:
    """The environment variable of a field."""
    return f"OCTAVO_{section}_{name}".upper()


def render(settings: BaseModel, section: str, found: Mapping[FieldKey, Sourced]) -> str:
    """The effective values as a TOML file, each with its source behind it."""
    values = settings.model_dump(mode="json")
    plain = {name: value for name, value in values.items() if not isinstance(getattr(settings, name), BaseModel)}
    tables = [(section, plain)] if plain else []
    tables += [(name, value) for name, value in values.items() if name not in plain]
    return "\n".join(_render_table(name, table, found) for name, table in tables)


def _render_table(section: str, values: Mapping[str, Any], found: Mapping[FieldKey, Sourced]) -> str:
    lines = [f"[{section}]"]
    for name, value in values.items():
        sourced = found.get(FieldKey(section, name))
        text = f"# {name} is unset" if value is None else f"{name} = {_toml(value)}"
        lines.append(f"{text}  # {sourced.source if sourced else DEFAULT}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    writers: list[tuple[type | tuple[type, ...], Callable[[Any], str]]] = [
        (bool, lambda flag: "true" if flag else "false"),
        ((int, float), repr),
        (list, lambda items: "[" + ", ".join(map(_toml, items)) + "]"),
        (dict, lambda table: "{ " + ", ".join(f"{name} = {_toml(item)}" for name, item in table.items()) + " }"),
    ]
    for kind, write in writers:
        if isinstance(value, kind):
            return write(value)
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _describe(error: ValidationError, section: str, found: Mapping[FieldKey, Sourced]) -> str:
    """The first thing that is wrong: which option, from where, what is allowed, what was given."""
    problems = error.errors(include_url=False)
    return _describe_one(problems[0], section, found) + (f" (and {len(problems) - 1} more)" if problems[1:] else "")


def _describe_one(problem: ErrorDetails, section: str, found: Mapping[FieldKey, Sourced]) -> str:
    path = [str(part) for part in problem["loc"]]
    if not path:
        return _message(problem)
    key, inner = FieldKey(section, path[0]), path[1:]
    if len(path) > 1 and FieldKey(path[0], path[1]) in found:
        key, inner = FieldKey(path[0], path[1]), path[2:]
    option = option_of(key.name if key.section == section else f"{key.section}.{key.name}")
    if inner:  # a table in a list
        option += ": " + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in inner).lstrip(".")
    elif problem["type"] == "missing":
        return f"{option} is required (or {variable_of(*key)}, or {key.name} in table [{key.section}] of the file)"
    source = found.get(key)
    given = f", got {source.value!r} from {_place(source)}" if source else ""
    return f"{option}: {_message(problem)}{given}"


def _place(sourced: Sourced) -> str:
    return sourced.source if sourced.source.startswith("OCTAVO_") else f"the {sourced.source}".replace("the /", "/")


def _message(problem: ErrorDetails) -> str:
    text = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return text[:1].lower() + text[1:]


def _fail(program: str, message: str) -> Any:
    sys.stderr.write(f"{program}: {message}\n")
    raise SystemExit(2)
