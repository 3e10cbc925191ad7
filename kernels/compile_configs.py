"""The launches that `kernels.compile` compiles: what the executor runs for the models it is built for.

Each configuration builds its launches on meta tensors, through the launchers that the executor calls. At most 40.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kernels.block_copy import block_copy_launches
from kernels.device import A100, B200, H100, MI300X, DeviceProperties
from kernels.gated_activation import gated_activation_launch
from kernels.kv_write import PlainKVWrite
from kernels.kv_write_quantized import kv_write_quantized_launch
from kernels.launch import Launch
from kernels.paged_attention import PagedAttention
from kernels.rms_norm import add_rms_norm_launch, rms_norm_launch
from kernels.rotary_kv_write import KVWrite
from kernels.rotary_kv_write_quantized import rotary_kv_write_quantized_launch
from kernels.sampling import PARAMETER_DTYPES, sample_launch

TARGETS = [A100, H100, B200, MI300X]
NUM_BLOCKS = 100_000


class Spill(NamedTuple):
    bytes: int  # per thread
    reason: str
    triton: str = "*"  # versions, a shell pattern


@dataclass(frozen=True)
class Configuration:
    name: str
    launches: Callable[[DeviceProperties], list[Launch]]


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def attention(
    name: str,
    heads: tuple[int, int] = (32, 8),
    head_dim: int = 128,
    v_head_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    block_size: int = 16,
    num_seqs: int = 256,
    query_len: int = 1,
    kv_len: int = 4096,
    **features: object,
) -> Configuration:
    """Attention of `num_seqs` sequences of `query_len` tokens, in one layer of a block-major arena of 32 layers."""
    v_head_dim = v_head_dim or head_dim
    kv_dtype = kv_dtype or dtype
    num_tokens = num_seqs * query_len

    def cache(dim: int) -> torch.Tensor:
        arena = meta(NUM_BLOCKS, 64, heads[1], block_size, dim, dtype=kv_dtype)
        return arena[:, 0]

    def launches(device: DeviceProperties) -> list[Launch]:
        scale = meta(NUM_BLOCKS, heads[1], block_size, dtype=torch.float32) if kv_dtype != dtype else None
        call = PagedAttention(
            query=meta(num_tokens, heads[0], head_dim, dtype=dtype),
            k_cache=cache(head_dim),
            v_cache=cache(v_head_dim),
            block_tables=meta(num_seqs, kv_len // block_size, dtype=torch.int32),
            query_start=meta(num_seqs + 1, dtype=torch.int32),
            kv_lens=meta(num_seqs, dtype=torch.int32),
            softmax_scale=head_dim**-0.5,
            max_query_len=query_len,
            max_kv_len=kv_len,
            k_scale=scale,
            v_scale=scale,
            **features,  # type: ignore[arg-type]
        )
        return call.launches(meta(num_tokens, heads[0], v_head_dim, dtype=dtype), device)

    return Configuration(name, launches)


def plain_kv_write(
    name: str, dtype: torch.dtype, heads: int, head_dim: int, num_tokens: int, kv_dtype: torch.dtype | None = None
) -> Configuration:
    cache = meta(NUM_BLOCKS, 64, heads, 16, head_dim, dtype=kv_dtype or dtype)[:, 0]
    by_head = meta(heads, num_tokens, head_dim, dtype=dtype)  # as modeling code leaves keys and values
    new = by_head.transpose(0, 1)
    write = PlainKVWrite(new, new, cache, cache, meta(num_tokens, dtype=torch.int64))
    if kv_dtype is None:
        return Configuration(name, lambda device: [write.launch()])
    scale = meta(NUM_BLOCKS, heads, 16, dtype=torch.float32)
    return Configuration(name, lambda device: [kv_write_quantized_launch(write, scale, scale)])


def kv_write(
    name: str,
    heads: tuple[int, int] = (32, 8),
    head_dim: int = 128,
    v_head_dim: int | None = None,
    rotary_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    interleaved: bool = False,
    num_tokens: int = 2048,
) -> Configuration:
    v_head_dim = v_head_dim or head_dim
    kv_dtype = kv_dtype or dtype
    query = meta(num_tokens, heads[0], head_dim, dtype=dtype)
    angles = meta(32768, (rotary_dim or head_dim) // 2, dtype=torch.float32)
    write = KVWrite(
        query_out=query,
        query=query,
        key=meta(num_tokens, heads[1], head_dim, dtype=dtype),
        value=meta(num_tokens, heads[1], v_head_dim, dtype=dtype),
        k_cache=meta(NUM_BLOCKS, 64, heads[1], 16, head_dim, dtype=kv_dtype)[:, 0],
        v_cache=meta(NUM_BLOCKS, 64, heads[1], 16, v_head_dim, dtype=kv_dtype)[:, 0],
        cos=angles,
        sin=angles,
        positions=meta(num_tokens, dtype=torch.int32),
        slots=meta(num_tokens, dtype=torch.int64),
        interleaved=interleaved,
    )
    if kv_dtype == dtype:
        return Configuration(name, lambda device: [write.launch()])
    scale = meta(NUM_BLOCKS, heads[1], 16, dtype=torch.float32)
    return Configuration(name, lambda device: [rotary_kv_write_quantized_launch(write, scale, scale)])


def sampling(configuration: str, num_rows: int, vocab_size: int, dtype: torch.dtype) -> Configuration:
    parameters = {name: meta(num_rows, dtype=of) for name, of in PARAMETER_DTYPES.items()}
    logits = meta(num_rows, vocab_size, dtype=dtype)
    out = meta(num_rows, dtype=torch.int64)
    return Configuration(configuration, lambda device: [sample_launch(out, logits, **parameters)])


def norm(name: str, num_columns: int, dtype: torch.dtype) -> Configuration:
    x, weight = meta(256, num_columns, dtype=dtype), meta(num_columns, dtype=dtype)
    return Configuration(
        name, lambda device: [rms_norm_launch(x, x, weight, 1e-6), add_rms_norm_launch(x, x, x, weight, 1e-6)]
    )


def activation(name: str, intermediate: int, function: str, dtype: torch.dtype) -> Configuration:
    gate_up, out = meta(256, 2 * intermediate, dtype=dtype), meta(256, intermediate, dtype=dtype)
    return Configuration(name, lambda device: [gated_activation_launch(out, gate_up, function)])


def copies(name: str) -> Configuration:
    arena = meta(NUM_BLOCKS, 2 << 20, dtype=torch.uint8)
    return Configuration(name, lambda device: block_copy_launches(arena, [(1, 2), (3, 4)]))


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FP8, INT8 = torch.float8_e4m3fn, torch.int8

CONFIGURATIONS = [
    attention("decode"),
    attention("decode-one", num_seqs=1, kv_len=8192),
    attention("prefill", num_seqs=4, query_len=512),
    attention("mixed", num_seqs=64, query_len=9),
    attention("decode-fp16", dtype=FP16),
    attention("prefill-fp16", dtype=FP16, num_seqs=4, query_len=512),
    attention("decode-fp32", dtype=FP32, heads=(9, 3), head_dim=64),
    attention("prefill-fp32", dtype=FP32, heads=(9, 3), head_dim=64, num_seqs=4, query_len=128),
    attention("decode-fp8", kv_dtype=FP8),
    attention("prefill-fp8", kv_dtype=FP8, num_seqs=4, query_len=512),
    attention("decode-int8", kv_dtype=INT8),
    attention("decode-one-int8", kv_dtype=INT8, num_seqs=1, kv_len=8192),
    attention("decode-16", heads=(4, 4), head_dim=16),
    attention("decode-80", heads=(32, 32), head_dim=80),
    attention("prefill-96", heads=(32, 32), head_dim=96, num_seqs=4, query_len=512),
    attention("decode-192-v128", heads=(16, 16), head_dim=192, v_head_dim=128),
    attention("prefill-256", heads=(8, 1), head_dim=256, num_seqs=4, query_len=512),
    attention("decode-256-window", heads=(8, 4), head_dim=256, sliding_window=1024, softcap=50.0),
    attention("prefill-window", num_seqs=4, query_len=512, sliding_window=4096, block_size=32),
    attention("decode-alibi", heads=(32, 1), alibi_slopes=meta(32, dtype=FP32)),
    kv_write("kv-write"),
    kv_write("kv-write-576", heads=(9, 3), head_dim=64),
    kv_write("kv-write-partial", heads=(32, 32), head_dim=80, rotary_dim=32, interleaved=True, dtype=FP16),
    kv_write("kv-write-256", heads=(8, 4), head_dim=256, num_tokens=64),
    kv_write("kv-write-fp8", kv_dtype=FP8),
    kv_write("kv-write-int8", kv_dtype=INT8, head_dim=192, v_head_dim=128, heads=(16, 16)),
    plain_kv_write("kv-write-plain", BF16, heads=8, head_dim=128, num_tokens=2048),
    plain_kv_write("kv-write-plain-fp8", BF16, heads=8, head_dim=128, num_tokens=2048, kv_dtype=FP8),
    plain_kv_write("kv-write-plain-int8", BF16, heads=8, head_dim=128, num_tokens=2048, kv_dtype=INT8),
    copies("block-copy"),
    norm("norm-576", 576, BF16),
    norm("norm-4096", 4096, BF16),
    norm("norm-16384", 16384, FP16),
    activation("silu", 14336, "silu", BF16),
    activation("gelu", 4096, "gelu", FP16),
    activation("gelu-tanh", 6912, "gelu_tanh", BF16),
    sampling("sample-bf16", 256, 128256, BF16),
    sampling("sample-fp32", 32, 49152, FP32),
]

# "configuration/kernel/target" as a shell pattern -> bytes per thread that may spill, and why that is right.
ALLOWED_SPILLS: dict[str, Spill] = {
    "prefill-fp32/*/sm_*": Spill(
        16, "fp32 dots run on the vector units with all 255 registers; the path is for exactness, not for speed"
    ),
    "decode-one/split_attention_kernel/sm_90": Spill(
        8, "two registers of a program that reads a share of the KV; the ptxas of 3.9 spills none, with 154", "3.6.*"
    ),
}
