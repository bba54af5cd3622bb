"""HostRead: a number of a device that the host wants to know later, and does not wait for now."""

from __future__ import annotations

import torch


class HostRead:
    """Starts the copy of a number to the host; ``wait`` returns it.

    Args:
        value: () of any dtype and device. It may be overwritten from now on.
    """

    def __init__(self, value: torch.Tensor) -> None:
        self._arrived: torch.Event | None = None
        if value.device.type == "cpu":
            self._value = value.clone()
        else:
            # Pinned: into other memory the copy would wait for the device.
            self._value = torch.empty((), dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
            self._arrived = torch.accelerator.current_stream(value.device).record_event()

    def wait(self) -> float:
        """Returns the number, once it has arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return float(self._value)
