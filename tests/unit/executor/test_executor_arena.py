"""Mapping: what is checked before memory is touched, and views by the reported strides alone."""

import fcntl
import os
from pathlib import Path

import pytest
import torch

from executor.arena import (
    Arena,
    ArenaLayout,
    KvGeometry,
    LayerGeometry,
    LayerLayout,
    TensorLayout,
    map_arena,
    private_arena,
)
from octavo.errors import OctavoError

GEOMETRY = KvGeometry(4, "float32", (LayerGeometry(2, 8, 6), LayerGeometry(1, 8, 8)))
# [token, head, dim] inside, V before K, a gap between the layers: nothing like the usual layout.
LAYOUT = ArenaLayout(
    data_offset=64,
    block_bytes=1024,
    num_blocks=5,
    layers=(
        LayerLayout(k=TensorLayout(192, 32, 64, 4), v=TensorLayout(0, 24, 48, 4)),
        LayerLayout(k=TensorLayout(512, 32, 32, 4), v=TensorLayout(768, 32, 32, 4)),
    ),
)
SIZE = 64 + 5 * 1024
# Scales by token and then by head, those of V first.
CODED_GEOMETRY = KvGeometry(4, "int8", GEOMETRY.layers[:1])
CODED = ArenaLayout(
    data_offset=64,
    block_bytes=1024,
    num_blocks=5,
    layers=(
        LayerLayout(
            k=TensorLayout(0, 8, 16, 1),
            v=TensorLayout(64, 6, 12, 1),
            k_scale=TensorLayout(128, 4, 8, 4),
            v_scale=TensorLayout(112, 24, 4, 4),
        ),
    ),
)


@pytest.fixture
def path(tmp_path) -> str:
    file = tmp_path / "arena"
    file.write_bytes(bytes(SIZE))
    return str(file)


def test_views_lie_where_the_layout_says(path):
    arena = map_arena(path, SIZE, LAYOUT, GEOMETRY)
    assert [tuple(view.shape) for layer in arena.views for view in (layer.k, layer.v)] == [
        (5, 2, 4, 8), (5, 2, 4, 6), (5, 1, 4, 8), (5, 1, 4, 8),
    ]  # fmt: skip
    arena.views[0].k[3, 1, 2, 5] = 7.0
    arena.views[1].v[4, 0, 3, 7] = 9.0
    data = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.float32)
    assert data[(64 + 3 * 1024 + 192 + 32 + 2 * 64 + 5 * 4) // 4] == 7.0
    assert data[(64 + 4 * 1024 + 768 + 3 * 32 + 7 * 4) // 4] == 9.0
    assert data.count_nonzero() == 2


def test_codes_and_scales_lie_where_the_layout_says(path):
    (views,) = map_arena(path, SIZE, CODED, CODED_GEOMETRY).views
    assert [tuple(view.shape) for view in (views.k, views.v, views.k_scale, views.v_scale)] == [
        (5, 2, 4, 8), (5, 2, 4, 6), (5, 2, 4), (5, 2, 4),
    ]  # fmt: skip
    views.v[3, 1, 2, 5] = -7
    views.k_scale[3, 1, 2], views.v_scale[4, 1, 3] = 0.5, 2.0
    data = bytearray(Path(path).read_bytes())
    assert data[64 + 3 * 1024 + 64 + 6 + 2 * 12 + 5] == 256 - 7
    floats = torch.frombuffer(data, dtype=torch.float32)
    assert floats[(64 + 3 * 1024 + 128 + 4 + 2 * 8) // 4] == 0.5
    assert floats[(64 + 4 * 1024 + 112 + 24 + 3 * 4) // 4] == 2.0


def test_two_mappings_share_memory(path):
    one, two = (map_arena(path, SIZE, LAYOUT, GEOMETRY) for _ in range(2))
    for block in range(5):
        one.blocks[block] = block
    assert [two.blocks[block].unique().tolist() for block in range(5)] == [[0], [1], [2], [3], [4]]


def test_a_shared_lock_is_held_until_it_is_closed(path):
    arena = map_arena(path, SIZE, LAYOUT, GEOMETRY)
    descriptor = os.open(path, os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    arena.close()
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)


def test_a_missing_file_is_an_error_and_stays_missing(tmp_path):
    """torch.from_file creates what is missing: an executor must not compute into a file that nobody else has."""
    path = tmp_path / "gone"
    with pytest.raises(OctavoError, match="cannot open"):
        map_arena(str(path), SIZE, LAYOUT, GEOMETRY)
    assert not path.exists()


def test_another_size_is_an_error_and_is_not_changed(path):
    with pytest.raises(OctavoError, match="has 5184 bytes, not the 6208"):
        map_arena(path, SIZE + 1024, LAYOUT, GEOMETRY)
    assert os.path.getsize(path) == SIZE


def test_a_file_that_is_being_made_or_reclaimed_is_refused(path):
    descriptor = os.open(path, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(OctavoError, match="is locked"):
        map_arena(path, SIZE, LAYOUT, GEOMETRY)
    os.close(descriptor)


@pytest.mark.parametrize(
    ("layout", "geometry", "text"),
    [
        (ArenaLayout(64, 1024, 6, LAYOUT.layers), GEOMETRY, "6 blocks of 1024 bytes in 5184"),
        (ArenaLayout(64, 1024, 1, LAYOUT.layers), GEOMETRY, "1 blocks"),
        (ArenaLayout(64, 1024, 5, LAYOUT.layers[:1]), GEOMETRY, "1 layers in the layout, 2"),
        (ArenaLayout(62, 1024, 5, LAYOUT.layers), GEOMETRY, "multiples of 4"),
        (ArenaLayout(64, 1020, 5, LAYOUT.layers[:1]), KvGeometry(64, "float32", GEOMETRY.layers[:1]), "past its block"),
        (LAYOUT, KvGeometry(4, "float64", GEOMETRY.layers), "KV dtype float64; this executor takes float32"),
        (LAYOUT, KvGeometry(4, "int8", GEOMETRY.layers), "0 tensors of scales in a layer of KV dtype int8"),
        (CODED, KvGeometry(4, "float32", GEOMETRY.layers[:1]), "2 tensors of scales in a layer of KV dtype float32"),
        (ArenaLayout(62, 1024, 5, CODED.layers), CODED_GEOMETRY, "multiples of 4 bytes, the size of float32"),
        (ArenaLayout(64, 156, 5, CODED.layers), CODED_GEOMETRY, "a tensor ends 4 bytes past its block"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(layout, geometry, text):
    with pytest.raises(OctavoError, match=text):
        Arena(torch.zeros(SIZE, dtype=torch.uint8), layout, geometry)


def test_a_private_arena_is_full_of_nan():
    arena = private_arena(KvGeometry(4, "bfloat16", GEOMETRY.layers), 3)
    assert all(view.isnan().all() for layer in arena.views for view in (layer.k, layer.v))
    arena.views[0].v[1] = 1
    assert arena.views[0].k.isnan().all()
    assert arena.views[1].k.isnan().all()


def test_the_scales_of_a_private_arena_are_nan():
    """Of codes nothing is NaN: what was never written must be seen by its scale."""
    geometry = KvGeometry(3, "int8", (LayerGeometry(1, 5, 7), LayerGeometry(1, 3, 2)))
    arena = private_arena(geometry, 3)
    assert all(scale.isnan().all() for layer in arena.views for scale in (layer.k_scale, layer.v_scale))
    for number, layer in enumerate(arena.views):
        for view in (layer.k, layer.v, layer.k_scale, layer.v_scale):
            view.fill_(number)
    assert all(view.eq(0).all() for view in (arena.views[0].k, arena.views[0].v, arena.views[0].v_scale))


def test_a_pool_of_more_than_two_to_the_31_elements(tmp_path):
    """Field failure 29: the last blocks of a sparse 12 GiB arena are addressed right."""
    geometry, per_block = KvGeometry(16, "float32", (LayerGeometry(8, 128, 128),)), 2 * 8 * 16 * 128 * 4
    num_blocks = 3 * 2**30 // (per_block // 4) + 5
    file = tmp_path / "sparse"
    with file.open("wb") as stream:
        stream.truncate(num_blocks * per_block)
    where = LayerLayout(TensorLayout(0, 8192, 512, 4), TensorLayout(per_block // 2, 8192, 512, 4))
    arena = map_arena(str(file), num_blocks * per_block, ArenaLayout(0, per_block, num_blocks, (where,)), geometry)
    last = num_blocks - 1
    arena.views[0].v.index_put_((torch.tensor([last]),), torch.tensor(5.0))
    assert arena.views[0].v.index_select(0, torch.tensor([last])).eq(5).all()
    with file.open("rb") as stream:
        stream.seek(last * per_block + per_block // 2)
        assert torch.frombuffer(bytearray(stream.read()), dtype=torch.float32).eq(5).all()
