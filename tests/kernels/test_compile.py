"""The compile check, on the few launches that compile in a second; all of them are the target's own business.

A process that interprets cannot compile, so the check runs in one of its own.
"""

import json
import os
import subprocess
import sys

import pytest

from kernels import compile_configs
from kernels.compile import Resources, allowed_spill, main
from kernels.compile_configs import CONFIGURATIONS, TARGETS, Spill

RESOURCES = Resources("norm-576", "rms_norm_kernel", "sm_90", 32, 8, 0, 2, 1, 0.1)


def compile_check(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "kernels.compile", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_a_launch_compiles_for_every_target_without_a_gpu(tmp_path):
    table = tmp_path / "table.json"
    result = compile_check("--match", "block-copy", "--json", str(table))
    assert result.returncode == 0, result.stderr
    rows = json.loads(table.read_text())
    assert [row["target"] for row in rows] == [device.name for device in TARGETS]
    assert all(row["registers"] > 0 and row["spill_bytes"] == 0 for row in rows)


def test_nothing_compiled_is_a_failure(monkeypatch, capsys):
    monkeypatch.setattr("kernels.compile.INTERPRETED", False)
    monkeypatch.setattr(sys, "argv", ["kernels.compile", "--match", "no-such-configuration"])
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # which the check sets, and which goes back with the patch
    assert main() == 1
    assert "0 kernels compiled from 0 configurations" in capsys.readouterr().out


def test_an_interpreting_process_says_why_it_cannot_compile(monkeypatch):
    monkeypatch.setattr("kernels.compile.INTERPRETED", True)
    monkeypatch.setattr(sys, "argv", ["kernels.compile", "--match", "block-copy"])
    with pytest.raises(SystemExit, match="unset it"):
        main()


def test_a_spill_must_be_listed(monkeypatch):
    monkeypatch.setattr("kernels.compile.ALLOWED_SPILLS", {})
    assert allowed_spill(RESOURCES) == 0
    monkeypatch.setattr("kernels.compile.ALLOWED_SPILLS", {"norm-576/*/sm_90": Spill(16, "because")})
    assert allowed_spill(RESOURCES) == 16
    monkeypatch.setattr("kernels.compile.ALLOWED_SPILLS", {"norm-576/*/sm_90": Spill(16, "because", "2.*")})
    assert allowed_spill(RESOURCES) == 0


def test_configurations_are_few_named_once_and_cover_every_kernel():
    names = [configuration.name for configuration in CONFIGURATIONS]
    assert len(names) == len(set(names)) <= 40
    kernels = {launch.name for c in CONFIGURATIONS for device in TARGETS for launch in c.launches(device)}
    assert kernels == {
        "mixed_attention_kernel",
        "split_attention_kernel",
        "reduce_splits_kernel",
        "kv_write_kernel",
        "kv_write_quantized_kernel",
        "rotary_kv_write_kernel",
        "rotary_kv_write_quantized_kernel",
        "block_copy_kernel",
        "rms_norm_kernel",
        "add_rms_norm_kernel",
        "gated_activation_kernel",
        "sample_kernel",
    }


def test_every_allowed_spill_names_a_configuration_and_a_reason():
    for pattern, spill in compile_configs.ALLOWED_SPILLS.items():
        assert pattern.split("/")[0] in {configuration.name for configuration in CONFIGURATIONS}
        assert spill.reason


def test_launches_pass_exactly_the_kernel_s_parameters():
    """Which an interpreted kernel would not notice: it drops what it does not know."""
    for configuration in CONFIGURATIONS:
        for launch in configuration.launches(TARGETS[1]):
            assert sorted(launch.kernel.arg_names) == sorted(launch.args), configuration.name
