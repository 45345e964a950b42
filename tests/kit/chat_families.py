"""Chat templates as model families have them, and a tokenizer with the tokens of all.

Written for these tests, to each family's format and with what it does to a conversation: headers, ends of turns, a
default system prompt, thoughts dropped from history, tools. `{% generation %}` stands around what is to be learned, for
transformers; `untagged` takes it out again.
"""

from __future__ import annotations

import functools
import re
import sysconfig
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

LLAMA3 = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools %}{{- 'Environment: ipython\\n' }}{% endif %}
{{- 'Today Date: ' + date_string + '\\n\\n' + system + '<|eot_id|>' }}
{%- if tools %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nGiven the following functions, respond with JSON.\\n\\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}{% endfor %}
    {{- messages[0].content | trim + '<|eot_id|>' }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% generation %}
        {%- if message.tool_calls %}
            {%- set call = message.tool_calls[0].function %}
            {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
        {%- else %}
            {{- message.content | trim }}
        {%- endif %}
        {{- '<|eot_id|>' }}{% endgeneration %}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""

_QWEN_SYSTEM = """\
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}
{%- endif %}
{%- if tools %}
    {{- '<|im_start|>system\\n' + (system + '\\n\\n' if system is defined else '') + '# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + tool | tojson }}{% endfor %}
    {{- '\\n</tools>\\n\\nAnswer with <tool_call></tool_call> to call one.<|im_end|>\\n' }}
{%- elif system is defined %}
    {{- '<|im_start|>system\\n' + system + '<|im_end|>\\n' }}
{%- endif %}
"""
_QWEN_CALLS = """\
{%- for call in message.tool_calls or [] %}
    {{- ('' if loop.first and not content else '\\n') + '<tool_call>\\n{"name": "' + call.function.name }}
    {{- '", "arguments": ' + call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}
"""
_QWEN_TOOL = """\
{%- if message.role == 'tool' %}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
    {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
{%- endif %}
"""

QWEN25 = (
    _QWEN_SYSTEM.replace(
        "{%- elif system is defined",
        """{%- elif system is not defined %}
    {{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\\n' }}
{%- elif true""",
    )
    + """\
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'user' or message.role == 'system' and not loop.first %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}{% generation %}
        {{- content }}"""
    + _QWEN_CALLS
    + """{{- '<|im_end|>' }}{% endgeneration %}
        {{- '\\n' }}
    {%- endif %}"""
    + _QWEN_TOOL
    + """\
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""
)

QWEN3 = (
    _QWEN_SYSTEM
    + """\
{%- set ns = namespace(searching=true, asked=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set said = message.content or '' %}
    {%- set answers = said.startswith('<tool_response>') and said.endswith('</tool_response>') %}
    {%- if ns.searching and message.role == 'user' and not answers %}
        {%- set ns.searching = false %}
        {%- set ns.asked = messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or message.role == 'system' and not loop.first %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content or '' %}
        {%- set thought = message.reasoning_content or '' %}
        {%- if message.reasoning_content is not defined and '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}{% generation %}
        {%- if loop.index0 > ns.asked and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}"""
    + _QWEN_CALLS
    + """{{- '<|im_end|>' }}{% endgeneration %}
        {{- '\\n' }}
    {%- endif %}"""
    + _QWEN_TOOL
    + """\
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""
)

MISTRAL = """\
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- set asked = messages | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and message == asked[-1] %}
            {{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST]' + (system + '\\n\\n' if system and loop.last else '') + message.content + '[/INST]' }}
    {%- elif message.tool_calls %}
        {% generation %}{{- '[TOOL_CALLS][' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception('Tool call IDs have length 9!') }}{% endif %}
            {{- (', ' if not loop.first else '') + (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
        {%- endfor %}
        {{- ']' + eos_token }}{% endgeneration %}
    {%- elif message.role == 'assistant' %}
        {%- generation %}{{- ' ' + message.content + eos_token }}{% endgeneration %}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]{"content": ' + message.content + ', "call_id": "' + message.tool_call_id }}
        {{- '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""

GEMMA = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{- raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message.role == 'assistant' %}
        {{- '<start_of_turn>model\\n' }}{% generation %}
        {{- message.content | trim + '<end_of_turn>' }}{% endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- '<start_of_turn>' + message.role + '\\n' + message.content | trim + '<end_of_turn>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{% endif %}
"""

PHI3 = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|assistant|>\\n' }}{% generation %}{{- message.content + '<|end|>' }}{% endgeneration %}
        {{- '\\n' }}
    {%- elif message.role == 'user' or message.content %}
        {{- '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{% else %}{{- eos_token }}{% endif %}
"""

ZEPHYR = """\
{%- for message in messages %}
    {{- '<|' + message.role + '|>\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content + eos_token }}{% endgeneration %}
    {%- else %}
        {{- message.content + eos_token }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{% endif %}
"""

DEEPSEEK = """\
{%- set ns = namespace(tool=false, system='') %}
{%- for message in messages if message.role == 'system' %}{% set ns.system = message.content %}{% endfor %}
{{- bos_token + ns.system }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<｜User｜>' + message.content }}
        {%- set ns.tool = false %}
    {%- elif message.role == 'tool' %}
        {{- ('\\n' if ns.tool else '<｜tool▁outputs▁begin｜>') + '<｜tool▁output▁begin｜>' + message.content }}
        {{- '<｜tool▁output▁end｜>' }}
        {%- set ns.tool = true %}
    {%- elif message.role == 'assistant' %}
        {{- '<｜tool▁outputs▁end｜>' if ns.tool else '<｜Assistant｜>' }}{% generation %}
        {%- if message.tool_calls %}
            {{- '<｜tool▁calls▁begin｜>' }}
            {%- for call in message.tool_calls %}
                {{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' }}
                {{- call.function.arguments | tojson + '\\n```<｜tool▁call▁end｜>' }}
            {%- endfor %}
            {{- '<｜tool▁calls▁end｜>' }}
        {%- else %}
            {{- message.content.split('</think>')[-1] }}
        {%- endif %}
        {{- eos_token }}{% endgeneration %}
        {%- set ns.tool = false %}
    {%- endif %}
{%- endfor %}
{%- if ns.tool %}{{- '<｜tool▁outputs▁end｜>' }}{% endif %}
{%- if add_generation_prompt and not ns.tool %}{{- '<｜Assistant｜><think>\\n' }}{% endif %}
"""

FAMILIES: dict[str, tuple[str, str, str]] = {
    "llama3": (LLAMA3, "<|begin_of_text|>", "<|eot_id|>"),
    "qwen2.5": (QWEN25, "", "<|im_end|>"),
    "qwen3": (QWEN3, "", "<|im_end|>"),
    "mistral": (MISTRAL, "<s>", "</s>"),
    "gemma": (GEMMA, "<bos>", "<eos>"),
    "phi3": (PHI3, "<s>", "<|endoftext|>"),
    "zephyr": (ZEPHYR, "<s>", "</s>"),
    "deepseek": (DEEPSEEK, "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
}
"""Tagged template, `bos_token` (empty: none) and `eos_token`."""

PLAIN_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Added tokens that are not special, as in Qwen3."""


def untagged(template: str) -> str:
    """The template as the model's publisher has it, without `{% generation %}`."""
    return re.sub(r"\{%-? *(end)?generation *-?%\}", "{#- -#}", template)


@functools.cache
def tokenizer() -> tokenizers.Tokenizer:
    """Byte-level BPE with every token that the templates write, trained on some of the standard library."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    written = "".join(template for template, *_ in FAMILIES.values())
    control = re.findall(r"<[|｜]\w+[|｜]>|\[/?[A-Z_]+\]|<\w+_of_turn>", written)
    named = [token for _, *tokens in FAMILIES.values() for token in tokens if token]
    roles = ["<|user|>", "<|system|>", "<|assistant|>"]
    special = [AddedToken(token, special=True) for token in dict.fromkeys([*named, *roles, *control])]
    library = Path(sysconfig.get_path("stdlib"))
    texts = [(library / name).read_text(encoding="utf-8") for name in ("argparse.py", "json/decoder.py", "this.py")]
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    made.add_tokens([AddedToken(token, special=False) for token in PLAIN_TOKENS])
    return made


def names(bos: str, eos: str) -> dict[str, Any]:
    """What `tokenizer_config.json` says of special tokens."""
    return {"bos_token": bos or None, "eos_token": eos}
