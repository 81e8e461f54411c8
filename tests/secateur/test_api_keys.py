"""The lines of a file of API keys."""

from __future__ import annotations

import pytest

from secateur.api_keys import ApiKey, parse_api_keys
from secateur.errors import ConfigError


def test_a_line_has_a_key_and_settings() -> None:
    text = "# ours\nfirst\n\n  second name=team-a tokens-per-minute=20 requests-per-minute=6\r\n#third name=x\nfirst\n"
    assert parse_api_keys(text, "keys") == (
        ApiKey(key="first"),
        ApiKey(key="second", name="team-a", requests_per_minute=6, tokens_per_minute=20),
        ApiKey(key="#third", name="x"),
    )


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("s3cret part", "has spaces within a key, or a setting without '='"),
        ("s3cret part=1", "has an unknown setting (valid: name, requests-per-minute, tokens-per-minute)"),
        ("s3cret requests-per-minute=0", "has a wrong requests-per-minute; write a whole number of at least 1"),
        ("s3cret tokens-per-minute=1e3", "has a wrong tokens-per-minute"),
        ("s3cret tokens-per-minute=-1", "has a wrong tokens-per-minute"),
        ("s3cret tokens-per-minute=", "has a wrong tokens-per-minute"),
        ("s3cret name=Team", "has a wrong name; write 1 to 32 of a-z"),
        ("s3cret name=", "has a wrong name"),
        ("s3cret name=a name=b", "has name twice"),
        ("k3y name=a", "repeats an earlier key with other settings"),
    ],
)
def test_a_wrong_line_is_named_without_its_key(line: str, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_api_keys(f"k3y\n\n{line}\n", "keys")
    message = str(refused.value)
    assert f"line 3 of keys {told}" in message
    assert not {"s3cret", "part", "k3y"} & set(message.replace("=", " ").split())


def test_a_key_is_not_shown() -> None:
    assert "s3cret" not in repr(ApiKey(key="s3cret"))
