"""The suite composes hundreds of configurations in a process, where a user composes one: what is the same every time is
done once."""

from __future__ import annotations

import copy
import functools
import io
from typing import Any

from hydra._internal.hydra import Hydra
from omegaconf import OmegaConf


def compose_once() -> None:
    """Spares this process a second composition and a second look at a text.

    Hydra composes a configuration twice, the first time only to read ``hydra.mode``, which is null wherever the command
    line says nothing of it.
    """
    read, load, known = Hydra.get_mode, OmegaConf.load, dict[str, Any]()

    def get_mode(hydra: Hydra, config_name: str | None, overrides: list[str]) -> Any:
        named = any("hydra.mode" in word or "hydra/" in word for word in overrides)
        return read(hydra, config_name, overrides) if named else None

    def load_text(file: Any) -> Any:
        if not hasattr(file, "read"):
            return load(file)
        text = file.read()
        if text not in known:
            known[text] = OmegaConf.to_container(load(io.StringIO(text)))
        return OmegaConf.create(known[text])

    Hydra.get_mode = get_mode  # type: ignore[method-assign]
    OmegaConf.load = staticmethod(load_text)  # type: ignore[method-assign]


@functools.cache
def _composed(command: str, words: tuple[str, ...]) -> dict[str, Any]:
    from vescale.train import points

    (point,) = points(words, command)
    return point.config


def composed(*words: str, command: str = "train") -> dict[str, Any]:
    """Returns what ``words`` name on the command line, composed once for all tests that ask for it.

    Not for tests of what a composition takes from the environment or from a folder of the user's.
    """
    return copy.deepcopy(_composed(command, words))
