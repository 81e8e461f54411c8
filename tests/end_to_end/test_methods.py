"""Every draft method in a real engine: the output equals that without a drafter, greedy and seeded.

Drafts of a random head would be accepted by chance alone, for any input. So the weights implement a permutation: after
token t the target generates p(t), and the head finds p(t_j) from the feature of t_{j-1} only. Its drafts are accepted
only if every committed row and tree node gets the right feature with its token.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import checkpoints
from tests.support.engines import BUNDLED, GeneratedAnswer, GenerationJob, Runner, ask, bundled, prompts
from workers.comm.ipc import Speculation, Submit
from workers.config import AcceptanceConfig, DraftConfig, EngineConfig, PruneConfig, SimulatedCosts, TreeConfig
from workers.sampling.grammar import grammar_text
from workers.settings import Constraints, SamplingSettings

TREE = TreeConfig(num_speculative_tokens=12, max_depth=5, max_children=4)
CHAIN = TreeConfig(kind="chain", num_speculative_tokens=4)
OFF, DRAFTED = Speculation(enabled=False), Speculation(auto=False)
PRUNED = replace(DRAFTED, rules={"min_prob": 0.1, "path_prob": 0.01})
DEAR = PruneConfig(
    auto=True,
    prompt_lookup=False,
    simulated_costs=SimulatedCosts(step_ms=1, row_ms=1, draft_ms=1000, level_ms=1000),
)
"""Under `auto` drafting is off, because it is dear, for the 31 steps before it is probed."""


def engine(target: Path, draft: DraftConfig) -> EngineConfig:
    draft = replace(draft, tree=replace(draft.tree, prune=DEAR))
    return EngineConfig(model_path=str(target), draft=draft, max_model_len=256, max_num_seqs=8, step_timeout_s=120.0)


def permutation(size: int) -> torch.Tensor:
    """Return the matrix that maps a token to its successor, both one-hot."""
    successor = torch.randperm(size, generator=torch.Generator().manual_seed(0))
    return torch.zeros(size, size).index_put((successor, torch.arange(size)), torch.ones(()))


def teach_permutation(path: Path) -> Path:
    """Replace weights: one-hot embeddings, layers that add nothing, the permutation in LM head and fc."""
    size = checkpoints.BASE["hidden_size"]
    assert isinstance(size, int)
    step = permutation(size)
    taught = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        match name.split(".")[-2:]:
            case ["embed_tokens", _]:
                taught[name] = torch.eye(size)
            case ["lm_head", _]:
                taught[name] = step
            case ["fc", "weight"]:
                taught[name] = torch.cat([torch.zeros(size, size), step], dim=1)
            case ["input_proj", _]:
                taught[name] = torch.cat([step, torch.zeros(size, size)], dim=1)
            case ["o_proj" | "down_proj", _] | [_, "bias"]:
                taught[name] = torch.zeros_like(tensor)
            case _:
                taught[name] = torch.ones_like(tensor) if "norm" in name else tensor
    save_file(taught, path / "model.safetensors", metadata={"format": "pt"})
    return path


def ngram(_: Path) -> EngineConfig:
    draft = DraftConfig(method="ngram", model_path="", prompt_lookup_min=2, prompt_lookup_max=4, tree=TREE)
    return engine(BUNDLED / "target", replace(draft, placement="colocated"))


def eagle(folder: Path) -> EngineConfig:
    target = teach_permutation(checkpoints.write_model(folder / "target", "llama", vocab_size=64))
    head = teach_permutation(checkpoints.write_eagle(folder / "head", num_hidden_layers=2, vocab_size=64))
    draft = DraftConfig(method="eagle", model_path=str(head), tree=TREE)
    return engine(target, draft)


def qwen3(folder: Path) -> EngineConfig:
    path = checkpoints.add_mtp(checkpoints.write_model(folder, "qwen3", vocab_size=64, head_dim=8), "qwen3")
    teach_permutation(path)
    return engine(path, DraftConfig(method="mtp", model_path=str(path), tree=CHAIN))


def mimo(folder: Path) -> EngineConfig:
    path = teach_permutation(checkpoints.add_mtp(checkpoints.write_model(folder, "qwen2", vocab_size=64), "mimo"))
    return engine(path, DraftConfig(method="mtp", model_path=str(path), tree=TREE))


def teach_block(path: Path) -> Path:
    """Let a block head of one layer with a window find the first draft from the last feature alone.

    The feature of a token is its embedding. Slots add nothing to attention, because their input norm is 0, so the first
    slot that predicts gets the feature that its window reaches. The Markov head finds the others, more weakly.
    """
    size = checkpoints.BASE["hidden_size"]
    assert isinstance(size, int)
    step = permutation(size)
    has_own_head = (tensors := load_file(path / "model.safetensors")).get("lm_head.weight") is not None
    taught = {}
    for name, tensor in tensors.items():
        match name.split(".")[-2:]:
            case ["embed_tokens" | "lm_head" | "fc" | "v_proj" | "markov_w1", _]:
                taught[name] = torch.eye(size)
            case ["o_proj", _]:  # from a token to the one after the next, or to the next, where the head finds its own
                taught[name] = step @ step if has_own_head else step
            case ["markov_w2", _]:
                taught[name] = 4 * step
            case ["input_layernorm" | "down_proj", _]:
                taught[name] = torch.zeros_like(tensor)
            case _:
                taught[name] = torch.ones_like(tensor) if "norm" in name else tensor
    save_file(taught, path / "model.safetensors", metadata={"format": "pt"})
    return path


def block_head(folder: Path, style: str, window: int, rank: int) -> EngineConfig:
    target = teach_permutation(checkpoints.write_model(folder / "target", "llama", vocab_size=64))
    head = checkpoints.write_block(
        folder / "head",
        style=style,
        taps=(0,),
        markov_rank=rank,
        num_hidden_layers=1,
        num_key_value_heads=8,
        vocab_size=64,
        **checkpoints.sliding(window, "sliding_attention"),
    )
    method = "dspark" if rank else "dflash"
    return engine(target, DraftConfig(method=method, model_path=str(teach_block(head)), tree=TREE))


def bigrams(folder: Path, tree: TreeConfig, **options: int) -> EngineConfig:
    head = checkpoints.write_bigrams(folder / "head", BUNDLED / "target")
    draft = DraftConfig(
        method="dspark", model_path=str(head), tensor_parallel_size=options.pop("draft_tp", 1), tree=tree
    )
    config = replace(engine(BUNDLED / "target", draft), max_model_len=512, eos_token_ids=(0, 2))
    return replace(config, **options)  # type: ignore[arg-type]


def peagle(folder: Path, tree: TreeConfig, **options: int) -> EngineConfig:
    """Draft with the bundled EAGLE-3 head, whose mask rows know nothing."""
    head = shutil.copytree(BUNDLED / "eagle3", folder / "head")
    checkpoints.edit_config(head, ptd_token_id=4)
    checkpoints.edit_weights(head, add={"mask_hidden": torch.ones(1, 1, 3 * 192)})
    size = options.pop("draft_tp", 1)
    draft = DraftConfig(method="eagle3", model_path=str(head), tensor_parallel_size=size, tree=tree)
    return replace(engine(BUNDLED / "target", draft), max_model_len=512, **options)  # type: ignore[arg-type]


METHODS: dict[str, Callable[[Path], EngineConfig]] = {
    "dspark of the bundled target": lambda folder: bigrams(folder, TREE),
    "dspark of the bundled target, TP 2, draft TP 2": lambda folder: bigrams(
        folder, TREE, tensor_parallel_size=2, draft_tp=2
    ),
    "dspark": lambda folder: block_head(folder, "deepspec", 2, 64),  # the anchor's slot predicts, and sees one feature
    "dflash": lambda folder: block_head(folder, "z-lab", 3, 0),  # the slot behind it does
    "p-eagle of the bundled target": lambda folder: peagle(folder, TREE),
    "p-eagle of the bundled target, TP 2, draft TP 2": lambda folder: peagle(
        folder, TREE, tensor_parallel_size=2, draft_tp=2
    ),
    "ngram": ngram,
    "eagle": eagle,
    "mtp of a Qwen3, chain": qwen3,
    "mtp of a MiMo": mimo,
}


MORE_OF_A_KIND = ("p-eagle of the bundled target",)
PARAMS = [
    pytest.param(config, id=name, marks=pytest.mark.full if name in MORE_OF_A_KIND else ())
    for name, config in METHODS.items()
]


@pytest.fixture(scope="module", params=PARAMS)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    with Runner(request.param(tmp_path_factory.mktemp("models"))) as runner:
        yield runner


def some_prompts(runner: Runner) -> list[list[int]]:
    """Return the bundled target's own prompts, for lookup with repetitions to find, or tokens at random."""
    if runner.config.model_path == str(BUNDLED / "target"):
        if runner.config.draft.method != "ngram":
            return prompts(3)
        return [prompt[:12] * 6 for prompt in prompts(3)]
    rng = random.Random(0)
    return [[rng.randrange(64) for _ in range(length)] for length in (1, 17, 40)]


def acceptance_length(answers: list[GeneratedAnswer]) -> float:
    drafts = sum(answer.stats.num_drafts for answer in answers)
    return 1 + sum(answer.stats.num_accepted_tokens for answer in answers) / max(1, drafts)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_equal_those_without_speculation(runner: Runner, temperature: float) -> None:
    jobs = [
        GenerationJob(prompt=prompt, max_tokens=32, sampling=SamplingSettings(temperature=temperature, seed=seed))
        for seed, prompt in enumerate(some_prompts(runner))
    ]
    plain = runner.run([replace(job, speculation=OFF) for job in jobs])
    drafted = runner.run([replace(job, speculation=DRAFTED) for job in jobs], concurrency=3)
    assert [answer.tokens for answer in drafted] == [answer.tokens for answer in plain]
    assert all(answer.stats.num_drafts == 0 for answer in plain)
    if temperature:
        pruned = runner.run([replace(job, speculation=PRUNED) for job in jobs], concurrency=3)
        assert [answer.tokens for answer in pruned] == [answer.tokens for answer in plain]
    least = {"ngram": 1.3, "eagle": 3.0, "mtp": 3.0, "dspark": 3.0, "dflash": 1.8}
    is_taught = runner.config.model_path != str(BUNDLED / "target") or runner.config.draft.method == "ngram"
    assert acceptance_length(drafted) > (least[runner.config.draft.method] if is_taught else 1.2)


@pytest.mark.parametrize("length", [17, 50])
@pytest.mark.parametrize("is_auto", [True, False])
def test_a_short_prompt_is_found_the_second_time_whether_or_not_it_is_drafted_for(
    runner: Runner, is_auto: bool, length: int
) -> None:
    rng = random.Random(length)
    submit = Submit(
        id=0, prompt=[rng.randrange(3, 63) for _ in range(length)], max_tokens=8,
        sampling=SamplingSettings(seed=length),
        ignore_eos=True, speculation=Speculation(auto=is_auto), cache_salt=f"{is_auto} {length}",
    )  # fmt: skip
    first, second = (ask(runner, submit) for _ in range(2))
    if runner.config.draft.method != "ngram":  # there is hardly anything to look up
        assert all((told[-1].stats.num_drafts > 0) != is_auto for told in (first, second))
    assert [token for chunk in first for token in chunk.tokens] == [token for chunk in second for token in chunk.tokens]
    assert (first[-1].num_cached_tokens, second[-1].num_cached_tokens) == (0, (length - 1) // 16 * 16)


@pytest.mark.parametrize("runner", PARAMS[:1], indirect=True)
def test_a_grammar_and_penalties_hold_for_drafts_of_one_pass(runner: Runner) -> None:
    """Constraints follow each node's own path, although no node has been run."""
    grammar = grammar_text("regex", "[A-Z][a-z]{2,9}( [0-9]{1,4}){0,8}", whitespace="none")
    asked = (Constraints(grammar=grammar), Constraints(frequency_penalty=0.7, repetition_penalty=1.2))
    jobs = [
        GenerationJob(
            prompt=prompt,
            max_tokens=24,
            sampling=SamplingSettings(temperature=temperature, seed=seed, constraints=constraints),
            speculation=DRAFTED,
        )
        for seed, prompt in enumerate(prompts(3))
        for temperature in (0.0, 0.9)
        for constraints in asked
    ]
    rejecting = replace(DRAFTED, acceptance="rejection")
    plain = runner.run([replace(job, speculation=OFF) for job in jobs], concurrency=4)
    drafted = runner.run(jobs, concurrency=4)
    sampled = runner.run([replace(job, speculation=rejecting) for job in jobs], concurrency=4)
    assert [answer.tokens for answer in drafted] == [answer.tokens for answer in plain]
    assert acceptance_length(drafted) > 1.05 and acceptance_length(sampled) > 1.05
    greedy = [i for i, job in enumerate(jobs) if not job.sampling.temperature]
    assert [sampled[i].tokens for i in greedy] == [plain[i].tokens for i in greedy]


def test_how_the_service_samples_its_drafts_reaches_the_drafter() -> None:
    """Hybrid nodes draw only their last child, so trees and texts differ."""
    jobs = [
        GenerationJob(prompt=prompt, max_tokens=24, sampling=SamplingSettings(seed=seed))
        for seed, prompt in enumerate(prompts(3))
    ]
    texts = {}
    for how in ("probabilistic", "hybrid"):
        config = bundled(TREE)
        assert config.draft is not None
        acceptance = AcceptanceConfig(kind="rejection", sample_method=how)
        with Runner(replace(config, draft=replace(config.draft, acceptance=acceptance))) as runner:
            texts[how] = [answer.tokens for answer in runner.run(jobs)]
    assert all(one != other for one, other in zip(*texts.values(), strict=True))
