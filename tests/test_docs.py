"""Commands and snippets in the documents: each is run, or parsed with the real command line, or says what it needs.

A fenced block may follow a marker: `<!-- needs: gpu -->`, `<!-- needs: FILE -->` or `<!-- long: REASON -->`. A marked
block is parsed and not run. Blocks without a language are parsed where a line starts with one of our commands.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

from cluster.local_service import local_service
from secateur.cli import app, main
from secateur.config import EngineArgs

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted({*ROOT.glob("*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("docs/**/*.md")})
SHELLS = {"bash", "sh", "console"}
NEEDS = {"gpu", "cluster", "hub", "build"}
DOCUMENTED_URL = "http://127.0.0.1:8000"
FENCE = re.compile(r"(?:<!-- ([^\n]*?) -->\n+)?^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TALKING = {("secateur", "complete"), ("secateur", "chat")}
WATCHING = {("secateur", "top")}
RUN = TALKING | WATCHING | {("secateur", "plan"), ("secateur", "completion")}


class Block(NamedTuple):
    """One fenced block of a document."""

    document: str
    marker: str
    language: str
    text: str


class Command(NamedTuple):
    """One command line of a block: its words up to the first pipe or redirection, and the whole line."""

    block: Block
    words: list[str]
    line: str


def blocks_of(name: str, text: str) -> list[Block]:
    return [Block(name, *(part or "" for part in match.groups())) for match in FENCE.finditer(text)]


def commands_of(block: Block) -> list[Command]:
    if block.language not in {*SHELLS, ""}:
        return []
    found, pending = [], ""
    for line in block.text.splitlines():
        pending += line
        if block.language == "console" and not pending.startswith("$ "):
            pending = ""  # output
            continue
        if pending.endswith("\\"):
            pending = pending[:-1]
            continue
        try:
            words = shlex.split(pending.removeprefix("$ "), comments=True)
        except ValueError:  # a quoted text goes on
            pending += "\n"
            continue
        ends = [at for at, word in enumerate(words) if re.fullmatch(r"[|<>&]+", word)]
        if words and (block.language or words[0] == "secateur"):
            found.append(Command(block, words[: min(ends, default=len(words))], pending.removeprefix("$ ")))
        pending = ""
    assert block.language != "bash" or not pending, f"{block.document}: unfinished command {pending!r}"
    return found


BLOCKS = [
    block for path in DOCUMENTS for block in blocks_of(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
]
COMMANDS = [command for block in BLOCKS for command in commands_of(block)]
MARKED = [block for block in BLOCKS if block.marker]
SNIPPETS = [block for block in BLOCKS if block.language == "python"]


def is_run(command: Command) -> bool:
    if command.block.marker or command.block.language not in SHELLS:
        return False
    return command.words[0] == "curl" or tuple(command.words[:2]) in RUN


def name_of(found: Command | Block) -> str:
    return f"{found.block.document}: {found.line}" if isinstance(found, Command) else found.document


def check(words: list[str]) -> None:
    """Raise unless the program, its subcommand and its options exist."""
    match words:
        case ["secateur", *args]:
            command: Any = typer.main.get_command(app)
            while hasattr(command, "commands") and args:
                assert args[0] in command.commands, f"no command {args[0]!r}"
                command = command.commands[args.pop(0)]
            command.make_context("secateur", args)
        case ["make", *targets]:
            known = set(re.findall(r"^(\w+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
            assert {target for target in targets if "=" not in target} <= known
        case ["pip", "install", *requirements]:
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            for names in re.findall(r"\[(.*?)\]", " ".join(requirements)):
                assert set(names.split(",")) <= set(extras)
        case ["python", "-m", "build", *_]:
            pass  # a tool of its own
        case ["python", "-m", module, *_]:
            assert importlib.util.find_spec(module), f"no module {module}"
        case ["python", script, *_]:
            assert (ROOT / script).is_file(), f"no file {script}"
        case ["curl", *_]:
            assert any(word.startswith("http") for word in words)
        case _:
            raise AssertionError(f"unknown command {words[0]!r}: mark its block, or teach this test")


def check_marker(block: Block) -> None:
    """Raise unless the marker is known and true of its block."""
    kind, _, value = block.marker.partition(": ")
    assert kind in {"needs", "long"} and value, f"{block.document}: unknown marker {block.marker!r}"
    if kind == "needs" and value not in NEEDS:
        assert value in block.text.split(), f"{block.document}: the block does not read {value}"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    settings = {"port": 0, "device": "cpu", "max_num_seqs": 2, "batch_dir": str(tmp_path_factory.mktemp("batches"))}
    with local_service(EngineArgs.load(settings)) as url:
        yield url


@pytest.mark.parametrize("command", COMMANDS, ids=name_of)
def test_every_command_exists_with_its_options(command: Command) -> None:
    if command.block.marker in {"needs: cluster", "needs: build"} and command.words[0] != "secateur":
        pytest.skip("a program from elsewhere")
    check(command.words)


@pytest.mark.parametrize("block", MARKED, ids=name_of)
def test_every_marker_is_known_and_true(block: Block) -> None:
    check_marker(block)


@pytest.mark.slow
@pytest.mark.parametrize("command", [command for command in COMMANDS if is_run(command)], ids=name_of)
def test_unmarked_commands_succeed(
    command: Command, url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if command.words[0] == "curl":
        if not shutil.which("curl"):
            pytest.skip("no curl here")
        line = command.line.replace(DOCUMENTED_URL, url)
        output = subprocess.run(["bash", "-c", f"{line} --silent --fail"], check=True, capture_output=True).stdout
        assert output
        return
    words = [word.replace(DOCUMENTED_URL, url) for word in command.words[1:]]
    if tuple(command.words[:2]) in TALKING | WATCHING and url not in words:
        words += ["--base-url", url]
    assert main(words) == 0
    assert capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("block", [block for block in SNIPPETS if not block.marker], ids=name_of)
def test_python_snippets_run_against_a_service(block: Block, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = compile(block.text.replace(DOCUMENTED_URL, url), block.document, "exec")
    exec(code, {"__name__": "snippet"})
    assert capsys.readouterr().out


def test_documents_have_commands_and_snippets() -> None:
    assert COMMANDS and SNIPPETS


@pytest.mark.parametrize("line", ["secateur serv", "make nothing", "pip install '.[nothing]'", "kubectl get pods"])
def test_a_command_that_does_not_exist_is_noticed(line: str) -> None:
    [command] = commands_of(Block("page", "", "bash", line))
    with pytest.raises(AssertionError):
        check(command.words)


def test_an_option_that_does_not_exist_is_noticed() -> None:
    with pytest.raises(Exception, match="nodez"):
        check(["secateur", "serve", "--nodez", "3"])


@pytest.mark.parametrize("marker", ["needs: costs.json", "needs:", "slow: yes"])
def test_a_marker_that_is_unknown_or_untrue_is_noticed(marker: str) -> None:
    [block] = blocks_of("page", f"<!-- {marker} -->\n```bash\nsecateur plan\n```\n")
    with pytest.raises(AssertionError):
        check_marker(block)


def test_a_command_is_read_over_several_lines() -> None:
    text = "$ curl http://x -d '{\n  \"a\": 1\n}'\nanswer\n$ secateur plan \\\n    --json | less  # all\n"
    first, second = commands_of(Block("page", "", "console", text))
    assert first.words == ["curl", "http://x", "-d", '{\n  "a": 1\n}']
    assert second.words == ["secateur", "plan", "--json"]


# Numbers and pictures


def test_the_table_of_sizes_is_the_planner_s_and_agrees_with_the_kubernetes_guide() -> None:
    spec = importlib.util.spec_from_file_location("sizing", ROOT / "docs" / "sizing.py")
    assert spec is not None and spec.loader is not None
    sizing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sizing)
    found = {size[:2] + size[3:4]: size for size in sizing.sizes()}
    assert found["Llama-3.1-8B", "h100", "colocated"].tensor_parallel_size == 1
    large = found["Llama-3.3-70B", "h100", "dedicated"]
    row = rf"Llama-3.3-70B | {large.tensor_parallel_size} | dedicated | {large.num_gpus} |"
    assert row in text_of("docs/guides/kubernetes.md")
    assert ("Llama-3.3-70B", "l4", "dedicated") not in found, "it does not fit on eight"
    assert found["Qwen3-8B", "h200", "dedicated"].tokens >= 64 * sizing.CONTEXT


def text_of(name: str) -> str:
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


@pytest.mark.parametrize(
    ("pattern", "documents"),
    [
        (
            r"\(?(\d+) MB\)? (?:holds SmolLM2|to download)|SmolLM2, (\d+) MB",
            ["README.md", "docs/guides/models.md", "Makefile"],
        ),
        (r"every test that needs no GPU, about (half an hour|\d+ minutes)", ["README.md", "CONTRIBUTING.md"]),
        (r"start no (?:engine and no )?process,? \(?([^)]*?minutes|[^)]*?seconds)", ["CONTRIBUTING.md", "Makefile"]),
    ],
)
def test_documents_agree_on_a_number(pattern: str, documents: list[str]) -> None:
    found = {name: {match[match.lastindex] for match in re.finditer(pattern, text_of(name))} for name in documents}
    assert all(len(values) == 1 for values in found.values()) and len(set.union(*found.values())) == 1, found


def test_what_auto_gains_and_loses_is_that_of_the_table() -> None:
    rows = re.findall(r"^\| (1|4|8) \| (\d+) \| (\d+) \| \d+ \| \d+ \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    one, four, eight = (round(100 * (int(auto) / int(off) - 1)) for _, off, auto in rows)
    assert f"gains {one} % with one request and loses {-four} % with four and {-eight} % with eight" in text_of(
        "docs/guides/auto.md"
    )


def test_the_default_drafter_of_smollm2_is_the_one_that_documents_name() -> None:
    spec = EngineArgs.load({"model": "smollm2"}).speculative_config
    assert spec is not None
    for name in ("CHANGELOG.md", "docs/guides/models.md"):
        assert re.search(rf"head `{spec.model}` drafts for (?:`smollm2`|this model)", text_of(name)), name
    assert "n-gram lookup drafts for `smollm2`" not in text_of("CHANGELOG.md")


def test_every_picture_is_shown_and_every_shown_picture_exists() -> None:
    shown = {
        (path.parent / target).resolve()
        for path in DOCUMENTS
        for target in re.findall(r"!\[[^\]]*\]\((?!http)([^)]+)\)", path.read_text(encoding="utf-8"))
    }
    assert set((ROOT / "docs/images").iterdir()) <= shown
    assert all(path.is_file() for path in shown)
