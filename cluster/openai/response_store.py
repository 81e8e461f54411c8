"""Stored responses, and the conversations that later requests continue."""

from __future__ import annotations

import json
import pickle
import sqlite3
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from sys import getsizeof
from typing import Any, Literal, Self

from cluster.errors import not_found
from secateur.responses_api import InputItem, InputItems, ListedItem, ResponseObject, ResponsesRequest

MAX_STORED, MAX_STORED_BYTES = 1024, 64 << 20
_BUSY_S = 30.0
"""How long a front waits for others that write."""
_ENTRY_BYTES = 256
"""At least what a response takes in the store's table."""
_SCORES = {"content": {"__all__": {"logprobs"}}}
"""No later request needs these fields of an item."""

Items = tuple[tuple[str, bytes], ...]
"""Ids, and items as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """A response, and the conversation up to it, without instructions. All is JSON: its memory is its size."""

    id: str
    owner: str | None
    """The API key that made it, as `Service.owner` names it; None = the service has no keys."""
    response: bytes
    messages: bytes
    input: Items
    output: Items

    @classmethod
    def of(
        cls, owner: str | None, body: ResponsesRequest, history: list[dict[str, Any]], response: ResponseObject
    ) -> Self:
        """Return what to keep of a response."""
        messages = [*history, *body.messages(), response.message()]
        input = [ListedItem.of(item) for item in body.items()]
        return cls(
            id=response.id,
            owner=owner,
            response=response.model_dump_json().encode(),
            messages=json.dumps(messages, ensure_ascii=False).encode(),
            input=tuple((item.id, item.model_dump_json().encode()) for item in input),
            output=tuple((item.id, item.model_dump_json(exclude=_SCORES).encode()) for item in response.output),
        )

    @property
    def num_bytes(self) -> int:
        """The memory that it takes."""
        items = self.input + self.output
        parts = chain((self, self.id, self.response, self.messages, self.input, self.output), items, *items)
        return _ENTRY_BYTES + sum(map(getsizeof, parts))


class _Memory:
    """Responses in the order in which they came."""

    def __init__(self) -> None:
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._num_bytes = 0

    def get(self, id: str) -> StoredResponse | None:
        return self._stored.get(id)

    def of(self, owner: str | None) -> Iterator[StoredResponse]:
        return (stored for stored in self._stored.values() if stored.owner == owner)

    def put(self, stored: StoredResponse) -> None:
        self._stored[stored.id] = stored
        self._num_bytes += stored.num_bytes
        while len(self._stored) > MAX_STORED or self._num_bytes > MAX_STORED_BYTES:
            self.delete(next(iter(self._stored)))

    def delete(self, id: str) -> None:
        self._num_bytes -= self._stored.pop(id).num_bytes


class _File:
    """The same in a file that fronts share."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)
        self._db.execute("PRAGMA synchronous = OFF")  # the file ends with the service
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS stored "
            "(seq INTEGER PRIMARY KEY, id TEXT UNIQUE, owner TEXT, num_bytes INTEGER, response BLOB)"
        )

    def get(self, id: str) -> StoredResponse | None:
        return next(self._read("id = ?", id), None)

    def of(self, owner: str | None) -> Iterator[StoredResponse]:
        return self._read("owner IS ?", owner)

    def put(self, stored: StoredResponse) -> None:
        row = stored.id, stored.owner, stored.num_bytes, pickle.dumps(stored)
        self._db.execute("INSERT INTO stored (id, owner, num_bytes, response) VALUES (?, ?, ?, ?)", row)
        self._db.execute(
            "DELETE FROM stored WHERE seq NOT IN (SELECT seq FROM (SELECT seq, row_number() OVER latest AS num, "
            "sum(num_bytes) OVER latest AS size FROM stored WINDOW latest AS (ORDER BY seq DESC)) "
            "WHERE num <= ? AND size <= ?)",
            (MAX_STORED, MAX_STORED_BYTES),
        )

    def delete(self, id: str) -> None:
        self._db.execute("DELETE FROM stored WHERE id = ?", (id,))

    def _read(self, where: str, value: str | None) -> Iterator[StoredResponse]:
        for (text,) in self._db.execute(f"SELECT response FROM stored WHERE {where} ORDER BY seq", (value,)):
            yield pickle.loads(text)


class ResponseStore:
    """The latest responses of a service; the oldest give way. An owner sees its own alone.

    path: of the file in which the fronts of an engine share them; None = in the memory of this process.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._stored = _Memory() if path is None else _File(path)

    def get(self, id: str, owner: str | None, *, param: str | None = None) -> StoredResponse:
        """Return a stored response. Raises HttpError (404)."""
        found = self._stored.get(id)
        if found is None or found.owner != owner:
            raise not_found(
                f"Response with id {id!r} not found: this replica keeps the latest {MAX_STORED} in memory, if store is "
                "true",
                param=param,
            )
        return found

    def put(self, stored: StoredResponse) -> None:
        """Keep a response, unless it alone is more than there is room for."""
        if stored.num_bytes <= MAX_STORED_BYTES:
            self._stored.put(stored)

    def delete(self, id: str, owner: str | None) -> None:
        """Forget a response. Raises HttpError (404)."""
        self.get(id, owner)
        self._stored.delete(id)

    def history(self, id: str | None, owner: str | None) -> list[dict[str, Any]]:
        """Return the conversation that a `previous_response_id` names. Raises HttpError (404)."""
        if id is None:
            return []
        messages: list[dict[str, Any]] = json.loads(self.get(id, owner, param="previous_response_id").messages)
        return messages

    def resolve(self, body: ResponsesRequest, owner: str | None) -> ResponsesRequest:
        """Return a request with stored items in the place of references to them. Raises HttpError (404)."""
        items = body.items()
        wanted = {item.id for item in items if item.type == "item_reference"}
        found: dict[str | None, InputItem] = {}
        for stored in self._stored.of(owner) if wanted else ():
            for id, text in chain(stored.input, stored.output):
                if id in wanted and id not in found:  # an item keeps the content that it was stored with
                    found[id] = InputItem.model_validate_json(text)
        if missing := wanted - found.keys():
            first = next(item.id for item in items if item.id in missing)
            raise not_found(
                f"there is no item {first!r}; this replica keeps those of the latest {MAX_STORED} responses in "
                "memory, if store is true; send the item itself (some clients do so once store is false)",
                param="input",
            )
        resolved = [found[item.id] if item.type == "item_reference" else item for item in items]
        return body.model_copy(update={"input": resolved})

    def input_items(
        self, id: str, owner: str | None, *, limit: int, after: str | None, order: Literal["asc", "desc"]
    ) -> InputItems:
        """Return a page of a response's input, behind the item `after`. Raises HttpError (404)."""
        items = self.get(id, owner).input[:: 1 if order == "asc" else -1]
        if after is not None:
            ids = [item for item, _ in items]
            if after not in ids:
                raise not_found(f"the input of response {id!r} has no item {after!r}", param="after")
            items = items[ids.index(after) + 1 :]
        return InputItems.page([ListedItem.model_validate_json(text) for _, text in items[: limit + 1]], limit)
