"""Chat templates in the shapes of well-known models, and chats to render with them."""

from typing import Any

from tests.text.qwen2_vocabulary import CHAT_TEMPLATE as QWEN2

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{#- The system message is taken out so that the right thing stands in front. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {%- for call in message.tool_calls %}
            {{- '{"name": "' + call.function.name + '", "parameters": ' }}
            {{- call.function.arguments | tojson }}{{ "}" }}
        {%- endfor %}
        {{- "<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" + message.content | tojson + "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

QWEN3 = """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_query_index=messages|length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and not message.content.startswith('<tool_response>') %}
        {%- set ns.searching = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content if message.content is string else '' %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' ~ (call.function | tojson) ~ '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

ALTERNATING = """{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>model\\n' }}{% endif %}
"""

GENERATION_BLOCK = """{% for message in messages %}
{% if message.role == 'assistant' %}
<|im_start|>assistant
{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}

{% else %}
{% if not message.content %}{% continue %}{% endif %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# One of each thing that templates are given besides messages.
TOOLBOX = """{% set extra = dict(a=1, b=[1, 2.5, none]) %}
{% macro line(role, text='-') %}[{{ role }}: {{ text }}]{% endmacro %}
{% for message in messages recursive %}{{ loop.index }}/{{ loop.length }} {{ line(message.role, message.content) }}
{% if loop.last %}{{ extra | tojson(indent=2) }} {{ 'ab' * 3 ~ '<&>' | tojson }} {{ 2 ** 10 }}{% endif %}
{% endfor %}
{% set box = namespace(n=0) %}{% for i in range(5) if i != 3 %}{% if i == 4 %}{% break %}{% endif %}
{% set box.n = box.n + i %}{% endfor %}{{ box.n }} {{ strftime_now('%Y') }} {{ eos_token }} {{ unk_token }}!
{% for key, value in extra.items() %}{{ key }}={{ value }},{% else %}none{% endfor %}
{% filter upper %}done{% endfilter %} {{ messages | map(attribute='role') | join('+') }}{{ tools }}{{ documents }}"""

TEMPLATES = {
    "qwen2": QWEN2,
    "llama3": LLAMA3,
    "qwen3": QWEN3,
    "alternating": ALTERNATING,
    "generation": GENERATION_BLOCK,
    "toolbox": TOOLBOX,
}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


_CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Zürich <&>", "days": [1, 2]}},
}

CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [user("Hello, world!")],
    "turns": [user(" What's\n\nup? 客单价 👨‍👩‍👧\n"), assistant("Nothing."), user("I see: x < y <| z <")],
    "system": [system("  Be brief.  "), user("Why?\r\n"), assistant("Because.\n"), user("")],
    "edges": [user("<"), assistant("<|"), user("{{ 7 * 7 }}{% raw %}")],
    "thinking": [user("2+2?"), assistant("<think>\nfour\n</think>\n\n4"), user("Sure?")],
    "tools": [
        user("Weather?"),
        {"role": "assistant", "content": None, "tool_calls": [_CALL]},
        {"role": "tool", "content": '{"sun": true}'},
    ],
}
