"""Paged attention by Octavo's Triton kernels: one writes K and V by slot, one attends, one copies blocks.

`triton` is these kernels compiled for a GPU, `triton-interpret` the same kernels in Triton's interpreter on a CPU:
slow, and exact enough to test with. Imported by `attention_choice` only when chosen, since it brings Triton in.
Not here: kernels and how they are launched.
"""

from dataclasses import dataclass

from torch import Tensor

from executor.attention import KvViews, LayerAttention
from executor.batch import AttentionBatch
from executor.cuda.transfer import uploader
from executor.step import Ints
from kernels.block_copy import block_copy
from kernels.interpreter import prepare_interpreter
from kernels.kv_write import kv_write
from kernels.kv_write_quantized import kv_write_quantized
from kernels.numeric import INTERPRETED
from kernels.paged_attention import paged_attention
from octavo.errors import Code, OctavoError


class TritonAttention:
    """The back ends `triton` and `triton-interpret`."""

    def __init__(self, name: str) -> None:
        """name: as the `attention` option names it."""
        self.name = name
        if INTERPRETED:
            prepare_interpreter()

    def prepare(self, batch: AttentionBatch, views: tuple[KvViews, ...]) -> "TritonStep":
        """See `AttentionBackend`."""
        return TritonStep(_read_rows(batch, views), views)

    def copy_blocks(self, blocks: Tensor, sources: Ints, targets: Ints) -> None:
        """See `AttentionBackend`."""
        block_copy(blocks, list(zip(sources.tolist(), targets.tolist(), strict=True)))


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """What the kernels read of a step's rows, on the device of the blocks, and bounds that the host knows."""

    query_start: Tensor  # [num_rows + 1] int32
    kv_lens: Tensor  # [num_rows] int32
    tables: Tensor  # [num_rows, max_blocks] int32
    slots: Tensor  # [num_tokens] int64, where each token's KV goes: block * block_size + offset
    max_query_len: int
    max_kv_len: int


def _read_rows(batch: AttentionBatch, views: tuple[KvViews, ...]) -> DeviceRows:
    """The batch lies on the host, where the bounds of its lengths are read without waiting for a device."""
    upload, block_size = uploader(views[0].k.device), views[0].k.shape[2]
    return DeviceRows(
        query_start=upload(batch.query_starts.int()),
        kv_lens=upload(batch.context_lengths.int()),
        tables=upload(batch.tables.int()),
        slots=upload(batch.write_blocks * block_size + batch.write_offsets),
        max_query_len=int(batch.query_starts.diff().max()),
        max_kv_len=int(batch.context_lengths.max()),
    )


class TritonStep:
    """One step's attention. Over rows in fixed memory it may be captured once and replayed with other content."""

    def __init__(self, rows: DeviceRows, views: tuple[KvViews, ...]) -> None:
        self._rows = rows
        self._views = views

    def attend(self, layer: LayerAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `PreparedAttention`.

        Computed in the KV's number format, to which a query of another is rounded; where KV is codes, in the query's.
        """
        views, rows = self._views[layer.layer], self._rows
        dtype = views.k.dtype if views.k_scale is None else query.dtype
        output = query.new_empty((*query.shape[:2], views.v.shape[3]), dtype=dtype)
        try:
            _write(key, value, views, rows.slots)
            paged_attention(
                output,
                query=query.to(dtype),
                k_cache=views.k,
                v_cache=views.v,
                k_scale=views.k_scale,
                v_scale=views.v_scale,
                block_tables=rows.tables,
                query_start=rows.query_start,
                kv_lens=rows.kv_lens,
                softmax_scale=layer.scale,
                max_query_len=rows.max_query_len,
                max_kv_len=rows.max_kv_len,
                sliding_window=layer.window or 0,
                softcap=layer.softcap or 0.0,
            )
        except (TypeError, ValueError) as error:  # shapes that no kernel takes; verify_model meets them at start
            raise OctavoError(
                Code.FAILED_PRECONDITION,
                "ATTENTION_NOT_AVAILABLE",
                f"the Triton kernels do not take attention layer {layer.layer}: {error}; use attention=torch",
            ) from error
        return output.to(query.dtype)


def _write(key: Tensor, value: Tensor, views: KvViews, slots: Tensor) -> None:
    if views.k_scale is None or views.v_scale is None:
        kv_write(key, value, views.k, views.v, slots)
    else:
        kv_write_quantized(key, value, views.k, views.v, views.k_scale, views.v_scale, slots)
