"""The Serve configurations of the manifests on a real Ray: `dev-cpu`, and then `ha` applied over it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.deployments import START_S, answers, deploying, free_port, wait_for
from tests.support.manifests import MANIFESTS, needs_kubectl, serve_config, service_of

pytestmark = [needs_kubectl, pytest.mark.serve]


def adapted(overlay: str, port: int, keys: Path) -> dict[str, Any]:
    """Return an overlay's Serve configuration with what belongs to its pods replaced: the address, the mounted file."""
    config = serve_config(service_of(MANIFESTS / "overlays" / overlay))
    config["http_options"] |= {"host": "127.0.0.1", "port": port}
    [application] = config["applications"]
    application["args"]["engine_kwargs"]["api_key_file"] = str(keys)
    return config


def replica(url: str) -> str:
    """Return the id of the replica that a scrape reaches."""
    families = text_string_to_metric_families(httpx2.get(f"{url}/metrics", timeout=10).text)
    [only] = {sample.labels["replica"] for family in families for sample in family.samples}
    return only


def complete(url: str, key: str) -> httpx2.Response:
    body = {"prompt": "def add(a, b):", "max_tokens": 8, "temperature": 0, "return_speculative_stats": True}
    body["speculative"] = {"tree_prune": "off"}  # `auto` may know that drafts cost more than they gain here
    return httpx2.post(f"{url}/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=60)


def check_that_conversations_stay(url: str, key: str) -> None:
    """Hold conversations: turns find their prefix cached (half of them would by chance), stored responses are found."""
    num_found = 0
    with httpx2.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=60) as http:
        for n in range(6):
            messages = [{"role": "user", "content": f"Write function number {n}: it adds {n} numbers to a sum. " * 2}]
            # What is never drafted for shares every page: `auto` may not have fed the drafter with a short prompt.
            body = {"max_completion_tokens": 24, "temperature": 0, "speculative": {"enabled": False}}
            num_before = None
            for _ in range(3):
                answer = http.post("/v1/chat/completions", json=body | {"messages": messages}).raise_for_status().json()
                usage = answer["usage"]
                if num_before is not None:  # all full pages of 16 but the last one, which may end differently
                    num_found += usage["prompt_tokens_details"]["cached_tokens"] >= num_before - 2 * 16
                num_before = usage["prompt_tokens"]
                messages += [answer["choices"][0]["message"], {"role": "user", "content": "And now?"}]
            response = None
            for _ in range(3):
                body = {"input": f"Add {n}.", "max_output_tokens": 4, "previous_response_id": response}
                response = http.post("/v1/responses", json=body).raise_for_status().json()["id"]
            assert http.delete(f"/v1/responses/{response}").status_code == 200
    assert num_found >= 10, "of 12 turns; a busy node may miss the router's deadlines"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path, because Ray's sockets lie below it."""
    with TemporaryDirectory(prefix="m") as name:
        yield Path(name)


def test_dev_cpu_answers_and_ha_adds_a_replica_without_a_restart(folder: Path) -> None:
    keys, port = folder / "api-keys", free_port()
    keys.write_text("first\n")
    url = f"http://127.0.0.1:{port}"
    with deploying(folder) as apply:
        apply(adapted("dev-cpu", port, keys))
        wait_for(lambda: answers(url), START_S)
        first = replica(url)
        assert complete(url, "wrong").status_code == 401
        answer = complete(url, "first").raise_for_status().json()
        assert answer["usage"]["completion_tokens"] == 8 and answer["speculative"]["num_drafts"] > 0
        keys.write_text("second\n")
        assert (complete(url, "first").status_code, complete(url, "second").status_code) == (401, 200)

        apply(adapted("ha", port, keys))
        seen = {first}
        wait_for(lambda: not seen.add(replica(url)) and len(seen) == 2, START_S)
        assert len({replica(url) for _ in range(20)} | {first}) == 2, "the first replica stayed"
        assert all(complete(url, "second").status_code == 200 for _ in range(4))
        check_that_conversations_stay(url, "second")
