"""A running OpenAI-compatible server as an engine. Needs aiohttp, which vLLM depends on."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from importlib import import_module
from typing import Any

_DATA, _DONE = b"data:", b"[DONE]"
_BODY = 200  # characters kept of an answer that is an error


class HttpEngine:
    """Completions of token ids, streamed.

    base_url: as in OpenAI's clients, with "/v1". model: as the server calls it; None: its first.
    vocab: prompts are drawn from [2, vocab). api_key: sent as the bearer.

    An async context: requests need `async with engine`. Raises ValueError if aiohttp is missing.
    """

    def __init__(self, base_url: str, model: str | None, vocab: int, api_key: str | None) -> None:
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
        self.base_url, self.model, self.vocab = base_url.rstrip("/"), model, vocab
        self.headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self.client: Any = None

    async def __aenter__(self) -> HttpEngine:
        """Open the connections, and ask for the model's name if none was given."""
        http = self.aiohttp
        self.client = http.ClientSession(
            headers=self.headers, connector=http.TCPConnector(limit=0),
            timeout=http.ClientTimeout(total=None), read_bufsize=1 << 20,
        )  # fmt: skip
        try:
            if self.model is None:
                async with self.client.get(f"{self.base_url}/models") as answer:
                    await _check(answer)
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

    async def generate(self, prompt: list[int], new: int) -> AsyncIterator[int]:
        """Numbers of new tokens as they come.

        A piece of the stream counts as one token; what the usage at the end has more, or fewer, is
        added to the last.
        """
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": new, "temperature": 0,
            "stream": True, "stream_options": {"include_usage": True},
            "ignore_eos": True, "min_tokens": new,
        }  # fmt: skip
        counted, total = 0, None
        async with self.client.post(f"{self.base_url}/completions", json=body) as answer:
            await _check(answer)
            async for line in answer.content:
                if not line.startswith(_DATA) or (text := line[len(_DATA) :].strip()) == _DONE:
                    continue
                piece = json.loads(text)
                if "error" in piece:
                    raise RuntimeError(f"the server says {piece['error']}")
                if piece.get("usage"):
                    total = piece["usage"]["completion_tokens"]
                if piece["choices"]:
                    counted += 1
                    yield 1
        if total is not None and total != counted:
            yield total - counted


async def _check(answer: Any) -> None:
    if answer.status != 200:
        text = " ".join((await answer.text()).split())[:_BODY]
        raise RuntimeError(f"HTTP {answer.status}: {text}")
