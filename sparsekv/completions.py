"""A running OpenAI-compatible server. Needs aiohttp, which vLLM depends on."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

_BODY = 200  # characters kept of an answer that is an error
Self = TypeVar("Self", bound="Server")


class Completion(NamedTuple):
    """What was generated: token ids and text."""

    ids: list[int]
    text: str


class Server:
    """Completions of token ids.

    base_url: as in OpenAI's clients, with "/v1". model: as the server calls it; None: its first.
    api_key: sent as the bearer.

    An async context: requests need `async with server`. Raises ValueError if aiohttp is missing.
    """

    def __init__(self, base_url: str, model: str | None, api_key: str | None) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(
                f"expected --base-url to start with http:// or https://, got {base_url!r}"
            )
        try:
            self.aiohttp: Any = import_module("aiohttp")
        except ImportError as error:
            raise ValueError(
                f"expected aiohttp for --base-url (pip install aiohttp), got {error}"
            ) from error
        self.base_url, self.model = base_url.rstrip("/"), model
        self.headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self.client: Any = None

    async def __aenter__(self: Self) -> Self:
        """Open the connections, and ask for the model's name if none was given."""
        http = self.aiohttp
        self.client = http.ClientSession(
            headers=self.headers, connector=http.TCPConnector(limit=0),
            timeout=http.ClientTimeout(total=None), read_bufsize=1 << 20,
        )  # fmt: skip
        try:
            if self.model is None:
                async with self.client.get(f"{self.base_url}/models") as answer:
                    await check(answer)
                    self.model = (await answer.json())["data"][0]["id"]
        except BaseException as error:
            await self.client.close()
            if isinstance(error, http.ClientError):
                raise ValueError(f"expected a server at {self.base_url}, got {error}") from error
            raise
        return self

    async def __aexit__(self, *error: Any) -> None:
        """Close the connections."""
        await self.client.close()

    async def complete(self, prompt: Sequence[int], new: int, **more: Any) -> Completion:
        """Greedy tokens after `prompt`, at most `new`. more: fields of the request.

        Raises:
            RuntimeError: the server refuses, or does not say which tokens it generated.
        """
        body = {
            "model": self.model, "prompt": list(prompt), "max_tokens": new, "temperature": 0,
            "return_token_ids": True, **more,
        }  # fmt: skip
        async with self.client.post(f"{self.base_url}/completions", json=body) as answer:
            await check(answer)
            choice = (await answer.json())["choices"][0]
        if choice.get("token_ids") is None:
            raise RuntimeError(
                "expected a server that knows return_token_ids, such as vLLM's, got an answer "
                "without token_ids"
            )
        return Completion(choice["token_ids"], choice["text"])


async def check(answer: Any) -> None:
    """RuntimeError with what the server says, unless all is well."""
    if answer.status != 200:
        text = " ".join((await answer.text()).split())[:_BODY]
        raise RuntimeError(f"HTTP {answer.status}: {text}")
