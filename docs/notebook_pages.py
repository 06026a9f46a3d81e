"""Make a page of every notebook in examples/, for the site."""

import json
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

EXAMPLES = Path(__file__).parent.parent / "examples"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add `examples/NAME.md` for each notebook."""
    for notebook in sorted(EXAMPLES.glob("*.ipynb")):
        page = File.generated(config, f"examples/{notebook.stem}.md", content=as_markdown(notebook))
        page.edit_uri = None
        files.append(page)
    return files


def as_markdown(notebook: Path) -> str:
    """Cells one below the other, code with its output, figures inline; links to notebooks lead to their pages."""
    cells = json.loads(notebook.read_text())["cells"]
    return "\n\n".join(map(_cell, cells)).replace(".ipynb)", ".md)")


def _cell(cell: dict[str, Any]) -> str:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    return "\n\n".join([f"```python\n{source}\n```", *map(_output, cell["outputs"])])


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {"text/plain": output.get("text", "")})
    if "image/png" in data:
        return f"![figure](data:image/png;base64,{data['image/png']})"
    return f"```\n{''.join(data['text/plain']).rstrip()}\n```"
