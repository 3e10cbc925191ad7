"""Holds custom resources of a rendered chart to the types of their operators, strictly: a field of no type is an error.

Run as `python helm/lint/custom_resources.py FOLDER`, with the packages of requirements.txt.
"""

import sys
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from cloudcoil.models.keda import v1alpha1 as keda
from cloudcoil.models.prometheus_operator import v1 as prometheus

TYPES = {
    "monitoring.coreos.com/v1": prometheus,
    "keda.sh/v1alpha1": keda,
}


def main(folder: Path) -> int:
    """Print what is wrong; returns the exit code."""
    found = [document for file in sorted(folder.glob("*.yaml")) for document in yaml.safe_load_all(file.read_text())]
    checked, wrong = 0, 0
    for document in found:
        types = TYPES.get(document["apiVersion"]) if document else None
        if types is not None:
            checked += 1
            for error in _violations(getattr(types, document["kind"]), document):
                wrong += 1
                print(f"{document['kind']} {document['metadata']['name']}: {error}")
    print(f"custom resources: {checked} checked, {wrong} violations")
    return 1 if wrong or not checked else 0


def _violations(kind: Any, document: dict[str, Any]) -> list[str]:
    validator = jsonschema.Draft202012Validator(_strict(kind.model_json_schema(by_alias=True)))
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)]


def _strict(schema: Any) -> Any:
    """The same, with every object closed that names its properties."""
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _strict(value) for name, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema:
        closed["additionalProperties"] = False
    return closed


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
