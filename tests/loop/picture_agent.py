"""An agent that asks with pictures, by the openai package: of the task's, of it upside down, and of it again."""

from __future__ import annotations

import base64
import io
from typing import Any

import openai
from PIL import Image


def turned(image: bytes) -> bytes:
    """The file of a picture upside down."""
    file = io.BytesIO()
    Image.open(io.BytesIO(image)).rotate(180).save(file, "PNG")
    return file.getvalue()


async def run(base_url: str, prompt: list[Any], request_kwargs: dict[str, Any], metadata: dict[str, Any]) -> float:
    client = openai.AsyncOpenAI(base_url=base_url, api_key="none")
    [first] = [part for part in prompt[0]["content"] if part["type"] == "image_url"]
    image = base64.b64decode(first["image_url"]["url"].partition(",")[2])
    data = base64.b64encode(turned(image)).decode()
    other = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    messages, score = list(prompt), 0.0
    for content in ([other], [{"type": "text", "text": "And now?"}, first], None):
        reply = (await client.chat.completions.create(messages=messages, **request_kwargs)).choices[0].message
        score += float((reply.content or "").strip() == str(metadata["ground_truth"]))
        messages += [reply, {"role": "user", "content": content}]
    return score
