"""Token data: one array of tokens, cut into a training and a validation part, read in an order that is a pure function.

Nothing is shuffled, stored or counted. The samples of a run are numbered for ever: number ``g`` is sample ``g % n``
of epoch ``g // n`` and lies at ``permute(g % n, seed, epoch)``. Step ``k`` takes the numbers from ``k * global_batch``
on, rank after rank; with a global batch of 8::

    step 3       sample    24   25   26   27   28   29   30   31
                 2 ranks   <------- 0 ------>  <------- 1 ------>
                 4 ranks   <-- 0 -->  <-- 1 ->  <-- 2 ->  <-- 3 ->

So a run resumes at step ``k`` with no state but ``k``, and at another number of ranks it goes on with the same samples
in the same batches. What must be equal on both sides ``Dataset.describe`` writes and ``Dataset.check`` compares.

Documents stand end to end and are then split: sample ``i`` of a part is its tokens ``[i*s, i*s + s]``. The last of them
is only a label, and is the next sample's first input, so an epoch predicts every token once.
"""

from vescale.data.mixture import MixedSamples, Mixture, Part
from vescale.data.order import ORDER, permute
from vescale.data.prefetch import Prefetch
from vescale.data.samples import IGNORED, Batch, Samples, num_labels
from vescale.data.text_data import SHIPPED_FILE, Dataset, TextData
from vescale.data.token_file import TokenFile, TokenWriter, open_tokens
from vescale.data.tokenizer import ByteTokenizer, JsonTokenizer, tokenizer_of

__all__ = [
    "IGNORED",
    "ORDER",
    "SHIPPED_FILE",
    "Batch",
    "ByteTokenizer",
    "Dataset",
    "JsonTokenizer",
    "MixedSamples",
    "Mixture",
    "Part",
    "Prefetch",
    "Samples",
    "TextData",
    "TokenFile",
    "TokenWriter",
    "num_labels",
    "open_tokens",
    "permute",
    "tokenizer_of",
]
