"""Hydra composes a configuration twice, the first time only to read ``hydra.mode``; the suite composes hundreds."""

from __future__ import annotations

from typing import Any

from hydra._internal.hydra import Hydra


def compose_once() -> None:
    """Spares this process the first time wherever the command line says nothing of ``hydra.mode``: it is null then."""
    read = Hydra.get_mode

    def get_mode(hydra: Hydra, config_name: str | None, overrides: list[str]) -> Any:
        named = any("hydra.mode" in word or "hydra/" in word for word in overrides)
        return read(hydra, config_name, overrides) if named else None

    Hydra.get_mode = get_mode  # type: ignore[method-assign]
