"""A piece of work of the device as a CUDA graph. Needs a device; what is captured, and in what order, is `graphs`'."""

from collections.abc import Callable

import torch


class CudaCapture:
    """Captures into one pool of memory, on a stream of its own."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run the work once for what is made at first use (kernels, workspaces), then capture it.

        Returns:
            What runs it again, on the current stream, with whatever its memory holds then.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Only this thread's calls belong to the capture; others of the process may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        return graph.replay
