"""Extract the program from an answer: a fenced Markdown block of any form, a tag, or the whole text."""

from __future__ import annotations

import re

from megarl.rewards.answer.grammar import after_thinking

PYTHON = ("python", "python3", "py", "py3", "ipython", "ipython3", "pypy", "pypy3")
_FENCE = re.compile(
    r"^(?P<indent>[ \t]*)(?P<fence>`{3,}|~{3,})(?P<info>[^\n`]*)\n(?P<body>.*?)(?:^[ \t]*(?P=fence)|(?P<open>\Z))",
    re.DOTALL | re.MULTILINE,
)
_IN_SENTENCE = re.compile(
    rf"(?P<indent>)(?P<fence>```)[ \t]*(?P<info>{'|'.join(PYTHON)})[ \t]*\n(?P<body>.*?)(?:^[ \t]*```|(?P<open>\Z))",
    re.DOTALL | re.MULTILINE | re.IGNORECASE,
)
_QUOTED = re.compile(r"^> ?(?=\s*(?:```|~~~))", re.MULTILINE)
_LANGUAGE = re.compile(r"[ \t{.]*([\w+-]*)")
_TAGS = (("<answer>", "</answer>"), ("[PYTHON]", "[/PYTHON]"))


def extract(text: str) -> str:
    """Return the last fenced block marked as Python, else the last block, else the content of tags, else the whole
    text.

    Thoughts are ignored. A transcript (``>>>``) counts only if there is no other block.
    """
    text = after_thinking(text).replace("\r\n", "\n").replace("\ufeff", "")
    if _QUOTED.search(text):
        text = re.sub(r"^> ?", "", text, flags=re.MULTILINE)
    found = list(_FENCE.finditer(text)) or list(_IN_SENTENCE.finditer(text))
    blocks = [(_language(match), _body(match)) for match in found]
    programs = [block for block in blocks if not block[1].lstrip().startswith(">>>")] or blocks
    if programs:
        return next((body for language, body in reversed(programs) if language in PYTHON), programs[-1][1])
    for opening, closing in _TAGS:
        before, tag, _ = text.rpartition(closing)
        if tag:
            return before.rpartition(opening)[2]
    return text


def _language(match: re.Match[str]) -> str:
    named = _LANGUAGE.match(match["info"])
    return named[1].lower() if named else ""


def _body(match: re.Match[str]) -> str:
    """Remove the fence's indentation, and a closing fence at the end of the last line."""
    body = match["body"]
    if match["open"] is not None:
        body = re.split(rf"(?<=\S){re.escape(match['fence'])}[ \t]*$", body, maxsplit=1, flags=re.MULTILINE)[0]
    width = len(match["indent"])
    return re.sub(rf"^[ \t]{{1,{width}}}", "", body, flags=re.MULTILINE) if width else body
