"""A Hugging Face folder of a random model small enough to learn to chat in seconds, and chats for it."""

from __future__ import annotations

import json
from pathlib import Path

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
BEFORE = ("", "please ", "now ", "pray ", "do ", "just ")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def chat(question: str, answer: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write_chats(file: Path) -> None:
    """Sixty of one question and its answer."""
    records = [chat(f"{before}say {at}", word) for before in BEFORE for at, word in enumerate(WORDS)]
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def write_tokenizer(folder: Path, template: str | None = CHATML, special: list[str] = SPECIAL) -> int:
    """Write a byte-level BPE of transformers; gives the number of its ids. Documents end with the first of `special`,
    which is not what ends a turn."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([f"user\nsay {at}\nassistant\n{word}" for at, word in enumerate(WORDS)] * 5, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[0])
    fast.chat_template = template
    fast.save_pretrained(folder)
    return len(fast)


def write_model(folder: Path, *, head: float = 1.0) -> None:
    """A random Llama with its tokenizer; its files name `<|endoftext|>` alone as the end.

    Args:
        folder: where it is written.
        head: multiplies its head: a large one can choose words although it stays as it is.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=write_tokenizer(folder),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config)
    model.lm_head.weight.data.mul_(head)
    model.save_pretrained(folder)
