"""Places of a program's source that read what differs between processes, attempts and machines. Pure.

They explain a difference that no state explains: the value was read and used within a step, or before the trace began.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

_CALLS: dict[str, str] = {
    "time.time": "time", "time.time_ns": "time", "time.monotonic": "time", "time.monotonic_ns": "time",
    "time.perf_counter": "time", "time.perf_counter_ns": "time", "time.process_time": "time", "datetime.now": "time",
    "datetime.datetime.now": "time", "datetime.utcnow": "time", "datetime.datetime.utcnow": "time",
    "date.today": "time",
    "os.getpid": "process", "os.getppid": "process", "id": "process", "threading.get_ident": "process",
    "multiprocessing.current_process": "process",
    "socket.gethostname": "host", "platform.node": "host", "os.uname": "host", "uuid.getnode": "host",
    "os.urandom": "entropy", "uuid.uuid1": "entropy", "uuid.uuid4": "entropy", "random.SystemRandom": "entropy",
    "secrets.randbits": "entropy", "secrets.token_bytes": "entropy", "secrets.randbelow": "entropy",
    "hash": "hash", "os.listdir": "folder", "os.scandir": "folder", "glob.glob": "folder", "os.walk": "folder",
}  # fmt: skip
_METHODS: dict[str, str] = {"iterdir": "folder", "glob": "folder", "rglob": "folder"}
_ORDERING = frozenset({"sorted", "min", "max", "fsum", "len", "set", "frozenset"})
"""Functions whose result does not depend on the order of their argument, unless they have a key: items may be equal by
it. That of `sum` does, but for whole numbers."""
_WHOLE = frozenset({"len", "int", "ord", "getsize", "st_size"})
"""Functions and attributes that give whole numbers."""
_ITERATING = frozenset({"list", "tuple", "enumerate", "iter", "zip", "map", "cycle"})
_SEEDING = frozenset(
    {
        "seed", "manual_seed", "manual_seed_all", "default_rng", "Random", "Generator", "RandomState", "PCG64",
        "SeedSequence", "seed_everything", "set_seed",
    }
)  # fmt: skip
_ATTEMPTS = frozenset({"ORTFLOW_ATTEMPT", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"})
_MACHINES = frozenset({"HOSTNAME", "SLURM_JOB_ID", "SLURM_JOBID", "MASTER_PORT", "MASTER_ADDR", "SLURMD_NODENAME"})
_STABLE = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "ORTFLOW_SEED", "HOME", "PATH", "OMP_NUM_THREADS"})


@dataclass(frozen=True)
class Reading:
    """An expression that has another value in another process."""

    kind: str
    """attempt, time, process, host, entropy, hash, folder or variable."""
    file: str
    line: int
    text: str
    """The expression."""
    seeds: bool = False
    """It is part of the seed of a generator."""

    def __str__(self) -> str:
        return f"{self.text} in {self.file}, line {self.line}"


def readings(source: str, file: str) -> list[Reading]:
    """The readings of a source file, in its order; none if it is not Python."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    visitor = _Visitor(file, _names_of_imports(tree), _names_of_sets(tree))
    visitor.visit(tree)
    seeds = _names_in_seeds(tree)
    return sorted(
        (_seeding(reading, visitor.assigned.get(reading), seeds) for reading in visitor.found),
        key=lambda reading: reading.line,
    )


def _seeding(reading: Reading, variable: str | None, seeds: set[str]) -> Reading:
    if reading.seeds or variable is None or variable not in seeds:
        return reading
    return Reading(reading.kind, reading.file, reading.line, reading.text, seeds=True)


class _Visitor(ast.NodeVisitor):
    def __init__(self, file: str, imported: dict[str, str], sets: set[str]) -> None:
        self.found: list[Reading] = []
        self.assigned: dict[Reading, str] = {}
        """The variable that gets the value of a reading."""
        self._file, self._imported, self._sets = file, imported, sets
        self._seeding = self._ordered = self._sorted = False
        self._variable: str | None = None

    def visit_Assign(self, node: ast.Assign) -> None:
        before = self._variable
        self._variable = node.targets[0].id if isinstance(node.targets[0], ast.Name) else before
        self.generic_visit(node)
        self._variable = before

    def visit_Call(self, node: ast.Call) -> None:
        name = self._name(node.func)
        last = name.rpartition(".")[2]
        if last == "set_epoch" or (isinstance(node.func, ast.Name) and last == "print"):
            return
        ordered, in_sorted, seeding = self._ordered, self._sorted, self._seeding
        self._ordered, self._sorted = _is_ordering(last, node), last == "sorted"
        self._seeding = seeding or last in _SEEDING
        kind = _CALLS.get(name)
        if kind is None and isinstance(node.func, ast.Attribute):
            kind = _METHODS.get(node.func.attr) if not name.startswith("glob.") else None
        if kind == "folder" and (ordered or in_sorted):
            kind = None  # names are unique, and so are most keys of them
        if kind is not None:
            self._add(kind, node)
        if name in ("os.getenv", "os.environ.get") and node.args:
            self._variable_of_environment(node.args[0], node)
        if last in _ITERATING or (last in _ORDERING and _has_key(node)):
            for argument in node.args:
                self._iteration(argument)
        if last == "join" and node.args:
            self._iteration(node.args[0])
        self.generic_visit(node)
        self._ordered, self._sorted, self._seeding = ordered, in_sorted, seeding

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if self._name(node.value) == "os.environ":
            self._variable_of_environment(node.slice, node)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr == "attempt":
            self._add("attempt", node)
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self._iteration(node.iter)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self._iteration(node.iter)
        self.generic_visit(node)

    def visit_Starred(self, node: ast.Starred) -> None:
        self._iteration(node.value)
        self.generic_visit(node)

    def _iteration(self, node: ast.expr) -> None:
        if not self._ordered and self._is_set(node):
            self._add("hash", node)

    def _is_set(self, node: ast.expr) -> bool:
        if isinstance(node, (ast.Set, ast.SetComp)):
            return True
        if isinstance(node, ast.Name):
            return node.id in self._sets
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitOr, ast.BitAnd, ast.Sub, ast.BitXor)):
            return self._is_set(node.left) or self._is_set(node.right)
        return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("set", "frozenset")

    def _variable_of_environment(self, key: ast.expr, node: ast.expr) -> None:
        name = key.value if isinstance(key, ast.Constant) else ""
        if name not in _STABLE:
            self._add("attempt" if name in _ATTEMPTS else "host" if name in _MACHINES else "variable", node)

    def _add(self, kind: str, node: ast.expr) -> None:
        reading = Reading(kind, self._file, node.lineno, ast.unparse(node)[:60], self._seeding)
        self.found.append(reading)
        if self._variable is not None:
            self.assigned[reading] = self._variable

    def _name(self, node: ast.expr) -> str:
        """The dotted name of an expression, with the module that an import gave it."""
        if isinstance(node, ast.Name):
            return self._imported.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            return f"{self._name(node.value)}.{node.attr}"
        return "?"


def _is_ordering(name: str, call: ast.Call) -> bool:
    if name == "sum":
        argument = call.args[0] if call.args else None
        return isinstance(argument, (ast.GeneratorExp, ast.ListComp)) and _is_whole(argument.elt)
    return name in _ORDERING and not _has_key(call)


def _has_key(call: ast.Call) -> bool:
    return any(keyword.arg == "key" for keyword in call.keywords)


def _is_whole(node: ast.expr) -> bool:
    """Whether an expression is evidently a whole number."""
    if isinstance(node, ast.BinOp) and not isinstance(node.op, (ast.Div, ast.Pow)):
        return _is_whole(node.left) and _is_whole(node.right)
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int)
    return isinstance(node, ast.Compare) or _last(node.func if isinstance(node, ast.Call) else node) in _WHOLE


def _names_of_imports(tree: ast.Module) -> dict[str, str]:
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update({alias.asname: alias.name for alias in node.names if alias.asname})
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return names


def _names_of_sets(tree: ast.Module) -> set[str]:
    """Variables to which a set is assigned."""
    return {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _makes_set(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _makes_set(node: ast.expr) -> bool:
    if isinstance(node, (ast.Set, ast.SetComp)):
        return True
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("set", "frozenset")


def _names_in_seeds(tree: ast.Module) -> set[str]:
    """Variables that are part of a seed."""
    return {
        name.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _last(node.func) in _SEEDING
        for argument in [*node.args, *(keyword.value for keyword in node.keywords)]
        for name in _names(argument)
    }


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _names(node: ast.expr) -> Iterator[ast.Name]:
    return (inner for inner in ast.walk(node) if isinstance(inner, ast.Name))
