"""Pages of the documentation site that are not in docs/, and its navigation, which is the README's table."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
OTHERS = {"README.md": "index.md", "ARCHITECTURE.md": "architecture.md", "CONTRIBUTING.md": "contributing.md",
          "CHANGELOG.md": "changelog.md"}  # fmt: skip
"""Files beside docs/ -> pages."""
API = "api.md"
ROW = re.compile(r"^\| ([a-z][a-z ]+) \| (\[.*) \|$", re.M)
LINK = re.compile(r"\[([^]]+)\]\(([^)\s]+)\)")
IMPORT = re.compile(r"^from (megarl[\w.]*) import (.+)$", re.M)


def page_of(target: str, folder: Path) -> str | None:
    """Return the page of a link, relative to docs/, anchor included; None for a file that is no page.

    Args:
        folder: Of the page that links, in the repository.
    """
    path, hash_, anchor = target.partition("#")
    file = (folder / path).resolve().relative_to(ROOT)
    if str(file) in OTHERS:
        return OTHERS[str(file)] + hash_ + anchor
    return f"{file.relative_to('docs')}{hash_}{anchor}" if file.parts[0] == "docs" else None


def with_links(text: str, folder: Path, depth: int) -> str:
    """Return a page with links to pages of the site; other files of the repository are shown by name."""

    def link(match: re.Match[str]) -> str:
        label, target = match.groups()
        if "://" in target or target.startswith("#"):
            return match[0]
        page = page_of(target, folder)
        if page is not None:
            return f"[{label}]({'../' * depth}{page})"
        file = (folder / target).resolve().relative_to(ROOT)
        return label if label.strip("`") == str(file) else f"{label} (`{file}`)"

    return LINK.sub(link, text)


def public_names() -> dict[str, set[str]]:
    """Return what pages, examples and configs import from megarl: module -> names. This is the public API."""
    found: dict[str, set[str]] = {}
    files = [ROOT / "README.md", *DOCS.rglob("*.md")]
    for folder in ("examples", "configs"):
        files += (ROOT / folder).rglob("*.py")
    for file in files:
        for module, names in IMPORT.findall(file.read_text()):
            found.setdefault(module, set()).update(name.strip() for name in names.split("#")[0].split(","))
    return found


def api_page() -> str:
    """Return the page of the public API."""
    names = sorted(f"{module}.{name}" for module, names in public_names().items() for name in names)
    head = (
        "# Public API\n\n"
        "Public are [commands](commands.md), [settings](settings.md), [metrics](metrics.md), files of a run and of its "
        "[checkpoints](checkpoints.md), and the names below, which pages and examples import. The "
        "[changes](changelog.md) name each change of them; before version 1.0 a release may make one. Everything else "
        "may change without notice.\n\n"
    )
    return head + "\n\n".join(f"::: {name}" for name in names) + "\n"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make the navigation of the README's table."""
    nav: list[Any] = [{"Home": "index.md"}]
    listed = {"index.md", API}
    for title, links in ROW.findall((ROOT / "README.md").read_text()):
        pages: list[dict[str, str]] = []
        for label, target in LINK.findall(links):
            page = page_of(target.partition("#")[0], ROOT)
            if page is not None and page not in listed:
                listed.add(page)
                pages.append({label[0].upper() + label[1:]: page})
        nav.append({title[0].upper() + title[1:]: pages})
    rest = sorted({str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} - listed)
    measured = {"Measured": [page for page in rest if "/" in page]}
    nav.append({"More": [{"Public API": API}, *(page for page in rest if "/" not in page), measured]})
    config.nav = nav
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    for source, page in OTHERS.items():
        text = with_links((ROOT / source).read_text(), ROOT, 0)
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, API, content=api_page()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Correct links to files outside docs/."""
    if page.file.src_uri in {*OTHERS.values(), API}:
        return markdown
    source = DOCS / page.file.src_uri
    return with_links(markdown, source.parent, page.file.src_uri.count("/"))
