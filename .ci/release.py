"""Make a release: python .ci/release.py [--draft | --launcher] DIRECTORY

It writes the wheel, the source archive, the launcher as one file (trnslurm.pyz), the licences of
what that file contains, the changelog of this version, and SHA256SUMS. The same commit gives the
same bytes. --draft makes one of a version that has no changelog yet, or of changed files;
--launcher only the one file.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import io
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from trnslurm import __version__
from trnslurm.remote import launcher

ROOT = Path(__file__).resolve().parent.parent
_SHEBANG = b"#!/usr/bin/env python3\n"
# Modules cannot read their templates inside a zip file: the launcher is unpacked once, into a
# directory named by a hash of its files. Those of other versions stay, because they may be running.
_MAIN = """\
import os, sys

if sys.version_info < (3, 11):
    sys.exit("error: trnslurm needs Python 3.11 or newer, this is " + sys.version.split()[0])

from pathlib import Path

NAME = "{name}"
base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trnslurm"
place = base / NAME

def unpack():
    import tempfile, zipfile  # slow to import
    umask = os.umask(0o077)
    base.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=base) as new:
        with zipfile.ZipFile(__file__.rpartition(os.sep)[0]) as file:
            file.extractall(Path(new, NAME))
        Path(new, NAME, "__main__.py").unlink()
        try:
            Path(new, NAME).rename(place)
        except OSError:
            if not place.is_dir():  # else another process was faster
                raise
    os.umask(umask)

try:
    if not place.is_dir():
        unpack()
    for path in (base, place):
        if path.stat().st_uid != os.getuid() or path.stat().st_mode & 0o022:
            sys.exit("error: others can write to " + str(path) + ": remove it, or chmod go-w it")
except OSError as error:
    sys.exit("error: " + str(error.filename) + ": " + error.strerror)
sys.path[0] = str(place)
sys.argv[0] = "trnslurm"
from trnslurm.__main__ import main
main()
"""


def main() -> None:
    """Write all files of the release."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--draft", action="store_true")
    parser.add_argument("--launcher", action="store_true", help="write trnslurm.pyz only")
    options = parser.parse_args()
    if options.launcher:
        write_launcher(options.directory)
        return
    draft, out, notes = options.draft, options.directory, changes()
    if not draft and not notes:
        sys.exit(f"error: CHANGELOG.md has no section '## {__version__}': write it, or --draft")
    if not draft and git("status", "--porcelain"):
        sys.exit("error: there are changed files: commit them, or --draft")
    out.mkdir(parents=True, exist_ok=True)
    # https://reproducible-builds.org/specs/source-date-epoch; hatchling takes it for both.
    environ = os.environ | {"SOURCE_DATE_EPOCH": git("log", "-1", "--format=%ct")}
    build = [sys.executable, "-m", "build", "--outdir", str(out), str(ROOT)]
    subprocess.run(build, check=True, env=environ, stdout=subprocess.DEVNULL)
    write_launcher(out)
    (out / "licences.txt").write_text("\n".join([*licences(), ""]))
    (out / "changes.md").write_text(notes or changes("Unreleased"))
    made = sorted(file for file in out.iterdir() if file.name != "SHA256SUMS")
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in made]
    (out / "SHA256SUMS").write_text("".join(sums))
    print(f"trnslurm {__version__} in {out}:", *(f"  {file.name}" for file in made), sep="\n")


def write_launcher(directory: Path) -> None:
    """Write the launcher as one file."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "trnslurm.pyz"
    file.write_bytes(one_file(launcher.files()))
    file.chmod(0o755)


def git(*words: str) -> str:
    """Ask git about this repository."""
    return subprocess.run(
        ["git", "-C", str(ROOT), *words], check=True, capture_output=True, text=True
    ).stdout.strip()


def changes(version: str = __version__) -> str:
    """Return the section of a version in the changelog; empty without one."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(version)}\b.*?(?=^## |\Z)", text, re.M | re.S)
    return found[0].strip() + "\n" if found else ""


def one_file(files: Mapping[str, bytes]) -> bytes:
    """Return the launcher as a zip file that Python runs; the same files make the same bytes."""
    main_file = _MAIN.format(name=launcher.name(launcher.ONE_FILE)).encode()
    contents = {**files, "__main__.py": main_file}
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted(contents.items()):
            entry = zipfile.ZipInfo(name)  # of 1980
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, data)
    return _SHEBANG + out.getvalue()


def licences() -> Iterator[str]:
    """Yield name, version and licence of each package in the one file."""
    for package in sorted(("trnslurm", *launcher.NEEDED), key=str.lower):
        about = importlib.metadata.metadata(package)
        classified = [
            line.rpartition(" :: ")[2]
            for line in about.get_all("Classifier") or ()
            if line.startswith("License ::")
        ]
        said = about.get("License-Expression") or ", ".join(classified) or about.get("License")
        yield f"{about['Name']} {about['Version']}: {said or 'see its page'}"


if __name__ == "__main__":
    main()
