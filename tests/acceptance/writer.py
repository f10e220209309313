"""A tiny writer with a tokenizer of bytes: made here, so that nothing has to be downloaded."""

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

PAD, END, BEGIN = "<pad>", "</s>", "<s>"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
GREEDY = {"do_sample": False, "max_new_tokens": 16}


def make_tokenizer():
    """One token per byte: made here, so that nothing has to be downloaded."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([PAD, END, BEGIN, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        bos_token=BEGIN,
        padding_side="left",
        chat_template=TEMPLATE,
        return_token_type_ids=False,
    )


def make_model(limit=512):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=259,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=limit,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5)
        model.lm_head.weight[3:36] *= 0.01  # rather characters that can be printed
    return model
