"""RunConfig: layers, parsing, and messages that name the setting and its origin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pydantic
import pytest

from jfbatch.config import (
    RunConfig,
    default_cache_directory,
    load_config,
    settings,
)
from jfbatch.configuration_page import configuration_page
from jfbatch.errors import UsageError

ROOT = Path(__file__).parent.parent


@pytest.fixture
def yaml_file(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_later_layers_win(yaml_file: Any) -> None:
    file = yaml_file("max_tokens: 10\nseed: 1\nbatch_size: 2\n")
    environment = {"JFBATCH_SEED": "20", "JFBATCH_BATCH_SIZE": "30"}
    config = load_config({"batch_size": "400"}, file, environment)
    assert (config.max_tokens, config.seed, config.batch_size) == (10, 20, 400)
    assert config.temperature == RunConfig().temperature


def test_texts_become_the_settings_types() -> None:
    config = load_config(
        {
            "inputs": ["a.jsonl", "b,c.jsonl"],
            "output": "out.parquet",
            "keep": "a, b",
            "kv_memory": "1.5GiB",
            "jump": "off",
            "temperature": "0.7",
            "dtype": "bfloat16",
            "schema": "s.json",
        },
        environment={},
    )
    assert config.inputs == ("a.jsonl", "b,c.jsonl")
    assert config.output == Path("out.parquet")
    assert config.keep == ("a", "b")
    assert config.kv_memory == 3 * 2**29
    assert config.jump is False
    assert config.temperature == 0.7
    assert config.dtype == "bf16"
    assert config.schema_file == Path("s.json")


@pytest.mark.parametrize(
    ("text", "count"), [("100", 100), ("2 GiB", 2**31), ("500MB", 500_000_000), ("3k", 3000), (7, 7)]
)
def test_sizes(text: Any, count: int) -> None:
    assert load_config({"kv_memory": text}, environment={}).kv_memory == count


def test_yaml_words_stay_words(yaml_file: Any) -> None:
    config = load_config({}, yaml_file("choice: [yes, no, on, 7, true, 2026-01-02]\njump: off\n"), {})
    assert config.choice == ("yes", "no", "on", "7", "true", "2026-01-02")
    assert config.jump is False


@pytest.mark.parametrize("name", [setting.name for setting in settings()])
def test_every_setting_has_a_variable_and_a_description(name: str) -> None:
    (setting,) = (setting for setting in settings() if setting.name == name)
    assert setting.description.endswith(".")
    assert setting.panel
    with pytest.raises(UsageError, match=f"unknown setting '{name}x'"):
        load_config({}, environment={setting.variable + "X": "1"})


def test_unknown_settings_name_the_nearest(yaml_file: Any) -> None:
    with pytest.raises(UsageError, match=r"run.yaml: unknown setting 'max_token'; did you mean 'max_tokens'"):
        load_config({}, yaml_file("max_token: 3"), {})
    with pytest.raises(
        UsageError, match="environment: unknown setting 'batchsize'; did you mean 'batch_size'"
    ):
        load_config({}, environment={"JFBATCH_BATCHSIZE": "3"})
    with pytest.raises(UsageError, match="unknown setting 'zzz'; known are inputs, output"):
        load_config({"zzz": 1}, environment={})
    with pytest.raises(pydantic.ValidationError):
        RunConfig(zzz=1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"max_tokens": "0"}, "--max-tokens: .*greater than or equal to 1, not '0'"),
        ({"temperature": "hot"}, "--temperature: .*number.*'hot'"),
        ({"json_style": "free"}, "--json-style: .*'spaced', 'compact' or 'pretty'"),
        ({"device": "gpu"}, "--device: must be auto, cpu, cuda or cuda:N, not 'gpu'"),
        ({"kv_memory": "lots"}, "--kv-memory: .*'lots'"),
        ({"choice": "a,b,a"}, "--choice: lists a text twice"),
        ({"regex": "a", "choice": "a,b"}, "give one of regex and choice, not both"),
    ],
)
def test_wrong_values_name_the_flag_and_the_reason(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        load_config(flags, environment={})
    assert "\n" not in str(caught.value)


def test_wrong_values_name_their_file_or_variable(yaml_file: Any) -> None:
    with pytest.raises(UsageError, match=r"run\.yaml: seed: .*'x'"):
        load_config({}, yaml_file("seed: x"), {})
    with pytest.raises(UsageError, match=r"^JFBATCH_SEED: "):
        load_config({}, environment={"JFBATCH_SEED": "x"})


def test_a_pattern_replaces_the_pattern_of_a_weaker_layer(yaml_file: Any) -> None:
    config = load_config({"regex": "[0-9]+"}, yaml_file("schema: s.json"), {})
    assert config.regex == "[0-9]+"
    assert config.schema_file is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b", "must be a mapping"),
        ("a: [", "not valid YAML in line"),
        ("seed: 1\nseed: 2", "'seed' is given twice"),
        ("seed: !!python/object/apply:os.getcwd []", "not valid YAML"),
    ],
)
def test_a_broken_file_is_one_line(yaml_file: Any, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        load_config({}, yaml_file(text), {})
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.yaml: No such file"):
        load_config({}, tmp_path / "none.yaml", {})


def test_an_empty_file_changes_nothing(yaml_file: Any) -> None:
    assert load_config({}, yaml_file("# nothing\n"), {}) == RunConfig()


def test_config_is_immutable() -> None:
    with pytest.raises(pydantic.ValidationError):
        RunConfig().seed = 3


@pytest.mark.parametrize("name", ["extract.yaml", "gpu-array.yaml"])
def test_shipped_files_are_valid(name: str) -> None:
    config = load_config({}, ROOT / "configs" / name, {})
    assert config != RunConfig()
    assert config.schema_file is not None
    assert (ROOT / config.schema_file).is_file()


def test_the_documentation_page_is_current() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == configuration_page()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"JFBATCH_CACHE_DIR": "/c", "SLURM_TMPDIR": "/s"}, Path("/c")),
        ({"SLURM_TMPDIR": "/s", "XDG_CACHE_HOME": "/x"}, Path("/s/jfbatch")),
        ({"XDG_CACHE_HOME": "/x"}, Path("/x/jfbatch")),
        ({}, Path.home() / ".cache" / "jfbatch"),
    ],
)
def test_default_cache_directory(environment: dict[str, str], expected: Path) -> None:
    assert default_cache_directory(environment) == expected


def test_the_cache_flag_wins() -> None:
    assert RunConfig(cache_dir=Path("/mine")).cache_directory == Path("/mine")
