"""The mapping of shared memory, and its pages gathered into huge ones while they are used."""

import gc
import os
from pathlib import Path

import pytest
import torch

from executor.huge_pages import HUGE_PAGE_BYTES, Collapsing, map_aligned, may_collapse

SIZE = 4 * HUGE_PAGE_BYTES + 4096


@pytest.fixture
def descriptor():
    number = os.open("/dev/shm", os.O_RDWR | os.O_TMPFILE)
    os.posix_fallocate(number, 0, SIZE)
    yield number
    os.close(number)


def mapped_at(address: int) -> dict[str, str] | None:
    """What /proc says of the mapping that begins there; None: there is none."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    for number, line in enumerate(lines):
        if line.startswith(f"{address:x}-"):
            return dict(each.split(":", 1) for each in lines[number + 1 : number + 24] if ":" in each)
    return None


def test_a_mapping_is_aligned_and_shared(descriptor):
    one, two = map_aligned(descriptor, SIZE), map_aligned(descriptor, SIZE)
    assert one.data_ptr() % HUGE_PAGE_BYTES == two.data_ptr() % HUGE_PAGE_BYTES == 0
    one[-1] = 7
    assert two[-1] == 7
    assert os.pread(descriptor, 1, SIZE - 1) == b"\x07"


def test_a_mapping_lives_as_long_as_a_view_of_it(descriptor):
    memory = map_aligned(descriptor, SIZE)
    address, view = memory.data_ptr(), memory[:10].view(2, 5)
    del memory
    gc.collect()
    assert mapped_at(address) is not None
    assert not view.any()
    del view
    gc.collect()
    assert mapped_at(address) is None


def test_what_cannot_be_mapped_is_refused():
    number = os.open("/dev/null", os.O_RDWR)
    try:
        with pytest.raises(OSError, match="No such device"):
            map_aligned(number, SIZE)
    finally:
        os.close(number)


def test_pages_are_gathered_and_keep_what_they_hold(descriptor):
    memory = map_aligned(descriptor, SIZE)
    memory.copy_(torch.arange(SIZE) % 251)
    before = memory.clone()
    collapsing = Collapsing(memory)
    while collapsing.is_at_work:
        memory[:: HUGE_PAGE_BYTES // 2] += 1  # while it works
        before[:: HUGE_PAGE_BYTES // 2] += 1
    assert torch.equal(memory, before)
    found = mapped_at(memory.data_ptr())
    assert found is not None
    if not may_collapse() or not collapsing.num_collapsed:
        pytest.skip("this kernel has no huge pages, or gathers none")
    assert collapsing.num_collapsed == SIZE // HUGE_PAGE_BYTES
    assert int(found["ShmemPmdMapped"].split()[0]) * 1024 == collapsing.num_collapsed * HUGE_PAGE_BYTES


def test_it_stops_when_it_is_told_to(descriptor):
    collapsing = Collapsing(map_aligned(descriptor, SIZE))
    collapsing.stop()
    assert not collapsing.is_at_work
    collapsing.stop()
