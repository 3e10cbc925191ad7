"""The layer over CUDA's driver: what it calls exists in the real binding, and its errors say what to do."""

import ast
import importlib
import inspect
from pathlib import Path

import pytest

from octavo import cuda_driver
from octavo.cuda_driver import CudaDriver, CudaError, load_driver, parse_ordinal
from octavo.errors import OctavoError
from tests.fake_cuda import FakeCuda, Result

SOURCE = Path(inspect.getsourcefile(cuda_driver) or "").read_text()


def named_in_source() -> dict[str, int]:
    """Calls of the driver by name -> number of arguments."""
    calls = [node for node in ast.walk(ast.parse(SOURCE)) if isinstance(node, ast.Call)]
    ours = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "_call"]
    return {call.args[0].value: len(call.args) - 1 for call in ours if isinstance(call.args[0], ast.Constant)}


def attributes_in_source() -> set[tuple[str, ...]]:
    """Chains of names behind `self._binding`."""
    chains = set()
    for node in ast.walk(ast.parse(SOURCE)):
        names: list[str] = []
        while isinstance(node, ast.Attribute):
            names.insert(0, node.attr)
            node = node.value
        if names[:1] == ["_binding"] and len(names) > 1:
            chains.add(tuple(names[1:]))
    return chains


def test_every_name_that_is_used_is_one_of_the_binding():
    """Runs where cuda-bindings is installed; needs neither driver nor device."""
    binding = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    for name, num_arguments in named_in_source().items():
        signature = inspect.signature(getattr(binding, name))
        assert len(signature.parameters) == num_arguments, f"{name}{signature}"
    for chain in attributes_in_source():
        found = binding
        for name in chain:
            found = getattr(found, name)


def test_the_fake_has_every_call():
    fake = FakeCuda()
    for name, num_arguments in named_in_source().items():
        assert len(inspect.signature(getattr(FakeCuda, f"_{name}")).parameters) == num_arguments + 1, name
    for chain in attributes_in_source():
        assert hasattr(fake, chain[0]), chain


def test_an_error_carries_the_call_and_the_name_of_its_result():
    driver = CudaDriver(FakeCuda(errors={"cuMemCreate": Result.CUDA_ERROR_OUT_OF_MEMORY}))
    with pytest.raises(CudaError) as caught:
        driver.create(0, 1 << 16)
    assert str(caught.value) == "cuMemCreate failed with CUDA_ERROR_OUT_OF_MEMORY"
    assert (caught.value.is_out_of_memory, caught.value.is_unsupported) == (True, False)


@pytest.mark.parametrize("failing", ["cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"])
def test_a_mapping_that_fails_leaves_nothing_behind(failing):
    fake = FakeCuda()
    driver = CudaDriver(fake)
    allocation = driver.create(0, 1 << 16)
    fake.errors[failing] = Result.CUDA_ERROR_MAP_FAILED
    with pytest.raises(CudaError, match=failing):
        driver.map(allocation, 0, 1 << 16)
    driver.release(allocation)
    assert fake.left == {}


def refusal_of(monkeypatch: pytest.MonkeyPatch, binding: object) -> str:
    def find(name: str) -> object:
        if isinstance(binding, Exception):
            raise binding
        return binding

    monkeypatch.setattr(importlib, "import_module", find)
    with pytest.raises(OctavoError) as caught:
        load_driver()
    assert caught.value.reason == "CUDA_NOT_AVAILABLE"
    return caught.value.message


class NoDriver(FakeCuda):
    def _cuInit(self, flags: int) -> None:
        raise RuntimeError("libcuda.so.1 is not there")


def test_a_machine_without_cuda_is_told_what_is_missing(monkeypatch):
    missing = refusal_of(monkeypatch, ModuleNotFoundError("No module named 'cuda'"))
    assert "pip install 'octavo[cuda]'" in missing
    assert "libcuda.so.1 is not there" in refusal_of(monkeypatch, NoDriver())
    assert "CUDA_VISIBLE_DEVICES" in refusal_of(monkeypatch, FakeCuda(uuids=()))
    broken = FakeCuda(errors={"cuInit": Result.CUDA_ERROR_NOT_SUPPORTED})
    assert "cuInit failed with CUDA_ERROR_NOT_SUPPORTED" in refusal_of(monkeypatch, broken)


@pytest.mark.parametrize(
    ("arena_id", "ordinal"),
    [
        ("cuda:0", 0),
        ("cuda:12", 12),
        ("cuda", None),
        ("cuda:", None),
        ("cuda:-1", None),
        ("cuda:²", None),
        ("cpu", None),
    ],
)
def test_devices_are_named_by_their_number(arena_id, ordinal):
    assert parse_ordinal(arena_id) == ordinal
