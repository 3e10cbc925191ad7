"""What the pages say about options and commands is what the code has."""

import importlib.util
import re
from pathlib import Path

from octavo.cli import COMMANDS
from octavo.launch_plan import CACHE_HEALTH, EXECUTOR_HEALTH, ROUTER_HEALTH

ROOT = Path(__file__).resolve().parents[3]
OPERATIONS = (ROOT / "docs" / "operations.md").read_text("utf-8")


def test_tables_of_options_are_those_of_the_configs():
    spec = importlib.util.spec_from_file_location("option_tables", ROOT / "docs" / "option_tables.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    assert tables.updated(OPERATIONS) == OPERATIONS, "run make docs"
    assert "`--max-queued-requests`" in OPERATIONS


def test_every_command_and_health_name_is_described():
    for command in COMMANDS:
        assert f"`octavo {command}`" in OPERATIONS
    for name in (CACHE_HEALTH, EXECUTOR_HEALTH, ROUTER_HEALTH):
        assert f"`{name}`" in OPERATIONS


def test_readme_names_only_make_targets_that_exist():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    readme = (ROOT / "README.md").read_text("utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)", readme))
    assert named
    assert named <= targets


def test_files_and_folders_that_pages_link_to_exist():
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for link in re.findall(r"\]\(([^)#]+)", page.read_text("utf-8")):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.name} links to {link}"
