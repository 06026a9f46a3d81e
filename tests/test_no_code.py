"""Nothing in the package runs what a file brings: a walk over every call and import."""

import ast
from pathlib import Path

import pytest

import sot

SOURCES = sorted(Path(sot.__file__).parent.rglob("*.py"))
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
CALLS = {"eval", "exec", "compile", "__import__"}
LOADERS = {"yaml": {"load", "unsafe_load", "full_load", "load_all", "unsafe_load_all"}, "np": set(), "numpy": set()}


def faults(tree):
    """What a source has that could run a stranger's code, as `(line, what)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            yield from ((node.lineno, f"import {name}") for name in names if name.split(".")[0] in MODULES)
        elif isinstance(node, ast.Call):
            yield from ((node.lineno, what) for what in _call(node))


def _call(node):
    called, given = ast.unparse(node.func), {word.arg: word.value for word in node.keywords}
    owner, _, name = called.rpartition(".")
    if called in CALLS or name in LOADERS.get(owner, ()):
        yield called
    if called == "torch.load" and ast.unparse(given.get("weights_only", ast.Constant(None))) != "True":
        yield "torch.load without weights_only=True"
    if "allow_pickle" in given and ast.unparse(given["allow_pickle"]) != "False":
        yield "allow_pickle"
    trust = given.get("trust_remote_code")
    if trust is not None and isinstance(trust, ast.Constant) and trust.value is not False:
        yield "trust_remote_code=True"
    if name == "from_pretrained" and owner.startswith("Auto") and trust is None:
        yield f"{called} without trust_remote_code"
    if called.startswith("subprocess.") and "shell" in given:
        yield "a shell"


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(Path(sot.__file__).parent)))
def test_no_source_runs_what_a_file_brings(source):
    assert not [*faults(ast.parse(source.read_text()))]


@pytest.mark.parametrize(
    "line",
    [
        "torch.load(file)",
        "torch.load(file, weights_only=False)",
        "import pickle",
        "from joblib import load",
        "eval(text)",
        "yaml.load(text, Loader=yaml.Loader)",
        "np.load(file, allow_pickle=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "AutoConfig.from_pretrained(name)",
        "subprocess.run(line, shell=True)",
    ],
)
def test_the_walk_sees_what_it_looks_for(line):
    assert len([*faults(ast.parse(line))]) == 1
    allowed = "torch.load(file, weights_only=True); yaml.safe_load(text); model.eval(); re.compile(text)"
    assert not [*faults(ast.parse(allowed))]
