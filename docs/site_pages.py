"""Hooks of mkdocs.yml: generated pages, links out of docs/, diagrams as pictures, and pages without a place.

    mkdocs build --strict

Commands and the Python API are generated from the code, and are in no folder. Diagrams are drawn here, because the
theme would load a program for them from the network.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

from command_reference import commands_page

DOCS = Path(__file__).parent
API = {
    "Training programs": {
        "ortflow.program.start": "", "ortflow.program.context": "", "ortflow.program.Run": "run",
        "ortflow.program.Context": "part", "ortflow.program.Sampler": "sampler",
        "ortflow.program.loader_worker": "workers", "ortflow.program.ProgramError": "errors",
    },
    "Models": {"ortflow.export_for_training": "export", "ortflow.grad": "gradient"},
    "PyTorch modules": {"ortflow.torch.ORTModule": "module"},
}  # fmt: skip
"""Heading -> objects whose docstrings are its reference, and their modules below the package."""
OUTWARD = re.compile(r"\]\((?:\.\./)+(?!https?:)([^)#]+)(#[^)]*)?\)")
DIAGRAM = re.compile(r"^```mermaid\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def on_config(config: Any) -> Any:
    """Give pages without a place in the navigation one."""
    named = set(re.findall(r"[\w/-]+\.md", str(config.nav)))
    walks = sorted(path.relative_to(DOCS).as_posix() for path in (DOCS / "walks").glob("*.md"))
    if walks:
        config.nav.insert(2, {"Walks": walks})
    howto = next(tab["How-to"] for tab in config.nav if "How-to" in tab)
    howto += sorted(path.name for path in DOCS.glob("*.md") if path.name not in named)
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "commands.md", content=commands_page()))
    files.append(File.generated(config, "api.md", content=api_page()))
    return files


def api_page() -> str:
    """Markdown, filled from docstrings by mkdocstrings."""
    parts = ["# Python API\n"]
    for heading, names in API.items():
        parts.append(f"## {heading}\n")
        for name, module in names.items():
            package, _, last = name.rpartition(".")
            place = f"{package}.{module}.{last}" if module else name
            parts.append(f"::: {place}\n    options: {{heading_level: 3, heading: {name}, toc_label: {last}}}\n")
    return "\n".join(parts)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Draw diagrams, and send links to files outside docs/ to the repository."""
    from mkdocs.structure.files import File

    depth = page.file.src_uri.count("/")
    count = 0

    def drawn(match: re.Match[str]) -> str:
        import mmdr

        nonlocal count
        count += 1
        uri = f"diagrams/{Path(page.file.src_uri).stem}-{count}.svg"
        picture = File.generated(config, uri, content=mmdr.render(match[1]).svg())
        files.append(picture)
        return f"![Diagram {count} of this page]({'../' * depth}{uri}){{: style=background:white }}"

    def outward(match: re.Match[str]) -> str:
        target = (DOCS / page.file.src_uri).parent / match[0][2:-1].partition("#")[0]
        inside = DOCS.resolve() in target.resolve().parents
        if inside or not target.exists():
            return match[0]
        return f"]({config.extra['repository']}/blob/main/{quote(match[1])}{match[2] or ''})"

    return DIAGRAM.sub(drawn, OUTWARD.sub(outward, markdown))
