"""A client-only installation: what works without the serving packages, and the errors of the rest."""

from __future__ import annotations

import http.server
import json
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from secateur import cli, install
from secateur.errors import SecateurError
from secateur.install import install_command
from secateur.responses import SSE_DONE, CompletionChoice, CompletionChunk, ModelCard, ModelList, Usage

ROOT = Path(__file__).parents[2]
LACKING = ["torch", "transformers", "numpy", "safetensors", "msgpack", "jinja2", "huggingface_hub", "tokenizers"]
LACKING += ["ray", "fastapi", "starlette", "uvicorn", "psutil"]
INSTALL = install_command("serve")


def run(*args: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process that cannot import the packages missing in a client's installation."""
    code = f"import sys; sys.modules.update(dict.fromkeys({LACKING})); from secateur import cli; sys.exit(cli.main())"
    return subprocess.run([sys.executable, "-c", code, *args], cwd=ROOT, capture_output=True, text=True, timeout=60)


class Wire(http.server.BaseHTTPRequestHandler):
    """Run a service that streams three tokens."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._reply(ModelList(data=[ModelCard(id="vendor-7b")]).model_dump_json())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        chunks = [CompletionChunk(model="m", choices=[CompletionChoice(text=text)]) for text in "abc"]
        chunks.append(CompletionChunk(model="m", choices=[], usage=Usage.of(2, 3)))
        self._reply("".join(chunk.sse() for chunk in chunks) + SSE_DONE)

    def _reply(self, text: str) -> None:
        data = text.encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Wire)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_running_service_is_measured_with_the_clients_packages(url: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"text": "x"}\n')
    flags = ["--base-url", url, "--prompts", str(prompts), "--quick", "--output", str(tmp_path / "results")]
    done = run("bench", "serve", *flags)
    assert done.returncode == 0, done.stderr
    [report] = (tmp_path / "results").glob("*-serve.json")
    result = json.loads(report.read_text())
    assert result["about"]["model"] == "vendor-7b"
    rows = [(row["mode"], row["num_requests"], row["num_failed"]) for row in result["rows"]]
    assert rows == [("as served", 6, 0)] * 2


RUNS_HERE = [["serve"], ["plan"], ["bench", "step"], ["bench", "step", "--quick"]]


@pytest.mark.parametrize("command", RUNS_HERE)
def test_commands_that_run_models_name_the_missing_extra(command: list[str]) -> None:
    done = run(*command)
    assert done.returncode == 1 and done.stdout == ""
    needs = r"(secateur: reading .*\n)?secateur: error: this command needs '\w+', which is not installed: "
    assert re.fullmatch(needs + re.escape(INSTALL) + "\n", done.stderr)


@pytest.mark.parametrize("command", [["complete", "x"], ["chat", "x"], ["bench", "serve"]])
def test_commands_with_base_url_suggest_it(command: list[str]) -> None:
    done = run(*command)
    assert done.returncode == 1
    assert f"{INSTALL} (or talk to a running service with --base-url)" in done.stderr


def test_the_suggested_extra_exists() -> None:
    assert "serve" in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


class Installed:
    """A distribution with a direct_url.json."""

    def __init__(self, origin: dict[str, object] | None) -> None:
        self._origin = origin

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self._origin is None else json.dumps(self._origin)


WHEEL = "secateur_llm-0.1.0-py3-none-any.whl"
GIT = {"url": "https://host/repo.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}}


@pytest.mark.parametrize(
    ("installed", "command"),
    [
        (None, f"pip install '{ROOT}[serve]'"),
        (Installed(None), "pip install 'secateur-llm[serve]'"),
        (Installed({"url": "file:///a%20b", "dir_info": {}}), "pip install '/a b[serve]'"),
        (Installed({"url": "file:///src", "dir_info": {"editable": True}}), "pip install -e '/src[serve]'"),
        (Installed({"url": f"file:///{WHEEL}", "archive_info": {}}), f"pip install '/{WHEEL}[serve]'"),
        (Installed({"url": f"https://host/{WHEEL}"}), f"pip install 'secateur-llm[serve] @ https://host/{WHEEL}'"),
        (Installed(GIT), "pip install 'secateur-llm[serve] @ git+https://host/repo.git@abc'"),
    ],
    ids=["not installed", "index", "folder", "editable", "wheel", "url", "git"],
)
def test_an_install_hint_names_what_this_copy_was_installed_from(
    monkeypatch: pytest.MonkeyPatch, installed: Installed | None, command: str
) -> None:
    monkeypatch.setattr(install, "installed_distribution", lambda: installed)
    told = str(install.needs_extra(ModuleNotFoundError("no torch", name="torch")))
    assert told == f"this command needs 'torch', which is not installed: {command}"


def test_the_planners_help_names_the_extra_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--help"]) == 0
    assert "the extra `serve`" in " ".join(capsys.readouterr().out.split())


def test_an_install_without_the_service_s_entry_points_says_to_install_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "entry_points", lambda **_: ())
    with pytest.raises(SecateurError, match="LLM needs Secateur to be installed, or installed again: pip install "):
        install.service_part("offline_engine", user="LLM")


def test_every_entry_point_is_used_and_every_name_that_is_used_has_one() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][install.SERVICE]
    sources = [path.read_text() for path in (ROOT / "secateur").rglob("*.py")]
    assert {name for source in sources for name in re.findall(r'service_part\("(\w+)"', source)} == declared.keys()
    for name in declared:
        assert callable(install.service_part(name))
