"""Builds the project's Dockerfile without a registry or Docker: builder.py CONTEXT CACHE OUTPUT NAME [ARG=VALUE…]

With --pause as CONTEXT it builds the image that holds a pod's namespaces, with --prune none, and removes old layers.
Called by `image`. A base image is made by debootstrap, each RUN runs in a chroot over the layers so far, and a step
whose inputs have not changed is taken from the cache. OUTPUT gets NAME.json: manifest, configuration and layers.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dockerfile import Instruction, Recipe, Stage, Unknown, command, expand, pairs, read
from layers import Layer, make

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BASES = {
    # Debian's own Python replaces the one of the base image: the same version, the same distribution.
    "python:3.11-slim-bookworm": "bookworm",
    "python:3.13-slim-trixie": "trixie",
}
PACKAGES = "python3,python3-venv,ca-certificates,netbase,tzdata"


@dataclass
class Built:
    """A stage so far: its layers and its configuration."""

    layers: list[Layer] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": PATH})
    config: dict[str, object] = field(default_factory=dict)
    workdir: str = "/"

    @property
    def key(self) -> str:
        return self.layers[-1].key


class Builder:
    """Stages are built when they are needed."""

    def __init__(self, context: Path, cache: Path, recipe: Recipe, arguments: dict[str, str]) -> None:
        self._context, self._folder, self._recipe, self._given = context, cache / "layers", recipe, arguments
        self._folder.mkdir(parents=True, exist_ok=True)
        self._globals: dict[str, str] = {}
        for instruction in recipe.arguments:
            self._globals.update(self._argument(instruction, {}))
        self._built: dict[str, Built] = {}
        self.used: list[Layer] = []
        patterns = (context / ".dockerignore").read_text().splitlines()
        self._ignored = [line for line in patterns if line and not line.startswith("#")]

    def image(self) -> Built:
        """The last stage."""
        return self._stage(self._recipe.stages[-1])

    def _named(self, name: str) -> Built:
        for stage in self._recipe.stages:
            if stage.name == name:
                return self._built[name] if name in self._built else self._stage(stage)
        return Built([self._base(name)])

    def _stage(self, stage: Stage) -> Built:
        parent = self._named(expand(stage.parent, self._globals))
        built = Built(list(parent.layers), dict(parent.environment), dict(parent.config), parent.workdir)
        arguments: dict[str, str] = {}
        for one in stage.instructions:
            values = {**arguments, **built.environment}
            if one.word == "ARG":
                arguments.update(self._argument(one, values))
            elif one.word == "ENV":
                built.environment.update(pairs(expand(one.value, values)))
            elif one.word == "RUN":
                self._run(built, one, arguments)
            elif one.word == "COPY":
                self._copy(built, one, values)
            elif one.word == "WORKDIR":
                built.workdir = expand(one.value, values)
            elif one.word == "USER":
                built.config["User"] = expand(one.value, values)
            elif one.word in ("ENTRYPOINT", "CMD"):
                built.config[one.word.title() if one.word == "ENTRYPOINT" else "Cmd"] = command(one)
            elif one.word == "LABEL":
                built.config["Labels"] = {**dict(built.config.get("Labels") or {}), **pairs(one.value)}  # type: ignore[call-overload]
            elif (one.word, one.value) != ("HEALTHCHECK", "NONE"):
                raise Unknown(f"line {one.line}: {one.word} {one.value}")
        self._built[stage.name] = built
        return built

    def _argument(self, instruction: Instruction, values: dict[str, str]) -> dict[str, str]:
        name, has_default, default = instruction.value.partition("=")
        if name in self._given:
            return {name: self._given[name]}
        if not has_default:
            return {name: self._globals[name]} if name in self._globals else {}
        return {name: expand(default, values)}

    def _layer(self, *inputs: object) -> Layer:
        key = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:20]
        layer = Layer(self._folder, key)
        self.used.append(layer)
        return layer

    def _base(self, name: str) -> Layer:
        bare = name.split("@")[0]
        if bare not in BASES:
            raise Unknown(f"the base {name} cannot be made here")
        release = BASES[bare]
        layer = self._layer("debootstrap", release, PACKAGES, 2)
        if not layer.whole:
            print(f"FROM {name}: debootstrap", flush=True)
            shutil.rmtree(layer.files.parent, ignore_errors=True)
            layer.files.mkdir(parents=True)
            subprocess.run(
                ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", release, str(layer.files)],
                check=True, stdout=subprocess.DEVNULL,
            )  # fmt: skip
            _slim(layer.files)
            (layer.files.parent / "whole").touch()
        return layer

    def _run(self, built: Built, one: Instruction, arguments: dict[str, str]) -> None:
        other, bind = self._mount(one)
        if built.config.get("User"):
            raise Unknown(f"line {one.line}: RUN after USER")
        environment = {"HOME": "/root", **arguments, **built.environment}
        layer = self._layer(built.key, "RUN", one.value, environment, other.key if other else "", bind, built.workdir)
        if not layer.whole:
            print(f"RUN {one.value.splitlines()[0]} …", flush=True)
            make(
                layer, built.layers, ["/bin/sh", "-c", one.value], environment=environment, workdir=built.workdir,
                other=other.layers if other else (), bind=bind,
            )  # fmt: skip
        built.layers.append(layer)

    def _mount(self, one: Instruction) -> tuple[Built | None, str]:
        if "mount" not in one.flags:
            return None, ""
        options = dict(word.split("=", 1) for word in one.flags["mount"].split(","))
        if set(options) != {"type", "from", "source", "target"} or options["type"] != "bind":
            raise Unknown(f"line {one.line}: --mount={one.flags['mount']}")
        return self._named(options["from"]), f"{options['source']}:{options['target']}"

    def _copy(self, built: Built, one: Instruction, values: dict[str, str]) -> None:
        *sources, target = expand(one.value, values).split()
        target = os.path.join(built.workdir, target)
        if set(one.flags) - {"from"}:
            raise Unknown(f"line {one.line}: COPY {one.flags}")
        with tempfile.TemporaryDirectory() as folder:
            staged = Path(folder)
            if "from" in one.flags:
                self._stage_from(self._named(one.flags["from"]), sources, staged)
            else:
                self._stage_context(sources, staged)
            single = len(sources) == 1 and (staged / Path(sources[0]).name).is_file() and not target.endswith("/")
            layer = self._layer(built.key, "COPY", target, single, list(_contents(staged)))
            if not layer.whole:
                print(f"COPY {one.value}", flush=True)
                self._place(layer, staged, sources, target, single)
            built.layers.append(layer)

    def _stage_context(self, sources: list[str], staged: Path) -> None:
        for source in sources:
            path = self._context / source
            if path.is_dir():
                shutil.copytree(path, staged / path.name, symlinks=True, ignore=self._ignore)
            else:
                shutil.copy(path, staged / path.name)

    def _stage_from(self, other: Built, sources: list[str], staged: Path) -> None:
        for source in sources:
            for layer in reversed(other.layers):  # files are searched from the top; a folder must be in one layer
                path = layer.files / source.lstrip("/")
                if path.exists():
                    shutil.copytree(path, staged / path.name) if path.is_dir() else shutil.copy(
                        path, staged / path.name
                    )
                    break
            else:
                raise Unknown(f"COPY --from: there is no {source}")

    def _ignore(self, folder: str, names: list[str]) -> set[str]:
        where = Path(folder).relative_to(self._context)
        return {
            name
            for name in names
            for pattern in self._ignored
            if fnmatch.fnmatch(str(where / name), pattern)
            or (pattern.startswith("**/") and fnmatch.fnmatch(name, pattern.removeprefix("**/")))
        }

    def _place(self, layer: Layer, staged: Path, sources: list[str], target: str, single: bool) -> None:
        shutil.rmtree(layer.files.parent, ignore_errors=True)
        into = layer.files / target.lstrip("/")
        (into.parent if single else into).mkdir(parents=True)
        for source in sources:
            path = staged / Path(source).name
            if path.is_dir():
                shutil.copytree(path, into, symlinks=True, dirs_exist_ok=True)
            else:
                shutil.copy(path, into)
        (layer.files.parent / "whole").touch()


def _slim(root: Path) -> None:
    """Remove what a slim base lacks, and what debootstrap copied from this machine."""
    for name in ("doc", "man", "locale", "info"):
        shutil.rmtree(root / "usr/share" / name)
        (root / "usr/share" / name).mkdir()
    for folder in ("var/cache/apt/archives", "var/lib/apt/lists"):
        shutil.rmtree(root / folder)
        (root / folder / "partial").mkdir(parents=True)
    (root / "etc/hostname").unlink(missing_ok=True)
    (root / "etc/resolv.conf").write_text("")
    policy = root / "usr/sbin/policy-rc.d"  # no daemon starts when its package is installed
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)


def _contents(folder: Path) -> Iterator[tuple[str, int, str]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield (
                str(path.relative_to(folder)),
                path.stat().st_mode & 0o111,
                hashlib.sha256(path.read_bytes()).hexdigest(),
            )


def description(built: Built) -> dict[str, object]:
    """The parts of an OCI image: JSON blobs, and layers with their digests."""
    digests = [f"sha256:{layer.digest}" for layer in built.layers]
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {
            **built.config,
            "Env": [f"{name}={value}" for name, value in built.environment.items()],
            "WorkingDir": built.workdir,
        },
        "rootfs": {"type": "layers", "diff_ids": digests},
    }
    kind = "application/vnd.oci.image"
    packed = json.dumps(config).encode()
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{kind}.manifest.v1+json",
        "config": {
            "mediaType": f"{kind}.config.v1+json",
            "digest": f"sha256:{hashlib.sha256(packed).hexdigest()}",
            "size": len(packed),
        },
        "layers": [
            {"mediaType": f"{kind}.layer.v1.tar", "digest": digest, "size": layer.tar.stat().st_size}
            for digest, layer in zip(digests, built.layers, strict=True)
        ],
    }
    return {"config": config, "manifest": manifest, "layers": {layer.digest: str(layer.tar) for layer in built.layers}}


def build(context: Path, cache: Path, arguments: dict[str, str]) -> dict[str, object]:
    """One image of the Dockerfile."""
    builder = Builder(context, cache, read((context / "Dockerfile").read_text()), arguments)
    reported = description(builder.image())
    reported["used"] = sorted({layer.key for layer in builder.used})
    return reported


def pause(cache: Path) -> dict[str, object]:
    """The image that holds the namespaces of a pod: a program that sleeps."""
    layer = Layer(cache / "layers", "pause")
    config: dict[str, object] = {"Entrypoint": ["/bin/busybox", "sleep", "2000000000"]}
    return {**description(Built([layer], config=config)), "used": ["pause"]}


def prune(cache: Path, output: Path) -> None:
    """Remove layers that no image contains and no image was built on."""
    used = {key for path in output.glob("*.json") for key in json.loads(path.read_text())["used"]}
    for layer in (cache / "layers").iterdir():
        if layer.name not in used:
            shutil.rmtree(layer)


def main() -> None:
    """Build one image, or remove the leftovers of earlier ones."""
    what, cache, output, *more = sys.argv[1:]
    if what == "--prune":
        prune(Path(cache), Path(output))
        return
    name, *given = more
    try:
        arguments = dict(word.split("=", 1) for word in given)
        reported = pause(Path(cache)) if what == "--pause" else build(Path(what), Path(cache), arguments)
    except Unknown as error:
        sys.exit(f"Dockerfile: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(f"a step of the Dockerfile failed with exit code {error.returncode}")
    Path(output, f"{name}.json").write_text(json.dumps(reported))


if __name__ == "__main__":
    main()
