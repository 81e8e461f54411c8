"""Models of the Hugging Face hub: which files are downloaded, and when. A local server stands in for the hub."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch

import secateur
from cluster.convert import engine_config, fetch_weights, with_tokenizer
from cluster.pairs import settled
from secateur.config import EngineArgs
from secateur.errors import ConfigError
from tests.support import checkpoints
from tests.support.fake_hub import COMMIT, FakeHub, fake_hub
from workers.config import EngineConfig
from workers.models.checkpoint import Weights
from workers.models.hub import resolve_path

BUNDLED = Path(secateur.__file__).parent / "bundled"
WEIGHTS = (".safetensors", ".bin", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with fake_hub(tmp_path / "hub") as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield hub
        assert len(set(hub.fetched)) == len(hub.fetched), "a file was fetched twice"


def publish(hub: FakeHub, name: str, *, shards: int = 1, tokenizer: bool = True, **config: Any) -> Path:
    """Add a small model to the hub, with files that no engine reads."""
    folder = checkpoints.write_model(hub.root / name, "llama", shards=shards, **config)
    if tokenizer:
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(BUNDLED / "target" / file, folder)
    for unread in ("consolidated.safetensors", "original/consolidated.00.pth", "original/model.safetensors",
                   "original/params.json", "onnx/model.onnx", "model.gguf", "tf_model.h5",
                   "flax_model.msgpack", "adapter_model.safetensors", "README.md"):  # fmt: skip
        (folder / unread).parent.mkdir(exist_ok=True)
        (folder / unread).write_bytes(b"{}")
    return folder


def start(**fields: Any) -> EngineConfig:
    """Run all preparations of a model before an engine starts."""
    args = settled(EngineArgs.load({"device": "cpu", **fields}))
    config, _ = with_tokenizer(args, engine_config(args))
    fetch_weights(args, config)
    return config


def weights(fetched: list[str]) -> list[str]:
    return [name for name in fetched if name.endswith(WEIGHTS)]


def test_weights_are_fetched_last_and_only_those_that_are_read(hub: FakeHub) -> None:
    folder = publish(hub, "org/llama", shards=3)
    shards = sorted(path.name for path in folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    config = start(model="org/llama")
    found = Path(config.model_path)
    assert found.name == COMMIT
    assert sorted(weights(hub.fetched)) == [f"org/llama:{name}" for name in shards]
    assert hub.fetched[-len(shards) :] == weights(hub.fetched), "after everything else"
    assert not [name for name in hub.fetched if "original/" in name or "onnx/" in name or "README" in name]
    assert Weights(found).names() == Weights(folder).names()


def test_cached_files_are_not_downloaded_again_and_need_no_hub(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(hub, "org/llama")
    first = start(model="org/llama")
    assert weights(hub.fetched) == ["org/llama:model.safetensors"]
    hub.fetched.clear()
    assert start(model="org/llama") == first and hub.fetched == []
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert start(model="org/llama") == first


def test_a_revision_is_that_of_the_model_and_of_its_tokenizer(hub: FakeHub) -> None:
    publish(hub, "org/llama")
    publish(hub, "org/words")
    start(model="org/llama", tokenizer="org/words", revision="v2")
    assert {name for name in hub.revisions if not name.endswith(COMMIT)} == {"org/llama:v2", "org/words:v2"}


@pytest.mark.parametrize(
    ("config", "fields", "told"),
    [
        ({"hidden_act": "gelu"}, {}, "activation 'gelu' is not supported"),
        ({}, {"tensor_parallel_size": 3}, "tensor_parallel_size 3 does not fit"),
        ({}, {"max_model_len": 513}, "max_model_len: 513 is more than the model's 512"),
        ({}, {"num_pages": 20}, "num_pages: 20 "),
        ({}, {"speculative_config": {"method": "draft_model", "model": "org/other"}}, "96 and 95 rows"),
    ],
)
def test_a_rejected_configuration_downloads_no_weights(
    hub: FakeHub, config: dict[str, Any], fields: dict[str, Any], told: str
) -> None:
    publish(hub, "org/llama", **config)
    publish(hub, "org/other", vocab_size=95, tokenizer=False)
    with pytest.raises(ConfigError, match=told):
        start(model="org/llama", **fields)
    assert "org/llama:config.json" in hub.fetched
    assert weights(hub.fetched) == []


def test_an_unsupported_architecture_downloads_no_weights(hub: FakeHub) -> None:
    folder = publish(hub, "org/strange")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"architectures": ["Strange"], "model_type": "strange"}))
    with pytest.raises(ConfigError, match="Strange"):
        start(model="org/strange")
    assert "org/strange:config.json" in hub.fetched and weights(hub.fetched) == []


def test_a_model_without_a_tokenizer_downloads_no_weights(hub: FakeHub) -> None:
    publish(hub, "org/llama", tokenizer=False)
    with pytest.raises(ConfigError, match="tokenizer: none could be read"):
        start(model="org/llama")
    assert weights(hub.fetched) == []


def test_a_tokenizer_of_another_repository_comes_without_its_weights(hub: FakeHub) -> None:
    publish(hub, "org/llama", tokenizer=False)
    publish(hub, "org/other")
    start(model="org/llama", tokenizer="org/other")
    assert weights(hub.fetched) == ["org/llama:model.safetensors"]
    assert "org/other:tokenizer.json" in hub.fetched


def test_the_drafters_weights_are_downloaded_too(hub: FakeHub) -> None:
    publish(hub, "org/llama")
    publish(hub, "org/draft", tokenizer=False, seed=1)
    start(model="org/llama", speculative_config={"method": "draft_model", "model": "org/draft"})
    assert sorted(weights(hub.fetched)) == ["org/draft:model.safetensors", "org/llama:model.safetensors"]


def test_a_speculator_fetches_its_pair_and_the_weights_last(hub: FakeHub) -> None:
    publish(hub, "org/target", hidden_size=64)
    head = checkpoints.write_eagle3(hub.root / "org/head", style="speculators")
    checkpoints.edit_config(head, speculators_config={"verifier": {"name_or_path": "org/target"}})
    config = start(model="org/head")
    assert config.draft is not None and config.draft.method == "eagle3"
    assert sorted(hub.fetched[-2:]) == ["org/head:model.safetensors", "org/target:model.safetensors"]
    assert len(weights(hub.fetched)) == 2 and {"org/head:config.json", "org/target:config.json"} <= set(hub.fetched)


def test_a_transfer_that_breaks_off_goes_on_where_it_was(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 1 << 12)
    folder, name = publish(hub, "org/llama"), "org/llama:model.safetensors"
    hub.cuts[name] = 5 << 12
    found = Path(start(model="org/llama").model_path)
    assert hub.resumed == [(name, 5 << 12)] and hub.fetched.count(name) == 1
    assert (found / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_a_later_start_fetches_only_the_files_that_are_missing(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    folder = publish(hub, "org/llama", shards=3)
    shards = sorted(f"org/llama:{path.name}" for path in folder.glob("model-*.safetensors"))
    hub.lost = {shards[-1]}
    with pytest.raises(ConfigError, match="cannot fetch the weights of 'org/llama' from the hub"):
        start(model="org/llama")
    hub.lost = set()
    hub.fetched.clear()
    start(model="org/llama")
    assert hub.fetched == [shards[-1]]


def test_pickles_are_downloaded_only_without_safetensors(hub: FakeHub) -> None:
    publish(hub, "org/target", hidden_size=64)
    head = checkpoints.write_eagle3(hub.root / "org/eagle3-head", bin_file=True)
    assert (head / "pytorch_model.bin").exists()
    publish(hub, "org/both")
    (hub.root / "org/both/pytorch_model.bin").write_bytes(b"")
    (hub.root / "org/both/pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "pytorch_model.bin"}}')
    start(model="org/both", speculative_config={"method": "eagle3", "model": "org/eagle3-head"})
    assert sorted(weights(hub.fetched)) == ["org/both:model.safetensors", "org/eagle3-head:pytorch_model.bin"]


def test_a_repository_without_weights_is_an_error_before_the_start(hub: FakeHub) -> None:
    folder = publish(hub, "org/llama")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no weights in .*org--llama.*model.safetensors"):
        start(model="org/llama")
    with pytest.raises(ConfigError, match=r"no weights in .*model.safetensors"):
        start(model=str(folder))


def test_a_name_that_the_hub_does_not_know_is_refused(hub: FakeHub) -> None:
    with pytest.raises(ConfigError, match="cannot find checkpoint 'org/nothing', neither a folder nor on the hub"):
        start(model="org/nothing")


def test_a_folder_is_returned_and_an_invalid_id_is_an_error(tmp_path: Path) -> None:
    assert resolve_path(str(tmp_path)) == tmp_path
    with pytest.raises(FileNotFoundError, match="no checkpoint folder"):
        resolve_path(str(tmp_path / "nowhere"))


def test_a_misshapen_checkpoint_is_refused_by_its_header(hub: FakeHub) -> None:
    folder = publish(hub, "org/llama")
    name = "model.layers.1.mlp.up_proj.weight"
    checkpoints.edit_weights(folder, remove=(name,), add={"model.layers.1.mlp.up_proj.lora": torch.ones(2)})
    with pytest.raises(ConfigError, match=f"{COMMIT}: tensor '{name}' is missing"):
        start(model="org/llama")
    assert weights(hub.fetched) == [] and weights(hub.peeked) == ["org/llama:model.safetensors"]


def test_a_head_of_another_width_is_refused_by_its_header(hub: FakeHub) -> None:
    publish(hub, "org/llama", hidden_size=64)
    head = checkpoints.write_eagle3(hub.root / "org/eagle3-head")
    checkpoints.edit_weights(head, remove=("fc.weight",), add={"fc.weight": torch.ones(64, 128)})
    with pytest.raises(ConfigError, match=r"eagle3-head.*: fc.weight is \(64, 128\), this target needs \(64, 192\)"):
        start(model="org/llama", speculative_config={"method": "eagle3", "model": "org/eagle3-head"})
    assert weights(hub.fetched) == []


def test_a_pickle_is_checked_before_the_start_though_it_has_no_header(hub: FakeHub) -> None:
    publish(hub, "org/llama", hidden_size=64)
    checkpoints.write_eagle3(hub.root / "org/eagle3-head", bin_file=True, intermediate_size=80)
    checkpoints.edit_config(hub.root / "org/eagle3-head", intermediate_size=96)
    with pytest.raises(ConfigError, match=r"gate_proj.weight is \(80, 64\), config.json asks for \(96, 64\)"):
        start(model="org/llama", speculative_config={"method": "eagle3", "model": "org/eagle3-head"})
    assert weights(hub.fetched) == ["org/llama:model.safetensors", "org/eagle3-head:pytorch_model.bin"]
