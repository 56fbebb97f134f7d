"""Marks around a final answer: announcements ("Final answer:", "Ans.") and decoration (✅, ∎, bold)."""

from __future__ import annotations

import re

NAMES = r"\bans(?:wers?\b|\b\.?)"
"""Names of a final answer before a sign of ``SIGNS``."""
SIGNS = r":|：|=|[→⇒➜➔⟶⟹]|->|=>|\$?\\(?:to|rightarrow|Rightarrow|implies)(?![a-zA-Z])\$?|(?<=\s)[-–—](?=\s)"
_BOLD = r"(?:\*\*|__|[*_])?"
_CHINESE = r"(?:正确|最终|最后)?的?(?:答案|结果)"
LINE = re.compile(
    rf"(?:[\[(【「][*_]*)?(?:\b(?:final|correct)\s+)?(?:{NAMES}{_BOLD}\s*(?:{SIGNS})|\bans\.(?=\s*[\d$\\(*-])|{_CHINESE}{_BOLD}\s*[:：])"
    rf"\s*{_BOLD}",
    re.IGNORECASE,
)
"""Start of an ``Answer:`` line, with the bracket of ``[Answer: 73]``."""

PICTURES = r"[\U0001F300-\U0001FAFF\u2B50\u2728\u2B55\u26A1\uFE0F\u2764]"
CHECKS = r"[✅✓✔☑]"
_ENDS = r"\\(?:blacksquare|qedsymbol|qed|square|Box|checkmark)(?![a-zA-Z])|[∎■□◼▪]|\bQ\.?E\.?D\b\.?"
_DECORATION = re.compile(
    rf"(?:\s*(?:(?<=[\s.$*)}}\]。])(?:\$\$?\s*(?:{_ENDS})\s*\$\$?|\\\(\s*(?:{_ENDS})\s*\\\)|{_ENDS})"
    rf"|(?<![,;、，；])(?:{PICTURES}|{CHECKS})))+\s*$"
)
_LEADING = re.compile(rf"^(?:(?:{PICTURES}|{CHECKS}|[👉➡▶])\s*)+(?=[^\s,;、，；])")
_HEADINGS = """step part case solution explanation verification check conclusion method approach reasoning analysis
problem summary given final answer result"""
HEADING = re.compile(
    rf"[\s*]*(?:\d+[.)]\s*)?(?:{'|'.join(_HEADINGS.split())})\b(?:\s+(?:\d+|answer|result|[A-Z]))?[\s*]*(?:[:：].*|$)",
    re.IGNORECASE,
)
"""Text of a ``####`` line that is a section heading, not an answer."""
_BOLD_WORDS = re.compile(r"(?<![\w)*])\*\*(?=[^\s*])([^*\n]*[^\s*])\*\*(?![\w(*])")


def undecorated(text: str) -> str:
    """Remove check marks, pictures and proof ends from the end of a text. Several check marks are kept: they may be
    answers."""
    if not text or text[-1] in "0123456789}abcdefghijklmnopqrstuvwxyz" and not text.endswith(_ENDINGS):
        return text
    if (found := _DECORATION.search(text[-80:])) is None:
        return text
    rest = text[: len(text) - len(found.string) + found.start()]
    return rest if rest.strip(" $*\\([") and not re.search(CHECKS, rest) else text


_ENDINGS = ("square", "qed", "qedsymbol", "checkmark")


def unled(text: str) -> str:
    """Remove check marks and pictures from the start of a text."""
    return _LEADING.sub("", text) if text and text[0] > "\u2000" and not re.search(CHECKS, text[1:]) else text


_TAGS = re.compile(r"\[(/?)ANSWER\]|<(/?)final(?:_answer)?>", re.IGNORECASE)
_CLOSED = re.compile(r"\[/ANSWER\]|</final(?:_answer)?>", re.IGNORECASE)


def with_answer_tags(text: str) -> str:
    """Rewrite ``[ANSWER]…[/ANSWER]`` and ``<final>…</final>`` as ``<answer>…</answer>``."""
    if "/" not in text or not _CLOSED.search(text):
        return text
    return _TAGS.sub(lambda tag: f"<{tag[1] or tag[2] or ''}answer>", text)


_ALIGNED = re.compile(r"\s*\\begin\{(aligned|gathered|split)\}(.*)\\end\{\1\}\s*", re.DOTALL)


def unaligned(text: str) -> str:
    """Remove an environment of formulas around a text's only line."""
    found = _ALIGNED.fullmatch(text) if r"\begin" in text else None
    return found[2].replace("&", "").strip() if found and r"\\" not in found[2] else text


_QUOTED = re.compile(r"""\s*(?:"([^"]+)"|'([^']+)'|“([^“”]+)”|‘([^‘’]+)’|「([^「」]+)」|`([^`]+)`)\s*+[.。]?\s*+""")


def unquoted(text: str) -> str:
    """Remove quotation marks around a whole text, and the brackets of ``['73']``."""
    if text[:2] in ("['", '["') and text.endswith(("']", '"]')):
        text = text[1:-1]
    quoted = _QUOTED.fullmatch(text) if text and text[0] in "\"'“‘「`" else None
    return text if quoted is None else str(quoted[quoted.lastindex or 0]).strip()


def asks(text: str) -> bool:
    """Return True if a text ends as a question, which is not an answer: ``73?``."""
    return text.rstrip(" $*_\"'”’)]】}.\\").endswith(("?", "？"))


_OPENED = re.compile(r"([\[(【「])\s*[*_]*(?:(?:the|my|final|correct)\s+)*[*_]*$", re.IGNORECASE)
_CLOSING = {"[": "]", "(": ")", "【": "】", "「": "」"}


def unbracketed(before: str, answer: str) -> str:
    """Return ``73`` for "[Answer: 73]", if ``before`` ends with the bracket that ``answer`` closes."""
    opened = _OPENED.search(before[-40:])
    head, closing, rest = answer.rpartition(_CLOSING[opened[1]]) if opened else ("", "", "")
    return head.strip() if closing and not rest.strip(" .。*_") else answer


_ROW = re.compile(
    rf"^[ \t]*\|[ \t]*{_BOLD}(?:the[ \t]+)?(?:(?:final|correct)[ \t]+)?(?:answer|result|{_CHINESE})"
    rf"[ \t]*[:：]?{_BOLD}[ \t]*\|"
    r"[ \t]*+([^|\n]{0,400}[^|\s])[ \t]*+\|?[ \t]*+$(?!\n[ \t]*\|[ \t]*:?--)",
    re.IGNORECASE | re.MULTILINE,
)


_COLUMN = re.compile(
    rf"^[ \t]*\|[ \t]*{_BOLD}(?:(?:final|correct)[ \t]+)?(?:answer|{_CHINESE}){_BOLD}[ \t]*\|[ \t]*+\n"
    r"[ \t]*\|[ \t:-]{2,80}\|[ \t]*+\n[ \t]*\|[ \t]*+([^|\n]{0,400}[^|\s])[ \t]*+\|[ \t]*+$(?!\n[ \t]*\|)",
    re.IGNORECASE | re.MULTILINE,
)
"""Table of one column and one row."""


def without_tables(text: str) -> str:
    """Rewrite each table row ``| Answer | 73 |`` as the line ``Answer: 73``; a table's head stays."""
    return _ROW.sub(r"Answer: \1", _COLUMN.sub(r"Answer: \1", text))


_HTML = re.compile(r"</?(?:b|strong|i|em|u|p|span|div|h[1-6])>", re.IGNORECASE)


def without_html(text: str) -> str:
    """Remove plain HTML tags if one is closed: ``a<b>c`` is unchanged."""
    return _HTML.sub("", text) if "</" in text else text


def without_bold(text: str) -> str:
    """Remove bold marks from a line; ``2**3`` is a power."""
    return _BOLD_WORDS.sub(r"\1", text) if "**" in text else text
