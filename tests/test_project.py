"""What holds for the project as a whole: layers, packaging, documentation."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from test_cli import sot as run

import sot
from sot.cli.main import app, option_of

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names = [f"sot.{alias.name}" for alias in node.names]  # from sot import probe
            yield from names if node.module == "sot" else [node.module]


def test_core_imports_torch_only():
    plain = [ROOT / "src/sot/lazy.py", ROOT / "src/sot/plugins.py"]  # names, not maths: of the standard library alone
    files = list((ROOT / "src/sot/core").glob("*.py"))
    assert len(files) >= 4
    for path in [*files, *plain]:
        ours = ("sot.core", "sot.ops", "sot.lazy", "sot.plugins")
        for module in imported_modules(path):
            top = module.split(".")[0]
            allowed = top == "torch" or top in sys.stdlib_module_names or module.startswith(ours)
            assert allowed, f"{path.name} imports {module}"


def test_core_is_read_in_one_sitting():
    lines = sum(len(path.read_text().splitlines()) for path in (ROOT / "src/sot/core").glob("*.py"))
    assert lines < 1000


def test_ops_import_what_computes_only():
    for path in (ROOT / "src/sot/ops").rglob("*.py"):
        for module in imported_modules(path):
            top = module.split(".")[0]
            allowed = top in ("torch", "numpy", "numba", "llvmlite", "triton") or top in sys.stdlib_module_names
            assert allowed or module.startswith("sot.ops"), f"{path.name} imports {module}"


JOBS = ("training", "evaluation", "probe", "explain", "bench", "paper")
BELOW = {  # what each room imports of the package besides itself; what lies in no room is below all
    "core": ("ops",),
    "ops": (),
    "pools": ("core", "ops"),
    "models": ("core", "ops"),  # not data: what imports timm loads this, see sot/registration.py
    "data": ("core", "ops", "models"),
    **dict.fromkeys(JOBS, ("core", "ops", "models", "data", *JOBS)),
    "ui": ("core", "ops", "models", "data", *JOBS),
    "cli": ("core", "ops", "models", "data", *JOBS, "ui"),
}


def room_of(module):
    """The package inside of `sot` that a module belongs to, or nothing."""
    return next((part for part in module.split(".")[1:2] if part in BELOW), None)


def test_imports_go_down_only():
    for path in (ROOT / "src/sot").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
        room = room_of(module)
        allowed = {None, room, *BELOW.get(room, ())}
        ours = {name for name in imported_modules(path) if name.startswith("sot.")}
        above = {name for name in ours if room_of(name) not in allowed}
        assert module in ("sot.__init__", "sot.__main__") or not above, f"{module} imports {above}"


LIBRARY = [path for path in sorted((ROOT / "src/sot").rglob("*.py")) if path.parent.name not in ("cli", "ui")]


def docstrings(tree):
    """The strings of a file that are documentation."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return {node.body[0].value for node in ast.walk(tree) if isinstance(node, kinds) and ast.get_docstring(node)}


def sentences(path):
    """The other strings of a file."""
    tree = ast.parse(path.read_text())
    said = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [node for node in said if node not in docstrings(tree)]


def test_the_library_does_not_name_options_of_the_command_line():
    option = re.compile(r"(?<![\w-])(?<!var\()--[a-z]")  # var(--name) is a property of CSS
    found = [f"{path.name}:{node.lineno}" for path in LIBRARY for node in sentences(path) if option.search(node.value)]
    assert not found, "name the setting by SettingError, the command line adds the option"


def test_the_command_line_has_an_option_for_every_setting_that_errors_name():
    commands = list(typer.main.get_command(app).commands.values())
    commands += [part for group in commands for part in getattr(group, "commands", {}).values()]  # sot bench …
    options = {name for command in commands for parameter in command.params for name in parameter.opts}
    for path in (path for path in LIBRARY if "import SettingError" in path.read_text()):
        for setting in (name for node in sentences(path) for name in re.findall(r"{([a-z_]+)}", node.value)):
            assert option_of(setting) in options, f"{path.name} names {setting}"


def is_text_of_error(node):
    return isinstance(node, ast.Call) and ast.unparse(node) in ("str(error)", "repr(error)", "one_line(error)")


def test_errors_are_told_apart_by_type_and_not_by_their_text():
    editing = ("replace", "removeprefix", "removesuffix", "startswith", "endswith", "find", "index", "partition")
    found = []
    for path in (ROOT / "src/sot").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                searched = any(map(is_text_of_error, [node.left, *node.comparators]))
            else:
                searched = isinstance(node, ast.Attribute) and node.attr in editing and is_text_of_error(node.value)
            found += [f"{path.name}:{node.lineno}"] if searched else []
    assert not found


def test_wheel_works_from_an_empty_folder(tmp_path):
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    (wheel,) = (tmp_path / "dist").glob("second_order_transformer-*.whl")
    assert sot.__version__ in wheel.name
    target, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target, wheel]
    subprocess.run(install, check=True, capture_output=True, timeout=300)
    script = (
        "import sot, timm, torch, pathlib; print(sot.__file__);"
        "assert (pathlib.Path(sot.__file__).parent / 'py.typed').is_file();"
        "print(timm.create_model('sot_7', num_classes=3).eval()(torch.randn(1, 3, 112, 112)).shape)"
    )
    command = [sys.executable, "-c", script]
    result = subprocess.run(
        command, cwd=empty, env={"PYTHONPATH": str(target)}, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(str(target)) and "torch.Size([1, 3])" in result.stdout
    command = [sys.executable, target / "bin" / "sot", "--help"]
    result = subprocess.run(command, env={"PYTHONPATH": str(target)}, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0 and "Usage: sot" in result.stdout, result.stderr


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_snippets_of_a_page_run_in_order(page, tmp_path, monkeypatch, stand_ins, capsys):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": page.stem}
    for number, code in enumerate(blocks(page, "python")):
        for name, folder in stand_ins.items():
            code = code.replace(f'"{name}"', f'"{folder}"')
        exec(compile(code, f"{page.name}, snippet {number + 1}", "exec"), namespace)
    shapes = re.findall(r"^```\n(torch\.Size.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert "".join(shapes) in capsys.readouterr().out  # what the page says that they print


COMMANDS = {
    command
    for page in PAGES
    for block in blocks(page, "sh")
    for command in re.findall(r"^(?:.* -m )?(sot .*)", block, flags=re.MULTILINE)
}


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_commands_in_the_pages_exist(command):
    """Every documented command parses: its help knows every option that the line uses."""
    command = re.sub(r"^sot --import \w+ ", "sot ", command)  # an option of all commands
    words = command.split("#")[0].split()
    result = run(*(words[1:3] if words[1] == "bench" else words[1:2]), "--help")
    assert result.returncode == 0, result.stderr
    for option in re.findall(r"--[a-z-]+", command):
        assert option in result.stdout


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_lines_of_a_page_are_wrapped(page):
    lines = [line for line in page.read_text().splitlines() if not line.lstrip().startswith("|")]
    assert [line for line in lines if len(line) > 160] == []


def test_the_site_builds_without_a_broken_link_or_a_missing_page(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path]
    built = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    reference = (tmp_path / "reference/index.html").read_text()
    for name in set(sot.__all__) - {"__version__", "Fusion", "NORMS", "POOLS"}:
        assert f"{name}</span>" in reference, f"docs/reference.md lacks {name}"


def test_changelog_speaks_of_this_version():
    assert f"## {sot.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_pinned_versions_name_no_index_and_all_have_hashes():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = [line for line in lines if not line.startswith(" ")]
    assert all(re.match(r"[\w.-]+==\S+", line) for line in pinned) and not any("://" in line for line in lines)
    hashed = [line for line, after in zip(lines, [*lines[1:], ""]) if "==" in line and "--hash=sha256:" in after]
    assert len(hashed) == len(pinned)
