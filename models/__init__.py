"""Models to train: plain modules whose parameters carry Hugging Face's names.

Nothing here knows how they are sharded or stepped.
"""

from models.decoder import CausalLM
from models.deepseek_v3 import DeepseekV3Config
from models.gpt_oss import GptOssConfig
from models.llama import LlamaConfig
from models.mixtral import MixtralConfig
from models.qwen3 import Qwen3Config, Qwen3MoeConfig

__all__ = [
    "CausalLM", "DeepseekV3Config", "GptOssConfig", "LlamaConfig", "MixtralConfig", "Qwen3Config", "Qwen3MoeConfig",
]  # fmt: skip
