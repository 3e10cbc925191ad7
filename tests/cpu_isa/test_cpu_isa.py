"""The checks of the kernels for other processors hold on this one, and the disc's archive is what Linux reads."""

import subprocess
import sys

import pytest

from tests.cpu_isa import run


def test_every_file_of_the_archive_begins_at_a_multiple_of_four():
    """The newc form: a header of 110 characters, the name, the data, each of the latter padded."""
    made, at, found = run.archive(b"12345"), 0, {}
    while at < len(made):
        header = made[at : at + 110]
        assert header.startswith(b"070701")
        assert at % 4 == 0
        fields = [int(header[6 + 8 * nth : 14 + 8 * nth], 16) for nth in range(13)]
        size, name_size = fields[6], fields[11]
        name = made[at + 110 : at + 110 + name_size - 1].decode()
        begin = (at + 110 + name_size + 3) // 4 * 4
        found[name] = made[begin : begin + size]
        at = (begin + size + 3) // 4 * 4
    assert found == {"dev": b"", "dev/console": b"", "init": b"12345", "TRAILER!!!": b""}


@pytest.mark.long
@pytest.mark.parametrize("target", ["native", "emulated-vnni"])
def test_the_checks_hold_on_this_processor(target, tmp_path):
    done = subprocess.run([sys.executable, run.__file__, "--folder", tmp_path, target], check=False)
    assert done.returncode == 0
