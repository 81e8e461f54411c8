"""Two fronts before a fake engine: processes and sockets as in a service, which count as one."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from cluster.convert import read_engine, with_tokenizer
from cluster.engine.engine_client import EngineClient
from cluster.fronts import Fronts
from cluster.system.listening import listening_sockets
from secateur.config import EngineArgs
from tests.support.fake_engine import FakeEngine
from tests.support.fake_service import wait_for

PENDING = 8
"""Requests that an engine with one place holds."""
BODY = {"prompt": [5], "max_tokens": 400}


class Running:
    """The service."""

    def __init__(self, folder: Path) -> None:
        keys = folder / "keys"
        keys.write_text("free name=free\nfive name=five requests-per-minute=5\nfew name=few tokens-per-minute=40\n")
        given = {"device": "cpu", "max_num_seqs": 1, "api_key_file": str(keys), "shutdown_timeout": 10, "seed": 7}
        self.args = EngineArgs.load({**given, "api_server_count": 2, "hang_timeout": 2})
        self.config, self.tokenizer = with_tokenizer(self.args, read_engine(self.args, num_gpus=0)[0])
        self.socks = listening_sockets("127.0.0.1", 0, 2)
        self.url = f"http://127.0.0.1:{self.socks[0].getsockname()[1]}"
        self.engine: FakeEngine
        self.fronts: Fronts
        self._address = f"unix:{folder}/engine.sock"
        self._up, self._failure = threading.Event(), list[BaseException]()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        assert self._up.wait(200) and not self._failure, self._failure

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._failure.append(error)
            self._up.set()

    async def _serve(self) -> None:
        client = EngineClient()
        self.engine = FakeEngine(await client.listen(self._address), lambda own: [[5]] * own.max_tokens)
        await client.wait_ready(60)
        self.fronts = Fronts(self.args, self.config, client, self.socks)
        await self.fronts.serve(self._up.set)
        await client.close()
        self.engine.die()

    def http(self, key: str = "free") -> httpx2.Client:
        """Return a client of one connection, which one front has."""
        limits = httpx2.Limits(max_connections=1)
        headers = {"authorization": f"Bearer {key}"}
        return httpx2.Client(base_url=self.url, timeout=100, headers=headers, limits=limits, trust_env=False)

    @contextmanager
    def one_each(self) -> Iterator[dict[int, httpx2.Client]]:
        """Yield a client of each front, by the front's process."""
        found: dict[int, httpx2.Client] = {}
        while len(found) < 2:
            http = self.http()
            pid = http.get("/server_info").json()["front"]["pid"]
            if found.setdefault(pid, http) is not http:
                http.close()
        yield found
        for http in found.values():
            http.close()

    def post(self, key: str = "free", **body: Any) -> httpx2.Response:
        with self.http(key) as http:
            return http.post("/v1/completions", json={**BODY, **body})


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(tmp_path_factory.mktemp("f"))
    yield running
    running.fronts.should_exit = True
    running.thread.join(60)
    assert not running.thread.is_alive()


def total(text: str, name: str) -> float:
    return sum(float(value) for value in re.findall(rf"^secateur_{name}{{[^}}]*}} (\S+)", text, re.MULTILINE))


def test_a_limit_of_requests_is_that_of_all_fronts(service: Running) -> None:
    service.engine.hold.set()
    before = len(service.engine.submitted)
    with ThreadPoolExecutor(24) as pool:
        asked = [pool.submit(service.post, max_tokens=2) for _ in range(24)]
        wait_for(lambda: sum(each.done() for each in asked) == 24 - PENDING)
        assert len(service.engine.submitted) - before == PENDING
        with service.one_each() as clients:
            assert [http.get("/load").json() for http in clients.values()] == [{"server_load": PENDING}] * 2
        service.engine.hold.clear()
        assert sorted(each.result().status_code for each in asked) == [200] * PENDING + [429] * (24 - PENDING)
    ids = {own.id % 64 for own in service.engine.submitted[before:]}
    seeds = {own.sampling.seed for own in service.engine.submitted[before:]}
    assert ids == {1, 2} and len(seeds) == PENDING, "both fronts had some, and no seed came twice"


def test_rate_limits_are_those_of_all_fronts(service: Running) -> None:
    answers = [service.post("five", max_tokens=1).status_code for _ in range(12)]
    assert answers == [200] * 5 + [429] * 7
    answers = [service.post("few", max_tokens=60).status_code for _ in range(6)]
    assert answers == [200] + [429] * 5


def test_every_front_sees_stored_responses_and_a_scrape_sums_up_all(service: Running) -> None:
    with service.one_each() as clients:
        first, second = clients.values()
        before = total(first.get("/metrics").text, "request_success_total")
        made = first.post("/v1/responses", json={"input": "hi", "max_output_tokens": 4}).json()
        assert second.get(f"/v1/responses/{made['id']}").json() == made
        again = {"input": "more", "max_output_tokens": 4, "previous_response_id": made["id"]}
        assert second.post("/v1/responses", json=again).status_code == 200
        assert second.delete(f"/v1/responses/{made['id']}").json()["deleted"]
        assert first.get(f"/v1/responses/{made['id']}").status_code == 404
        texts = [http.get("/metrics").text for http in clients.values()]
        assert [total(text, "request_success_total") for text in texts] == [before + 2] * 2
        wait_for(lambda: total(first.get("/metrics").text, "client_requests_running") == 0)
        assert total(texts[0], "process_resident_memory_bytes") == 0 and "process_open_fds" in texts[0]


def test_a_front_that_dies_takes_its_own_streams_along_and_is_started_again(service: Running) -> None:
    def text_of(http: httpx2.Client) -> str:
        with http.stream("POST", "/v1/completions", json={**BODY, "max_tokens": 6, "stream": True}) as response:
            return "".join(response.iter_text())

    service.engine.hold.set()
    before, aborted = len(service.engine.submitted), len(service.engine.aborted)
    with service.one_each() as clients, ThreadPoolExecutor(2) as pool:
        streams = {pid: pool.submit(text_of, http) for pid, http in clients.items()}
        wait_for(lambda: len(service.engine.submitted) == before + 2)
        killed, kept = streams
        os.kill(killed, signal.SIGKILL)
        with pytest.raises(httpx2.HTTPError):
            streams[killed].result(60)
        service.engine.hold.clear()
        whole = streams[kept].result(60)
        assert '"finish_reason":"length"' in whole and "data: [DONE]" in whole
        wait_for(lambda: len(service.engine.aborted) == aborted + 1)
    with service.one_each() as clients:
        assert killed not in clients and kept in clients
        assert [http.post("/v1/completions", json=BODY).status_code for http in clients.values()] == [200] * 2


def test_a_front_that_is_stopped_for_long_is_started_again(service: Running) -> None:
    with service.one_each() as clients:
        stopped, kept = clients
        os.kill(stopped, signal.SIGSTOP)
        wait_for(lambda: not Path(f"/proc/{stopped}").exists())
        assert clients[kept].post("/v1/completions", json=BODY).status_code == 200
    with service.one_each() as clients:
        assert stopped not in clients and kept in clients
        assert [http.post("/v1/completions", json=BODY).status_code for http in clients.values()] == [200] * 2


def test_a_lost_engine_is_found_again_and_its_requests_go_on(service: Running) -> None:
    service.engine.hold.set()
    before = len(service.engine.submitted)
    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(service.post, max_tokens=3) for _ in range(6)]
        wait_for(lambda: len(service.engine.submitted) == before + 6)
        for other in list(service.engine.sockets._others.values()):  # as if they had not read for long
            other._sock.shutdown(2)
        service.engine.hold.clear()
        assert [each.result().status_code for each in asked] == [200] * 6


def test_running_answers_end_before_the_fronts_do(tmp_path: Path, service: Running) -> None:
    service.engine.hold.set()
    before = len(service.engine.submitted)
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(service.post, max_tokens=3) for _ in range(4)]
        wait_for(lambda: len(service.engine.submitted) == before + 4)
        service.fronts.should_exit = True
        wait_for(lambda: service.socks[0].fileno() < 0)
        service.engine.hold.clear()
        assert [each.result().status_code for each in asked] == [200] * 4
    service.thread.join(60)
    assert all(process.poll() is not None for process in service.fronts._running.values())
    assert not service.fronts._folder.path.exists()
