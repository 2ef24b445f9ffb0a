"""Wheels from compiled modules, the same bytes each time: sorted names, one date, fixed permissions."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterable
from pathlib import Path

from tools.wheels.build import ROOT
from tools.wheels.platforms import Platform, Python

FOLDERS = {"_cpu": "billfish/backends/cpu", "_cuda": "billfish/backends/cuda"}
COMPILED = (".so", ".pyd", ".dylib")
FIRST_DATE = 315532800  # 1980, before which zip files have no dates


def read_pure_wheel() -> dict[str, bytes]:
    """All files of a wheel but the compiled ones, as the build backend makes them."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--no-build-isolation", "-C", "wheel.cmake=false", "--wheel-dir", folder, str(ROOT)]
        subprocess.run(command, check=True)
        (path,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(path) as archive:
            # A checkout may hold modules that were compiled for this machine.
            return {
                name: archive.read(name) for name in archive.namelist() if not name.endswith((*COMPILED, "/RECORD"))
            }


def write_wheel(
    files: dict[str, bytes], modules: Iterable[Path], platform: Platform, python: Python, out: Path
) -> Path:
    """A wheel of these files and modules, in the folder `out`."""
    (information,) = {name.split("/")[0] for name in files if name.split("/")[0].endswith(".dist-info")}
    tag = "-".join((*python.tags, platform.tag))
    content = dict(files)
    content |= {f"{FOLDERS[path.name.split('.')[0]]}/{path.name}": path.read_bytes() for path in modules}
    content[f"{information}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: billfish tools/wheels\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    )
    record = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in sorted(content.items())]
    content[f"{information}/RECORD"] = ("\n".join([*record, f"{information}/RECORD,,"]) + "\n").encode()
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{information.removesuffix('.dist-info')}-{tag}.whl"
    path.write_bytes(_zip(content, information))
    return path


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


def _zip(content: dict[str, bytes], information: str) -> bytes:
    """A zip file with the metadata at its end, as readers of wheels expect."""
    date = time.gmtime(max(FIRST_DATE, int(os.environ.get("SOURCE_DATE_EPOCH", FIRST_DATE))))[:6]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in sorted(content, key=lambda name: (name.startswith(information), name)):
            member = zipfile.ZipInfo(name, date)
            member.create_system = 3  # Unix, whatever writes it
            member.external_attr = (0o100755 if name.endswith(COMPILED) else 0o100644) << 16
            archive.writestr(member, content[name], zipfile.ZIP_DEFLATED, 9)
    return buffer.getvalue()
