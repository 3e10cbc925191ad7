"""Which attention back end is chosen, and what is said where it cannot run.

How Triton runs is decided when it is imported, so what depends on it is tried in processes of their own.
"""

import os
import subprocess
import sys

import pytest
from pydantic import ValidationError

from executor.attention_choice import AUTO, DEVICES_OF, choose_attention
from executor.config import Attention, ExecutorConfig
from octavo.errors import Code, OctavoError


@pytest.mark.parametrize("name", ["torch", "cpu", "triton-interpret"])
def test_the_back_end_bears_the_name_of_the_option(name):
    assert choose_attention(name, "cpu").name == name


def test_every_value_of_the_option_has_devices():
    assert {*DEVICES_OF, AUTO} == set(Attention.__args__)
    assert ExecutorConfig().attention == AUTO


def test_automatic_is_the_compiled_one():
    assert choose_attention(AUTO, "cpu").name == "cpu"


def test_without_a_compiler_plain_torch_attends_and_says_so(tmp_path):
    """Nothing compiled is at hand, and nothing to compile with."""
    code = "import logging; logging.basicConfig()\n" + CHOOSE + "print(choose_attention('auto', 'cpu').name)"
    done = python(code.format(name="cpu", device="cpu"), PATH="", CXX="", XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    refused, chosen = done.stdout.splitlines()
    assert refused == "attention 'cpu' cannot be had: there is no C++ compiler (c++ or g++; $CXX names another)"
    assert chosen == "torch"
    assert f"{refused}; plain torch attends instead, which is slower" in done.stderr


@pytest.mark.parametrize(
    ("name", "device", "message"),
    [
        ("triton", "cpu", "attention 'triton' is not available on cpu; available: torch, cpu, triton-interpret"),
        ("triton-interpret", "cuda", "attention 'triton-interpret' is not available on cuda; available: triton"),
        ("flash", "cpu", "attention 'flash' is not available on cpu; available: torch, cpu, triton-interpret"),
    ],
)
def test_a_back_end_of_another_device_is_refused_with_those_there_are(name, device, message):
    with pytest.raises(OctavoError) as caught:
        choose_attention(name, device)
    assert caught.value.code is Code.FAILED_PRECONDITION
    assert caught.value.message == message


@pytest.mark.parametrize("options", [{"attention": "torch"}, {"device": "cuda:0"}, {"rewrite_model": False}])
def test_int8_is_refused_beside_what_never_gives_it(options):
    (name, value) = next(iter(options.items()))
    with pytest.raises(ValidationError, match=f"int8 cannot be had with {name} {value}: it needs device cpu"):
        ExecutorConfig(weights="int8", **options)
    assert ExecutorConfig(weights="int8").weights == "int8"


@pytest.mark.parametrize("attention", ["auto", "cpu", "torch"])
def test_fp8_kv_is_refused_where_there_is_no_kernel_for_it_and_int8_is_named(attention):
    said = f"float8_e4m3fn cannot be had with attention {attention} on device cpu: .*or kv_dtype int8, which every"
    with pytest.raises(ValidationError, match=said):
        ExecutorConfig(kv_dtype="float8_e4m3fn", attention=attention)
    assert ExecutorConfig(kv_dtype="int8", attention=attention).kv_dtype == "int8"


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
def test_a_device_takes_kv_of_codes(kv_dtype):
    assert ExecutorConfig(kv_dtype=kv_dtype, device="cuda:0").kv_dtype == kv_dtype
    assert ExecutorConfig(kv_dtype=kv_dtype, attention="triton-interpret").kv_dtype == kv_dtype


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environment
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)


CHOOSE = """
from executor.attention_choice import choose_attention
from octavo.errors import OctavoError
try:
    choose_attention({name!r}, {device!r})
except OctavoError as error:
    print(error.message)
"""


@pytest.mark.parametrize(
    ("name", "device", "environment", "message"),
    [
        ("triton-interpret", "cpu", {}, "set TRITON_INTERPRET=1 in the environment before Python starts"),
        ("triton", "cuda", {"TRITON_INTERPRET": "1"}, "unset TRITON_INTERPRET in the environment"),
    ],
)
def test_a_triton_that_runs_otherwise_is_refused_with_the_remedy(name, device, environment, message):
    done = python(CHOOSE.format(name=name, device=device), **environment)
    assert done.returncode == 0, done.stderr
    assert message in done.stdout


@pytest.mark.long
def test_an_executor_whose_triton_was_imported_too_early_says_so_in_one_line():
    code = "import sys, triton, executor.__main__ as m; sys.exit(m.main(sys.argv[1:] + {options}))"
    options = ["--attention=triton-interpret", "--listen=127.0.0.1:0", "--metrics-listen=", "--log-level=error"]
    done = python(code.format(options=options))
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert "'triton-interpret' cannot be loaded: TRITON_INTERPRET was changed after Triton was imported" in line
    assert "set it before Python starts" in line


def test_torch_attention_leaves_triton_alone():
    """Where it is not installed, an executor on torch runs all the same."""
    code = "import sys; sys.modules['triton'] = None; sys.modules['kernels'] = None\n" + CHOOSE
    done = python(code.format(name="torch", device="cpu") + "print('chosen')")
    assert done.stdout == "chosen\n", done.stderr
