"""Lane: a queue of communication beside the compute stream.

On CUDA a lane is a stream of its own, and what is launched on it runs behind everything that the compute stream had
been given by then; ``Flight.wait`` lets the compute stream wait for it, not the host. On CPU a lane is the works of
the process group, and ``wait`` waits.

Who owns memory that crosses streams: it is always allocated and freed on the compute stream, at a moment when either
the lane has not been given its use yet, or the compute stream has waited for that use. So the caching allocator may
hand it on in the order of the compute stream, and nobody calls ``record_stream``. What a flight reads and writes stays
referenced by the flight until then.
"""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

import torch
import torch.autograd.profiler

from vescale.collectives import Handle


class Launch(Protocol):
    """Starts one collective; asynchronously, then it returns its handle, or not."""

    def __call__(self, *, async_op: bool) -> Handle | None: ...


class Flight:
    """One collective under way, and the tensors that it reads and writes."""

    def __init__(self, handle: Handle | None, event: torch.Event | None, *held: torch.Tensor) -> None:
        self._handle, self._event, self._held = handle, event, held

    def wait(self) -> None:
        """After this the compute stream may read what arrived, and what was sent may be freed."""
        if self._handle is not None:
            self._handle.wait()
        if self._event is not None:
            torch.accelerator.current_stream().wait_event(self._event)
        self._handle, self._event, self._held = None, None, ()


class Lane:
    """Collectives that run one after another, beside the compute stream.

    Args:
        stream: Of the accelerator; None where the process group runs its works itself.
    """

    def __init__(self, stream: torch.Stream | None) -> None:
        self._stream = stream

    def launch(self, start: Launch, *held: torch.Tensor) -> Flight:
        """Runs ``start`` behind everything that the compute stream has been given so far.

        Args:
            start: The collective; gets whether to be asynchronous.
            held: Tensors that it reads and writes.
        """
        if self._stream is None:
            return Flight(start(async_op=True), None, *held)
        self._stream.wait_stream(torch.accelerator.current_stream())
        with self._stream:
            handle = start(async_op=False)
            event = self._stream.record_event()
        return Flight(handle, event, *held)


class Lanes:
    """The two lanes of a device: gathers do not wait for reductions."""

    gather: Lane
    reduce: Lane

    def __init__(self, device: torch.device) -> None:
        if device.type in ("cpu", "meta"):
            self.gather = self.reduce = Lane(None)
        else:
            # Of high priority, so that a collective begins while a large product runs; as FSDP2's streams.
            self.gather, self.reduce = (Lane(torch.Stream(device, priority=-1)) for _ in range(2))


_lanes: dict[Any, Lanes] = {}


def lanes_of(device: torch.device) -> Lanes:
    """Returns the lanes of a device, the same at every call: new streams would grow the allocator's pools."""
    if device not in _lanes:
        _lanes[device] = Lanes(device)
    return _lanes[device]


_UNLABELLED = contextlib.nullcontext()


def labelled(what: str, name: str) -> contextlib.AbstractContextManager[Any]:
    """Returns a range of the profiler, ``vescale.<what> <name>``; nothing, at no cost, when none is recording."""
    if torch.autograd.profiler._is_profiler_enabled:
        return torch.autograd.profiler.record_function(f"vescale.{what} {name}")
    return _UNLABELLED
