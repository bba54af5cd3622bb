"""Optimizer rules: what one step does to one block, with nothing about ranks, meshes or collectives.

A rule is a frozen, keyword-only dataclass whose fields are the hyperparameters. It states its block, the smallest piece
of a parameter that its update is closed over, and has up to three functions:

    prepare    element-wise, on flat runs cut anywhere    returns payloads       AdamW does everything here
    block      pure, on batches of whole blocks           returns a direction    Muon orthogonalises here
    apply      element-wise, on flat runs cut anywhere    writes the parameter

Whoever drives a rule decides where each part runs; ``tests/optimizers/conftest.py`` has a driver of a dozen lines.
"""

from optimizers.adam8bit import Adam8bit
from optimizers.adamw import AdamW
from optimizers.muon import Muon
from optimizers.muon8bit import Muon8bit
from optimizers.newton_schulz import COEFFICIENTS, newton_schulz
from optimizers.normuon import NorMuon
from optimizers.qk_clip import QKClip
from optimizers.schedule import WSD, Constant, Linear, WarmupCosine
from optimizers.shampoo import Shampoo
from optimizers.soap import SOAP
from optimizers.stochastic_rounding import BF16AdamW, BF16Muon

__all__ = [
    "Adam8bit", "AdamW", "BF16AdamW", "BF16Muon", "COEFFICIENTS", "Constant", "Linear", "Muon", "Muon8bit", "NorMuon",
    "QKClip", "SOAP", "Shampoo", "WSD", "WarmupCosine", "newton_schulz",
]  # fmt: skip
