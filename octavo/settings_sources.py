"""The sources of `octavo.settings` one by one, read through pydantic-settings: command line, variables, file.

Each gives `{(section, field): raw value}` and refuses names that no field has. Not here: precedence, validation.
"""

import argparse
import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

from pydantic import BaseModel, create_model
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, CliSettingsSource, EnvSettingsSource, SettingsConfigDict

Values = dict[tuple[str, str], Any]  # (section, field) -> as its source gave it

# Kubernetes gives every pod such variables for every Service of its namespace; one called octavo-router is likely.
_KUBERNETES = re.compile(r"(_SERVICE_HOST|_SERVICE_PORT(_\w+)?|_PORT(_\d+_(TCP|UDP|SCTP)(_PROTO|_PORT|_ADDR)?)?)$")


class UsageError(Exception):
    """A source says something that no option knows; the message is for people."""


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What the arguments said."""

    values: Values
    config_file: str | None
    print_config: bool


class OptionParser(argparse.ArgumentParser):
    """An argument parser that raises `UsageError` and knows what an unknown option was meant to be."""

    def __init__(self, program: str, description: str, epilog: str) -> None:
        super().__init__(
            prog=program, description=description, epilog=epilog, allow_abbrev=False, formatter_class=_HelpFormatter
        )

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)

    def parse_strictly(self, argv: list[str]) -> argparse.Namespace:
        """As `parse_args`, with a suggestion for what is unknown."""
        parsed, unknown = self.parse_known_args(argv)
        if unknown:
            name = unknown[0].partition("=")[0]
            raise UsageError(f"unknown argument {name}{_meant(name, self._option_string_actions)}")
        return parsed


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=44, width=160)

    def add_usage(self, usage: Any, actions: Iterable[Any], groups: Iterable[Any], prefix: str | None = None) -> None:
        positional = [action for action in actions if not action.option_strings]
        super().add_usage(
            f"%(prog)s {' '.join(['[options]', *(f'[{a.metavar}]' for a in positional)])}", [], [], prefix
        )


class SettingsSources:
    """Reads the fields of one model, and of the sections inside it, from each source."""

    def __init__(self, model: type[BaseModel], section: str, all_sections: Iterable[str], parser: OptionParser) -> None:
        self._section = section
        self._all_sections = tuple(all_sections)
        self._parser = parser
        self._model = _settings_class(model)
        self._sections = _sections_of(model, section)

    def read_command_line(self, argv: list[str]) -> CommandLine:
        source: Any = CliSettingsSource(
            self._model,
            root_parser=self._parser,
            add_argument_method=_add_argument,
            formatter_class=_HelpFormatter,
            cli_kebab_case=True,
            cli_implicit_flags=True,
            cli_hide_none_type=True,
        )
        arguments = self._parser.parse_strictly(argv)
        own = {"config": arguments.config, "print_config": arguments.print_config}
        for name in own:
            delattr(arguments, name)
        values = self._flatten(source(parsed_args=arguments)())
        return CommandLine(values, own["config"], own["print_config"])

    def read_variables(self, environ: Mapping[str, str]) -> Values:
        values: Values = {}
        for section, model in self._sections.items():
            prefix = f"OCTAVO_{section.upper()}_"
            _refuse_unknown_variables(prefix, model, environ)
            source = _Variables(_settings_class(model), env_prefix=prefix.lower(), env_parse_none_str="null")
            values |= {(section, name): value for name, value in source().items()}
        return values

    def read_file(self, path: str) -> Values:
        try:
            tables = tomllib.loads(Path(path).read_text("utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise UsageError(f"configuration file {path}: {getattr(error, 'strerror', None) or error}") from error
        values: Values = {}
        for section, table in tables.items():
            if section not in self._all_sections or not isinstance(table, dict):
                known = ", ".join(f"[{name}]" for name in self._all_sections)
                raise UsageError(f"configuration file {path}: {section!r} is no table of Octavo's; there are {known}")
            if section in self._sections:
                values |= self._read_table(path, section, table)
        return values

    def _read_table(self, path: str, section: str, table: Mapping[str, Any]) -> Values:
        fields = _plain_fields(self._sections[section])
        for name in table:
            if name not in fields:
                raise UsageError(
                    f"configuration file {path}: unknown key {name!r} in [{section}]{_meant(name, fields)}"
                )
        return {(section, name): value for name, value in table.items()}

    def _flatten(self, values: Mapping[str, Any]) -> Values:
        flat: Values = {}
        for name, value in values.items():
            if name in self._sections and name != self._section and isinstance(value, dict):
                flat |= {(name, inner): inner_value for inner, inner_value in value.items()}
            else:
                flat[self._section, name] = value
        return flat


class _Variables(EnvSettingsSource):
    """Lists may be written `a,b` as well as in JSON."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        try:
            return json.loads(value)
        except json.JSONDecodeError:
            return [item.strip() for item in value.split(",") if item.strip()]


def option_of(name: str) -> str:
    """The option of a field: `max_queued_requests` -> `--max-queued-requests`."""
    return "--" + name.replace("_", "-")


def _settings_class(model: type[BaseModel]) -> type[BaseSettings]:
    """The same fields as something that pydantic-settings reads; validation stays with `model`."""
    fields: dict[str, Any] = {name: (info.annotation, info) for name, info in model.model_fields.items()}
    base = type("SettingsBase", (BaseSettings,), {"model_config": SettingsConfigDict(extra="ignore")})
    return create_model(f"{model.__name__}Settings", __base__=base, **fields)


def _sections_of(model: type[BaseModel], section: str) -> dict[str, type[BaseModel]]:
    nested: dict[str, type[BaseModel]] = {
        name: cast(type[BaseModel], info.annotation)
        for name, info in model.model_fields.items()
        if _is_model(info.annotation)
    }
    return {section: _without_sections(model), **nested} if _plain_fields(model) else nested


def _without_sections(model: type[BaseModel]) -> type[BaseModel]:
    fields: dict[str, Any] = {name: (info.annotation, info) for name, info in _plain_fields(model).items()}
    return create_model(model.__name__, **fields)


def _plain_fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    return {name: info for name, info in model.model_fields.items() if not _is_model(info.annotation)}


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _add_argument(parser: Any, *names: str, **options: Any) -> Any:
    """As argparse; but whole sections cannot be given as JSON, so they are not offered."""
    if options.get("const") == "{}":
        return None
    options["help"] = _tidy(options["help"])
    if options.get("action") == "append":
        is_table = any(kind in options["metavar"] for kind in ("JSON", "dict"))
        options["metavar"] = "JSON" if is_table else "a,b,..."
    return parser.add_argument(*names, **options)


def _tidy(text: str) -> str:
    """No default where there is none; switches are on or off."""
    for ending, instead in (("null", ""), ("()", ""), ("", ""), ("False", "off"), ("True", "on")):
        text = text.replace(f" (default: {ending})", f" (default: {instead})" if instead else "")
    return text


def _refuse_unknown_variables(prefix: str, model: type[BaseModel], environ: Mapping[str, str]) -> None:
    known = {prefix + name.upper(): name for name in model.model_fields}
    for variable in environ:
        if not variable.startswith(prefix) or variable in known or _KUBERNETES.search(variable):
            continue
        raise UsageError(f"unknown variable {variable}{_meant(variable, known)}")


def _meant(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else "; --help lists all options"
