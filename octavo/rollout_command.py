"""`octavo rollout`: ask a running `octavo serve` or `octavo engine` of this machine for a roll-out, and follow it."""

import sys
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from octavo import control
from octavo.run_directory import find_live
from octavo.settings import load_settings

PROGRAM = "octavo rollout"


class RolloutConfig(BaseModel):
    """Put a new process in the place of every executor that runs; what runs moves to it, and nothing is recomputed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_directory: str = Field(
        "", description="run directory of the octavo serve or octavo engine; empty: of the only one of this user"
    )


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code: 0 done, 1 refused or given up, 2 nobody to ask."""
    config = load_settings(RolloutConfig, section="rollout", program=PROGRAM, argv=argv)
    try:
        directory = _directory_of(config)
        for line in control.ask(directory, "rollout"):
            sys.stderr.write(f"{line}\n")
    except RuntimeError as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return 1
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return 2
    return 0


def _directory_of(config: RolloutConfig) -> Path:
    """Raises ValueError: there is none, or more than one."""
    if config.run_directory:
        return Path(config.run_directory)
    found = find_live()
    if not found:
        raise ValueError("no octavo serve or octavo engine of this user runs here, or it has another TMPDIR")
    if len(found) > 1:
        names = ", ".join(map(str, found))
        raise ValueError(f"several run here: {names}; name one by --run-directory")
    return found[0]
