"""The shared-memory arena with real processes: who may end how, and what is left in the directory."""

import json
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cache_service import arena as arena_module
from cache_service.arena import SHARED_MEMORY_DIR, Arena, attached, create_arena, read_header, reclaim_stale
from cache_service.geometry import KvGeometry, LayerGeometry
from cache_service.memory import available_bytes
from octavo.errors import Code, OctavoError

GEOMETRY = KvGeometry(4, "float32", (LayerGeometry(2, 8, 8),))
ATTACHER = """
import sys, time
from cache_service.arena import attached
with attached(sys.argv[1]) as (descriptor, header):
    print(header["arena_id"], flush=True)
    sys.stdin.read()
"""
CREATOR = """
import sys, time
from cache_service.arena import create_arena, reclaim_stale
from cache_service.geometry import KvGeometry, LayerGeometry
reclaim_stale()
arena = create_arena("cpu:7", sys.argv[1], KvGeometry(4, "float32", (LayerGeometry(2, 8, 8),)), 1 << 20)
print(arena.description.path, flush=True)
time.sleep(60)
"""


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = create_arena("cpu", "model", GEOMETRY, 1 << 20)
    yield made
    made.close()


def start(program: str, argument: str) -> tuple["subprocess.Popen[str]", str]:
    """A process that has said its first line."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, argument], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def segments() -> set[str]:
    return {entry.path for entry in os.scandir(SHARED_MEMORY_DIR) if entry.name.startswith("octavo-cpu-7-")}


def end(process: "subprocess.Popen[str]", *, kill: bool) -> None:
    if kill:
        process.send_signal(signal.SIGKILL)
    process.communicate()  # closes its input


def test_a_segment_says_what_it_is_and_is_its_users_alone(arena: Arena) -> None:
    about = arena.description
    status = os.stat(about.path)
    assert status.st_mode & 0o777 == 0o600
    assert status.st_size == about.size_bytes > about.layout.data_offset + about.num_blocks * about.layout.block_bytes
    assert status.st_blocks * 512 >= about.size_bytes, "pages are reserved"
    with attached(about.path) as (_, header):
        assert header["model_fingerprint"] == "model"
        assert header["layout"]["block_bytes"] == about.layout.block_bytes
        assert header == json.loads(json.dumps(header))


@pytest.mark.parametrize("kill", [False, True])
def test_an_attacher_that_ends_leaves_the_segment_to_its_owner(arena: Arena, kill: bool) -> None:
    """Field failure 38: attachers end normally and by SIGKILL."""
    process, arena_id = start(ATTACHER, arena.description.path)
    assert arena_id == "cpu"
    end(process, kill=kill)
    assert arena.description.path not in reclaim_stale()
    assert Path(arena.description.path).exists()


def test_a_mapping_outlives_the_owner(arena: Arena) -> None:
    with (
        attached(arena.description.path) as (descriptor, _),
        mmap.mmap(descriptor, arena.description.size_bytes) as view,
    ):
        view[-1] = 7
        arena.close()
        assert view[-1] == 7
        with pytest.raises(OctavoError) as gone, attached(arena.description.path):
            pass
    assert (gone.value.code, gone.value.reason) == (Code.NOT_FOUND, "ARENA_GONE")


def test_a_stack_killed_ten_times_does_not_fill_the_directory() -> None:
    """Field failure 38: the owner and an attacher are killed together; the next start takes the segment away."""
    for _ in range(10):
        owner, path = start(CREATOR, "model")
        attacher, _ = start(ATTACHER, path)
        assert segments() == {path}
        end(owner, kill=True)
        end(attacher, kill=True)
    assert path in reclaim_stale()
    assert segments() == set()


def test_a_dead_owners_segment_stays_while_somebody_holds_it() -> None:
    """Field failure 38: the executor lives on; its memory is not taken from under it."""
    owner, path = start(CREATOR, "model")
    attacher, _ = start(ATTACHER, path)
    end(owner, kill=True)
    assert path not in reclaim_stale()
    end(attacher, kill=True)
    assert path in reclaim_stale()


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "octavo-notes").write_text("not an arena")
    (tmp_path / "other").write_bytes(arena_module.MAGIC)
    (tmp_path / "octavo-link").symlink_to(tmp_path / "other")
    assert reclaim_stale(str(tmp_path)) == []
    assert len(list(tmp_path.iterdir())) == 3
    with pytest.raises(OctavoError) as error, attached(str(tmp_path / "octavo-notes")):
        pass
    assert error.value.reason == "NOT_AN_ARENA"


def test_too_little_space_is_said_before_anything_is_taken() -> None:
    """Field failure 38: a clear error with the numbers, no SIGBUS later, nothing left behind."""
    before = set(os.listdir(SHARED_MEMORY_DIR))
    with pytest.raises(OctavoError) as error:
        create_arena("cpu:7", "model", GEOMETRY, 1 << 39)
    assert (error.value.code, error.value.reason) == (Code.RESOURCE_EXHAUSTED, "ARENA_TOO_LARGE")
    assert int(error.value.metadata["needed_bytes"]) > int(error.value.metadata["free_bytes"]) > 0
    assert segments() == set()
    assert {name for name in set(os.listdir(SHARED_MEMORY_DIR)) - before if "cpu-7" in name} == set()


def test_space_that_goes_between_asking_and_taking_is_the_same_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Field failure 38: the file system refuses by itself."""
    monkeypatch.setattr(arena_module, "_check_room", lambda size_bytes, directory: None)
    num_descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OctavoError) as error:
        create_arena("cpu:7", "model", GEOMETRY, 1 << 39)
    assert error.value.reason == "ARENA_TOO_LARGE"
    assert segments() == set()
    assert len(os.listdir("/proc/self/fd")) == num_descriptors


def test_only_arenas_of_a_cpu_are_made_here() -> None:
    with pytest.raises(OctavoError) as error:
        create_arena("cuda:0", "model", GEOMETRY, 1 << 20)
    assert error.value.violations[0].field == "arena_id"


def test_closing_twice_is_closing_once(arena: Arena) -> None:
    arena.close()
    arena.close()
    assert not Path(arena.description.path).exists()


def test_the_memory_left_is_that_of_the_tightest_limit(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 50000\n")
    information = tmp_path / "meminfo"
    information.write_text("MemTotal: 900 kB\nMemAvailable:   700 kB\n")
    assert available_bytes("/dev/shm", cgroup=tmp_path, memory_info=information) == 650_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes("/dev/shm", cgroup=tmp_path, memory_info=information) == 700 * 1024
    nowhere = tmp_path / "nowhere"
    room = os.statvfs("/dev/shm")
    assert available_bytes("/dev/shm", cgroup=nowhere, memory_info=nowhere) == pytest.approx(
        room.f_bavail * room.f_frsize, rel=0.1
    )


def test_a_header_that_is_cut_off_is_not_an_arena(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(b"OCT")
    descriptor = os.open(path, os.O_RDONLY)
    with pytest.raises(OctavoError):
        read_header(descriptor)
    os.close(descriptor)
