"""Models to train: plain modules whose parameters carry Hugging Face's names.

Nothing here knows how they are sharded or stepped.
"""

from models.llama import Llama, LlamaConfig

__all__ = ["Llama", "LlamaConfig"]
