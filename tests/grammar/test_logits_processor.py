"""model.generate() with our LogitsProcessor: greedy, sampled or with beams, outputs obey their grammar."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from jfbatch.errors import GrammarError
from jfbatch.grammar import Grammar, LogitsProcessor, Vocabulary
from jfbatch.grammar.grammar import AutomatonMatcher

PROMPTS = ["Where is my order?", "The invoice", "naïve 東京 🎉 and much more of it", "a"]
GRAMMAR = """
root  ::= list "." | "none"
list  ::= list ", " item | item
item  ::= ("yes" | "no" | "maybe " [a-f]{1,3}) ("!"{2})?
"""
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "tags": {"type": "array", "items": {"enum": ["new", "urgent"]}, "maxItems": 3},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "tags", "age"],
    "additionalProperties": False,
}


class Setup:
    """The tiny model, its tokenizer and the vocabulary of both."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(directory, padding_side="left")
        self.model = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
        self.vocabulary = Vocabulary.from_tokenizer(self.tokenizer, size=self.model.config.vocab_size)

    def generate(self, grammar: Grammar, prompts: list[str], **options: Any) -> list[tuple[str, bool]]:
        """Each output's text, and whether it ended by itself."""
        torch.manual_seed(0)
        batch = self.tokenizer(prompts, return_tensors="pt", padding=True)
        out = self.model.generate(
            **batch, logits_processor=[LogitsProcessor(grammar)], max_new_tokens=64, **options
        )
        new = out[:, batch["input_ids"].shape[1] :]
        end = self.tokenizer.eos_token_id
        return [(self.tokenizer.decode(ids, skip_special_tokens=True), end in ids.tolist()) for ids in new]


@pytest.fixture(scope="module")
def setup(tiny_model: Path) -> Setup:
    return Setup(tiny_model)


def grammars(vocabulary: Vocabulary) -> dict[str, Grammar]:
    return {
        "grammar": Grammar.from_grammar(GRAMMAR, vocabulary),
        "schema": Grammar.from_json_schema(SCHEMA, vocabulary),
        "choice": Grammar.from_choice(["yes", "yesterday", "no"], vocabulary),
        "regex": Grammar.from_regex(r"(\d{2}-){2}[a-zé東]{1,8}", vocabulary),
    }


def check(grammar: Grammar, outputs: list[tuple[str, bool]]) -> None:
    """Every finished output is a text of the grammar, every cut one the beginning of one."""
    for text, has_ended in outputs:
        state = grammar.automaton.advance(grammar.automaton.start, text.encode())
        assert state >= 0, text
        assert not has_ended or grammar.automaton.is_accepting(state), text


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 2.0, "top_k": 20, "top_p": 0.9},
    "several samples": {"do_sample": True, "num_return_sequences": 3},
    "sampled beams": {"do_sample": True, "num_beams": 4},
    "beams": {"do_sample": False, "num_beams": 4},
    "returned beams": {"do_sample": False, "num_beams": 4, "num_return_sequences": 2},
}


@pytest.mark.parametrize("kind", ["grammar", "schema", "choice", "regex"])
@pytest.mark.parametrize("way", WAYS)
def test_every_output_of_a_padded_batch_obeys_the_grammar(setup: Setup, kind: str, way: str) -> None:
    grammar = grammars(setup.vocabulary)[kind]
    outputs = setup.generate(grammar, PROMPTS, **WAYS[way])
    assert len(outputs) == len(PROMPTS) * WAYS[way].get("num_return_sequences", 1)
    check(grammar, outputs)
    if kind != "grammar":  # that one alone has texts of any length
        assert all(has_ended for _, has_ended in outputs)
    if kind == "schema":
        for text, _ in outputs:
            jsonschema.validate(json.loads(text), SCHEMA)


def test_without_it_the_outputs_are_noise(setup: Setup) -> None:
    batch = setup.tokenizer(PROMPTS, return_tensors="pt", padding=True)
    out = setup.model.generate(**batch, max_new_tokens=20, do_sample=False)
    texts = setup.tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    grammar = grammars(setup.vocabulary)["choice"]
    assert all(grammar.automaton.advance(grammar.automaton.start, text.encode()) < 0 for text in texts)


def test_a_batch_gives_what_its_rows_give_alone(setup: Setup) -> None:
    grammar = grammars(setup.vocabulary)["schema"]
    together = setup.generate(grammar, PROMPTS, do_sample=False)
    assert together == [setup.generate(grammar, [prompt], do_sample=False)[0] for prompt in PROMPTS]


def test_one_processor_serves_one_generation_after_the_other(setup: Setup) -> None:
    grammar = grammars(setup.vocabulary)["schema"]
    processor = LogitsProcessor(grammar)
    texts = []
    for prompts in (PROMPTS[:2], PROMPTS[:2], PROMPTS[1:3], PROMPTS[:1]):
        batch = setup.tokenizer(prompts, return_tensors="pt", padding=True)
        out = setup.model.generate(**batch, logits_processor=[processor], max_new_tokens=64, do_sample=False)
        new = out[:, batch["input_ids"].shape[1] :]
        texts.append(setup.tokenizer.batch_decode(new, skip_special_tokens=True))
        for text in texts[-1]:
            jsonschema.validate(json.loads(text), SCHEMA)
    assert texts[0] == texts[1]


def test_assisted_generation_obeys_the_grammar_and_changes_nothing(setup: Setup, tmp_path: Path) -> None:
    from tests.tiny_model import save_tiny_model

    save_tiny_model(tmp_path, seed=1)
    assistant = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    grammar = grammars(setup.vocabulary)["schema"]
    alone = setup.generate(grammar, PROMPTS[:1], do_sample=False)
    assert setup.generate(grammar, PROMPTS[:1], do_sample=False, assistant_model=assistant) == alone


BYTES = Vocabulary.from_tokens([bytes([byte]) for byte in range(256)] + [b"ab", None], end_ids=[257])
LETTERS = Grammar.from_regex("(ab|b){2,6}", BYTES)


def allowed(scores: torch.Tensor) -> list[list[int]]:
    return [torch.nonzero(torch.isfinite(row)).flatten().tolist() for row in scores]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_reordered_and_repeated_beams_get_the_masks_of_their_own_tokens(data: st.DataObject) -> None:
    processor = LogitsProcessor(LETTERS)
    rows: list[list[int]] = [[1, 2]] * 3
    for _ in range(8):
        scores = processor(torch.tensor(rows), torch.zeros(3, 258))
        expected = []
        for row in rows:
            matcher = LETTERS.matcher()
            for token in row[2:]:
                if not matcher.ended:
                    matcher.accept_token(token)
            expected.append([257] if matcher.ended else mask_of(matcher))
        assert allowed(scores) == expected
        parents = data.draw(st.lists(st.integers(0, 2), min_size=3, max_size=3))
        rows = [[*rows[parent], data.draw(st.sampled_from(allowed(scores)[parent]))] for parent in parents]


def mask_of(matcher: Any) -> list[int]:
    mask = matcher.token_mask()
    return [token for token in range(258) if mask[token >> 5] >> (token & 31) & 1]


def test_beams_cost_one_step_of_the_grammar_per_row_and_token(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    calls: list[int] = []
    accept, call = AutomatonMatcher.accept_token, LogitsProcessor.__call__
    monkeypatch.setattr(AutomatonMatcher, "accept_token", lambda *args: (steps.append(1), accept(*args))[1])
    monkeypatch.setattr(LogitsProcessor, "__call__", lambda *args: (calls.append(1), call(*args))[1])
    setup.generate(grammars(setup.vocabulary)["schema"], PROMPTS[:2], do_sample=False, num_beams=4)
    assert 0 < len(steps) <= 2 * 4 * len(calls)


def test_a_beam_that_left_the_grammar_may_only_end_and_disturbs_no_other() -> None:
    processor = LogitsProcessor(LETTERS)
    processor(torch.tensor([[5], [5]]), torch.zeros(2, 258))
    scores = processor(torch.tensor([[5, ord("x")], [5, ord("a")]]), torch.zeros(2, 258))
    assert allowed(scores) == [[257], [ord("b")]]


def test_tokens_from_elsewhere_are_an_error_not_an_output() -> None:
    processor = LogitsProcessor(LETTERS)
    processor(torch.tensor([[5], [6]]), torch.zeros(2, 258))
    with pytest.raises(GrammarError, match="row 1 has tokens that the grammar does not allow"):
        processor(torch.tensor([[5, ord("a")], [6, ord("x")]]), torch.zeros(2, 258))
    processor.reset()
    forbidding = torch.zeros(1, 258)
    forbidding[:, [ord("a"), ord("b"), 256]] = float("-inf")
    with pytest.raises(GrammarError, match="forbids every token"):
        processor(torch.tensor([[5]]), forbidding)


def test_logits_wider_or_narrower_than_the_vocabulary_are_masked_to_their_width() -> None:
    processor = LogitsProcessor(LETTERS)
    assert allowed(processor(torch.tensor([[5]]), torch.zeros(1, 320))) == [[97, 98, 256]]
    assert allowed(processor(torch.tensor([[6]]), torch.zeros(1, 200))) == [[97, 98]]


def test_a_vocabulary_without_an_end_is_refused() -> None:
    with pytest.raises(GrammarError, match="no end token"):
        LogitsProcessor(Grammar.from_choice(["a"], Vocabulary.from_tokens([b"a"])))


def test_importing_the_package_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, jfbatch.grammar; "
        "assert not {'torch', 'transformers'} & set(sys.modules); "
        "from jfbatch.grammar import LogitsProcessor; "
        "assert {'torch', 'transformers'} <= set(sys.modules)"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, timeout=120)
