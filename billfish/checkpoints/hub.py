"""Models by their names on the Hugging Face Hub: `hf:USER/MODEL[:QUANT]`, or as its addresses, `hf.co/USER/MODEL`.

huggingface_hub downloads, resumes and caches. It knows tokens, mirrors (HF_ENDPOINT) and the offline mode
(HF_HUB_OFFLINE). Here names are read, the files of one model are chosen, and new files' checksums are compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from billfish.core.errors import CheckpointError, failure, readable
from billfish.core.extras import require

LOGGER = logging.getLogger("billfish")
PREFIX = re.compile(r"hf:(?://)?|(?:https?://)?(?:hf\.co|huggingface\.co)/")
NAME = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+?)(?:@(?P<revision>[\w./-]+))?(?::(?P<quant>[\w.-]+))?/?")
# How files call what their weights were quantized to: Q4_K_M, IQ2_XXS, UD-Q4_K_XL, MXFP4, F16.
QUANT = re.compile(
    r"(?<![A-Za-z0-9])((?:UD-)?(?:I?Q\d\w*|TQ\d_\d|MXFP4(?:_MOE)?|NVFP4|BF16|F16|F32))(?![A-Za-z0-9])", re.I
)
SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.I)
NO_MODEL = re.compile(r"(^|[/_.-])(mmproj|imatrix)", re.I)  # projections of images, and statistics
# Where no quantization is named: four to five bits first, then the next more exact ones.
USUAL = ("Q4_K_M", "Q4_K_S", "Q4_0", "Q4_1", "MXFP4", "Q5_K_M", "Q6_K", "Q8_0")
BESIDE = (".json", ".jinja", ".model", ".txt")  # what lies beside safetensors: configuration, tokenizer, template


class HubName(NamedTuple):
    """A model on the Hub."""

    repository: str  # USER/MODEL
    revision: str | None  # a branch, a tag or a commit; None: the main branch
    quant: str | None


class HubFile(NamedTuple):
    """A file of a repository. sha256: None for small files, which git keeps."""

    sha256: str | None


def is_hub_name(path: object) -> bool:
    """Whether a user named a model of the Hub. A folder that is called so wins, except behind `hf:`."""
    if not isinstance(path, str) or not PREFIX.match(path):
        return False
    return path.startswith("hf:") or not os.path.lexists(path)


def parse_name(call: str, name: str) -> HubName:
    """The parts of `hf:USER/MODEL[@REVISION][:QUANT]`."""
    prefix = PREFIX.match(name)
    found = NAME.fullmatch(name, prefix.end()) if prefix else None
    if found is None:
        problem = f"{readable(repr(name))} is not the name of a model on the Hub"
        raise CheckpointError(failure(call, problem, "Pass hf:USER/MODEL or hf:USER/MODEL:QUANT."))
    return HubName(found["repository"], found["revision"], found["quant"])


def fetch_model(call: str, name: str) -> Path:
    """Download what is not in the cache yet. Returns a GGUF file (the first, of a split one) or a model folder."""
    wanted = parse_name(call, name)
    hub = require("huggingface_hub", "hub")
    for part in ("constants", "errors"):
        require(f"huggingface_hub.{part}", "hub")
    with _errors_of(call, hub, wanted):
        folder, files = _list_files(hub, wanted)
        names = choose_files(call, wanted, files)
        if folder is None:
            for file in names:
                folder = _download(call, hub, wanted, file, files[file])
    assert folder is not None
    first = folder / names[0]
    return first if first.suffix == ".gguf" else first.parent


def choose_files(call: str, name: HubName, files: Iterable[str]) -> list[str]:
    """The files of one model: a GGUF file, all parts of a split one, or safetensors with what lies beside them."""
    names = sorted(files)
    models = [file for file in names if file.endswith(".gguf") and not NO_MODEL.search(file)]
    if not models:
        return _choose_folder(call, name, names)
    by_quant: dict[str, list[str]] = {}
    for file in models:
        by_quant.setdefault(quant_of(file), []).append(file)
    if name.quant is not None:
        wanted = name.quant.upper()
        quants = [quant for quant in by_quant if quant in (wanted, f"UD-{wanted}")][:1]
    else:
        quants = [quant for quant in USUAL if quant in by_quant][:1] or (list(by_quant) if len(by_quant) == 1 else [])
    if not quants:
        known = ", ".join(sorted(filter(None, by_quant))) or ", ".join(models)
        problem = f"{name.repository} has no {name.quant}" if name.quant else f"{name.repository} has several models"
        raise CheckpointError(failure(call, problem, f"Name one: hf:{name.repository}:QUANT. There are: {known}."))
    return _one_model(call, name, by_quant[quants[0]])


def quant_of(file: str) -> str:
    """What a GGUF file was quantized to, by its name or its folder's; an empty string if neither says."""
    path = PurePosixPath(SPLIT.sub("", file))
    for part in (path.name.removesuffix(".gguf"), *map(str, path.parts[-2::-1])):
        if found := QUANT.findall(part):
            return str(found[-1]).upper()
    return ""


def _one_model(call: str, name: HubName, files: list[str]) -> list[str]:
    """The only file among those of one quantization, or all parts of the only one that is split."""
    models: dict[str, list[str]] = {}
    for file in files:
        models.setdefault(SPLIT.sub("", file), []).append(file)
    if len(models) > 1:
        problem = f"{name.repository} has several such models: {', '.join(files)}"
        fix = f"Download one: hf download {name.repository} FILE --local-dir DIR"
        raise CheckpointError(failure(call, problem, fix))
    (parts,) = models.values()
    split = SPLIT.search(parts[0])
    if split and len(parts) != int(split[2]):
        problem = f"{name.repository} has {len(parts)} of {int(split[2])} parts of {parts[0]}"
        raise CheckpointError(failure(call, problem, "Choose another model."))
    return parts


def _choose_folder(call: str, name: HubName, names: list[str]) -> list[str]:
    """Safetensors at the top of a repository, the configuration first."""
    top = [file for file in names if "/" not in file]
    tensors = [file for file in top if file.endswith(".safetensors")]
    # Mistral's own copy of the same weights.
    tensors = [file for file in tensors if not file.startswith("consolidated")] or tensors
    if not tensors:
        problem = f"{name.repository} has neither GGUF nor safetensors files"
        raise CheckpointError(failure(call, problem, "Choose another model."))
    if name.quant is not None:
        problem = f"{name.repository} has no {name.quant}: it holds safetensors"
        raise CheckpointError(failure(call, problem, f"Pass hf:{name.repository}, and quantize= or --quantize."))
    return [*tensors, *(file for file in top if file.endswith(BESIDE))]


def _list_files(hub: Any, name: HubName) -> tuple[Path | None, Mapping[str, HubFile]]:
    """The files of a repository; or, in the offline mode, those that the cache has, and their folder."""
    if hub.constants.HF_HUB_OFFLINE:
        folder = _cached_folder(hub, name)
        found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        return folder, dict.fromkeys(found, HubFile(None))
    about = hub.HfApi().model_info(name.repository, revision=name.revision, files_metadata=True)
    return None, {item.rfilename: HubFile(item.lfs.sha256 if item.lfs else None) for item in about.siblings or ()}


def _cached_folder(hub: Any, name: HubName) -> Path:
    """The snapshot of a revision in the cache."""
    wanted = name.revision or "main"
    with contextlib.suppress(hub.errors.CacheNotFound):
        for repository in hub.scan_cache_dir().repos:
            if (repository.repo_type, repository.repo_id) == ("model", name.repository):
                for revision in repository.revisions:
                    if wanted in (revision.commit_hash, *revision.refs):
                        return Path(revision.snapshot_path)
    raise hub.errors.LocalEntryNotFoundError(name.repository)


def _download(call: str, hub: Any, name: HubName, file: str, about: HubFile) -> Path:
    """The folder of the snapshot with this file in it. A file that was not there before must have its checksum."""
    known = hub.try_to_load_from_cache(name.repository, file, revision=name.revision)
    path = Path(hub.hf_hub_download(name.repository, file, revision=name.revision))
    if str(path) != known and about.sha256 is not None and _sha256(path) != about.sha256:
        path.resolve().unlink()  # else the cache would be believed the next time
        path.unlink(missing_ok=True)
        problem = f"{file} of {name.repository} is damaged: its checksum is not that of the Hub"
        raise CheckpointError(failure(call, problem, "Run the same command again."))
    return path.parents[len(PurePosixPath(file).parts) - 1]


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextlib.contextmanager
def _errors_of(call: str, hub: Any, name: HubName) -> Iterator[None]:
    """What huggingface_hub raises, as sentences that say what to do."""
    errors = hub.errors
    again = "Run the same command again: it continues where it stopped."
    try:
        yield
    except errors.GatedRepoError:
        fix = f"Accept its terms at https://huggingface.co/{name.repository}, then run: hf auth login"
        raise CheckpointError(failure(call, f"{name.repository} is gated", fix)) from None
    except errors.RepositoryNotFoundError:
        fix = "Check the name. For a private model, run: hf auth login"
        raise CheckpointError(failure(call, f"the Hub has no model {name.repository}", fix)) from None
    except errors.RevisionNotFoundError:
        problem = f"{name.repository} has no revision {name.revision!r}"
        raise CheckpointError(failure(call, problem, "Check the name behind @.")) from None
    except errors.LocalEntryNotFoundError as error:
        if hub.constants.HF_HUB_OFFLINE:
            problem, fix = f"{name.repository} is not in the cache, and HF_HUB_OFFLINE is set", "Unset it to download."
        else:
            problem, fix = f"{name.repository} could not be downloaded: {_first_line(error)}", again
        raise CheckpointError(failure(call, problem, fix)) from None
    except CheckpointError:
        raise
    except Exception as error:  # the HTTP library's own, a full disk, a broken connection
        problem = f"{name.repository} could not be downloaded: {_first_line(error) or type(error).__name__}"
        raise CheckpointError(failure(call, problem, again)) from None


def _first_line(error: Exception) -> str:
    return readable(str(error).strip().split("\n")[0])
