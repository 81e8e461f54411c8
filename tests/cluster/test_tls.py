"""HTTPS without Ray, and what is refused before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.local_service import local_service
from secateur.config import AppArgs, EngineArgs
from secateur.errors import ConfigError
from secateur.local_files import check_tls
from tests.support.certificates import Pair, assert_speaks_tls_alone, self_signed


def test_a_service_speaks_tls_and_nothing_else(tmp_path: Path) -> None:
    pair = self_signed(tmp_path)
    files = {"ssl_certfile": str(pair.certificate), "ssl_keyfile": str(pair.key)}
    with local_service(EngineArgs.load({"device": "cpu", "port": 0, "no_speculation": True, **files})) as url:
        assert_speaks_tls_alone(url, pair)


def without_certificate(pair: Pair, folder: Path) -> Pair:
    return pair._replace(certificate=folder / "nowhere")


def with_key_as_certificate(pair: Pair, folder: Path) -> Pair:
    return pair._replace(certificate=pair.key)


def with_certificate_as_key(pair: Pair, folder: Path) -> Pair:
    return pair._replace(key=pair.certificate)


def with_another_key(pair: Pair, folder: Path) -> Pair:
    return pair._replace(key=self_signed(folder, "other").key)


def with_an_encrypted_key(pair: Pair, folder: Path) -> Pair:
    return self_signed(folder, "secret", "-passout", "pass:sesame")


def with_a_broken_certificate(pair: Pair, folder: Path) -> Pair:
    lines = pair.certificate.read_text().splitlines()
    pair.certificate.write_text("\n".join([lines[0], "AAAA", *lines[3:]]))
    return pair


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        (without_certificate, r"ssl_certfile: cannot read .*nowhere: No such file"),
        (with_key_as_certificate, r"ssl_certfile: .*own\.key holds no PEM certificate"),
        (with_certificate_as_key, r"ssl_keyfile: .*own\.crt holds no PEM key"),
        (with_another_key, r"ssl_keyfile: .*other\.key is not the key of .*own\.crt; give the key"),
        (with_an_encrypted_key, r"ssl_keyfile: .*secret\.key is encrypted; write it without a password"),
        (with_a_broken_certificate, r"ssl_certfile: OpenSSL cannot use .*own\.crt"),
    ],
)
def test_files_that_do_not_work_are_refused(tmp_path: Path, broken: Callable[[Pair, Path], Pair], told: str) -> None:
    pair = self_signed(tmp_path)
    check_tls(*map(str, pair))
    with pytest.raises(ConfigError, match=told):
        check_tls(*map(str, broken(pair, tmp_path)))


@pytest.mark.parametrize(("given", "missing"), [("ssl_certfile", "ssl_keyfile"), ("ssl_keyfile", "ssl_certfile")])
def test_half_a_pair_is_refused(given: str, missing: str) -> None:
    with pytest.raises(ConfigError, match=f"{missing}: is missing; name the file"):
        EngineArgs.load({given: "file.pem"})


def test_a_serve_config_has_them_elsewhere() -> None:
    with pytest.raises(ConfigError, match=r"ssl_certfile: does not belong here; set http_options\.ssl_certfile"):
        AppArgs.load({"engine_kwargs": {"ssl_certfile": "a", "ssl_keyfile": "b"}})


@pytest.mark.parametrize("theirs", [None, "their.pem"])
def test_a_serve_that_runs_with_another_certificate_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, theirs: str | None
) -> None:
    from ray.serve.config import HTTPOptions

    from cluster.serve import launch

    found = HTTPOptions(port=8000, ssl_keyfile=theirs, ssl_certfile=theirs)
    monkeypatch.setattr(launch, "_serve_address", lambda: found)
    args = EngineArgs.load({"ssl_certfile": "own.pem", "ssl_keyfile": "own.pem"})
    with pytest.raises(ConfigError, match=theirs or "without a certificate"):
        launch._find_or_start_serve(args)
    scheme = "https" if theirs else "http"
    assert launch._find_or_start_serve(EngineArgs.load({})) == f"{scheme}://127.0.0.1:8000"
