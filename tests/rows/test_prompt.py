"""Prompts: the chat template, raw text, and what is the row's fault."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from jfbatch.errors import UsageError
from jfbatch.rows.prompt import PromptRenderer, Rendered
from jfbatch.rows.row import Row, RowProblem

WORDS = ["<unk>", "<s>", "user", "system", "assistant", ":", "|", "hello", "be", "short", "you", "there"]
TEMPLATE = (
    "<s> {% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ message.role }} : {{ message.content }} | {% endfor %}"
    "{% if add_generation_prompt %}assistant :{% endif %}"
)


def tokenizer(template: str | None = TEMPLATE) -> Any:
    inner = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", bos_token="<s>")
    made.chat_template = template
    return made


def row(prompt: str | None = None, messages: Any = None) -> Row:
    return Row(0, "f:1", 1, "id:1", bytes(16), prompt=prompt, messages=messages)


def words(rendered: Rendered | RowProblem) -> list[str]:
    assert isinstance(rendered, Rendered)
    return [WORDS[token] for token in rendered.token_ids]


def test_a_prompt_becomes_a_user_message() -> None:
    (rendered,) = PromptRenderer(tokenizer()).render([row("hello there")])
    # The template writes <s> itself: it must not be doubled.
    assert words(rendered) == ["<s>", "user", ":", "hello", "there", "|", "assistant", ":"]


def test_the_system_text_is_for_rows_without_their_own() -> None:
    own = [{"role": "system", "content": "you"}, {"role": "user", "content": "hello"}]
    renderer = PromptRenderer(tokenizer(), system="be short")
    first, second = renderer.render([row("hello"), row(messages=own)])
    assert words(first)[1:6] == ["system", ":", "be", "short", "|"]
    assert words(second)[1:5] == ["system", ":", "you", "|"]


def test_raw_prompts_get_only_what_the_tokenizer_adds() -> None:
    renderer = PromptRenderer(tokenizer(None), raw=True)
    good, bad = renderer.render([row("hello"), row(messages=[{"role": "user", "content": "x"}])])
    assert words(good) == ["<s>", "hello"]
    assert isinstance(bad, RowProblem) and "--raw" in str(bad)


def test_a_row_that_the_template_refuses_costs_only_itself() -> None:
    rows = [row("hello"), row(messages=[{"role": "tool", "content": "x"}]), row("you")]
    first, second, third = PromptRenderer(tokenizer()).render(rows)
    assert isinstance(second, RowProblem) and "no tools here" in str(second)
    assert words(first)[3] == "hello" and words(third)[3] == "you"


@pytest.mark.parametrize(
    "fault", ["content|items|list", "content + 1", "content|length // 0", "content.encode('no codec')"]
)
def test_whatever_a_template_raises_costs_only_its_row(fault: str) -> None:
    template = TEMPLATE.replace("no tools here", "unused").replace(
        "{{ raise_exception('unused') }}", "{{ message." + fault + " }}"
    )
    rows = [row("hello"), row(messages=[{"role": "tool", "content": "x"}])]
    first, second = PromptRenderer(tokenizer(template)).render(rows)
    assert words(first)[3] == "hello"
    assert isinstance(second, RowProblem) and "chat template refuses the messages: " in str(second)


def test_a_prompt_without_tokens_is_refused() -> None:
    plain = tokenizer(None)
    plain._tokenizer.post_processor = processors.Sequence([])
    (rendered,) = PromptRenderer(plain, raw=True).render([row("")])
    assert isinstance(rendered, RowProblem) and "empty" in str(rendered)


def test_a_tokenizer_without_template_says_raw() -> None:
    with pytest.raises(UsageError, match="--raw"):
        PromptRenderer(tokenizer(None))


def test_raw_and_system_do_not_go_together() -> None:
    with pytest.raises(UsageError, match="--system or --raw"):
        PromptRenderer(tokenizer(), system="x", raw=True)


def test_calls_after_raw_prompts_are_written_as_the_models_template_shows_them() -> None:
    renderer = PromptRenderer(tokenizer("{{ tools }}<function=name>"), raw=True)
    assert renderer.tool_format is not None and renderer.tool_format.name == "function"
    hermes = PromptRenderer(tokenizer(None), raw=True).tool_format
    assert hermes is not None and hermes.name == "hermes"
