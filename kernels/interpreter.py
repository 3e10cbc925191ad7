"""Makes Triton's interpreter twice as fast for kernels made of helpers, and fit for NumPy 2.4. For tests, not devices.

Two costs go, no result changes: the interpreter patches all of `triton.language` again at every call of a @jit
helper (once a launch is enough), and it computes overflow checks whose outcome it drops unless debugging is on.
Triton 3.6 makes integers of arrays of one element and one dimension, which NumPy 2.4 refuses, so that no loop runs;
Triton 3.9 squeezes them, and so does this.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import triton.language as tl
import triton.runtime.interpreter as interpreter


def prepare_interpreter() -> None:
    """Replace private parts of the interpreter where they are found; called again it does nothing."""
    options: Any = getattr(getattr(interpreter, "interpreter_builder", None), "options", None)
    if hasattr(options, "sanitize_overflow"):
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    original = getattr(interpreter, "_patch_lang", None)
    if original is not None and not isinstance(original, _PatchOnce):
        interpreter._patch_lang = _PatchOnce(original)
    patch_tensor = getattr(interpreter, "_patch_lang_tensor", None)
    if patch_tensor is not None and not isinstance(patch_tensor, _PatchTensor):
        interpreter._patch_lang_tensor = _PatchTensor(patch_tensor)


class _PatchTensor:
    """`_patch_lang_tensor`, by which a scalar becomes an integer whatever its number of dimensions."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original = original

    def __call__(self, tensor: Any, scope: Any) -> None:
        self._original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))


class _LaunchScope:
    """Scope of a launch: what was patched within it is remembered until it is restored."""

    def __init__(self, inner: Any, patched: set[int]) -> None:
        self._inner = inner
        self._patched = patched

    def restore(self) -> None:
        self._patched.clear()
        self._inner.restore()


class _PatchOnce:
    """`_patch_lang` that skips the language modules which the running launch has patched already."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original = original
        self._patched: set[int] = set()
        self._languages: dict[int, frozenset[int]] = {}  # id of a function's globals -> language modules among them

    def __call__(self, fn: Callable[..., Any]) -> Any:
        languages = self._languages_of(fn.__globals__)
        if self._patched and languages <= self._patched:
            return None  # a helper's call; nobody restores its scope
        is_launch = not self._patched
        scope = self._original(fn)
        self._patched |= languages
        return _LaunchScope(scope, self._patched) if is_launch else scope

    def _languages_of(self, module_globals: dict[str, Any]) -> frozenset[int]:
        key = id(module_globals)
        if key not in self._languages:
            values = [value for value in module_globals.values() if inspect.ismodule(value)]
            self._languages[key] = frozenset(id(value) for value in values if value is tl or value is tl.core)
        return self._languages[key]
