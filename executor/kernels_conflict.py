"""Octavo's folder `kernels` and the PyPI distribution of the same name: one Python process can import only one.

`transformers` imports that distribution where it is installed. Octavo's folder has no `__init__.py`, so it never
stands in the way; but while the distribution is installed, Octavo's own kernels cannot be imported.
"""

import importlib.metadata

from octavo.errors import Code, OctavoError

NEEDS_NO_KERNELS = ("torch", "auto")


def installed_kernels_version() -> str | None:
    """The version of the PyPI distribution `kernels`; None where it is not installed."""
    try:
        return importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        return None


def check_kernels(attention: str, installed_version: str | None) -> str | None:
    """Whether an attention back end can be imported beside that distribution.

    Returns:
        A warning for the log; None where all is well.

    Raises:
        OctavoError: FAILED_PRECONDITION, KERNELS_SHADOWED.
    """
    if installed_version is None:
        return None
    clash = f"the PyPI distribution kernels {installed_version} is installed and hides Octavo's own kernels"
    if attention in NEEDS_NO_KERNELS:
        return f"{clash}; attention {attention} does without them. To be rid of this: pip uninstall kernels"
    raise OctavoError(
        Code.FAILED_PRECONDITION,
        "KERNELS_SHADOWED",
        f"{clash}, which attention {attention} needs: pip uninstall kernels, or use attention=torch",
    )
