"""/v1/files over a fake engine: uploads and what is wrong with them, lists, and the life of a file."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette import formparsers

from cluster.http import limits, uploads
from tests.cluster.http.test_batches import COMPLETIONS, Own, create, ended, jsonl, line, upload
from tests.support.fake_service import error_of, wait_for


def test_an_output_is_no_input(api: httpx2.Client) -> None:
    made = ended(api, create(api, jsonl(line("a")))["id"])["output_file_id"]
    body = {"input_file_id": made, "endpoint": COMPLETIONS, "completion_window": "24h"}
    response = api.post("/v1/batches", json=body)
    assert response.status_code == 400 and "batch_output" in error_of(response)["message"]


def test_files_are_listed_by_pages_and_deleted(own: Own, tmp_path: Path) -> None:
    with own(batch_dir=tmp_path / "new" / "folder").http() as http:
        assert http.get("/v1/files").json() == {
            "object": "list",
            "data": [],
            "first_id": None,
            "last_id": None,
            "has_more": False,
        }
        made = [upload(http, f"line {n}\n".encode()).json() for n in range(5)]
        assert made[0].keys() == {"id", "object", "bytes", "created_at", "filename", "purpose", "status"}
        assert (made[0]["bytes"], made[0]["filename"], made[0]["purpose"]) == (7, "in.jsonl", "batch")
        ids = [file["id"] for file in made]
        assert http.get("/v1/files").json()["data"] == made[::-1]
        page = http.get("/v1/files?limit=2&order=asc").json()
        assert ([file["id"] for file in page["data"]], page["has_more"]) == (ids[:2], True)
        page = http.get(f"/v1/files?limit=3&order=asc&after={page['last_id']}").json()
        assert ([file["id"] for file in page["data"]], page["has_more"]) == (ids[2:], False)
        assert http.get(f"/v1/files?limit=2&after={ids[2]}").json()["data"] == [made[1], made[0]]
        assert http.get("/v1/files?purpose=batch_output").json()["data"] == []
        assert http.get(f"/v1/files/{ids[3]}").json() == made[3]
        assert http.get(f"/v1/files/{ids[3]}/content").content == b"line 3\n"
        assert http.delete(f"/v1/files/{ids[3]}").json() == {"id": ids[3], "object": "file", "deleted": True}
        assert http.get(f"/v1/files/{ids[3]}").status_code == http.delete(f"/v1/files/{ids[3]}").status_code == 404
        folder = tmp_path / "new" / "folder"
        assert folder.stat().st_mode & 0o077 == (folder / "files").stat().st_mode & 0o077 == 0
        assert {path.name for path in (folder / "files").iterdir()} == {*ids} - {ids[3]}
        for query, words in (("limit=0", "greater than or equal to 1"), ("order=up", "asc"), ("limit=a", "integer")):
            response = http.get(f"/v1/files?{query}")
            assert (response.status_code, error_of(response)["param"]) == (400, query.partition("=")[0])
            assert words in error_of(response)["message"]


def test_an_uploaded_file_has_the_life_that_was_asked_for(api: httpx2.Client) -> None:
    asked = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "5000"}
    made = upload(api, b"a", **asked).raise_for_status().json()
    assert made["expires_at"] == made["created_at"] + 5000


@pytest.mark.parametrize(
    ("fields", "file", "param", "words"),
    [
        ({"purpose": "fine-tune"}, b"a", "purpose", "'batch'"),
        ({"purpose": ""}, b"a", "purpose", "'batch'"),
        ({"zeta": "1"}, b"a", "zeta", "unknown field"),
        ({}, b"", "file", "empty"),
        ({}, None, "file", "no field"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "5"}, b"a", "expires_after", "3600"),
        ({"expires_after[seconds]": "5000"}, b"a", "expires_after", "anchor"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "x"}, b"a", "expires_after", "integer"),
    ],
)
def test_a_wrong_upload_gets_an_error_and_leaves_nothing(
    own: Own, tmp_path: Path, fields: dict[str, str], file: bytes | None, param: str, words: str
) -> None:
    with own(batch_dir=tmp_path).http() as http:
        parts = [("purpose", (None, "batch")), *((name, (None, value)) for name, value in fields.items())]
        form: list[Any] = list(dict(parts).items())
        response = http.post("/v1/files", files=form + ([] if file is None else [("file", ("in.jsonl", file))]))
        assert (response.status_code, error_of(response)["param"]) == (400, param)
        assert words in error_of(response)["message"]
        assert list((tmp_path / "files").iterdir()) == [] and http.get("/v1/files").json()["data"] == []


# Starlette leaves the file of a form that ends early to the garbage collector, which closes it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_upload_that_is_no_form_or_too_large_is_refused(api: httpx2.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    response = api.post("/v1/files", json={"purpose": "batch"})
    assert response.status_code == 400 and "multipart/form-data" in error_of(response)["message"]
    part = b'--x\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
    purpose, file = part % (b"purpose", b"batch"), part % (b'file"; filename="a', b"a\n")
    for broken, words in (
        (b"a form", "Invalid multipart"),
        (b"--y\r\n", "Invalid multipart"),
        (b"--x\r\nX: " + b"y" * 9000, "Invalid multipart"),
        (b"--x\r\nX: y\r\n\r\na\r\n--x--", '"name" must be provided'),
        (purpose + part % (b"expires_after[anchor]", b"y" * 2000), "maximum size of 1KB"),
        (purpose * 5, "Too many fields"),
        (purpose + file + file, "Too many files"),
        (purpose, "ends before its last boundary"),
        (purpose + file, "ends before its last boundary"),
        (purpose + part % (b"file", b"a\n") + b"--x--", "send it as a file"),
        (file + part % (b'purpose"; filename="a', b"batch") + b"--x--", "Too many files"),
        (part % (b'purpose"; filename="a', b"batch") + b"--x--", "send it as text"),
    ):
        response = api.post("/v1/files", content=broken, headers={"Content-Type": "multipart/form-data; boundary=x"})
        assert response.status_code == 400 and words in error_of(response)["message"], broken
    assert api.post("/v1/files", content=file, headers={"Content-Type": "multipart/form-data"}).status_code == 400
    monkeypatch.setattr(uploads, "MAX_FILE_BYTES", 1 << 20)
    response = upload(api, b"x" * ((1 << 20) + 1))
    assert (response.status_code, error_of(response)["code"]) == (413, "file_too_large")


def test_an_upload_that_breaks_off_leaves_nothing(own: Own, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running, spooled = own(batch_dir=tmp_path), list[tempfile.SpooledTemporaryFile]()

    def spool(**options: Any) -> tempfile.SpooledTemporaryFile:
        spooled.append(tempfile.SpooledTemporaryFile(**options))  # noqa: SIM115 - Starlette closes it
        return spooled[-1]

    monkeypatch.setattr(formparsers, "SpooledTemporaryFile", spool)
    with socket.create_connection(("127.0.0.1", int(running.url.rsplit(":", 1)[1]))) as connection:
        head = "POST /v1/files HTTP/1.1\r\nHost: here\r\nContent-Length: 5000000\r\n"
        part = '--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + "y" * 3_000_000
        connection.sendall(f"{head}Content-Type: multipart/form-data; boundary=x\r\n\r\n{part}".encode())
        wait_for(lambda: len(spooled) > 0)
    wait_for(lambda: spooled[0].closed)
    with running.http() as http:
        assert http.get("/v1/files").json()["data"] == [] and not any((tmp_path / "files").iterdir())


def test_an_upload_may_be_larger_than_other_bodies(api: httpx2.Client) -> None:
    data = b"x" * (limits.MAX_BODY_BYTES + (1 << 20))
    made = upload(api, data).raise_for_status().json()
    assert made["bytes"] == len(data) and api.get(f"/v1/files/{made['id']}/content").content == data
    api.delete(f"/v1/files/{made['id']}").raise_for_status()
