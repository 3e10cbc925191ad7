"""What this executor refuses of a model, each with the reason. The texts are for the person who starts it."""

from octavo.errors import Code, OctavoError


def unsupported(what: str) -> OctavoError:
    """The model needs something that the paged path cannot do right."""
    return OctavoError(Code.FAILED_PRECONDITION, "MODEL_NOT_SUPPORTED", f"this model cannot be served: {what}")


def not_loadable(what: str) -> OctavoError:
    """The model's files are damaged or incomplete, or a package is missing or in the way."""
    return OctavoError(Code.FAILED_PRECONDITION, "MODEL_NOT_LOADABLE", f"the model cannot be loaded: {what}")
