"""The admin routes without an engine: who may use them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from secateur.config import EngineArgs
from secateur.errors import ConfigError
from tests.support.fake_service import FakeService, error_of


def test_without_an_admin_key_the_route_says_what_to_set(own: Callable[..., FakeService]) -> None:
    with own(api_key="user").http(headers={"Authorization": "Bearer user"}) as http:
        answers = http.post("/admin/drafter", json={"model": None}), http.get("/admin/drafter")
    for refused in answers:
        assert refused.status_code == 404 and "--admin-api-key" in error_of(refused)["message"]


@pytest.mark.parametrize("key", ["", "Bearer user", "Bearer", "boss"])
def test_no_other_key_opens_it(own: Callable[..., FakeService], key: str) -> None:
    with own(api_key="user", admin_api_key="boss").http(headers={"Authorization": key}) as http:
        answers = http.post("/admin/drafter", json={"model": None}), http.get("/admin/drafter")
    for refused in answers:
        assert refused.status_code == 401 and error_of(refused)["code"] == "invalid_api_key"


def test_the_admin_key_opens_nothing_else(own: Callable[..., FakeService]) -> None:
    with own(api_key="user", admin_api_key="boss").http(headers={"Authorization": "Bearer boss"}) as http:
        assert http.get("/v1/models").status_code == 401
        assert http.post("/admin/drafter", json={"model": None}).status_code == 400, "no head was swapped"
        for steps in (-1, 1_000_001, "10"):
            refused = http.post("/admin/drafter", json={"model": "x", "canary_steps": steps})
            assert refused.status_code == 400 and error_of(refused)["param"] == "canary_steps"


def test_an_admin_key_is_a_key_of_its_own() -> None:
    for keys in ({"admin_api_key": " "}, {"admin_api_key": "one", "api_key": "one"}):
        with pytest.raises(ConfigError, match="admin_api_key: is empty or the api_key"):
            EngineArgs.load(keys)
    assert "boss" not in repr(EngineArgs.load({"admin_api_key": "boss"}))
