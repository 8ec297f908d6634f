"""A running OpenAI-compatible server as an engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

from sparsekv.completions import Server, check

_DATA, _DONE = b"data:", b"[DONE]"


class HttpEngine(Server):
    """Completions of token ids, streamed. vocab: prompts are drawn from [2, vocab)."""

    def __init__(self, base_url: str, model: str | None, vocab: int, api_key: str | None) -> None:
        super().__init__(base_url, model, api_key)
        self.vocab = vocab

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
            await check(answer)
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
