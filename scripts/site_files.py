"""MkDocs hook: the site has the repository's own paths, so no page is copied and no link rewritten.

Everything in docs/ and config/ is part of it, and the pages at the root. A line `<!-- include PATH
NAME -->` is replaced by that file (from the page's folder), or by its part between `<!-- NAME -->`
and `<!-- end NAME -->`. If the file does not exist, a sentence says so.
"""

import re
from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

FOLDERS: Final = ("docs", "config")
INCLUDED: Final = ("docs/performance/report.md",)  # parts of pages, and none themselves
_INCLUDE: Final = re.compile(r"^<!-- include (\S+)(?: (\w+))? -->$", re.MULTILINE)


def site_paths(root: Path) -> list[Path]:
    """Return every file of the site."""
    inside = [path for folder in FOLDERS for path in (root / folder).rglob("*") if path.is_file()]
    parts = {root / name for name in INCLUDED}
    return sorted({*root.glob("*.md"), *inside} - parts)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace what MkDocs found in docs/ by the files of the repository; the theme's stay."""
    root = Path(config.config_file_path).parent
    theme = [file for file in files if not str(file.abs_src_path).startswith(config.docs_dir)]
    ours = [
        File.generated(config, str(path.relative_to(root)), abs_src_path=str(path))
        for path in site_paths(root)
    ]
    return Files([*theme, *ours])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put in what a page includes."""
    folder = Path(config.config_file_path).parent / Path(page.file.src_uri).parent
    return _INCLUDE.sub(lambda line: included(folder / line[1], line[2]), markdown)


def included(path: Path, name: str | None) -> str:
    """Return a file, or a named part of it, with its headings a level deeper.

    Raises:
        ValueError: the file has no such part.
    """
    if not path.exists():
        return f"There is no `{path.name}` in this copy of the repository."
    text = path.read_text(encoding="utf-8")
    if name is not None:
        found = re.search(rf"<!-- {name} -->\n(.*?)<!-- end {name} -->", text, re.DOTALL)
        if found is None:
            raise ValueError(f"{path}: nothing stands between the comments of {name}")
        text = found[1]
    return re.sub(r"^(#+ )", r"#\1", text, flags=re.MULTILINE)
