"""Chat templates: the same text as by transformers, and a template that would hang or fill the router does not."""

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from octavo.errors import Code, OctavoError
from router.request import Chat, ChatMessage
from router.text import template_process
from router.text.chat import render
from router.text.template_process import TemplateProcesses
from tests.fakes import save_byte_tokenizer

CHATML = (
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\n' + message['content'] | trim }}"
    "{{- '<|im_end|>' + '\n' }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
HANG = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}" + "{% endfor %}" * 3
VARIED = """{{ bos_token }}{% set seen = namespace(count=0, last='') %}
{% for message in messages %}
    {% if message.role == 'skip' %}{% continue %}{% endif %}
    {% if message.role == 'stop' %}{% break %}{% endif %}
    {% if message.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}
    {% set seen.count = seen.count + 1 %}
    {% set extra = dict(role=message.role) %}
[{{ loop.index }}/{{ seen.count }}] {{ extra | tojson }} {{ message | tojson(indent=2) }}
    {% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}{% else %}
{{ message.content.strip().title() if loop.last else message.content }}{% endif %}
{% endfor %}
{% if tools %}tools{% endif %}{{ eos_token }}{% if add_generation_prompt %}<assistant>{% endif %}
"""
PLAIN = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
CHATS = [
    [("user", "Hello, wörld \N{SNOWMAN}!")],
    [("system", "Be <brief> & 'kind'."), ("user", "  spaces around  "), ("assistant", "an answer"), ("user", "more?")],
    [("user", "one"), ("skip", "two"), ("assistant", " three "), ("stop", "four"), ("user", "five")],
    [("user", "{{ 7 * 7 }} {% raw %}"), ("assistant", "goes on ")],
    [("robot", "beep")],
    [("user", ""), ("assistant", "")],
]


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    folder = save_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return PreTrainedTokenizerFast.from_pretrained(folder, bos_token="<bos>")


def chat_of(messages: list[tuple[str, str]], *, add_generation_prompt: bool = True) -> Chat:
    return Chat(tuple(ChatMessage(role, content) for role, content in messages), add_generation_prompt)


def processes(template: str, cpu_s: float = 10.0, **special_tokens: str) -> TemplateProcesses:
    return TemplateProcesses(template, special_tokens, cpu_s)


def refusal_of(template: TemplateProcesses, chat: Chat, max_chars: int = 100_000) -> OctavoError:
    with pytest.raises(OctavoError) as raised:
        render(template, chat, max_chars)
    return raised.value


@pytest.mark.parametrize("template", [CHATML, VARIED, PLAIN], ids=["chatml", "varied", "plain"])
def test_the_text_is_that_of_transformers(template: str, pretrained: PreTrainedTokenizerFast):
    ours = TemplateProcesses(template, pretrained.special_tokens_map, 10.0)
    for messages in CHATS:
        for opens_turn in (True, False):
            chat = chat_of(messages, add_generation_prompt=opens_turn)
            try:
                expected = pretrained.apply_chat_template(
                    [{"role": role, "content": content} for role, content in messages],
                    chat_template=template,
                    tokenize=False,
                    add_generation_prompt=opens_turn,
                    continue_final_message=not opens_turn,
                )
            except Exception:
                assert refusal_of(ours, chat).code is Code.INVALID_ARGUMENT
            else:
                assert render(ours, chat, 100_000) == expected
    assert len(ours._idle) == 1  # one process did all


@pytest.mark.parametrize(
    "template",
    [
        HANG,
        "{% for i in range(99999) %}{{ 7 ** 99999999 }}{% endfor %}",
    ],
    ids=["endless", "arithmetic"],
)
def test_a_template_without_end_is_ended(template: str):
    ours = processes(template, cpu_s=0.2)
    error = refusal_of(ours, chat_of([("user", "hi")]))
    assert (error.code, error.violations[0].field) == (Code.INVALID_ARGUMENT, "chat.messages")
    assert "0.2 s of CPU time" in error.message
    assert ours._idle == []


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x' * 9999999999 }}",
        "{{ messages[0].content.ljust(9999999999) }}",
        "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(99999) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{{ '%09999999999d' | format(1) }}",
    ],
    ids=["repeat", "pad", "double", "format"],
)
def test_a_template_that_would_fill_the_memory_does_not(template: str):
    error = refusal_of(processes(template), chat_of([("user", "hi")]))
    assert error.code is Code.INVALID_ARGUMENT
    assert len(error.message) < 500


def test_a_text_longer_than_any_prompt_is_not_gathered():
    template = "{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}"
    error = refusal_of(processes(template), chat_of([("user", "x" * 1000)]), max_chars=5000)
    assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "NEVER_FITS")
    assert error.metadata == {"max_prompt_characters": "5000"}


def test_after_one_that_was_ended_the_next_chat_is_served():
    template = (
        "{% if messages[0].content == 'hang' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
    )
    template += "{% endfor %}{% endif %}fine"
    ours = processes(template, cpu_s=0.2)
    for _ in range(2):
        refusal_of(ours, chat_of([("user", "hang")]))
        assert render(ours, chat_of([("user", "go")]), 100) == "fine"


def test_what_somebody_wrote_is_in_no_refusal():
    secret = "confidential " * 50
    for template in ("{{ raise_exception('bad: ' + messages[0].content) }}", "{{ messages[0].content | int + [] }}"):
        assert "confidential" not in refusal_of(processes(template), chat_of([("user", secret)])).message
    assert "no robots" in refusal_of(processes(VARIED), chat_of([("robot", "x")])).message


def test_templates_cannot_reach_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HF_TOKEN", "a secret of the router")
    for template in (
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ (messages | first).update(role='x') }}",
        "{{ raise_exception.__globals__ }}",
        "{{ dict.__class__ }}",
    ):
        with contextlib.suppress(OctavoError):
            text = render(processes(template), chat_of([("user", "hi")]), 1000)
            assert "class" not in text
            assert "globals" not in text
    ours = processes(PLAIN)
    render(ours, chat_of([("user", "hi")]), 1000)
    [process] = ours._idle
    environment = Path(f"/proc/{process._popen.pid}/environ").read_text()
    assert "secret" not in environment


def test_a_template_that_cannot_be_compiled_is_said():
    error = refusal_of(processes("{% for %}"), chat_of([("user", "hi")]))
    assert "cannot be compiled" in error.message


def test_a_process_that_is_stopped_is_given_up(monkeypatch: pytest.MonkeyPatch):
    ours = processes(PLAIN)
    assert render(ours, chat_of([("user", "hi")]), 100) == "<user>hi"
    monkeypatch.setattr(template_process, "MAX_WAIT_S", 0.2)
    os.kill(ours._idle[0]._popen.pid, signal.SIGSTOP)
    began_s = time.monotonic()
    assert refusal_of(ours, chat_of([("user", "hi")])).code is Code.INVALID_ARGUMENT
    assert time.monotonic() - began_s < 30


def test_processes_end_with_their_owner():
    ours = processes(PLAIN)
    render(ours, chat_of([("user", "hi")]), 100)
    popen = ours._idle[0]._popen
    del ours
    assert popen.poll() is not None


def test_special_tokens_of_any_kind_can_be_sent(pretrained: PreTrainedTokenizerFast):
    ours = TemplateProcesses("{{ bos_token }}{{ extra[1] }}", {"bos_token": "<b>", "extra": ["a", object]}, 10.0)
    assert render(ours, chat_of([("user", "hi")]), 1000).startswith("<b>")
    assert json.dumps(ours._special_tokens)
